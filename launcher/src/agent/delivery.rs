//! Verdicts reach the ranks: the communicators of a rank that is lost, and of ranks that wait for each other,
//! fail with one text for all.

use std::time::{Duration, Instant};

use serde_json::json;
use tpurun_memory::FailureKind;
use tpurun_protocol::board::RankView;

use super::console::Console;
use super::world::World;
use crate::judge::wait_graph::{self, Deadlock, Names};
use crate::nodes::DeadlockProof;
use crate::ranks::Rank;

/// The failures that are to be told to the ranks now, or may be soon.
#[derive(Debug, Default)]
pub(super) struct FailureDelivery {
    /// Lost ranks that the others do not know of yet.
    due: Vec<Due>,
    suspicion: Suspicion,
}

/// A rank whose end is told to the others as soon as its last words are here.
#[derive(Clone, Copy, Debug)]
struct Due {
    rank: u32,
    at: Instant,
}

/// The deadlock that the last look saw; the next look proves it, or does not.
#[derive(Debug, Default)]
struct Suspicion {
    finished: Option<Deadlock>,
    stuck: Option<wait_graph::Stuck>,
}

impl FailureDelivery {
    /// A rank has ended, other than in order.
    pub(super) fn mourn(&mut self, rank: u32, now: Instant) {
        self.due.push(Due { rank, at: now + LAST_WORDS });
    }

    pub(super) fn next(&self) -> Option<Instant> {
        self.due.iter().map(|due| due.at).min()
    }

    /// Lost ranks of which the others are told now: all that these have written is read, or it has taken too long.
    pub(super) fn take_due(&mut self, console: &Console, now: Instant) -> Vec<u32> {
        let is_ready = |due: &Due| now >= due.at || console.has_read_all_of(due.rank);
        let (ready, due) = std::mem::take(&mut self.due).into_iter().partition(is_ready);
        self.due = due;
        let ready: Vec<Due> = ready;
        ready.into_iter().map(|due| due.rank).collect()
    }

    /// Looks for ranks that can never go on; a proof takes two looks.
    pub(super) fn look_for_deadlock(&mut self, world: &World, views: &[RankView]) -> Option<DeadlockProof> {
        let ended: Vec<bool> = world.roster.ranks.iter().map(Rank::has_ended).collect();
        let supervisor = world.control.supervisor();
        let graph = wait_graph::World { views, ended: &ended, groups: supervisor };
        let finished = graph.waits_for_finished(|comm_id| supervisor.has_failed(comm_id));
        let stuck = graph.stuck(self.suspicion.stuck.as_ref());
        let was_seen_before = finished.is_some() && finished == self.suspicion.finished;
        let is_proven = !stuck.is_empty() && Some(&stuck) == self.suspicion.stuck.as_ref();
        let found = if was_seen_before {
            finished.clone()
        } else if is_proven {
            graph
                .circle(&stuck)
                .filter(|circle| !circle.comm_ids().iter().all(|id| supervisor.has_failed(*id)))
        } else {
            None
        };
        if let Some(deadlock) = found {
            let names = Names { host: &|rank| world.host_of(rank), views, ended: &ended };
            self.suspicion = Suspicion::default();
            return Some(proof(deadlock, &names));
        }
        let is_new = stuck.is_empty() || is_proven;
        let stuck = if is_new { graph.stuck(None) } else { stuck };
        self.suspicion = Suspicion { finished, stuck: Some(stuck).filter(|stuck| !stuck.is_empty()) };
        None
    }

    /// Whether another look soon may prove a deadlock.
    pub(super) fn is_suspicious(&self) -> bool {
        self.suspicion.finished.is_some() || self.suspicion.stuck.is_some()
    }
}

fn proof(deadlock: Deadlock, names: &Names<'_>) -> DeadlockProof {
    let text = wait_graph::describe(&deadlock, names);
    DeadlockProof {
        groups: deadlock.comm_ids().into_iter().collect(),
        guilty: deadlock.guilty(),
        finished: deadlock.finished.into_iter().collect(),
        text,
    }
}

/// Notes the failure in all communicators here, before any rank wakes up and acts on it in one of them.
pub(super) fn settle_deadlock(world: &World, proof: &DeadlockProof) {
    let DeadlockProof { groups, guilty, text, .. } = proof;
    world.control.supervisor().fail_quietly(groups, FailureKind::Deadlock, text, guilty);
}

/// Wakes the ranks.
pub(super) fn announce_deadlock(world: &mut World, proof: &DeadlockProof) {
    let DeadlockProof { groups, guilty, finished, text } = proof;
    world.control.supervisor().announce(groups);
    world.run_dir.event("deadlock", json!({"ranks": guilty, "text": text}));
    for rank in finished {
        world.control.refuse_all_of(*rank, FailureKind::Deadlock, text);
    }
}

/// Time for the agent to read what a dead rank has written.
const LAST_WORDS: Duration = Duration::from_millis(10);
pub(super) const SECOND_LOOK: Duration = Duration::from_millis(20);
