//! Which copies go past the caches, and which through them: what is used again soon should be in a cache, and what is
//! not should push nothing out of it.

use super::sizes::PipelinePieces;
use tpurun_kernels::reduce::Copying;
use tpurun_memory::buffer::Link;
use tpurun_protocol::op::{Op, OpKind};
use tpurun_protocol::segment::Segment;

/// How an operation is staged, and how its results are taken.
pub(crate) fn staging(segment: &Segment, op: &Op) -> (Copying, Copying) {
    let (ranks, is_bridged) = (segment.ranks_here().len(), segment.is_bridged());
    let tuning = segment.tuning();
    let outgrows = outgrows_caches(op, ranks, is_bridged, tuning.cache_bytes);
    let is_in_place = op.outputs.is_same_memory(&op.inputs);
    // Rounds between hosts are as large as second-level caches; on one host what is staged is folded while it is
    // there, and what has just been read is, too, when it is written over.
    let (staged, taken) = match (outgrows, is_bridged, is_in_place) {
        (false, _, _) => (Copying::Cached, Copying::Cached),
        (true, true, _) => (Copying::Streaming, Copying::Streaming),
        (true, false, true) => (Copying::Loading, Copying::Cached),
        (true, false, false) => (Copying::Loading, Copying::Streaming),
    };
    let is_read_by_many = matches!(op.kind, OpKind::Broadcast | OpKind::AllGather) && ranks > 2;
    if is_read_by_many && !is_bridged && op.inputs.total() >= tuning.read_by_many_bytes {
        (Copying::Streaming, taken)
    } else {
        (staged, taken)
    }
}

/// How an operation is copied or folded where its tensors are.
pub(crate) fn in_place(segment: &Segment, op: &Op) -> Copying {
    let cache_bytes = segment.tuning().cache_bytes;
    match outgrows_caches(op, segment.ranks_here().len(), false, cache_bytes) {
        true => Copying::Streaming,
        false => Copying::Cached,
    }
}

/// How a rank of a pipeline reads its tensor, or the first one copies it, and how results are taken.
pub(crate) fn pipeline(
    segment: &Segment,
    op: &Op,
    link: Link,
    pieces: &PipelinePieces,
) -> (Copying, Copying) {
    let ranks = segment.size() as usize;
    let read = match link {
        Link::First => Copying::Streaming,
        _ if outgrows_caches(op, ranks, false, segment.tuning().cache_bytes) => Copying::Loading,
        _ => Copying::Cached,
    };
    (read, if pieces.is_kept { Copying::Cached } else { Copying::Streaming })
}

/// How a message is written into a ring, and how it is read out of one: both ends of it together count.
pub(crate) fn message(segment: &Segment, op: &Op) -> (Copying, Copying) {
    match outgrows_caches(op, 2, false, segment.tuning().cache_bytes) {
        true => (Copying::Loading, Copying::Streaming),
        false => (Copying::Cached, Copying::Cached),
    }
}

/// Whether so many ranks of a host read and write more of it than caches keep until it is used again.
fn outgrows_caches(op: &Op, ranks_here: usize, is_bridged: bool, cache_bytes: usize) -> bool {
    // In a gather or a scatter, one rank has the whole of which all others have parts.
    let is_whole = matches!(op.kind, OpKind::Gather | OpKind::Scatter)
        && op.inputs.chunks().max(op.outputs.chunks()) > 1;
    let ranks = if is_whole { 1 } else { ranks_here };
    // Data that goes to other hosts is copied to sockets, and data that comes from there out of them.
    let copies = if is_bridged { 2 } else { 1 };
    let (inputs, outputs) = (op.inputs.total(), op.outputs.total());
    let least = cache_bytes / ranks / copies;
    inputs + outputs >= least && (inputs.max(outputs) >= least || !op.outputs.is_same_memory(&op.inputs))
}

/// Whether what so many ranks give to a fold does by itself: the same on each of them, whatever it makes of the
/// result.
pub(crate) fn operands_outgrow_caches(op: &Op, ranks: usize, cache_bytes: usize) -> bool {
    op.inputs.total() >= cache_bytes / ranks
}

#[cfg(test)]
mod tests {
    use super::*;
    use tpurun_kernels::dtype::Dtype;
    use tpurun_memory::buffer::Spans;
    use tpurun_protocol::testing::{self as memory, nowhere};
    use tpurun_protocol::tuning::Tuning;

    #[test]
    fn what_all_ranks_of_a_host_use_counts() {
        let caches = Tuning::default().cache_bytes;
        let outgrows = |kind, [inputs, outputs]: [Spans; 2], ranks, is_bridged| {
            outgrows_caches(&memory::op(kind, Dtype::F32, inputs, outputs), ranks, is_bridged, caches)
        };
        let apart = |inputs, outputs, chunks| [nowhere(64, inputs, 1), nowhere(caches, outputs, chunks)];
        let in_place = |bytes| [nowhere(64, bytes, 1), nowhere(64, bytes, 1)];
        // Ranks share the caches, and a tensor that is its own result is there once.
        assert!(outgrows(OpKind::AllReduce, in_place(caches / 8), 8, false));
        assert!(!outgrows(OpKind::AllReduce, in_place(caches / 8), 7, false));
        assert!(outgrows(OpKind::AllReduce, apart(caches / 16, caches / 16, 1), 8, false));
        assert!(!outgrows(OpKind::AllGather, apart(caches / 32, caches / 16, 8), 8, false));
        // Sockets have a part of what goes to other hosts.
        assert!(outgrows(OpKind::AllReduce, in_place(caches / 16), 8, true));
        assert!(!outgrows(OpKind::AllReduce, in_place(caches / 16), 7, true));
        // The root alone has all.
        assert!(!outgrows(OpKind::Gather, apart(caches / 16, caches / 2, 8), 8, false));
        assert!(outgrows(OpKind::Gather, apart(caches / 8, caches, 8), 8, false));
        assert!(outgrows(OpKind::Gather, apart(caches / 8, 0, 1), 8, false));
        assert!(!outgrows(OpKind::Barrier, apart(0, 0, 1), 64, false));
    }
}
