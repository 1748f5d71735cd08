//! Verdicts reach the ranks: the communicators of a rank that is lost, and of ranks that wait for each other,
//! fail with one text for all.

use std::time::{Duration, Instant};

use serde_json::json;
use tpurun_memory::FailureKind;
use tpurun_protocol::board::RankView;

use super::{Agent, Phase};
use crate::last_words::{self, Loss};
use crate::nodes::Proof;
use crate::ranks::{Ending, Rank};
use crate::verdict::Cause;
use crate::wait_graph::{self, Deadlock, Names, World};

/// A rank whose end is told to the others as soon as its last words are here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Due {
    rank: u32,
    at: Instant,
}

impl Agent {
    /// A rank has ended, other than in order.
    pub(super) fn mourn(&mut self, rank: u32, now: Instant) {
        self.due.push(Due { rank, at: now + LAST_WORDS });
    }

    pub(super) fn next_delivery(&self) -> Option<Instant> {
        self.due.iter().map(|due| due.at).min()
    }

    /// Tells the others of lost ranks, once what these have written is read or it has taken too long.
    pub(super) fn deliver_losses(&mut self, now: Instant) {
        let streams = &self.open_streams;
        let (ready, due) = std::mem::take(&mut self.due)
            .into_iter()
            .partition(|due| now >= due.at || streams[due.rank as usize] == 0);
        self.due = due;
        let ready: Vec<Due> = ready;
        for Due { rank, .. } in ready {
            let text = self.loss_of(rank);
            self.lose(rank, text);
        }
    }

    fn lose(&mut self, rank: u32, text: String) {
        self.lose_here(rank, FailureKind::RankLost, &text);
        self.tell_loss(rank, &text);
    }

    /// Gives the ranks of this host that need the lost rank the text that they raise.
    pub(super) fn lose_here(&mut self, rank: u32, kind: FailureKind, text: &str) {
        self.control.lose(rank, kind, text);
        self.run_dir.event("lost", json!({"rank": rank, "text": text}));
    }

    fn loss_of(&self, rank: u32) -> String {
        let state = &self.ranks[rank as usize];
        let ending = match state {
            Rank::Ended { ending, .. } => *ending,
            _ => Ending::Exit(1),
        };
        last_words::describe(&Loss {
            rank,
            host: self.host_of(rank),
            pid: state.pid(),
            cause: &Cause::Ended { ending, error: self.run_dir.error_of(rank) },
            last_line: self.output.last_line(rank),
        })
    }

    /// A rank that is stopped is lost to those who wait for it.
    pub(super) fn lose_stopped(&mut self, rank: u32, since: Duration) {
        let text = last_words::describe(&Loss {
            rank,
            host: self.host_of(rank),
            pid: self.ranks[rank as usize].pid(),
            cause: &Cause::Stopped(since),
            last_line: None,
        });
        self.lose(rank, text);
    }

    /// Looks for ranks that can never go on; a proof takes two looks.
    pub(super) fn look_for_deadlock(&mut self, views: &[RankView], now: Instant) {
        if !matches!(self.phase, Phase::Running) {
            return;
        }
        let ended: Vec<bool> = self.ranks.iter().map(Rank::has_ended).collect();
        let supervisor = self.control.supervisor();
        let world = World { views, ended: &ended, groups: supervisor };
        let finished = world.waits_for_finished(|comm_id| supervisor.has_failed(comm_id));
        let stuck = world.stuck(self.suspicion.stuck.as_ref());
        let was_seen_before = finished.is_some() && finished == self.suspicion.finished;
        let is_proven = !stuck.is_empty() && Some(&stuck) == self.suspicion.stuck.as_ref();
        let found = if was_seen_before {
            finished.clone()
        } else if is_proven {
            world
                .circle(&stuck)
                .filter(|circle| !circle.comm_ids().iter().all(|id| supervisor.has_failed(*id)))
        } else {
            None
        };
        if let Some(deadlock) = found {
            let text = wait_graph::describe(
                &deadlock,
                &Names { host: &|rank| self.host_of(rank), views, ended: &ended },
            );
            let proof = Proof {
                groups: deadlock.comm_ids().into_iter().collect(),
                guilty: deadlock.guilty(),
                finished: deadlock.finished.into_iter().collect(),
                text,
            };
            self.deliver_deadlock(proof, now);
            self.suspicion = Suspicion::default();
            return;
        }
        let is_new = stuck.is_empty() || is_proven;
        let stuck = if is_new { world.stuck(None) } else { stuck };
        self.suspicion = Suspicion { finished, stuck: Some(stuck).filter(|stuck| !stuck.is_empty()) };
        if self.is_suspicious() {
            self.next_watch = self.next_watch.min(now + SECOND_LOOK);
        }
    }

    /// Whether another look soon may prove a deadlock.
    pub(super) fn is_suspicious(&self) -> bool {
        self.suspicion.is_any()
    }

    /// Notes the failure in all communicators here, before any rank wakes up and acts on it in one of them.
    pub(super) fn settle_deadlock(&mut self, proof: &Proof) {
        let Proof { groups, guilty, text, .. } = proof;
        self.control.supervisor().fail_quietly(groups, FailureKind::Deadlock, text, guilty);
    }

    /// Wakes the ranks.
    pub(super) fn announce_deadlock(&mut self, proof: &Proof) {
        let Proof { groups, guilty, finished, text } = proof;
        self.control.supervisor().announce(groups);
        self.run_dir.event("deadlock", json!({"ranks": guilty, "text": text}));
        for rank in finished {
            self.control.refuse_all_of(*rank, FailureKind::Deadlock, text);
        }
    }
}

/// The deadlock that the last look saw; the next look proves it, or does not.
#[derive(Debug, Default)]
pub(super) struct Suspicion {
    finished: Option<Deadlock>,
    stuck: Option<wait_graph::Stuck>,
}

impl Suspicion {
    fn is_any(&self) -> bool {
        self.finished.is_some() || self.stuck.is_some()
    }
}

/// Time for the agent to read what a dead rank has written.
const LAST_WORDS: Duration = Duration::from_millis(10);
pub(super) const SECOND_LOOK: Duration = Duration::from_millis(20);
