//! One rank's way through the phases of a lane, a dimension after the other.

use super::lane::GridLane;
use crate::schedule::{Action, Block, Step};
use crate::shape::{Coordinates, Dimension, Grid};

/// One message of a round, for each of a number of blocks: to or from which coordinate, and what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass<T> {
    pub(super) with: u32,
    pub(super) what: T,
}

/// The messages of one rank in a round: all sends, then all receives, at most one to and from each
/// neighbour.
///
/// All ranks of a line go through the same rounds. A block that a rank receives in a round is sent in that
/// round, and the queue it is sent into was emptied in the round before: that is why nothing waits in a
/// circle although a queue has room for one message only.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round<T> {
    pub(super) sends: [Option<Pass<T>>; 2],
    pub(super) receives: [Option<Pass<T>>; 2],
}

impl<T> Round<T> {
    fn is_empty(&self) -> bool {
        self.sends.iter().chain(&self.receives).all(Option::is_none)
    }
}

/// The steps of one rank on the channel of one lane, as they are made.
pub(super) struct Walk<'a> {
    pub(super) lane: &'a GridLane,
    pub(super) grid: &'a Grid,
    pub(super) at: Coordinates,
    steps: Vec<Step>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(lane: &'a GridLane, grid: &'a Grid, rank: u32) -> Self {
        Self { lane, grid, at: grid.coordinates(rank), steps: Vec::new() }
    }

    pub(super) fn into_steps(self) -> Vec<Step> {
        self.steps
    }

    /// The dimension of the phase at a position of the lane's order.
    pub(super) fn dimension(&self, position: usize) -> Dimension {
        self.grid.dimensions()[self.lane.order[position]]
    }

    /// This rank's coordinate in that dimension.
    pub(super) fn coordinate(&self, position: usize) -> u32 {
        self.at[self.lane.order[position]]
    }

    /// Adds a round of the phase at `position`, once for each of `blocks` blocks; `block` names them.
    pub(super) fn round<T: Copy>(
        &mut self,
        position: usize,
        round: &Round<T>,
        blocks: u32,
        action: Action,
        block: impl Fn(&Self, T, u32) -> Block,
    ) {
        // The ends of a line have rounds without a message for them.
        let blocks = if round.is_empty() { 0 } else { blocks };
        let other = |walk: &Self, with| walk.grid.rank_along(&walk.at, walk.lane.order[position], with);
        for index in 0..blocks {
            for pass in round.sends.iter().flatten() {
                let (to, block) = (other(self, pass.with), block(self, pass.what, index));
                self.steps.push(Step::Send { to, block });
            }
            for pass in round.receives.iter().flatten() {
                let (from, block) = (other(self, pass.with), block(self, pass.what, index));
                self.steps.push(Step::Receive { from, block, action });
            }
        }
    }
}
