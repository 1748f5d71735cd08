//! How a rank waits for others in the middle of an operation: on its doorbell, looking now and then whether they can
//! still come.

use std::time::Instant;

use crate::execute::presence::Blocked;
use tpurun_memory::failure::Failure;
use tpurun_memory::process::LOOK_PERIOD;
use tpurun_memory::sync::Patience;
use tpurun_protocol::segment::{Segment, Verdict};

/// Says from the ranks that are needed next why an operation can not complete.
pub(crate) type Hopeless<'a> = &'a dyn Fn(&[u32]) -> Option<Verdict>;

/// Says that this rank waits.
pub(crate) type Tell<'a> = &'a dyn Fn() -> Blocked;

/// One operation's.
pub(crate) struct Lookout<'a> {
    segment: &'a Segment,
    deadline: Instant,
    patience: Patience,
    hopeless: Hopeless<'a>,
    tell: Tell<'a>,
    blocked: Option<Blocked>,
    look: Option<Instant>,
    departures: u32,
    verdict: Option<Verdict>,
}

impl<'a> Lookout<'a> {
    pub(crate) fn new(
        segment: &'a Segment,
        deadline: Instant,
        patience: Patience,
        hopeless: Hopeless<'a>,
        tell: Tell<'a>,
    ) -> Self {
        let (blocked, look, verdict) = (None, None, None);
        Self { segment, deadline, patience, hopeless, tell, blocked, look, departures: 0, verdict }
    }

    /// To be read before looking at what the doorbell announces.
    pub(crate) fn rings(&self) -> u32 {
        self.segment.doorbell(self.segment.rank()).rings()
    }

    /// Something has moved: that may be what the gone ones had left, so they are looked at again.
    pub(crate) fn moved(&mut self) {
        (self.blocked, self.look, self.verdict, self.departures) = (None, None, None, 0);
    }

    /// Nothing has moved since the doorbell was `seen`: waits for a ring, or a while. `needed` are the ranks without
    /// which nothing will move.
    ///
    /// # Errors
    /// When the communicator has failed, or now fails because they do not come.
    pub(crate) fn wait(&mut self, seen: u32, needed: impl FnOnce() -> Vec<u32>) -> Result<(), Failure> {
        let mut waiting = self.patience.begin();
        while waiting.again() {
            if self.rings() != seen {
                return Ok(());
            }
        }
        self.sleep(seen, needed)
    }

    /// As [`wait`](Self::wait), for what will not move soon.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub(crate) fn sleep(&mut self, seen: u32, needed: impl FnOnce() -> Vec<u32>) -> Result<(), Failure> {
        let segment = self.segment;
        if let Some(failure) = segment.failure() {
            return Err(failure);
        }
        // A rank that died had done what it could before it was seen dead: only a wait after that counts.
        if let Some(verdict) = self.verdict.take() {
            return Err(segment.failure_word().fail_by(&verdict));
        }
        // Most waits are shorter than it is worth to say so.
        let first = || Instant::now() + LOOK_PERIOD / 5;
        let until = self.deadline.min(*self.look.get_or_insert_with(first));
        let now_left = segment.roster().departures();
        if now_left == self.departures {
            segment.doorbell(segment.rank()).wait(seen, Some(until));
        }
        if now_left != self.departures || Instant::now() >= until {
            self.departures = now_left;
            self.look = Some(Instant::now() + LOOK_PERIOD);
            self.blocked.get_or_insert_with(self.tell);
            self.verdict = (self.hopeless)(&needed());
        }
        Ok(())
    }
}
