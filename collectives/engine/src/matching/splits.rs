//! Sizes that are agreed between pairs of ranks: what `q` sends to `r` must be what `r` expects from `q`.
//!
//! Each rank writes the element counts of its chunks beside its slot; the last to arrive compares pairs.

use std::collections::BTreeMap;

use crate::matching::verdict::listed;
use tpurun_memory::buffer::Spans;
use tpurun_memory::failure::FailureKind;
use tpurun_memory::sync::{AtomicU64, Ordering};
use tpurun_protocol::match_key::Slot;
use tpurun_protocol::op::{Op, OpKind};
use tpurun_protocol::segment::{Segment, Verdict};

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

/// A pair of ranks that do not agree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pair {
    from: u32,
    to: u32,
    sent: u64,
    expected: u64,
}

/// Compares all pairs; the error lists those that differ.
pub(crate) fn compare(segment: &Segment, parity: usize) -> Result<(), Vec<Pair>> {
    let ranks = segment.size();
    let sends = |from: u32, to: u32| word(segment, from, parity, to as usize).load(Ordering::Relaxed);
    let expects =
        |to: u32, from: u32| word(segment, to, parity, (ranks + from) as usize).load(Ordering::Relaxed);
    let pairs = segment.ranks().flat_map(|from| segment.ranks().map(move |to| (from, to)));
    let pairs = pairs.map(|(from, to)| Pair { from, to, sent: sends(from, to), expected: expects(to, from) });
    let different: Vec<Pair> = pairs.filter(|pair| pair.sent != pair.expected).collect();
    if different.is_empty() { Ok(()) } else { Err(different) }
}

/// The verdict on pairs that differ. To blame is who is in most of them, if that is not everybody in them.
pub(crate) fn mismatch(segment: &Segment, op: &Op, seq: u64, slots: &[Slot<'_>], pairs: &[Pair]) -> Verdict {
    let group = segment.members().title();
    let head = format!(
        "collective mismatch in {group}, operation {seq}: the ranks differ in the sizes of {}",
        op.kind
    );
    // The shorter way is taken: by who sends, or by who receives.
    let (by_from, by_to) =
        (grouped(pairs, |pair| pair.from, |pair| pair.to), grouped(pairs, |pair| pair.to, |pair| pair.from));
    let at = |rank: u32| slots[rank as usize].posted().to_string();
    let lines: Vec<String> = if by_from.len() <= by_to.len() {
        let line = |((from, sent, expected), to): (Key, Vec<u32>)| {
            let (who, whom) = (segment.roster().describe(&[from]), segment.roster().describe(&to));
            format!("{who} posted {sent} elements for {whom}, expected {expected}, in {}", at(from))
        };
        by_from.into_iter().map(line).collect()
    } else {
        let line = |((to, sent, expected), from): (Key, Vec<u32>)| {
            let (who, whom) = (segment.roster().describe(&[to]), segment.roster().describe(&from));
            format!("{who} expects {expected} elements from {whom}, given {sent}, in {}", at(to))
        };
        by_to.into_iter().map(line).collect()
    };
    let text = listed(head, &lines, "pairs of ranks");
    Verdict::new(FailureKind::Mismatch, text).blaming(in_most(pairs))
}

type Key = (u32, u64, u64);

fn grouped(pairs: &[Pair], one: impl Fn(&Pair) -> u32, other: impl Fn(&Pair) -> u32) -> Vec<(Key, Vec<u32>)> {
    let mut groups: BTreeMap<Key, Vec<u32>> = BTreeMap::new();
    for pair in pairs {
        groups.entry((one(pair), pair.sent, pair.expected)).or_default().push(other(pair));
    }
    groups.into_iter().collect()
}

fn in_most(pairs: &[Pair]) -> Vec<u32> {
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    for pair in pairs {
        let both = if pair.from == pair.to { vec![pair.from] } else { vec![pair.from, pair.to] };
        both.into_iter().for_each(|rank| *counts.entry(rank).or_default() += 1);
    }
    let most = counts.values().copied().max().unwrap_or(0);
    let ranks: Vec<u32> = counts.iter().filter(|(_, count)| **count == most).map(|(rank, _)| *rank).collect();
    if ranks.len() < counts.len() { ranks } else { vec![] }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_in_most_pairs_is_to_blame() {
        let pair = |from, to| Pair { from, to, sent: 1, expected: 2 };
        assert_eq!(in_most(&[pair(2, 0), pair(2, 1), pair(2, 3)]), [2]);
        assert_eq!(in_most(&[pair(0, 2), pair(2, 1)]), [2]);
        assert_eq!(in_most(&[pair(2, 0)]), Vec::<u32>::new());
    }
}
