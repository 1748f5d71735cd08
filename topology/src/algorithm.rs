//! The algorithms: each one a generator of one rank's schedule, with formulas for what it moves.

mod all_to_all;
pub mod bucket;
pub mod flat;
pub mod ring;
mod spread;
mod sweep;
mod walk;

use crate::grid::Grid;
use crate::placement::Placement;
use crate::planner::MAX_ALL_TO_ALL_RANKS;
use crate::schedule::{Algorithm, Block, Collective, Schedule, cut};
use crate::traffic::{Tensor, Traffic};

/// The schedule of one rank, in time proportional to its steps.
///
/// # Panics
/// When `rank` or the root of a broadcast is not a rank of the placement, or an all-to-all has more than
/// [`MAX_ALL_TO_ALL_RANKS`] ranks; [`crate::plan`] reports these instead.
pub fn schedule(algorithm: Algorithm, collective: Collective, placement: &Placement, rank: u32) -> Schedule {
    match algorithm {
        Algorithm::Flat => flat::schedule(collective, placement.ranks(), rank),
        Algorithm::Ring => ring::schedule(collective, placement.ranks(), rank),
        Algorithm::Bucket => bucket::schedule(collective, placement.grid(), rank),
    }
}

/// Returns the traffic of all ranks together, by formula.
pub fn traffic(
    algorithm: Algorithm,
    collective: Collective,
    placement: &Placement,
    tensor: Tensor,
) -> Traffic {
    match algorithm {
        Algorithm::Flat => flat::traffic(collective, placement.ranks(), tensor),
        Algorithm::Ring => ring::traffic(collective, placement.ranks(), tensor),
        Algorithm::Bucket => bucket::traffic(collective, placement.grid(), tensor),
    }
}

/// Returns the load that the schedules put on the links, in closed form.
pub fn load(algorithm: Algorithm, collective: Collective, placement: &Placement) -> Load {
    match algorithm {
        Algorithm::Flat => flat::load(collective, placement.ranks()),
        Algorithm::Ring => ring::load(collective, placement.ranks()),
        Algorithm::Bucket => bucket::load(collective, placement.grid()),
    }
}

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

/// The generators' duty to their callers: what they panic on.
fn check(collective: Collective, ranks: u32, rank: u32) {
    assert!(rank < ranks, "rank {rank} is not one of {ranks}");
    match collective {
        Collective::Broadcast { root } => assert!(root < ranks, "root {root} is not one of {ranks}"),
        Collective::AllToAll => assert!(ranks <= MAX_ALL_TO_ALL_RANKS, "{ranks} ranks in an all-to-all"),
        _ => {}
    }
}

/// How the grid algorithms divide their work: a lane for each dimension to begin with and each way around.
fn lanes(grid: &Grid) -> impl Iterator<Item = Lane> + '_ {
    let count = grid.dimensions().len();
    let ways = if grid.any_wraps() { &[Way::Up, Way::Down][..] } else { &[Way::Up][..] };
    let starts = (0..count).flat_map(move |first| ways.iter().map(move |&way| (first, way)));
    starts.zip(0..).map(move |((first, way), part)| Lane {
        order: (0..count).map(|k| (first + k) % count).collect(),
        way,
        part,
    })
}

fn lane_count(grid: &Grid) -> u32 {
    let ways = if grid.any_wraps() { 2 } else { 1 };
    (grid.dimensions().len() as u32 * ways).max(1)
}

/// One part of every chunk and how it goes through the grid, on a channel of its own.
#[derive(Clone, Debug)]
struct Lane {
    /// Dimensions in the order they are gone through.
    order: Vec<usize>,
    /// Which way around the dimensions that wrap.
    way: Way,
    part: u32,
}

/// Which way along a dimension.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Up,
    Down,
}

/// How large the blocks of a collective are.
struct Cuts {
    tensor: Tensor,
    chunks: u32,
    parts: u32,
}

impl Cuts {
    fn bytes(&self, block: Block) -> u64 {
        let chunk = cut(self.tensor.elements, block.chunk, self.chunks);
        let part = cut(chunk.end - chunk.start, block.part, self.parts);
        (part.end - part.start) * self.tensor.element_bytes
    }
}
