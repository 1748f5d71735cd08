//! The common ground of the generators: the load of a schedule, the size of its blocks, and the refusals.

use crate::schedule::{Block, Collective, MAX_ALL_TO_ALL_RANKS, Tensor, cut};

/// The load that a schedule puts on the links when every neighbour is one link away, in closed form.
///
/// Multiples are of the bytes of the collective: of the tensor for all-reduce and broadcast, of the gathered
/// output for all-gather, of one rank's input for reduce-scatter and all-to-all.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Load {
    /// Messages that follow from each other, at most.
    pub rounds: u64,
    /// Bytes over the busiest directed link of each phase, summed over the phases, as a multiple.
    pub busiest: f64,
    /// Bytes sent by all ranks together, as a multiple.
    pub total: f64,
    /// Channels beside each other.
    pub channels: u32,
}

impl Load {
    /// The load of a single rank: none.
    pub const NONE: Self = Self { rounds: 0, busiest: 0.0, total: 0.0, channels: 0 };
}

/// How large the blocks of a collective are.
pub(super) struct Cuts {
    pub(super) tensor: Tensor,
    pub(super) chunks: u32,
    pub(super) parts: u32,
}

impl Cuts {
    pub(super) fn bytes(&self, block: Block) -> u64 {
        let chunk = cut(self.tensor.elements, block.chunk, self.chunks);
        let part = cut(chunk.end - chunk.start, block.part, self.parts);
        (part.end - part.start) * self.tensor.element_bytes
    }
}

/// The generators' duty to their callers: what they panic on.
pub(super) fn check(collective: Collective, ranks: u32, rank: u32) {
    assert!(rank < ranks, "rank {rank} is not one of {ranks}");
    match collective {
        Collective::Broadcast { root } => assert!(root < ranks, "root {root} is not one of {ranks}"),
        Collective::AllToAll => assert!(ranks <= MAX_ALL_TO_ALL_RANKS, "{ranks} ranks in an all-to-all"),
        _ => {}
    }
}
