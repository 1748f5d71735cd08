//! The ranks of the world that runs now, and what has become of each.

use std::collections::HashMap;
use std::time::Instant;

use tpurun_protocol::board::RankView;

use crate::job::Job;
use crate::judge::verdict::FailedRank;
use crate::ranks::{Ending, Rank};

/// All ranks of the job, those on other nodes included.
#[derive(Debug)]
pub(super) struct AllRanks {
    pub(super) ranks: Vec<Rank>,
    /// Ranks that have failed, in the order in which that was seen.
    pub(super) failures: Vec<FailedRank>,
    /// Ranks that exited with code 0, first one first.
    pub(super) left: Vec<u32>,
    /// The views that ranks of other nodes left behind when they ended in order.
    pub(super) views_elsewhere: HashMap<u32, RankView>,
}

impl AllRanks {
    /// The ranks before any of them is started.
    pub(super) fn unborn(job: &Job) -> AllRanks {
        let here = |rank| if job.here.contains(&rank) { Rank::Unborn } else { Rank::Elsewhere };
        AllRanks {
            ranks: (0..job.ranks).map(here).collect(),
            failures: Vec::new(),
            left: Vec::new(),
            views_elsewhere: HashMap::new(),
        }
    }

    pub(super) fn of(&self, rank: u32) -> &Rank {
        &self.ranks[rank as usize]
    }

    pub(super) fn set(&mut self, rank: u32, state: Rank) {
        self.ranks[rank as usize] = state;
    }

    pub(super) fn is_anybody_alive(&self) -> bool {
        self.ranks.iter().any(Rank::is_alive)
    }

    pub(super) fn alive(&self) -> usize {
        self.ranks.iter().filter(|rank| rank.is_alive()).count()
    }

    /// Whether a rank will never do anything any more; an unknown rank will not either.
    pub(super) fn has_ended(&self, rank: u32) -> bool {
        self.ranks.get(rank as usize).is_none_or(Rank::has_ended)
    }

    pub(super) fn has_failed(&self, rank: u32) -> bool {
        self.failures.iter().any(|failure| failure.rank == rank)
    }

    /// The processes of this host that run, and the rank of each.
    pub(super) fn running(&self) -> HashMap<i32, u32> {
        let alive = self.ranks.iter().zip(0_u32..).filter(|(rank, _)| rank.is_alive());
        alive.filter_map(|(rank, index)| Some((rank.pid()?, index))).collect()
    }

    /// Notes how a rank of this host has ended; false when it had ended before, or there is none.
    pub(super) fn end(&mut self, rank: u32, ending: Ending, at: Instant) -> bool {
        let Some(state) = self.ranks.get_mut(rank as usize).filter(|state| state.is_alive()) else {
            return false;
        };
        // Nobody knows earlier how this rank has ended.
        *state = Rank::Ended { pid: state.pid(), ending, at };
        true
    }

    /// The time at which the last rank has ended, or `otherwise` when none has.
    pub(super) fn last_end(&self, otherwise: Instant) -> Instant {
        let ends = self.ranks.iter().filter_map(|rank| match rank {
            Rank::Ended { at, .. } => Some(*at),
            _ => None,
        });
        ends.max().unwrap_or(otherwise)
    }
}
