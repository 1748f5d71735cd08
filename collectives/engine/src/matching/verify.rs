//! Results that must be equal on all ranks, hashed and compared before their operation ends: what the engine
//! wrote is right, so a rank that has something else has memory that something else writes to.

use std::hash::Hasher;

use twox_hash::XxHash3_64;

use crate::matching::verdict;
use tpurun_memory::buffer::Spans;
use tpurun_memory::failure::Failure;
use tpurun_protocol::config::Results;
use tpurun_protocol::match_key::{KeyClass, Slot};
use tpurun_protocol::op::{Op, OpKind};
use tpurun_protocol::segment::Segment;

/// The hash of what this rank has after `op`; none where results are trusted or differ by design.
pub(crate) fn hash_of_result(segment: &Segment, op: &Op) -> Option<u64> {
    if segment.results() == Results::Trusted || segment.size() == 1 {
        return None;
    }
    match op.kind {
        OpKind::AllReduce | OpKind::AllGather => Some(hash(&op.outputs)),
        OpKind::Broadcast if op.root == Some(segment.rank()) => Some(hash(&op.inputs)),
        OpKind::Broadcast => Some(hash(&op.outputs)),
        _ => None,
    }
}

/// The last to arrive: all hashes must be equal.
pub(crate) fn compare(segment: &Segment, op: &Op, seq: u64, parity: usize) -> Result<(), Failure> {
    let result = |rank| Slot::new(segment.region(), segment.layout().slot(rank, parity)).result();
    let first = result(0);
    if segment.ranks().all(|rank| result(rank) == first) {
        return Ok(());
    }
    let mut classes: Vec<(u64, Vec<u32>)> = vec![];
    for rank in segment.ranks() {
        let hash = result(rank);
        match classes.iter_mut().find(|(known, _)| *known == hash) {
            Some((_, ranks)) => ranks.push(rank),
            None => classes.push((hash, vec![rank])),
        }
    }
    classes.sort_by_key(|(_, ranks)| (usize::MAX - ranks.len(), ranks[0]));
    let classes: Vec<KeyClass> =
        classes.into_iter().map(|(hash, ranks)| vec![(ranks, format!("{hash:016x}"))]).collect();
    let name = segment.members().title();
    let posted = tpurun_protocol::match_key::Posted::of(op);
    let head = format!("results differ after operation {seq} of {name}, {posted}");
    Err(segment.failure_word().fail_by(&verdict::of_classes(segment, head, "have ", "results", &classes)))
}

/// The same for the same bytes, however they are cut into pieces. Apart: an operation whose result is not looked at has
/// no room for the copy on its stack.
#[inline(never)]
fn hash(spans: &Spans) -> u64 {
    // Copied first: other threads of the program may write to it, which is what this is looking for.
    let mut copy = [0; 16 << 10];
    let mut hasher = XxHash3_64::new();
    let total = spans.total();
    let mut done = 0;
    while done < total {
        let bytes = copy.len().min(total - done);
        spans.read(done, &mut copy[..bytes]);
        hasher.write(&copy[..bytes]);
        done += bytes;
    }
    hasher.finish()
}
