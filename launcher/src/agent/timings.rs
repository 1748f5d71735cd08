//! `--timings` in the agent: it notes moments as they come, takes those of the ranks from the board, and tells
//! all of it once, when every rank has had its first collective or the ranks of the first world are gone.
//!
//! The file in the run directory is always written; the table and the cost are for `--timings`.

use std::time::{Duration, Instant};

use tpurun_protocol::board::{self, Mark};

use super::origin::Origin;
use super::world::World;
use crate::job::Job;
use crate::observe::flight::dump;
use crate::observe::timings::cost::{self, Cost, Measuring};
use crate::observe::timings::{self, Moments, Step};
use crate::ranks::Rank;

/// The time between two looks of the agent at its ranks.
pub(super) const WATCH_EVERY: Duration = Duration::from_millis(100);
/// The moments that are noted until they are told.
#[derive(Debug)]
pub(super) struct Watching {
    moments: Moments,
    state: State,
    /// All ranks below this one have had their first collective.
    done: u32,
}

#[derive(Debug)]
enum State {
    Waiting { next_look: Instant },
    Measuring(Measuring),
    Told,
}

impl Watching {
    pub(super) fn new(job: &Job, origin: &Origin) -> Watching {
        let mut moments = Moments::new(origin.begun_ns, job.ranks);
        moments.reached(Step::Understood, Some(origin.understood_ns));
        Watching { moments, state: State::Waiting { next_look: Instant::now() }, done: job.here.start }
    }

    /// The job has reached a step just now.
    pub(super) fn reached(&mut self, step: Step) {
        self.reached_at(step, Some(board::now_ns()));
    }

    pub(super) fn reached_at(&mut self, step: Step, at_ns: Option<u64>) {
        if !matches!(self.state, State::Told) {
            self.moments.reached(step, at_ns);
        }
    }

    /// A rank was started; of later worlds nothing is told.
    pub(super) fn started(&mut self, rank: u32, at_ns: Option<u64>) {
        if !matches!(self.state, State::Told) {
            self.moments.rank_reached(rank, Step::RankStarted, at_ns);
        }
    }

    /// When to look again, while there is something to look for.
    pub(super) fn next(&self) -> Option<Instant> {
        match &self.state {
            State::Waiting { next_look } => Some(*next_look),
            // The thread that measures cannot wake the agent.
            State::Measuring(_) => Some(Instant::now() + LOOK_EVERY),
            State::Told => None,
        }
    }

    pub(super) fn look(&mut self, world: &mut World, now: Instant) {
        match &mut self.state {
            State::Waiting { next_look } if now >= *next_look => {
                // Ranks may leave soon after, and then their memory can not be measured any more. A job that has
                // run for long without a collective may never have one.
                let often = LOOK_EVERY.max((now - world.started) / 1000).min(WATCH_EVERY);
                *next_look = now + if world.job.timings { often } else { WATCH_EVERY };
                // The agent may hear that a rank was started later than that its first collective is done.
                let is_done = |rank: &u32| {
                    world.roster.of(*rank).pid().is_some()
                        && world.board.mark(*rank, Mark::FirstDone).is_some()
                };
                self.done += (self.done..world.job.here.end).take_while(is_done).count() as u32;
                if self.done == world.job.here.end {
                    self.measure(world);
                }
            }
            State::Measuring(measuring) if measuring.is_finished() => self.close(world),
            _ => {}
        }
    }

    fn measure(&mut self, world: &mut World) {
        if !world.job.timings {
            return self.tell(world, None);
        }
        let ranks = world.roster.ranks.iter().map(|rank| match rank {
            Rank::Running(pid) => *pid,
            // A rank that is not there, or not known to be.
            _ => -1,
        });
        match Measuring::start(world.front, ranks.collect()) {
            Ok(measuring) => self.state = State::Measuring(measuring),
            Err(_) => self.tell(world, None),
        }
    }

    /// Tells what there is: the ranks are gone, or all there.
    pub(super) fn close(&mut self, world: &mut World) {
        match std::mem::replace(&mut self.state, State::Told) {
            State::Told => {}
            State::Measuring(measuring) => self.tell(world, measuring.finish()),
            State::Waiting { .. } => {
                let cost = || Cost { cpu_ms: cost::cpu_ms(world.front), memory: None };
                let cost = world.job.timings.then(cost);
                self.tell(world, cost);
            }
        }
    }

    fn tell(&mut self, world: &mut World, cost: Option<Cost>) {
        self.state = State::Told;
        for rank in 0..world.board.world() {
            for (step, mark) in ON_THE_BOARD {
                self.moments.rank_reached(rank, step, world.board.mark(rank, mark));
            }
        }
        let is_python = world.job.python.is_some();
        let expected = if is_python { &Step::OF_RANKS[..] } else { &Step::OF_RANKS[..1] };
        let timings = self.moments.timings(board::now_ns(), expected, cost);
        // As with the events, a full disk ends no job.
        let _ = dump::replace(&world.run_dir.path().join(timings::FILE), &timings.to_json());
        if world.job.timings {
            world.console.note(timings::render(&timings).trim_end());
        }
    }
}

const ON_THE_BOARD: [(Step, Mark); 4] = [
    (Step::ScriptEntered, Mark::ScriptEntered),
    (Step::GroupCreated, Mark::GroupCreated),
    (Step::FirstPosted, Mark::FirstPosted),
    (Step::FirstDone, Mark::FirstDone),
];
const LOOK_EVERY: Duration = Duration::from_millis(5);
