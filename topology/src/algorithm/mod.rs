//! The algorithms: each one a generator of one rank's schedule, with formulas for what it moves.
//!
//! This room knows shapes and schedules. It knows no machine, and so no time: the planner has the costs.

mod all_to_all;
pub mod bucket;
pub mod flat;
mod lane;
mod load;
pub mod ring;
mod spread;
mod sweep;
mod walk;

pub use load::Load;

use crate::schedule::{Algorithm, Collective, Schedule, ScheduleTraffic, Tensor};
use crate::shape::Placement;

/// The schedule of one rank, in time proportional to its steps.
///
/// # Panics
/// When `rank` or the root of a broadcast is not a rank of the placement, or an all-to-all has more than
/// [`crate::schedule::MAX_ALL_TO_ALL_RANKS`] ranks; [`crate::plan`] reports these instead.
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
) -> ScheduleTraffic {
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
