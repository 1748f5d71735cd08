//! The way from one world to the next: the failures that the job goes on with, and the ranks that follow those that
//! failed. The decisions themselves are in `policy.rs`.

use std::io;
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::sync::mpsc;
use tpurun_protocol::board::Board;

use super::nodes::{self, Others};
use super::start::{QUEUED_CHUNKS, new_output, queued_answers, unborn};
use super::{Agent, Clearing, Phase, Receivers, Stopping, Why};
use crate::control_server::ControlServer;
use crate::heard::Heard;
use crate::kill;
use crate::losses::Losses;
use crate::policy::{Census, Tolerance};
use crate::ranks::Rank;
use crate::verdict::{self, Cause, Verdict};
use crate::watch::Watch;

impl Agent {
    /// Decides once every failure that belongs to those seen has been seen, too.
    pub(super) fn decide(&mut self) {
        let views = self.views();
        let verdict = verdict::of_failures(&self.failures, &self.left, &views).expect("a rank has failed");
        // The board says only at first which operation the others waited in.
        let first = self.forgiven.take().filter(|first| first.culprit == verdict.culprit);
        let verdict = first.unwrap_or(verdict);
        let lines = self.take_losses();
        if self.job.policy.tolerates(&self.census()) {
            self.forgive(verdict, &lines);
        } else {
            self.fail(verdict);
        }
    }

    /// A verdict on a rank that has not failed by itself. Only one that is stopped can be gone on without:
    /// the others have waited for it, so that it has no place among them any more.
    pub(super) fn judge(&mut self, verdict: Verdict) {
        if let (Some(rank), Cause::Stopped(since)) = (verdict.culprit, &verdict.cause) {
            self.ask_for_stacks();
            self.lose_stopped(rank, *since);
        }
        let stopped = verdict.culprit.filter(|_| matches!(verdict.cause, Cause::Stopped(_)));
        match stopped.and_then(|rank| self.ranks[rank as usize].pid()) {
            Some(pid) if self.job.policy.tolerance != Tolerance::Nothing => {
                self.say(&format!("{}: killing it", self.headline(&verdict)));
                self.forgiven.get_or_insert(verdict);
                kill::kill_group(pid);
            }
            _ => self.fail(verdict),
        }
    }

    fn forgive(&mut self, verdict: Verdict, lines: &[String]) {
        self.forgiven = Some(verdict);
        self.phase = Phase::Running;
        self.record_flight("failed");
        for line in lines {
            self.run_dir.event("rank lost", json!({"what": line}));
            self.say(line);
        }
    }

    /// Ends the world, and the job unless another world may follow.
    pub(super) fn fail(&mut self, verdict: Verdict) {
        if matches!(self.phase, Phase::Stopping(_) | Phase::Clearing(_)) {
            return;
        }
        if verdict.is_hang() && self.stacks.is_empty() {
            self.ask_for_stacks();
        }
        self.take_losses();
        if self.others.is_some() {
            return self.propose(&verdict);
        }
        let why = match self.next_world(&verdict) {
            None => Why::Failed(Box::new(verdict)),
            Some(ranks) => Why::Restart(Box::new(verdict), ranks),
        };
        self.stop(why, self.job.failure_grace);
    }

    /// Accounts for the failures that are new, and ends what those ranks have left behind.
    fn take_losses(&mut self) -> Vec<String> {
        if self.job.policy.tolerance != Tolerance::Nothing {
            for failure in self.losses.new_among(&self.failures) {
                self.ranks[failure.rank as usize].pid().into_iter().for_each(kill::kill_group);
            }
        }
        let running = self.ranks.iter().filter(|rank| rank.is_alive()).count();
        self.losses.take(&self.failures, running as u32)
    }

    fn census(&self) -> Census {
        self.losses.census(self.job.ranks, self.left.len() as u32)
    }

    /// A culprit that is still there is as good as lost; one that only left early did nothing wrong by itself.
    pub(super) fn census_with(&self, verdict: &Verdict) -> Census {
        let mut census = self.census();
        let is_alive = verdict.culprit.is_some_and(|rank| self.ranks[rank as usize].is_alive());
        census.lost += u32::from(is_alive);
        census
    }

    /// Takes the next step from a world that has ended to the one that follows it.
    pub(super) async fn advance(&mut self, rx: &mut Receivers) {
        let is_anybody_alive = self.is_anybody_alive();
        match &self.phase {
            Phase::Running if !is_anybody_alive && !self.losses.is_empty() => self.look_back(),
            _ => {}
        }
        match &self.phase {
            Phase::Stopping(Stopping { why: Why::Restart(..), .. }) if !is_anybody_alive => {
                self.clear().await;
            }
            _ => {}
        }
        let Phase::Clearing(Clearing { is_clear, until, .. }) = self.phase else { return };
        match is_clear {
            true if self.is_turn() => self.begin_again(rx).await,
            false if Instant::now() >= until => self.on_cleared(false),
            _ => {}
        }
    }

    /// All ranks have ended, some of them too soon.
    fn look_back(&mut self) {
        if self.job.policy.has_succeeded(&self.census()) {
            return;
        }
        let verdict = self.forgiven.take();
        let of_failures = || verdict::of_failures(&self.failures, &self.left, &self.views());
        let verdict = verdict.or_else(of_failures);
        self.fail(verdict.expect("a rank has failed"));
    }

    /// Sees to it that nothing is left of the ranks, wherever it has gone.
    async fn clear(&mut self) {
        let Phase::Stopping(stopping) = std::mem::replace(&mut self.phase, Phase::Starting) else { return };
        let until = Instant::now() + CLEARED_WITHIN;
        self.phase = Phase::Clearing(Clearing { stopping, until, is_clear: false });
        let is_anybody_born = self.job.here.clone().any(|rank| self.ranks[rank as usize] != Rank::Unborn);
        match &self.server {
            // On other nodes ranks were started sooner: it goes on, and forks those that follow.
            Some(server) if !server.is_ready && !is_anybody_born => self.on_cleared(true),
            // When it is gone, its end is reported, too.
            Some(server) if server.forks && self.job.programs.are_all_forked() => {
                drop(server.clear().await);
            }
            // Some ranks are not its children: it goes with them, and another one comes.
            _ => {
                self.server = None;
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
        match std::mem::replace(&mut self.phase, Phase::Starting) {
            Phase::Clearing(clearing) => {
                self.phase = Phase::Clearing(Clearing { is_clear, ..clearing });
                match is_clear {
                    true => self.tell_cleared(),
                    false => self.call_off_everywhere(&self.leftover()),
                }
            }
            phase => self.phase = phase,
        }
    }

    async fn begin_again(&mut self, rx: &mut Receivers) {
        if let Some(asked) = self.read_the_rest(rx).await {
            return self.on_signal(asked);
        }
        let Phase::Clearing(clearing) = std::mem::replace(&mut self.phase, Phase::Starting) else { return };
        let Why::Restart(verdict, ranks) = &clearing.stopping.why else { return };
        self.finish_flight();
        self.close_timings();
        let report = self.report(verdict, &clearing.stopping, Instant::now());
        self.run_dir.close_world(self.restarts, &report);
        self.recorder.close_world();
        self.restarts += 1;
        let text = self.announce_restart(verdict, *ranks);
        match self.renew(rx, *ranks) {
            Ok(()) => {
                self.output.mark_logs(&text);
                self.start().await;
            }
            Err(error) => self.on_not_started(self.job.here.start, &format!("the board: {error}")),
        }
    }

    fn announce_restart(&mut self, verdict: &Verdict, ranks: u32) -> String {
        let (policy, number, why) = (self.job.policy, self.restarts, self.headline(verdict));
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
        self.run_dir.event("restart", details);
        text
    }

    /// Nothing of what the ranks shared, wrote or were sent reaches their successors.
    fn renew(&mut self, rx: &mut Receivers, ranks: u32) -> io::Result<()> {
        self.others.iter_mut().for_each(Others::renew);
        (self.board, self.board_fd) = Board::create(ranks)?;
        if ranks != self.job.ranks {
            self.job.resize(ranks);
        }
        (self.tx.chunks, rx.chunks) = mpsc::channel(QUEUED_CHUNKS);
        (self.tx.control, rx.control) = mpsc::channel(QUEUED_CHUNKS);
        if self.server.is_none() && self.job.wants_server {
            (self.tx.server, rx.server) = mpsc::channel(queued_answers(&self.job));
        }
        let spread = self.others.as_ref().map(|others| nodes::spread(others.nodes())).unwrap_or_default();
        self.control = ControlServer::new(ranks, self.control.take_identities(), spread);
        self.output = new_output(&self.job, &self.run_dir);
        self.ranks = unborn(&self.job);
        self.open_streams = vec![0; ranks as usize];
        self.failures.clear();
        self.left.clear();
        self.losses = Losses::default();
        self.forgiven = None;
        self.watch = Watch::default();
        self.suspects = self.suspects.renewed();
        self.sleepers.forget();
        self.stacks.clear();
        self.due.clear();
        self.suspicion = Default::default();
        self.heard = Heard::default();
        self.lingering.clear();
        self.suspected_lingering.clear();
        self.views_elsewhere.clear();
        Ok(())
    }
}

/// Processes that take longer wait for a device.
pub(super) const CLEARED_WITHIN: Duration = Duration::from_secs(5);
