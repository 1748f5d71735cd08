//! The account of what a world has lost: which failures have been judged, and whether the world goes on without them.

use std::time::Instant;

use tpurun_protocol::board;

use super::world::World;
use crate::control::control_server::ControlServer;
use crate::job::policy::{Census, Tolerance};
use crate::judge::heard::Heard;
use crate::judge::losses::{self, Losses};
use crate::judge::verdict::{self, FailedRank, Verdict};
use crate::processes::kill;
use crate::ranks::Ending;

/// The losses of one world.
#[derive(Debug, Default)]
pub(super) struct Account {
    /// Ranks that the world goes on without.
    pub(super) losses: Losses,
    /// The verdict that the world would have been stopped for.
    forgiven: Option<Verdict>,
    /// The knowledge that each rank may have had of the failures of others.
    heard: Heard,
}

impl Account {
    /// Remembers which communicators have failed, before their ranks act on it.
    pub(super) fn note_heard(&mut self, control: &ControlServer) {
        self.heard.note(control.supervisor().all());
    }

    /// Explains how the program of a rank has failed.
    pub(super) fn explain(&self, world: &World, rank: u32, ending: Ending, at: Instant) -> FailedRank {
        let own = world.run_dir.error_of(rank);
        let error = self.heard.explain(rank, ending, own, &world.board.records(rank), board::now_ns());
        FailedRank { rank, ending, error, at }
    }

    /// The verdict on the failures seen so far.
    pub(super) fn verdict(&mut self, world: &World) -> Verdict {
        let verdict = of_failures(world).expect("a rank has failed");
        // The board says only at first which operation the others waited in.
        let first = self.forgiven.take().filter(|first| first.culprit == verdict.culprit);
        first.unwrap_or(verdict)
    }

    /// The verdict on a world of which all ranks have ended, some of them too soon.
    pub(super) fn last_verdict(&mut self, world: &World) -> Verdict {
        self.forgiven.take().or_else(|| of_failures(world)).expect("a rank has failed")
    }

    /// The world goes on in spite of this.
    pub(super) fn forgive(&mut self, verdict: Verdict) {
        self.forgiven = Some(verdict);
    }

    /// The same, unless there is a verdict already that the world goes on in spite of.
    pub(super) fn forgive_first(&mut self, verdict: Verdict) {
        self.forgiven.get_or_insert(verdict);
    }

    /// Accounts for the failures that are new, and ends what those ranks have left behind. Returns a line for each way
    /// to fail.
    pub(super) fn take_losses(&mut self, world: &World) -> Vec<String> {
        let failures = &world.roster.failures;
        if world.job.policy.tolerance != Tolerance::Nothing {
            for failure in self.losses.new_among(failures) {
                world.roster.of(failure.rank).pid().into_iter().for_each(kill::kill_group);
            }
        }
        self.losses.take(failures, world.roster.alive() as u32)
    }

    /// Says at the end of a job that has ended well who is missing, and how often the job was started again.
    pub(super) fn say_what_was_survived(&self, world: &mut World) {
        if self.losses.is_empty() && world.restarts == 0 {
            return;
        }
        let (run, ran_for) = (world.shown_run(), world.started.elapsed());
        let text = losses::survived(&self.losses, world.job.ranks, &world.restarts_text(), ran_for, &run);
        world.run_dir.write_report(&text);
        world.console.note(text.trim_end());
    }

    pub(super) fn census(&self, world: &World) -> Census {
        self.losses.census(world.job.ranks, world.roster.left.len() as u32)
    }

    /// A culprit that is still there is as good as lost; one that only left early did nothing wrong by itself.
    pub(super) fn census_with(&self, world: &World, verdict: &Verdict) -> Census {
        let mut census = self.census(world);
        let is_alive = verdict.culprit.is_some_and(|rank| world.roster.of(rank).is_alive());
        census.lost += u32::from(is_alive);
        census
    }

    /// Whether the world goes on after the failures that have been accounted for.
    pub(super) fn is_tolerated(&self, world: &World) -> bool {
        world.job.policy.tolerates(&self.census(world))
    }
}

fn of_failures(world: &World) -> Option<Verdict> {
    verdict::of_failures(&world.roster.failures, &world.roster.left, &world.views())
}
