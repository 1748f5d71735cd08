//! Tensors that other ranks read and write where they are.

use std::time::{Duration, Instant};

use tpurun_memory::failure::{Failure, FailureKind};
use tpurun_memory::sync::Hands;

use super::{M_HANDS, Segment};

/// The time between two looks at a rank that is waited for: it may die meanwhile.
const LOOK: Duration = Duration::from_millis(20);

impl Segment {
    /// Does something with tensors of other ranks; nothing once the communicator has failed.
    pub fn in_place<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let _holding = self.hands(self.rank()).fill(|| self.meeting().is_poisoned())?;
        Some(work())
    }

    /// Waits until nobody has tensors of this rank in its hands any more. The communicator has failed: a rank
    /// that is not at work by now does not begin. A rank that is lost by that failure is not waited for: it
    /// is dead, or will be before it goes on.
    pub fn take_back(&self, failure: &Failure) {
        let is_lost = |rank| {
            failure.kind() == FailureKind::RankLost && failure.ranks().contains(&self.world_rank(rank))
        };
        for rank in self.ranks().filter(|rank| *rank != self.rank()) {
            let has_nothing = |until| self.hands(rank).await_empty(Some(until));
            while !has_nothing(Instant::now()) && !is_lost(rank) && !self.is_gone(rank) {
                has_nothing(Instant::now() + LOOK);
            }
        }
    }

    fn hands(&self, rank: u32) -> &Hands {
        self.region.at(self.layout.member(rank) + M_HANDS)
    }
}
