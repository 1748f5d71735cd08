//! The words about the end of a world, made of what the services of the agent know.

use std::time::{Duration, Instant};

use super::judge::Judge;
use super::phase::Stopping;
use super::world::World;
use crate::base::rank_set::RankSet;
use crate::job::policy::Tolerance;
use crate::judge::foreign;
use crate::judge::report::{self, Facts};
use crate::judge::verdict::{self, Cause, Verdict};
use crate::nodes::JobFailure;
use crate::processes::cgroup;
use crate::ranks::Rank;

/// A look at all that the report is made of.
pub(super) struct Reporter<'a> {
    pub(super) world: &'a World,
    pub(super) judge: &'a Judge,
    /// Whether a copy of the board has been kept.
    pub(super) has_flight: bool,
    /// The kills for want of memory on this host before the job began.
    pub(super) oom_kills_before: u64,
}

impl Reporter<'_> {
    /// The report; `gone_at` is the time at which nothing of the ranks was left.
    pub(super) fn report(&self, verdict: &Verdict, stopping: &Stopping, gone_at: Instant) -> String {
        let victims = stopping.victims.iter().copied().filter(|rank| Some(*rank) != verdict.culprit);
        let stopped_after = self.world.roster.last_end(gone_at).duration_since(stopping.asked_at);
        self.with_facts(verdict, victims.collect(), stopped_after, |facts| report::render(verdict, facts))
    }

    /// Says in one line which rank failed, and how.
    pub(super) fn headline(&self, verdict: &Verdict) -> String {
        self.with_words(verdict, |facts| report::headline(verdict, facts))
    }

    /// The verdict as other nodes are told of it.
    pub(super) fn told(&self, verdict: &Verdict) -> JobFailure {
        let (who, why, last_line) = self.with_words(verdict, |facts| report::told(verdict, facts));
        let failures = &self.world.roster.failures;
        let is_echo = !failures.is_empty() && failures.iter().all(verdict::is_echo);
        JobFailure { culprit: verdict.culprit, exit_code: verdict.exit_code(), is_echo, who, why, last_line }
    }

    /// Words of the report at a time when no rank has been stopped for the failure yet.
    fn with_words<T>(&self, verdict: &Verdict, word: impl FnOnce(&Facts<'_>) -> T) -> T {
        self.with_facts(verdict, RankSet::default(), Duration::ZERO, word)
    }

    fn with_facts<T>(
        &self,
        verdict: &Verdict,
        victims: RankSet,
        stopped_after: Duration,
        word: impl FnOnce(&Facts<'_>) -> T,
    ) -> T {
        let world = self.world;
        let culprit = verdict.culprit;
        let rank = culprit.and_then(|rank| world.roster.ranks.get(rank as usize));
        let log_file = culprit
            .map(|rank| world.run_dir.shown().join(world.labels.log_name(rank)))
            .filter(|path| path.exists());
        word(&Facts {
            ranks: world.job.ranks,
            ran_for: verdict.at.duration_since(world.started),
            run_dir: world.run_dir.shown(),
            host: culprit.map_or(&world.host, |rank| world.host_of(rank)),
            program: culprit.and_then(|rank| world.labels.program(rank)),
            pid: rank.and_then(Rank::pid),
            coordinates: culprit.and_then(|rank| world.job.coordinates(rank)),
            victims,
            stopped_after,
            last_line: self.last_line(verdict),
            log_file: log_file.as_deref(),
            stacks: if verdict.is_hang() { self.judge.stacks() } else { &[] },
            has_flight: self.has_flight,
            foreign: foreign::line(&foreign::groups(world.run_dir.path(), world.job.ranks)),
            lost: match world.job.policy.tolerance {
                Tolerance::Nothing => Vec::new(),
                _ => self.judge.account.losses.besides(culprit),
            },
            restarts: world.restarts_text(),
            is_out_of_memory: cgroup::oom_kills() > self.oom_kills_before,
        })
    }

    /// The last line of the rank that is to blame.
    fn last_line<'b>(&'b self, verdict: &'b Verdict) -> Option<&'b str> {
        if let Cause::JobFailure(told) = &verdict.cause {
            return told.last_line.as_deref();
        }
        let output = &self.world.console.output;
        match verdict.is_exception() {
            true => output.last_printed(verdict.culprit?),
            false => output.last_line(verdict.culprit?),
        }
    }
}
