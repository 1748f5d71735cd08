//! The end of a job: nothing stays alive, everything written is shown, the report comes last.

use std::time::Instant;

use serde_json::json;

use super::console::DRAIN;
use super::console::LOST_OUTPUT;
use super::phase::{Stopping, Why, WorldPhase, signal_word};
use super::{Agent, Asked, Receivers};
use crate::base::signals::Signals;
use crate::judge::report;
use crate::processes::kill;
use crate::ranks::Ending;

impl Agent {
    /// Returns the exit code of the job.
    pub(super) async fn finish(&mut self, rx: &mut Receivers) -> i32 {
        let gone_at = Instant::now();
        let are_gone = self.end_descendants();
        self.starter.cgroup = None;
        if !are_gone {
            self.world.say("some processes of the job do not end (see ps; they wait for a device)");
        }
        if let (Some(_), WorldPhase::Stopping(stopping)) =
            (self.read_the_rest(rx).await, &mut self.world.phase)
        {
            stopping.is_hurried = true;
        }
        self.recorder.finish(&mut self.world);
        self.starter.timings.close(&mut self.world);
        let phase = std::mem::replace(&mut self.world.phase, WorldPhase::Running);
        let (code, is_hurried) = match phase {
            WorldPhase::Stopping(stopping) => (self.conclude(&stopping, gone_at), stopping.is_hurried),
            _ => {
                self.judge.account.say_what_was_survived(&mut self.world);
                self.world.say_who_was_alone();
                (0, false)
            }
        };
        self.world.run_dir.event("ended", json!({"exit": code}));
        if let Some(others) = self.others.take() {
            others.nodes.close().await;
        }
        let lost = self.world.say_lost_logs();
        let console = &mut self.world.console;
        tokio::select! {
            () = console.screen.flushed() => {}
            // Nobody reads the output: then nobody needs it.
            _ = asked_to_go(&mut rx.signals) => {}
            () = tokio::time::sleep(DRAIN), if is_hurried => {}
        }
        let logs = self.world.shown_run();
        let code = self.world.console.say_what_is_lost(code, &logs).await;
        if lost && code == 0 { LOST_OUTPUT } else { code }
    }

    /// Ends all descendants, also the fork server; false when some do not end.
    pub(super) fn end_descendants(&mut self) -> bool {
        let running = self.world.roster.running();
        let mut ended = Vec::new();
        let are_gone = kill::end_all_descendants(self.starter.cgroup.as_ref(), |pid, status| {
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
        let was_hurried = matches!(&self.world.phase, WorldPhase::Stopping(stopping) if stopping.is_hurried);
        let mut asked = None;
        let console = &mut self.world.console;
        while console.is_read() {
            tokio::select! {
                chunk = tokio::time::timeout_at(deadline, rx.chunks.recv()), if console.screen.has_room() => {
                    let Ok(Some(chunk)) = chunk else { break };
                    console.on_chunk(chunk);
                }
                () = console.screen.room(), if !console.screen.has_room() => {}
                () = tokio::time::sleep_until(deadline), if was_hurried || asked.is_some() => break,
                by = asked_to_go(&mut rx.signals) => asked = Some(by),
            }
            console.show();
        }
        for rank in self.world.job.here.clone() {
            console.output.finish(rank, Instant::now());
        }
        console.show();
        asked
    }

    fn conclude(&mut self, stopping: &Stopping, gone_at: Instant) -> i32 {
        match &stopping.why {
            Why::FrontDied => 1,
            Why::Asked(signal) => {
                let ran_for = report::clock(self.world.started.elapsed());
                let how = match stopping.killing_since {
                    Some(_) if stopping.is_hurried => "killed".to_owned(),
                    Some(_) => format!("killed after {}", self.world.stop_grace_text()),
                    None => "stopped".to_owned(),
                };
                let (word, victims) = (signal_word(*signal), stopping.victims.len());
                let run = self.world.shown_run();
                self.world.say(&format!("{word} after {ran_for}, {victims} ranks {how}, run {run}"));
                128 + signal.as_raw()
            }
            Why::Failed(verdict) | Why::Restart(verdict, _) => {
                let text = self.reporter().report(verdict, stopping, gone_at);
                self.world.run_dir.write_report(&text);
                if !self.others.as_ref().is_some_and(|others| others.is_said_by_node_0) {
                    self.world.console.note(text.trim_end());
                }
                verdict.exit_code()
            }
        }
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
