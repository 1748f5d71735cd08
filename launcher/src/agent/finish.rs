//! The end of a job: nothing stays alive, everything written is shown, the report comes last.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use super::nodes::Others;
use super::{Agent, Asked, Phase, Receivers, Stopping, Why, signal_word};
use crate::alone;
use crate::cgroup;
use crate::dry_run;
use crate::foreign;
use crate::kill;
use crate::losses;
use crate::output::Stream;
use crate::policy::Tolerance;
use crate::rank_set::RankSet;
use crate::ranks::{Ending, Rank};
use crate::report::{self, Facts};
use crate::signals::Signals;
use crate::verdict::{Cause, Verdict};

impl Agent {
    /// Returns the exit code of the job.
    pub(super) async fn finish(&mut self, rx: &mut Receivers) -> i32 {
        let gone_at = Instant::now();
        self.end_everything();
        if let (Some(_), Phase::Stopping(stopping)) = (self.read_the_rest(rx).await, &mut self.phase) {
            stopping.is_hurried = true;
        }
        self.finish_flight();
        self.close_timings();
        let phase = std::mem::replace(&mut self.phase, Phase::Running);
        let (code, is_hurried) = match phase {
            Phase::Stopping(stopping) => (self.conclude(&stopping, gone_at), stopping.is_hurried),
            _ => (self.conclude_well(), false),
        };
        self.run_dir.event("ended", json!({"exit": code}));
        if let Some(others) = self.others.take() {
            others.into_nodes().close().await;
        }
        let lost = self.output.log_error().or_else(|| self.run_dir.error()).map(ToString::to_string);
        if let Some(error) = &lost {
            let text =
                format!("error: the logs in {} are incomplete: {error}", self.run_dir.shown().display());
            self.say(&text);
        }
        tokio::select! {
            () = self.screen.flushed() => {}
            // Nobody reads the output: then nobody needs it.
            _ = asked_to_go(&mut rx.signals) => {}
            () = tokio::time::sleep(DRAIN), if is_hurried => {}
        }
        let code = self.say_what_is_lost(code).await;
        if lost.is_some() && code == 0 { LOST_OUTPUT } else { code }
    }

    /// A full disk is no reader that has left: the output of the ranks is wanted, and not there. Returns the exit code.
    async fn say_what_is_lost(&mut self, code: i32) -> i32 {
        let Some((stream, error)) = self.screen.error() else { return code };
        let (lost, other) = match stream {
            Stream::Out => ("standard output", Stream::Err),
            Stream::Err => ("standard error", Stream::Out),
        };
        let logs = self.run_dir.shown().display();
        let text =
            format!("tpurun: error: cannot write to {lost}: {error} (the logs of the ranks are in {logs})\n");
        self.screen.write(other, text.into_bytes());
        // The wait has a bound, as perhaps nobody reads that stream either.
        let _ = tokio::time::timeout(DRAIN, self.screen.flushed()).await;
        if code == 0 || code == 128 + Signal::PIPE.as_raw() { LOST_OUTPUT } else { code }
    }

    fn end_everything(&mut self) {
        let are_gone = self.end_descendants();
        self.cgroup = None;
        if !are_gone {
            self.say("some processes of the job do not end (see ps; they wait for a device)");
        }
    }

    /// Ends all descendants, also the fork server; false when some do not end.
    pub(super) fn end_descendants(&mut self) -> bool {
        let running = self.running();
        let mut ended = Vec::new();
        let are_gone = kill::end_all_descendants(self.cgroup.as_ref(), |pid, status| {
            ended.extend(running.get(&pid.as_raw_nonzero().get()).copied().zip(Ending::of(status)));
        });
        for (rank, ending) in ended {
            self.on_end(rank, ending);
        }
        are_gone
    }

    /// Every writer is dead, unless a rank has handed its pipe to somebody outside the job. Returns what was
    /// asked for meanwhile.
    pub(super) async fn read_the_rest(&mut self, rx: &mut Receivers) -> Option<Asked> {
        let deadline = tokio::time::Instant::now() + DRAIN;
        let was_hurried = matches!(&self.phase, Phase::Stopping(stopping) if stopping.is_hurried);
        let mut asked = None;
        while self.open_streams.iter().any(|open| *open > 0) && !self.screen.is_broken() {
            tokio::select! {
                chunk = tokio::time::timeout_at(deadline, rx.chunks.recv()), if self.screen.has_room() => {
                    let Ok(Some(chunk)) = chunk else { break };
                    self.on_chunk(chunk);
                }
                () = self.screen.room(), if !self.screen.has_room() => {}
                () = tokio::time::sleep_until(deadline), if was_hurried || asked.is_some() => break,
                by = asked_to_go(&mut rx.signals) => asked = Some(by),
            }
            self.show();
        }
        for rank in self.job.here.clone() {
            self.output.finish(rank, Instant::now());
        }
        self.show();
        asked
    }

    fn conclude(&mut self, stopping: &Stopping, gone_at: Instant) -> i32 {
        match &stopping.why {
            Why::FrontDied => 1,
            Why::Asked(signal) => {
                let ran_for = report::clock(self.started.elapsed());
                let how = match stopping.killing_since {
                    Some(_) if stopping.is_hurried => "killed".to_owned(),
                    Some(_) => format!("killed after {}", self.stop_grace_text()),
                    None => "stopped".to_owned(),
                };
                let victims = stopping.victims.len();
                let run = self.run_dir.shown().display().to_string();
                self.say(&format!(
                    "{} after {ran_for}, {victims} ranks {how}, run {run}",
                    signal_word(*signal)
                ));
                128 + signal.as_raw()
            }
            Why::Failed(verdict) | Why::Restart(verdict, _) => {
                let text = self.report(verdict, stopping, gone_at);
                self.run_dir.write_report(&text);
                if !self.others.as_ref().is_some_and(Others::is_said_by_node_0) {
                    self.output.note(text.trim_end());
                    self.show();
                }
                verdict.exit_code()
            }
        }
    }

    /// Says who is missing, how often the job was started again, and when no rank knew of another one.
    fn conclude_well(&mut self) -> i32 {
        if !self.losses.is_empty() || self.restarts > 0 {
            let run = self.run_dir.shown().display().to_string();
            let ran_for = self.started.elapsed();
            let text = losses::survived(&self.losses, self.job.ranks, &self.restarts_text(), ran_for, &run);
            self.run_dir.write_report(&text);
            self.output.note(text.trim_end());
            self.show();
        }
        let alone: Option<Vec<_>> =
            self.job.here.clone().map(|rank| self.run_dir.libraries_alone(rank)).collect();
        if let Some(libraries) = alone.filter(|_| self.job.ranks > 1) {
            self.say(&alone::line(self.job.ranks, &libraries.concat()));
        }
        0
    }

    fn restarts_text(&self) -> String {
        let most = self.job.policy.max_restarts;
        if self.restarts > 0 { format!("{} of {most}", self.restarts) } else { String::new() }
    }

    pub(super) fn report(&self, verdict: &Verdict, stopping: &Stopping, gone_at: Instant) -> String {
        let victims = stopping.victims.iter().copied().filter(|rank| Some(*rank) != verdict.culprit);
        let stopped_after = self.last_end(gone_at).duration_since(stopping.asked_at);
        self.with_facts(verdict, victims.collect(), stopped_after, |facts| report::render(verdict, facts))
    }

    /// Says in one line which rank failed, and how.
    pub(super) fn headline(&self, verdict: &Verdict) -> String {
        self.with_words(verdict, |facts| report::headline(verdict, facts))
    }

    /// Words of the report at a time when no rank has been stopped for the failure yet.
    pub(super) fn with_words<T>(&self, verdict: &Verdict, word: impl FnOnce(&Facts<'_>) -> T) -> T {
        self.with_facts(verdict, RankSet::default(), Duration::ZERO, word)
    }

    fn with_facts<T>(
        &self,
        verdict: &Verdict,
        victims: RankSet,
        stopped_after: Duration,
        word: impl FnOnce(&Facts<'_>) -> T,
    ) -> T {
        let culprit = verdict.culprit;
        let rank = culprit.and_then(|rank| self.ranks.get(rank as usize));
        let log_file = culprit
            .map(|rank| self.run_dir.shown().join(self.labels.log_name(rank)))
            .filter(|path| path.exists());
        word(&Facts {
            ranks: self.job.ranks,
            ran_for: verdict.at.duration_since(self.started),
            run_dir: self.run_dir.shown(),
            host: culprit.map_or(&self.host, |rank| self.host_of(rank)),
            program: culprit.and_then(|rank| self.labels.program(rank)),
            pid: rank.and_then(Rank::pid),
            coordinates: culprit.and_then(|rank| dry_run::coordinates(&self.job, rank)),
            victims,
            stopped_after,
            last_line: match &verdict.cause {
                Cause::Told(told) => told.last_line.as_deref(),
                _ => culprit.and_then(|rank| match verdict.is_exception() {
                    true => self.output.last_printed(rank),
                    false => self.output.last_line(rank),
                }),
            },
            log_file: log_file.as_deref(),
            stacks: if verdict.is_hang() { &self.stacks } else { &[] },
            has_flight: self.recorder.has_dump(),
            foreign: foreign::line(&foreign::groups(self.run_dir.path(), self.job.ranks)),
            lost: match self.job.policy.tolerance {
                Tolerance::Nothing => Vec::new(),
                _ => self.losses.besides(culprit),
            },
            restarts: self.restarts_text(),
            is_out_of_memory: cgroup::oom_kills() > self.oom_kills_before,
        })
    }

    fn last_end(&self, otherwise: Instant) -> Instant {
        let ends = self.ranks.iter().filter_map(|rank| match rank {
            Rank::Ended { at, .. } => Some(*at),
            _ => None,
        });
        ends.max().unwrap_or(otherwise)
    }
}

/// Any signal that ends a job, once there is no rank left to tell.
async fn asked_to_go(signals: &mut Signals<Asked>) -> Asked {
    loop {
        match signals.next().await {
            asked @ (Asked::Stop(_) | Asked::FrontDied) => return asked,
            Asked::PassOn(_) | Asked::Reap => {}
        }
    }
}

const DRAIN: Duration = Duration::from_millis(500);
/// Exit code of a job that has ended well, but whose output or logs could not be written.
const LOST_OUTPUT: i32 = 1;
