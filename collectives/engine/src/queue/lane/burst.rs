//! Bursts: small all-reduces queued behind each other share a meeting.
//!
//! A rank that has several of them queued offers all of their keys at once. The last to arrive compares as
//! many as every rank offers, and folds those that agree; the others wait for a later meeting, where the
//! first of them is compared like any operation, so that a difference is told as it always is. The number
//! that a rank has queued by then need not be the same anywhere.
//!
//! To come to a meeting takes no waiting, so the thread that posts does that itself. The rank that comes last
//! does the work for all: an operation that nobody of this rank attends to holds up no other rank.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tpurun_topology::{Algorithm, Schedule};

use super::Lane;
use crate::execute::rounds::{Meet, Posting, Staged};
use crate::execute::windows::{fold_windows, folds_together};
use crate::plan::planning::Wanted;
use crate::plan::strategy::is_small;
use tpurun_kernels::reduce::Copying;
use tpurun_memory::failure::Failure;
use tpurun_memory::sync::Arrival;
use tpurun_protocol::board::Recording;
use tpurun_protocol::config::Results;
use tpurun_protocol::layout::LINE;
use tpurun_protocol::match_key::{self, Offer};
use tpurun_protocol::op::Op;
use tpurun_protocol::strategy::Strategy;

/// Most operations of one meeting.
pub(crate) const BURST: usize = match_key::MAX_BEHIND + 1;

/// The call that a caller wants to be run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'a> {
    pub(crate) op: &'a Op,
    pub(crate) timeout: Duration,
    pub(crate) recording: Option<Recording>,
}

impl Call<'_> {
    fn timeout(&self) -> Duration {
        self.op.timeout.unwrap_or(self.timeout)
    }
}

/// A meeting that this rank has come to with the oldest of its queued operations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Begun {
    count: usize,
    deadline: Instant,
}

/// The state of the calls after all that could be done without waiting.
#[derive(Debug)]
pub(crate) enum Progress {
    /// The first of them, so many, have ended, alike.
    Ended(usize, Result<(), Failure>),
    /// All of them are in a meeting: the last to come ends them.
    Begun,
    /// Somebody has to wait.
    Stuck,
}

impl Lane {
    /// Runs the first of these to its end, and those behind it that could share its meeting. Says how many it
    /// ran; they ended alike. `caller` is as in [`Posting`].
    pub(crate) fn run_some(
        &mut self,
        calls: &[Call<'_>],
        caller: Option<u32>,
    ) -> (usize, Result<(), Failure>) {
        if self.begun.is_none() {
            let staged = self.staged(calls);
            if staged.len() < 2 || self.rounds.prospects.over().is_some() {
                let Call { op, timeout, recording } = calls[0];
                return (1, self.run(op, timeout, Posting { recording, caller }));
            }
            if let Err(failure) = self.begin(calls, &staged) {
                return self.ended(calls, Err(failure));
            }
        }
        self.end(calls, caller)
    }

    /// As [`run_some`](Self::run_some), as far as nobody has to wait.
    pub(crate) fn try_run_some(&mut self, calls: &[Call<'_>]) -> Progress {
        match self.begun {
            Some(Begun { count, .. }) => {
                if !self.rounds.is_ready() {
                    return if count == calls.len() { Progress::Begun } else { Progress::Stuck };
                }
            }
            None => {
                let staged = self.staged(calls);
                if staged.is_empty() || self.rounds.prospects.over().is_some() {
                    return Progress::Stuck;
                }
                match self.begin(calls, &staged) {
                    Ok(Arrival::Last) => {}
                    Ok(Arrival::Early) if staged.len() == calls.len() => return Progress::Begun,
                    Ok(Arrival::Early) => return Progress::Stuck,
                    Err(failure) => {
                        let (ran, result) = self.ended(calls, Err(failure));
                        return Progress::Ended(ran, result);
                    }
                }
            }
        }
        let (ran, result) = self.end(calls, None);
        Progress::Ended(ran, result)
    }

    /// Whether there are queued operations that come before any other.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun.is_some()
    }

    /// As many of these as fit into one meeting, in order.
    fn staged<'a>(&mut self, calls: &[Call<'a>]) -> Vec<Staged<'a>> {
        if self.rounds.segment.size() == 1
            || self.rounds.segment.results() != Results::Trusted
            || cfg!(tpurun_unmatched)
        {
            return vec![];
        }
        let room = self.rounds.segment.layout().window_bytes();
        let tuning = *self.rounds.segment.tuning();
        let mut at = 0;
        let next = |call: &Call<'a>| {
            let is_small = is_small(call.op, &tuning);
            let plan = is_small.then(|| self.flat_plan(call.op)).flatten()?;
            let place = Staged { op: call.op, at, together: folds_together(&plan) };
            at += place.bytes().next_multiple_of(LINE);
            (at <= room).then_some(place)
        };
        calls.iter().take(BURST).map_while(next).collect()
    }

    fn flat_plan(&mut self, op: &Op) -> Option<Arc<Schedule>> {
        // An operation that can not be planned says so when it is its turn.
        let plan = Wanted::by(op, self.planner.forced())
            .and_then(|wanted| self.plan(self.between_hosts(wanted), op.kind).ok())?;
        (plan.algorithm == Algorithm::Flat).then_some(plan)
    }

    fn meet_for<'a>(
        &self,
        calls: &[Call<'a>],
        staged: &'a [Staged<'a>],
        deadline: Instant,
        caller: Option<u32>,
    ) -> Meet<'a> {
        let Call { op, recording, .. } = calls[0];
        let posted = Posting { recording, caller };
        Meet {
            strategy: Some(Strategy::Windows),
            fold_bytes: if staged[0].together { staged[0].bytes() } else { 0 },
            fold_window: self.rounds.parity(),
            behind: &staged[1..],
            ..Meet::new(op, self.seq, deadline, calls[0].timeout(), posted)
        }
    }

    /// Comes to a meeting with all of `staged`, the first of `calls`.
    fn begin(&mut self, calls: &[Call<'_>], staged: &[Staged<'_>]) -> Result<Arrival, Failure> {
        let begun = Begun { count: staged.len(), deadline: Instant::now() + calls[0].timeout() };
        let meet = self.meet_for(calls, staged, begun.deadline, None);
        let arrival = self.guarded(|lane| {
            lane.rounds.refuse_if_closing(&meet)?;
            let parity = lane.rounds.parity();
            let segment = lane.rounds.segment.clone();
            let (region, layout) = (segment.region(), segment.layout());
            for tensor in staged {
                let at = layout.window(segment.rank(), parity) + tensor.at;
                tensor.op.inputs.stage(Copying::Cached, (0, 0), tensor.bytes(), region, at);
                lane.rounds.shared.traffic.stage(tensor.bytes());
                lane.rounds.staged_mut().for_all = tensor.at + tensor.bytes();
            }
            for (index, tensor) in staged[1..].iter().enumerate() {
                let offer = Offer::new(region, layout.behind(segment.rank(), parity), index);
                offer.write(tensor.op, meet.strategy, segment.matching());
            }
            lane.rounds.offer_keys(&meet, 1)
        })?;
        self.begun = Some(begun);
        Ok(arrival)
    }

    /// Waits for the end of the meeting that has begun, and takes what it has settled.
    fn end(&mut self, calls: &[Call<'_>], caller: Option<u32>) -> (usize, Result<(), Failure>) {
        let Begun { count, deadline } = self.begun.take().expect("it has begun");
        let staged = self.staged(&calls[..count]);
        let meet = self.meet_for(calls, &staged, deadline, caller);
        let parity = self.rounds.parity();
        let result = self.guarded(|lane| {
            let agreed = lane.rounds.await_keys(&meet, 1)?;
            let ran = 1 + agreed.behind.min(meet.behind.len());
            let (region, layout) = (lane.rounds.segment.region(), lane.rounds.segment.layout());
            for tensor in &staged[..ran] {
                if tensor.together {
                    let at = layout.folded(parity) + tensor.at;
                    tensor.op.outputs.fetch(Copying::Cached, (0, 0), tensor.bytes(), region, at);
                    lane.rounds.shared.traffic.stage(tensor.bytes());
                } else {
                    let window = |rank| (rank, layout.window(rank, parity) + tensor.at);
                    let sources = lane.rounds.segment.ranks().map(window);
                    let whole = 0..tensor.bytes();
                    fold_windows(
                        &lane.rounds.segment,
                        tensor.op,
                        sources,
                        whole,
                        &lane.rounds.shared.traffic,
                    );
                }
            }
            Ok(ran)
        });
        self.ended(calls, result)
    }

    /// `ran` of them have ended well, or the first one has failed.
    fn ended(&mut self, calls: &[Call<'_>], ran: Result<usize, Failure>) -> (usize, Result<(), Failure>) {
        let count = *ran.as_ref().unwrap_or(&1);
        let result = ran.map(drop);
        self.seq += count as u64;
        if result.is_ok() {
            for call in &calls[1..count] {
                self.rounds.presence.agreed(call.recording, Some(Strategy::Burst));
            }
            self.rounds.presence.completed(self.seq - 1);
        }
        for call in &calls[..count] {
            self.rounds.presence.ended(call.recording, &result);
        }
        (count, result)
    }
}

#[cfg(test)]
mod tests;
