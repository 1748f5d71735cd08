//! The judge of the ranks: what follows from what they do, and how they hear of it. Whether the world ends for it is
//! the loop's to say.

use std::time::{Duration, Instant};

use tpurun_memory::FailureKind;
use tpurun_protocol::board::RankView;

use super::account::Account;
use super::delivery::{self, FailureDelivery, SECOND_LOOK};
use super::lingering::Lingering;
use super::nodes::Others;
use super::observation::{self, Observation};
use super::phase::WorldPhase;
use super::world::World;
use crate::job::Job;
use crate::judge::verdict::Verdict;
use crate::nodes::DeadlockProof;
use crate::observe::run_dir::RunDir;
use crate::observe::stacks::StackClass;
use crate::ranks::Ending;

/// The knowledge of the failures of one world, and of those that may come.
pub(super) struct Judge {
    pub(super) account: Account,
    delivery: FailureDelivery,
    observation: Observation,
    lingering: Lingering,
}

impl Judge {
    pub(super) fn new(job: &Job, run_dir: &RunDir) -> Judge {
        Judge {
            account: Account::default(),
            delivery: FailureDelivery::default(),
            observation: Observation::new(job, run_dir),
            lingering: Lingering::default(),
        }
    }

    /// Other ranks follow.
    pub(super) fn renew(&mut self) {
        self.account = Account::default();
        self.delivery = FailureDelivery::default();
        self.observation.renew();
        self.lingering = Lingering::default();
    }

    /// The time at which the next loss is told, if there is one.
    pub(super) fn next_delivery(&self) -> Option<Instant> {
        self.delivery.next()
    }

    /// Tells the others of lost ranks, once what these have written is read or it has taken too long.
    pub(super) fn deliver_losses(&mut self, world: &mut World, others: Option<&Others>, now: Instant) {
        for rank in self.delivery.take_due(&world.console, now) {
            let text = world.loss_of(rank);
            lose(world, others, rank, &text);
        }
    }

    /// The program of a rank has failed, whether or not its process is still there.
    pub(super) fn on_failure(&mut self, world: &mut World, rank: u32, ending: Ending, now: Instant) {
        self.account.note_heard(&world.control);
        self.delivery.mourn(rank, now);
        let failure = self.account.explain(world, rank, ending, now);
        world.roster.failures.push(failure);
        if matches!(world.phase, WorldPhase::Running | WorldPhase::Starting) {
            world.phase = WorldPhase::Settling { until: now + SETTLE };
        }
    }

    /// Looks for failures that nobody reports: communicators that have failed, and programs that have ended while
    /// their processes go on.
    pub(super) fn look_for_failures(&mut self, world: &mut World, now: Instant) {
        self.account.note_heard(&world.control);
        for (rank, ending) in self.lingering.look(world, now) {
            self.on_failure(world, rank, ending, now);
        }
    }

    /// Looks for ranks that can never go on, and tells them. Returns the time by which to look again, if another look
    /// may prove something.
    pub(super) fn look_for_deadlock(
        &mut self,
        world: &mut World,
        others: Option<&mut Others>,
        views: &[RankView],
        now: Instant,
    ) -> Option<Instant> {
        // One judge of what is true of all nodes, in one text.
        if !world.phase.is_running() || others.as_ref().is_some_and(|others| !others.is_node_0()) {
            return None;
        }
        if let Some(proof) = self.delivery.look_for_deadlock(world, views) {
            // It stands on all nodes before any rank wakes up.
            delivery::settle_deadlock(world, &proof);
            match others {
                Some(others) => others.tell_deadlock(proof, now),
                None => self.announce_deadlock(world, &proof),
            }
        }
        self.is_suspicious().then(|| now + SECOND_LOOK)
    }

    /// Whether another look soon may prove a deadlock.
    pub(super) fn is_suspicious(&self) -> bool {
        self.delivery.is_suspicious()
    }

    /// Tells the ranks here of a deadlock that stands on the other nodes.
    pub(super) fn hear_of_deadlock(&mut self, world: &mut World, proof: &DeadlockProof) {
        delivery::settle_deadlock(world, proof);
        self.announce_deadlock(world, proof);
    }

    /// Tells the ranks here of a deadlock, once they have been asked where they are.
    pub(super) fn announce_deadlock(&mut self, world: &mut World, proof: &DeadlockProof) {
        self.observation.ask_for_stacks(world);
        delivery::announce_deadlock(world, proof);
    }

    /// The verdict on a rank that has stopped, or left, while others wait for it.
    pub(super) fn verdict(&mut self, world: &World, views: &[RankView], now: Instant) -> Option<Verdict> {
        if world.phase.is_running() { self.observation.judge(world, views, now) } else { None }
    }

    /// Names the ranks that keep others waiting, in the log and in the text of timeouts to come.
    pub(super) fn look_for_suspects(
        &mut self,
        world: &mut World,
        others: Option<&Others>,
        views: &[RankView],
        now: Instant,
    ) {
        if world.phase.is_running() && self.observation.look_for_suspects(world, views, now) {
            if let Some(others) = others {
                others.tell_suspects(self.observation.suspects().collect());
            }
            self.note_suspects(world, others);
        }
    }

    /// Lets timeouts to come say which ranks keep which waiting, on whatever host.
    pub(super) fn note_suspects(&self, world: &World, others: Option<&Others>) {
        let elsewhere = others.iter().flat_map(|others| others.looks.suspects()).cloned();
        let lines: Vec<(u32, String)> = self.observation.suspects().chain(elsewhere).collect();
        observation::note_suspects(world, &lines);
    }

    /// Says which ranks wait in groups of other backends.
    pub(super) fn look_for_sleepers(&mut self, world: &mut World, now: Instant) {
        self.observation.look_for_sleepers(world, now);
    }

    /// Asks the ranks where they are in their programs, unless they have been asked for a failure before.
    pub(super) fn ask_for_stacks_once(&mut self, world: &World) {
        if self.observation.stacks().is_empty() {
            self.observation.ask_for_stacks(world);
        }
    }

    /// Tells the others that a rank which is stopped is lost to those who wait for it.
    pub(super) fn lose_stopped(
        &mut self,
        world: &mut World,
        others: Option<&Others>,
        rank: u32,
        verdict: &Verdict,
    ) {
        self.observation.ask_for_stacks(world);
        let text = world.describe_loss(rank, &verdict.cause, None);
        lose(world, others, rank, &text);
    }

    /// The places where the ranks were when the job failed of a hang.
    pub(super) fn stacks(&self) -> &[StackClass] {
        self.observation.stacks()
    }

    /// Returns the number of ranks of the world that follows one that has failed; None when no world follows.
    pub(super) fn next_world(
        &self,
        world: &World,
        others: Option<&Others>,
        verdict: &Verdict,
    ) -> Option<u32> {
        if world.phase.is_ending() || others.is_some_and(|others| !others.turn.may_come()) {
            return None;
        }
        world.job.policy.next_world(&self.account.census_with(world, verdict), world.restarts)
    }
}

/// Tells the ranks that need this one, on whatever node, that it is lost.
fn lose(world: &mut World, others: Option<&Others>, rank: u32, text: &str) {
    world.lose(rank, FailureKind::RankLost, text);
    if let Some(others) = others {
        others.tell_loss(rank, text);
    }
}

/// How much later a failure may be seen that happened before the one seen first.
const SETTLE: Duration = Duration::from_millis(30);
