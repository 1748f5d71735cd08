//! The choice of the way in which a collective is run, in one function.
//!
//! All ranks of a communicator choose alike: what [`choose`] looks at is the same for each of them, or the match
//! keys say what is not. Whether tensors lie where other ranks can reach them is each rank's own affair, and only
//! their meeting tells; so a choice says what is done either way.

use tpurun_topology::Algorithm;

use tpurun_protocol::op::{Op, OpKind};
use tpurun_protocol::segment::Segment;
use tpurun_protocol::strategy::Strategy;
use tpurun_protocol::tuning::Tuning;

/// The ranks of a communicator, and what they share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Ground {
    pub(crate) ranks: u32,
    pub(crate) hosts: u32,
    pub(crate) cpus: u32,
}

impl Ground {
    pub(crate) fn of(segment: &Segment) -> Self {
        Self { ranks: segment.size(), hosts: segment.hosts().count(), cpus: segment.planned_cpus() }
    }
}

/// The properties of an operation that the choice depends on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Traits {
    pub(crate) kind: OpKind,
    /// Bytes that a rank gives.
    pub(crate) bytes: usize,
    /// Bytes that a rank gives or gets, whichever is more.
    pub(crate) most: usize,
    /// Bytes of the longest chunk, of what is only copied.
    pub(crate) longest_chunk: usize,
    /// How many times as large as elements partial results are.
    pub(crate) widening: usize,
}

impl Traits {
    pub(crate) fn of(op: &Op, ground: Ground) -> Self {
        let (bytes, outputs) = (op.inputs.total(), op.outputs.total());
        let is_copied = !op.kind.reduces() && op.kind != OpKind::Broadcast;
        let longest_chunk =
            if is_copied { op.inputs.longest_chunk().max(op.outputs.longest_chunk()) } else { 0 };
        // It counts between hosts alone, and takes a moment to find out.
        let widening = if ground.hosts > 1 { op.reduction(ground.ranks).widening() } else { 1 };
        Self { kind: op.kind, bytes, most: bytes.max(outputs), longest_chunk, widening }
    }
}

/// How an operation is run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Choice {
    /// Where a rank has its tensors elsewhere than in arenas; what match keys say.
    pub(crate) staged: Strategy,
    /// Where all have them in arenas, if that is worth finding out.
    pub(crate) in_place: Option<Strategy>,
}

/// Chooses. `algorithm` is what the planner found the cheapest, or the user forces.
pub(crate) fn choose(ground: Ground, op: &Traits, algorithm: Algorithm, tuning: &Tuning) -> Choice {
    let staged = match algorithm {
        Algorithm::Ring => Strategy::Ring,
        Algorithm::Bucket => Strategy::Bucket,
        // Any of the ranks may have it share a meeting with others.
        _ if op.kind == OpKind::AllReduce && op.bytes <= tuning.small_bytes => Strategy::Windows,
        _ => {
            return Choice { staged: staged(ground, op, tuning), in_place: in_place(ground, op, tuning) };
        }
    };
    Choice { staged, in_place: None }
}

/// Whether it may share a meeting with others of its kind, as far as it alone says.
pub(crate) fn is_small(op: &Op, tuning: &Tuning) -> bool {
    op.kind == OpKind::AllReduce && (1..=tuning.small_bytes).contains(&op.inputs.total())
}

fn staged(Ground { ranks, hosts, cpus }: Ground, op: &Traits, tuning: &Tuning) -> Strategy {
    if !op.kind.reduces() || ranks == 1 {
        return Strategy::Windows;
    }
    if hosts == 1 {
        // With a core for each rank, all of them fold at once out of windows.
        let is_shared = ranks > cpus;
        let is_many = is_shared && (ranks / cpus) as usize >= tuning.pipeline_many;
        let least = if is_many { tuning.pipeline_bytes_many } else { tuning.pipeline_bytes };
        return if is_shared && op.bytes >= least { Strategy::Pipeline } else { Strategy::Windows };
    }
    // Small tensors are folded at once, in the order of ranks: it takes longer to send them than to fold them.
    if op.bytes < tuning.hierarchical_bytes {
        return Strategy::Windows;
    }
    // A part of a result goes to where it is folded as a partial result, and from there to all as elements.
    let (ranks, widening) = (ranks as usize, op.widening);
    let is_scattered = op.kind != OpKind::ReduceScatter
        && hosts as usize >= tuning.scattered_hosts
        && op.bytes >= tuning.scattered_bytes
        && ranks > widening + 1;
    let sends_less = ranks > hosts as usize * widening;
    match (is_scattered, sends_less) {
        (true, _) => Strategy::Scattered,
        (false, true) => Strategy::Hierarchical,
        (false, false) => Strategy::Windows,
    }
}

fn in_place(Ground { ranks, hosts, cpus }: Ground, op: &Traits, tuning: &Tuning) -> Option<Strategy> {
    // Over several hosts only the input of a fold is read so.
    if ranks == 1 || hosts > 1 || op.kind == OpKind::Barrier {
        return None;
    }
    let (bytes, part) = match op.kind {
        OpKind::Broadcast => (op.most, tuning.in_place_broadcast_part),
        kind if kind.reduces() => (op.most, tuning.in_place_fold_part),
        _ => (op.longest_chunk, tuning.in_place_chunk_part),
    };
    if bytes < tuning.in_place_bytes.max(part * ranks as usize) {
        return None;
    }
    // Where what moves is no rank's own, it is cut for all of them.
    let least = match op.kind {
        OpKind::AllReduce | OpKind::Reduce => {
            tuning.shares_fold_bytes.min(ranks as usize * tuning.shares_fold_part)
        }
        OpKind::Broadcast => tuning.shares_broadcast_bytes,
        _ => tuning.shares_bytes,
    };
    let is_shared = ranks > cpus && op.most >= least;
    Some(if is_shared { Strategy::InPlaceShares } else { Strategy::InPlace })
}

#[cfg(test)]
mod tests;
