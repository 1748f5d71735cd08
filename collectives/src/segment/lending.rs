//! Tensors that other ranks read and write where they are.

use std::time::Instant;

use crate::process::LOOK_PERIOD;
use crate::sync::Hands;

use super::{M_HANDS, Segment};

impl Segment {
    /// Does something with tensors of other ranks; nothing once the communicator has failed.
    pub(crate) fn in_place<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let _holding = self.hands(self.rank()).fill(|| self.meeting().is_poisoned())?;
        Some(work())
    }

    /// Waits until nobody has tensors of this rank in its hands any more. The communicator has failed: who is not at
    /// work by now does not begin.
    pub(crate) fn take_back(&self) {
        Hands::failure_seen();
        for rank in self.ranks().filter(|rank| *rank != self.rank()) {
            while !self.hands(rank).await_empty(Some(Instant::now() + LOOK_PERIOD)) && !self.is_gone(rank) {}
        }
    }

    fn hands(&self, rank: u32) -> &Hands {
        self.region.at(self.layout.member(rank) + M_HANDS)
    }
}
