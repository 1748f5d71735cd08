//! Tensors that other ranks read and write where they are.

use std::time::{Duration, Instant};

use tpurun_memory::failure::{Failure, FailureKind};
use tpurun_memory::sync::Hands;

use super::base::Base;
use super::roster::Roster;
use super::words::*;

/// The time between two looks at a rank that is waited for: it may die meanwhile.
const LOOK: Duration = Duration::from_millis(20);
/// A rank that keeps tensors of others longer than this, in a communicator that has failed, is named in the log. A copy
/// takes milliseconds, so the rank is probably stopped.
const PATIENCE: Duration = Duration::from_secs(3);

/// Tensors of other ranks that are in use.
#[derive(Clone, Copy, Debug)]
pub struct Loans<'a>(pub(super) &'a Base);

impl<'a> Loans<'a> {
    /// Does something with tensors of other ranks; nothing once the communicator has failed.
    #[inline]
    pub fn in_place<T>(self, work: impl FnOnce() -> T) -> Option<T> {
        let _holding = self.hands(self.0.rank()).fill(|| self.0.meeting().is_poisoned())?;
        Some(work())
    }

    /// Waits until nobody has tensors of this rank in its hands any more. The communicator has failed: a rank
    /// that is not at work by now does not begin. A rank that is lost by that failure is not waited for: it
    /// is dead, or will be before it goes on. A rank that is alive and does not let go is named after a while.
    #[inline]
    pub fn take_back(self, failure: &Failure) {
        self.take_back_within(PATIENCE, failure, |text| tracing::warn!("{text}"));
    }

    fn take_back_within(self, patience: Duration, failure: &Failure, say: impl Fn(&str)) {
        let patient_until = Instant::now() + patience;
        let is_lost = |rank| {
            failure.kind() == FailureKind::RankLost && failure.ranks().contains(&self.0.world_rank(rank))
        };
        for rank in self.0.ranks().filter(|rank| *rank != self.0.rank()) {
            let has_nothing = |until| self.hands(rank).await_empty(Some(until));
            let mut is_named = false;
            while !has_nothing(Instant::now()) && !is_lost(rank) && !Roster(self.0).is_gone(rank) {
                if !is_named && Instant::now() >= patient_until {
                    is_named = true;
                    say(&self.keeps_tensors(rank));
                }
                has_nothing(Instant::now() + LOOK);
            }
        }
    }

    fn keeps_tensors(self, rank: u32) -> String {
        let (keeper, me) = (Roster(self.0).describe(&[rank]), Roster(self.0).describe(&[self.0.rank()]));
        let (name, pid) = (self.0.members().title(), Roster(self.0).pid(rank));
        format!(
            "{name} has failed, and {keeper} still has tensors of {me}, which waits for them: is it stopped? \
             kill -CONT {pid} lets it go on"
        )
    }

    fn hands(self, rank: u32) -> &'a Hands {
        self.0.region.at(self.0.layout.member(rank) + M_HANDS)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::segment::M_PID;
    use crate::segment::Segment;
    use tpurun_memory::sync::Ordering;

    /// A rank that lives and does not let go is named once, and is waited for until it does.
    #[test]
    fn who_keeps_tensors_for_long_is_named() {
        let segment = Segment::alone("dp0", 3, 4096);
        for rank in 0..3 {
            segment.member_word(rank, M_PID).store(std::process::id(), Ordering::Relaxed);
        }
        let said = RefCell::new(vec![]);
        let failure = Failure::new(FailureKind::Timeout, "some");
        let holding = RefCell::new(segment.loans().hands(2).fill(|| false));
        let say = |text: &str| {
            said.borrow_mut().push(text.to_owned());
            holding.borrow_mut().take();
        };
        segment.loans().take_back_within(Duration::ZERO, &failure, say);
        let said = said.into_inner();
        assert_eq!(said.len(), 1);
        assert!(said[0].starts_with("dp0 has failed, and rank 2 (host "), "{}", said[0]);
        // Whoever has nothing is not waited for.
        segment.loans().take_back_within(Duration::ZERO, &failure, |_| unreachable!("nobody has any"));
    }
}
