//! The way from one world to the next: the failures that the job goes on with, and the ranks that follow those that
//! failed. The decisions themselves are in `job/policy.rs`.

use std::io;
use std::time::Instant;

use rustix::process::Signal;
use serde_json::json;
use tokio::sync::mpsc;

use super::command::Scope;
use super::ending::CLEARED_WITHIN;
use super::nodes::{self, Others};
use super::phase::{Clearing, Stopping, Why, WorldPhase, signal_word};
use super::start::{QUEUED_CHUNKS, new_output, queued_answers};
use super::{Agent, Receivers};
use crate::job::policy::Tolerance;
use crate::judge::verdict::{Cause, Verdict};
use crate::processes::kill;
use crate::ranks::Rank;

impl Agent {
    /// Decides once every failure that belongs to those seen has been seen, too.
    pub(super) fn decide(&mut self) {
        let verdict = self.judge.account.verdict(&self.world);
        let lines = self.judge.account.take_losses(&self.world);
        if !self.judge.account.is_tolerated(&self.world) {
            return self.fail(verdict);
        }
        self.judge.account.forgive(verdict);
        self.world.phase = WorldPhase::Running;
        self.recorder.record(&mut self.world, self.starter.server_pid(), "failed");
        for line in lines {
            self.world.run_dir.event("rank lost", json!({"what": line}));
            self.world.say(&line);
        }
    }

    /// A verdict on a rank that has not failed by itself. Only one that is stopped can be gone on without:
    /// the others have waited for it, so that it has no place among them any more.
    pub(super) fn on_verdict(&mut self, verdict: Verdict) {
        let Some(rank) = verdict.culprit.filter(|_| matches!(verdict.cause, Cause::Stopped(_))) else {
            return self.fail(verdict);
        };
        self.judge.lose_stopped(&mut self.world, self.others.as_ref(), rank, &verdict);
        match self.world.roster.of(rank).pid() {
            Some(pid) if self.world.job.policy.tolerance != Tolerance::Nothing => {
                let headline = self.reporter().headline(&verdict);
                self.world.say(&format!("{headline}: killing it"));
                self.judge.account.forgive_first(verdict);
                kill::kill_group(pid);
            }
            _ => self.fail(verdict),
        }
    }

    /// Ends the world, and the job unless another world may follow. Where there are several nodes, node 0 says why.
    pub(super) fn fail(&mut self, verdict: Verdict) {
        if self.world.phase.is_ending() {
            return;
        }
        if verdict.is_hang() {
            self.judge.ask_for_stacks_once(&self.world);
        }
        self.judge.account.take_losses(&self.world);
        let told = self.others.as_ref().map(|_| self.reporter().told(&verdict));
        if let (Some(others), Some(told)) = (&mut self.others, told) {
            self.world.phase = WorldPhase::Running;
            let command = others.propose(told);
            return command.into_iter().for_each(|command| self.execute(command));
        }
        let why = match self.judge.next_world(&self.world, None, &verdict) {
            None => Why::Failed(Box::new(verdict)),
            Some(ranks) => Why::Restart(Box::new(verdict), ranks),
        };
        self.stop(why, self.world.job.failure_grace);
    }

    /// Takes the next step from a world that has ended to the one that follows it.
    pub(super) async fn advance(&mut self, rx: &mut Receivers) {
        let is_anybody_alive = self.world.roster.is_anybody_alive();
        let account = &mut self.judge.account;
        let is_hurt = self.world.phase.is_running() && !is_anybody_alive && !account.losses.is_empty();
        if is_hurt && !self.world.job.policy.has_succeeded(&account.census(&self.world)) {
            // All ranks have ended, some of them too soon.
            let verdict = account.last_verdict(&self.world);
            self.fail(verdict);
        }
        if self.world.phase.is_stopping() && self.world.phase.is_restarting() && !is_anybody_alive {
            self.clear().await;
        }
        let WorldPhase::Clearing(Clearing { is_clear, until, .. }) = self.world.phase else { return };
        match is_clear {
            true if self.others.as_mut().is_none_or(Others::is_turn) => self.begin_again(rx).await,
            false if Instant::now() >= until => self.on_cleared(false),
            _ => {}
        }
    }

    /// Sees to it that nothing is left of the ranks, wherever it has gone.
    async fn clear(&mut self) {
        let phase = std::mem::replace(&mut self.world.phase, WorldPhase::Starting);
        let WorldPhase::Stopping(stopping) = phase else { return };
        let until = Instant::now() + CLEARED_WITHIN;
        self.world.phase = WorldPhase::Clearing(Clearing { stopping, until, is_clear: false });
        let job = &self.world.job;
        let is_anybody_born = job.here.clone().any(|rank| *self.world.roster.of(rank) != Rank::Unborn);
        match &self.starter.server {
            // On other nodes ranks were started sooner: it goes on, and forks those that follow.
            Some(server) if !server.is_ready && !is_anybody_born => self.on_cleared(true),
            // When it is gone, its end is reported, too.
            Some(server) if server.forks && job.programs.are_all_forked() => {
                drop(server.clear().await);
            }
            // Some ranks are not its children: it goes with them, and another one comes.
            _ => {
                self.starter.server = None;
                self.end_world();
            }
        }
    }

    /// Without a fork server, all that descends from this process is of the world.
    pub(super) fn end_world(&mut self) {
        let are_gone = self.end_descendants();
        self.on_cleared(are_gone);
    }

    /// A process that does not end would meet the next world: then there is no next world.
    pub(super) fn on_cleared(&mut self, is_clear: bool) {
        let WorldPhase::Clearing(clearing) = &mut self.world.phase else { return };
        clearing.is_clear = is_clear;
        match is_clear {
            true => self.others.iter_mut().for_each(Others::tell_cleared),
            false => self.call_off(&self.world.leftover(), Scope::AllNodes),
        }
    }

    /// There is no next world, for this reason.
    pub(super) fn call_off(&mut self, why: &str, scope: Scope) {
        if self.world.phase.end_with_this_world().is_some() {
            self.say_once(&format!("no restart: {why}"));
        }
        if let (Scope::AllNodes, Some(others)) = (scope, &self.others) {
            others.tell_no_restart(why);
        }
    }

    /// A signal asks for the end: the failure that the ranks were stopped for gets no report any more, but one line.
    /// Returns whether there was a restart to call off.
    pub(super) fn interrupt_restart(&mut self, signal: Signal) -> bool {
        let Some(stopping) = self.world.phase.end_with_this_world() else { return false };
        if let Why::Failed(verdict) = std::mem::replace(&mut stopping.why, Why::Asked(signal)) {
            let after = self.reporter().headline(&verdict);
            self.say_once(&format!("{}: no restart after this: {after}", signal_word(signal)));
        }
        kill::ask_to_end(self.world.roster.running().into_keys(), Signal::TERM);
        true
    }

    async fn begin_again(&mut self, rx: &mut Receivers) {
        if let Some(asked) = self.read_the_rest(rx).await {
            return self.on_signal(asked);
        }
        let phase = std::mem::replace(&mut self.world.phase, WorldPhase::Starting);
        let WorldPhase::Clearing(Clearing { stopping, .. }) = phase else { return };
        let Why::Restart(verdict, ranks) = &stopping.why else { return };
        self.recorder.finish(&mut self.world);
        self.starter.timings.close(&mut self.world);
        let text = self.close_world(&stopping, verdict, *ranks);
        match self.renew(rx, *ranks) {
            Ok(()) => {
                self.world.console.output.mark_logs(&text);
                self.start().await;
            }
            Err(error) => self.on_not_started(self.world.job.here.start, &format!("the board: {error}")),
        }
    }

    /// Keeps what the world leaves behind. Returns the line that announces the next one.
    fn close_world(&mut self, stopping: &Stopping, verdict: &Verdict, ranks: u32) -> String {
        let reporter = self.reporter();
        let (report, why) = (reporter.report(verdict, stopping, Instant::now()), reporter.headline(verdict));
        self.world.run_dir.close_world(self.world.restarts, &report);
        self.recorder.close_world();
        self.world.restarts += 1;
        let (policy, number) = (self.world.job.policy, self.world.restarts);
        let with = match policy.tolerance {
            Tolerance::Elastic { .. } => format!(" with {ranks} ranks"),
            _ => String::new(),
        };
        let text = format!("restart {number} of {}{with}: {why}", policy.max_restarts);
        self.say_once(&text);
        let details = json!({
            "restart": number, "of": policy.max_restarts, "ranks": ranks,
            "culprit": verdict.culprit, "why": why,
        });
        self.world.run_dir.event("restart", details);
        text
    }

    /// Nothing of what the ranks shared, wrote or were sent reaches their successors.
    fn renew(&mut self, rx: &mut Receivers, ranks: u32) -> io::Result<()> {
        self.others.iter_mut().for_each(Others::renew);
        let spread = self.others.as_ref().map(|others| nodes::spread(&others.nodes)).unwrap_or_default();
        self.world.renew(ranks, spread, new_output)?;
        let tx = &mut self.starter.tx;
        (tx.chunks, rx.chunks) = mpsc::channel(QUEUED_CHUNKS);
        (tx.control, rx.control) = mpsc::channel(QUEUED_CHUNKS);
        if self.starter.server.is_none() && self.world.job.wants_server {
            (tx.server, rx.server) = mpsc::channel(queued_answers(&self.world.job));
        }
        self.judge.renew();
        Ok(())
    }
}
