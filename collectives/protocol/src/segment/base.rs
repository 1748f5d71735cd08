//! The memory of a segment and its members: what every part of it stands on.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tpurun_memory::region::Region;
use tpurun_memory::sync::{AtomicU32, Doorbell, Meeting, Ordering};

use crate::config::{Matching, Results};
use crate::hosts::Hosts;
use crate::layout::Layout;
use crate::membership::Membership;
use crate::tuning::Tuning;

use super::bell::Bell;
use super::words::*;

/// The memory, the members, and what this rank has seen of them.
#[derive(Debug)]
pub struct Base {
    pub(super) region: Region,
    pub(super) layout: Layout,
    pub(super) members: Membership,
    pub(super) hosts: Hosts,
    pub(super) tuning: Tuning,
    /// Rung for the bridge to other hosts, where there are any.
    pub(super) bell: Option<Bell>,
    /// The time for which it is left to somebody else to say that a rank is gone.
    pub(super) grace: Duration,
    /// When this rank first saw that another one was gone.
    pub(super) seen_gone: OnceLock<Instant>,
    /// When it first saw that the communicator had failed.
    pub(super) seen_failed: OnceLock<Instant>,
}

impl Base {
    #[inline]
    pub(super) fn member_word(&self, rank: u32, word: usize) -> &AtomicU32 {
        self.region.at(self.layout.member(rank) + word)
    }

    /// The memory itself.
    #[inline]
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Where everything lies in it.
    #[inline]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The members of the communicator.
    #[inline]
    pub fn members(&self) -> &Membership {
        &self.members
    }

    /// This rank.
    #[inline]
    pub fn rank(&self) -> u32 {
        self.members.rank
    }

    /// Returns the fields that are compared, the same on every rank.
    #[inline]
    pub fn matching(&self) -> Matching {
        let strict: &AtomicU32 = self.region.at(self.layout.header() + H_STRICT);
        if strict.load(Ordering::Relaxed) == 0 { Matching::Normal } else { Matching::Strict }
    }

    /// Whether results are compared, the same on every rank.
    #[inline]
    pub fn results(&self) -> Results {
        let verify: &AtomicU32 = self.region.at(self.layout.header() + H_VERIFY);
        if verify.load(Ordering::Relaxed) == 0 { Results::Trusted } else { Results::Verified }
    }

    /// The CPUs that plans count on, the same on every rank.
    #[inline]
    pub fn planned_cpus(&self) -> u32 {
        self.region.at::<AtomicU32>(self.layout.header() + H_CPUS).load(Ordering::Relaxed).max(1)
    }

    /// The numbers by which operations are planned, the same on every rank.
    #[inline]
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// How many ranks there are.
    #[inline]
    pub fn size(&self) -> u32 {
        self.members.size()
    }

    /// All ranks.
    #[inline]
    pub fn ranks(&self) -> std::ops::Range<u32> {
        0..self.size()
    }

    /// The rank in the world of `rank`.
    #[inline]
    pub fn world_rank(&self, rank: u32) -> u32 {
        self.members.world_ranks[rank as usize]
    }

    /// The words of the rounds.
    #[inline]
    pub fn meeting(&self) -> &Meeting {
        self.region.at(self.layout.meeting())
    }

    /// Rung whenever something happened on a byte ring of `rank`.
    #[inline]
    pub fn doorbell(&self, rank: u32) -> &Doorbell {
        self.region.at(self.layout.member(rank) + M_DOORBELL)
    }

    /// Wakes all ranks that sleep on their doorbells, and the bridge.
    #[inline]
    pub fn ring_all(&self) {
        for rank in self.ranks() {
            self.doorbell(rank).ring();
        }
        self.ring_bridge();
    }

    /// The same ranks by their rank in the world.
    #[inline]
    pub fn in_world(&self, ranks: &[u32]) -> Vec<u32> {
        ranks.iter().map(|rank| self.world_rank(*rank)).collect()
    }

    /// The hosts of the ranks.
    #[inline]
    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Where this rank is.
    #[inline]
    pub fn host(&self) -> u32 {
        self.hosts.of(self.rank())
    }

    /// Whether `rank` is on the host of this rank.
    #[inline]
    pub fn is_here(&self, rank: u32) -> bool {
        self.hosts.of(rank) == self.host()
    }

    /// The ranks of this host, in order.
    #[inline]
    pub fn ranks_here(&self) -> &[u32] {
        self.hosts.ranks(self.host())
    }

    /// Whether ranks are on other hosts, too.
    #[inline]
    pub fn is_bridged(&self) -> bool {
        self.hosts.count() > 1
    }

    /// Has the bridge look.
    #[inline]
    pub fn ring_bridge(&self) {
        if let Some(bell) = &self.bell {
            bell.ring(self.rung());
        }
    }

    /// Not 0 while a ring of the bell is on its way.
    #[inline]
    pub fn rung(&self) -> &AtomicU32 {
        self.region().at(self.layout().header() + H_RUNG)
    }
}
