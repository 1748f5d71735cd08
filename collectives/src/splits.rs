//! Sizes that are agreed between pairs of ranks: what `q` sends to `r` must be what `r` expects from `q`.
//!
//! Each rank writes the element counts of its chunks beside its slot; the last to arrive compares pairs.

use std::collections::BTreeMap;

use crate::buffer::Spans;
use crate::op::{Op, OpKind};
use crate::segment::Segment;
use crate::sync::{AtomicU64, Ordering};

/// Whether this kind of operation is checked pair by pair.
pub(crate) fn needed(kind: OpKind) -> bool {
    matches!(kind, OpKind::AllToAll | OpKind::Gather | OpKind::Scatter)
}

/// Writes this rank's counts.
pub(crate) fn write(segment: &Segment, op: &Op, parity: usize) {
    let size = op.dtype.size();
    let me = segment.rank();
    let store = |index: usize, bytes: usize| {
        word(segment, me, parity, index).store((bytes / size) as u64, Ordering::Relaxed);
    };
    let ranks = segment.size() as usize;
    for peer in 0..ranks {
        // Off the root, a gather has one input, for the root, and a scatter one output, from it.
        let root = op.root.is_some_and(|root| root as usize == peer);
        let of = |spans: &Spans, to_root: OpKind| match spans.chunks() {
            _ if op.kind == to_root && root => spans.chunk_bytes(0),
            _ if op.kind == to_root => 0,
            chunks if chunks == ranks => spans.chunk_bytes(peer),
            _ => 0,
        };
        store(peer, of(&op.inputs, OpKind::Gather));
        store(ranks + peer, of(&op.outputs, OpKind::Scatter));
    }
}

/// Compares all pairs; the error lists what each rank posted, ready for a mismatch text.
pub(crate) fn compare(segment: &Segment, parity: usize) -> Result<(), BTreeMap<String, Vec<u32>>> {
    let ranks = segment.size();
    let sends = |from: u32, to: u32| word(segment, from, parity, to as usize).load(Ordering::Relaxed);
    let expects =
        |to: u32, from: u32| word(segment, to, parity, (ranks + from) as usize).load(Ordering::Relaxed);
    let mut classes: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for from in 0..ranks {
        for to in 0..ranks {
            let (sent, expected) = (sends(from, to), expects(to, from));
            if sent == expected {
                continue;
            }
            let (from, to) = (segment.world_rank(from), segment.world_rank(to));
            classes
                .entry(format!("{sent} elements for rank {to}, which expects {expected}"))
                .or_default()
                .push(from);
        }
    }
    if classes.is_empty() { Ok(()) } else { Err(classes) }
}

/// Whether any two pairs of ranks have different sizes.
pub(crate) fn uneven(segment: &Segment, parity: usize) -> bool {
    let ranks = segment.size();
    let first = word(segment, 0, parity, 0).load(Ordering::Relaxed);
    let sends =
        |from| (0..ranks as usize).map(move |to| word(segment, from, parity, to).load(Ordering::Relaxed));
    segment.ranks().flat_map(sends).any(|sent| sent != first)
}

fn word(segment: &Segment, rank: u32, parity: usize, index: usize) -> &AtomicU64 {
    segment.region().at(segment.layout().splits(rank, parity) + index * 8)
}
