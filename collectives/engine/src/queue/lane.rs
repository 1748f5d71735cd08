//! The collective lane of a communicator: its operations, one after the other, on the caller's thread or on
//! the progress thread.
//!
//! Every operation begins with a meeting of all ranks over its match keys (`execute/rounds.rs`); only then does any
//! user tensor change. The rest depends on the schedule: flat ones go on meeting over shared windows, the others
//! stream over byte rings.

mod burst;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tpurun_topology::{Algorithm, Schedule};

use crate::execute::lookout::Lookout;
use crate::execute::presence::Presence;
use crate::execute::rounds::{Meet, Memory, Posting, Rounds, Shared};
use crate::execute::stepwise;
use crate::execute::windows::Windowed;
use crate::plan::planning::{Planner, Wanted};
use crate::plan::strategy::{Choice, Ground, Traits, choose};
use tpurun_memory::failure::{Failure, FailureKind, bug};
use tpurun_memory::sync::Patience;
use tpurun_protocol::config::Config;
use tpurun_protocol::op::{Op, OpKind};
use tpurun_protocol::segment::Segment;
use tpurun_protocol::strategy::Strategy;

pub(crate) use burst::{BURST, Begun, Call, Progress};

/// Executes the collectives of one communicator in order.
#[derive(Debug)]
pub(crate) struct Lane {
    rounds: Rounds,
    ground: Ground,
    planner: Planner,
    /// Few: sizes are rounded.
    plans: Vec<(Wanted, Arc<Schedule>)>,
    /// Whether the memory that ranks stage in lies in huge pages, where there are any.
    is_settled: bool,
    seq: u64,
    /// Queued operations that this rank has come to a meeting with, and not waited for yet.
    begun: Option<Begun>,
}

impl Lane {
    pub(crate) fn new(
        segment: Arc<Segment>,
        config: Config,
        presence: Arc<Presence>,
        shared: Arc<Shared>,
    ) -> Result<Self, Failure> {
        let ground = Ground::of(&segment);
        let planner = Planner::new(segment.members(), &config, ground.cpus, segment.tuning())?;
        let rounds = Rounds::new(segment, config, presence, shared, planner.fingerprint());
        Ok(Self { rounds, ground, planner, plans: vec![], is_settled: false, seq: 0, begun: None })
    }

    /// Runs one collective to its end.
    pub(crate) fn run(&mut self, op: &Op, timeout: Duration, posted: Posting) -> Result<(), Failure> {
        if let Some(failure) = self.rounds.prospects.over() {
            let result = Err(failure);
            self.rounds.presence.ended(posted.recording, &result);
            return result;
        }
        let seq = self.seq;
        self.seq += 1;
        let timeout = op.timeout.unwrap_or(timeout);
        let deadline = Instant::now() + timeout;
        let meet = || Meet::new(op, seq, deadline, timeout, posted);
        let result = self.guarded(|lane| {
            let mut first = meet();
            lane.rounds.refuse_if_closing(&first)?;
            lane.execute(&mut first)?;
            lane.rounds.verify(op, meet)
        });
        if result.is_ok() {
            self.rounds.presence.completed(seq);
        }
        self.rounds.take_back(&result);
        self.rounds.presence.ended(posted.recording, &result);
        self.settle();
        result
    }

    /// Has the memory that all ranks stage in lie in huge pages, for ranks that meet as often as this goes
    /// on.
    fn settle(&mut self) {
        const OFTEN: u32 = 256;
        let segment = &self.rounds.segment;
        let is_first = segment.hosts().first(segment.host()) == segment.rank();
        if self.rounds.count() >= OFTEN && is_first && !self.is_settled {
            self.is_settled = true;
            for range in segment.layout().busiest() {
                if let Err(error) = segment.region().make_huge(range) {
                    tracing::debug!(%error, "the host gives no huge pages");
                    return;
                }
            }
        }
    }

    /// A bug of ours must reach the other ranks, too, which would wait for this one.
    fn guarded<T>(&mut self, run: impl FnOnce(&mut Self) -> Result<T, Failure>) -> Result<T, Failure> {
        let segment = self.rounds.segment.clone();
        catch_unwind(AssertUnwindSafe(|| run(self)))
            .unwrap_or_else(|panic| Err(segment.failure_word().fail(FailureKind::Internal, &bug(&*panic))))
    }

    fn execute(&mut self, meet: &mut Meet<'_>) -> Result<(), Failure> {
        let op = meet.op;
        let Some(wanted) = Wanted::by(op, self.planner.forced()) else {
            return self.rounds.match_keys(meet, 1).map(drop);
        };
        let wanted = self.between_hosts(wanted);
        let schedule = self.plan(wanted, op.kind)?;
        let (segment, shared) = (self.rounds.segment.clone(), self.rounds.shared.clone());
        let traits = Traits::of(op, self.ground);
        let Choice { staged, in_place } = choose(self.ground, &traits, schedule.algorithm, segment.tuning());
        (meet.strategy, meet.in_place) = (Some(staged), in_place);
        if schedule.algorithm == Algorithm::Flat {
            let flat = Windowed::new(&segment, op, &schedule, staged, &shared.traffic);
            meet.mapped = in_place.and_then(|_| self.rounds.lend(op));
            if meet.mapped.is_none() {
                return flat.run(&mut self.rounds, meet, None);
            }
            let agreed = self.rounds.match_keys(meet, flat.rounds())?;
            let mapped = meet.mapped.take();
            return match (agreed.memory, mapped) {
                (Memory::Arenas, _) => Ok(()),
                (Memory::Shares, Some(mapped)) => {
                    self.rounds.in_place(|| mapped.run_share(&segment, op, &shared.traffic))?;
                    self.rounds.meet_again(meet)
                }
                _ => flat.run(&mut self.rounds, meet, Some(agreed)),
            };
        }
        // Whether an all-to-all is even, which routes through other ranks need, all know only afterwards.
        let flat = self.plan(wanted.flat(), op.kind)?;
        let flat = Windowed::new(&segment, op, &flat, Strategy::Windows, &shared.traffic);
        let agreed = self.rounds.match_keys(meet, flat.rounds())?;
        if agreed.uneven {
            return flat.run(&mut self.rounds, meet, Some(agreed));
        }
        let hopeless = |needed: &[u32]| self.rounds.hopeless(meet, needed);
        let tell = || self.rounds.blocked(meet);
        let lookout = Lookout::new(&segment, meet.deadline, Patience::NONE, &hopeless, &tell);
        let moved = stepwise::run(&segment, op, &schedule, meet.seq, lookout)?;
        shared.traffic.add(moved);
        Ok(())
    }

    /// Plans so that data goes from one host to another once, whatever is cheapest on one of them.
    fn between_hosts(&self, wanted: Wanted) -> Wanted {
        if self.rounds.segment.is_bridged() && self.planner.forced().is_none() {
            wanted.flat()
        } else {
            wanted
        }
    }

    fn plan(&mut self, wanted: Wanted, op: OpKind) -> Result<Arc<Schedule>, Failure> {
        if let Some((_, plan)) = self.plans.iter().find(|(known, _)| *known == wanted) {
            return Ok(plan.clone());
        }
        let plan = Arc::new(self.planner.plan(wanted, op)?);
        self.plans.push((wanted, plan.clone()));
        Ok(plan)
    }

    /// This rank takes no part in any later operation. Tells the others.
    pub(crate) fn leave(&mut self) {
        self.rounds.prospects.leave(self.seq);
    }
}
