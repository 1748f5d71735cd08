//! The planner: which algorithm a collective uses, and the schedule of one rank.
//!
//! The top floor: this room knows all others but the verifier, and no other room knows it.

pub mod cost;

use crate::algorithm;
use crate::machine::Machine;
use crate::schedule::{Algorithm, Collective, MAX_ALL_TO_ALL_RANKS, Schedule};
use crate::shape::Placement;

/// A question to the planner. All ranks must ask with the same values but `rank` to get schedules that fit.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The collective that is asked.
    pub collective: Collective,
    /// The size, as [`cost::estimate`] counts it.
    pub bytes: u64,
    /// Where the ranks sit.
    pub placement: &'a Placement,
    /// The rank whose schedule is wanted.
    pub rank: u32,
    /// The machine that the ranks run on.
    pub machine: &'a Machine,
    /// The algorithm to use whatever it costs.
    pub forced: Option<Algorithm>,
}

/// Why there is no plan.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A rank that the communicator does not have.
    #[error("rank {rank} is not in the communicator, expected a rank below {ranks}")]
    NoSuchRank {
        /// The rank as given.
        rank: u32,
        /// Ranks of the communicator.
        ranks: u32,
    },
    /// A root that the communicator does not have.
    #[error("broadcast root {root} is not in the communicator, expected a rank below {ranks}")]
    NoSuchRoot {
        /// The root as given.
        root: u32,
        /// Ranks of the communicator.
        ranks: u32,
    },
    /// Flat where there is no memory to share.
    #[error("algorithm flat needs all {ranks} ranks on one host, expected ring or bucket")]
    NotOneHost {
        /// Ranks of the communicator.
        ranks: u32,
    },
    /// More ranks than an all-to-all can number.
    #[error("all_to_all has {ranks} ranks, expected at most {MAX_ALL_TO_ALL_RANKS}")]
    TooManyRanks {
        /// Ranks of the communicator.
        ranks: u32,
    },
}

/// Plans a collective: the cheapest algorithm, or the forced one, as rank `request.rank` sees it.
///
/// The choice depends on nothing but the request without its rank, so every rank makes the same. It compares
/// costs in closed form; time is proportional to the steps of this one rank.
///
/// # Errors
/// When the rank or the root is not in the communicator, flat is forced without shared memory, or an
/// all-to-all has too many ranks.
pub fn plan(request: &Request<'_>) -> Result<Schedule, PlanError> {
    let ranks = request.placement.ranks();
    if request.rank >= ranks {
        return Err(PlanError::NoSuchRank { rank: request.rank, ranks });
    }
    let algorithm = choose(request)?;
    Ok(algorithm::schedule(algorithm, request.collective, request.placement, request.rank))
}

/// The algorithm that [`plan`] uses, the same for every rank.
///
/// # Errors
/// As [`plan`], but for the rank, which is not looked at.
pub fn choose(request: &Request<'_>) -> Result<Algorithm, PlanError> {
    let Request { collective, bytes, placement, machine, forced, .. } = *request;
    let ranks = placement.ranks();
    match collective {
        Collective::Broadcast { root } if root >= ranks => return Err(PlanError::NoSuchRoot { root, ranks }),
        Collective::AllToAll if ranks > MAX_ALL_TO_ALL_RANKS => {
            return Err(PlanError::TooManyRanks { ranks });
        }
        _ => {}
    }
    let seconds = |algorithm| cost::estimate(algorithm, collective, bytes, placement, machine);
    if let Some(algorithm) = forced {
        return seconds(algorithm).map(|_| algorithm).ok_or(PlanError::NotOneHost { ranks });
    }
    // If two cost the same, the first is taken: they are listed by the cost of setting them up.
    let costs = Algorithm::ALL.into_iter().filter_map(|algorithm| Some((algorithm, seconds(algorithm)?)));
    let cheapest = costs.reduce(|best, next| if next.1 < best.1 { next } else { best });
    Ok(cheapest.expect("ring runs on every machine").0)
}
