//! The communicators of the job's ranks, as the agent sees them: where verdicts are delivered.
//!
//! Every segment that ranks hand to each other passes through the agent, which keeps it mapped while any of
//! its ranks may use it.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::OwnedFd;

use tpurun_collectives::FailureKind;
use tpurun_collectives::supervise::{Between, Supervised};

use crate::wait_graph::Groups;

/// By the number that the board shows; a group that was destroyed and made again under its old name has
/// several lives.
#[derive(Debug, Default)]
pub(crate) struct Supervisor {
    groups: HashMap<u64, Vec<Supervised>>,
    lives: usize,
}

impl Supervisor {
    /// Keeps an eye on a segment; one that is not ours, or one too many, goes on without.
    pub(crate) fn add(&mut self, segment: &OwnedFd) -> Option<&Supervised> {
        if self.lives >= MAX_LIVES {
            return None;
        }
        let supervised = Supervised::open(segment).ok()?;
        self.lives += 1;
        let lives = self.groups.entry(supervised.comm_id()).or_default();
        lives.push(supervised);
        lives.last()
    }

    /// Lets go of communicators that every rank has destroyed or left.
    pub(crate) fn forget(&mut self, has_ended: impl Fn(u32) -> bool) {
        let is_over = |group: &Supervised| {
            (0_u32..)
                .zip(group.world_ranks())
                .all(|(rank, world_rank)| group.is_closed(rank) || has_ended(*world_rank))
        };
        for lives in self.groups.values_mut() {
            lives.retain(|group| !is_over(group));
        }
        self.groups.retain(|_, lives| !lives.is_empty());
        self.lives = self.groups.values().map(Vec::len).sum();
    }

    /// Communicators that need `rank`: it is in them, and has not destroyed its end.
    pub(crate) fn of_rank(&self, rank: u32) -> impl Iterator<Item = &Supervised> {
        self.groups.values().flatten().filter(move |group| {
            let place = (0_u32..).zip(group.world_ranks()).find(|(_, world_rank)| **world_rank == rank);
            place.is_some_and(|(place, _)| !group.is_closed(place))
        })
    }

    /// All of them.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Supervised> {
        self.groups.values().flatten()
    }

    /// Raises the same text on all ranks of these communicators, and says whom it blames.
    pub(crate) fn fail(&self, comm_ids: &BTreeSet<u64>, kind: FailureKind, text: &str, guilty: &[u32]) {
        let groups = || comm_ids.iter().filter_map(|comm_id| self.groups.get(comm_id)).flatten();
        groups().for_each(|group| group.fail_quietly(kind, text, guilty));
        groups().for_each(Supervised::announce);
    }

    /// Whether it has failed, or is not known.
    pub(crate) fn has_failed(&self, comm_id: u64) -> bool {
        self.current(comm_id).is_none_or(|group| group.failure().is_some())
    }

    fn current(&self, comm_id: u64) -> Option<&Supervised> {
        self.groups.get(&comm_id)?.last()
    }
}

impl Groups for Supervisor {
    fn members(&self, comm_id: u64) -> Option<&[u32]> {
        self.current(comm_id).map(Supervised::world_ranks)
    }

    fn between(&self, comm_id: u64, from: u32, to: u32) -> Option<Between> {
        self.current(comm_id).map(|group| group.between(from, to))
    }
}

/// Each is a mapping of this process, of which Linux allows 65,530 by default.
const MAX_LIVES: usize = 32_768;
