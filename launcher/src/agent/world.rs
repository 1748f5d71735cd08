//! The world that runs now: what all services of the agent know of it.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use serde_json::json;
use tpurun_memory::FailureKind;
use tpurun_protocol::board::{self, Board, RankView};

use super::all_ranks::AllRanks;
use super::console::Console;
use super::phase::WorldPhase;
use crate::control::control_server::ControlServer;
use crate::control::supervisor::Spread;
use crate::job::Job;
use crate::judge::alone;
use crate::judge::last_words::{self, Loss};
use crate::judge::verdict::Cause;
use crate::nodes::RankSays;
use crate::observe::run_dir::RunDir;
use crate::output::Output;
use crate::output::labels::Labels;
use crate::processes::kill;
use crate::ranks::{Ending, Rank};

/// One world, on this host.
pub(super) struct World {
    pub(super) job: Job,
    /// The name of this host.
    pub(super) host: String,
    /// The process that waits for us.
    pub(super) front: i32,
    pub(super) run_dir: RunDir,
    pub(super) labels: Labels,
    pub(super) console: Console,
    pub(super) board: Board,
    /// The board, as the ranks inherit it.
    pub(super) board_fd: OwnedFd,
    pub(super) control: ControlServer,
    pub(super) roster: AllRanks,
    pub(super) phase: WorldPhase,
    /// The number of worlds before this one.
    pub(super) restarts: u32,
    /// The start of the job.
    pub(super) started: Instant,
}

impl World {
    /// Nothing of what the ranks shared, wrote or were sent reaches their successors.
    pub(super) fn renew(
        &mut self,
        ranks: u32,
        spread: Spread,
        output: impl FnOnce(&Job, &RunDir) -> Output,
    ) -> io::Result<()> {
        (self.board, self.board_fd) = Board::create(ranks)?;
        if ranks != self.job.ranks {
            self.job.resize(ranks);
        }
        self.control = ControlServer::new(ranks, self.control.take_identities(), spread);
        self.console.renew(output(&self.job, &self.run_dir), ranks);
        self.roster = AllRanks::unborn(&self.job);
        Ok(())
    }

    /// A line of our own, in its place among those of the ranks.
    pub(super) fn say(&mut self, line: &str) {
        self.console.say(line);
    }

    /// The host of a rank, wherever it is.
    pub(super) fn host_of(&self, rank: u32) -> &str {
        self.job.hosts.of(rank).map_or(&self.host, |(_, host)| &host.name)
    }

    /// The run directory as people read it.
    pub(super) fn shown_run(&self) -> String {
        self.run_dir.shown().display().to_string()
    }

    /// For how long ranks are waited for that were asked to end, and the option that says so.
    pub(super) fn stop_grace_text(&self) -> String {
        format!("{} s (--shutdown-timeout)", self.job.stop_grace.as_secs_f64())
    }

    pub(super) fn restarts_text(&self) -> String {
        let most = self.job.policy.max_restarts;
        if self.restarts > 0 { format!("{} of {most}", self.restarts) } else { String::new() }
    }

    /// The view of every rank on the board; ranks on other nodes have only the view that they have left behind.
    pub(super) fn views(&self) -> Vec<RankView> {
        let mut views = crate::judge::watch::views(&self.board);
        self.add_views_elsewhere(&mut views);
        views
    }

    /// Puts in what ranks of other nodes that have ended in order left behind.
    pub(super) fn add_views_elsewhere(&self, views: &mut [RankView]) {
        for (rank, view) in &self.roster.views_elsewhere {
            views[*rank as usize] = view.clone();
        }
    }

    /// The ranks of this node, each with its view on the board.
    pub(super) fn views_here(&self) -> impl Iterator<Item = (u32, RankView)> {
        self.job.here.clone().map(|rank| (rank, self.board.read(rank)))
    }

    /// The running processes whose programs have ended.
    pub(super) fn ended_programs(&self) -> HashMap<i32, u32> {
        let has_ended = |rank: u32| self.run_dir.program_end_of(rank).is_some();
        self.roster.running().into_iter().filter(|(_, rank)| has_ended(*rank)).collect()
    }

    /// A rank of this host runs as this process.
    pub(super) fn on_started(&mut self, rank: u32, pid: i32) {
        let Some(state) = self.roster.ranks.get_mut(rank as usize) else { return };
        *state = Rank::Running(pid);
        let program = &self.job.programs.of(rank).name;
        self.run_dir.event("rank started", json!({"rank": rank, "program": program, "pid": pid}));
        if self.phase.is_stopping() {
            kill::ask_to_end([pid], self.phase.signal());
        }
    }

    /// Writes down how a rank of this host has ended; false when it had ended before.
    pub(super) fn on_end(&mut self, rank: u32, ending: Ending, now: Instant) -> bool {
        if !self.roster.end(rank, ending, now) {
            return false;
        }
        let program = &self.job.programs.of(rank).name;
        let details = match ending {
            Ending::Exit(code) => json!({"rank": rank, "program": program, "code": code}),
            Ending::Signal(number) => json!({"rank": rank, "program": program, "signal": number}),
        };
        self.run_dir.event("rank ended", details);
        true
    }

    /// A rank of another node has ended, and has left this view behind.
    pub(super) fn on_end_elsewhere(&mut self, ending: Ending, left: RankSays) {
        let rank = left.rank;
        let pid = i32::try_from(left.pid).ok().filter(|pid| *pid != 0);
        self.roster.set(rank, Rank::Ended { pid, ending, at: Instant::now() });
        if ending == Ending::Exit(0) {
            self.roster.left.push(rank);
            self.roster.views_elsewhere.insert(rank, left.view(board::now_ns()).unwrap_or_default());
        }
    }

    /// Gives the ranks of this host that need the lost rank the text that they raise.
    pub(super) fn lose(&mut self, rank: u32, kind: FailureKind, text: &str) {
        self.control.lose(rank, kind, text);
        self.run_dir.event("lost", json!({"rank": rank, "text": text}));
    }

    /// The text that ranks raise who need this one, which has ended.
    pub(super) fn loss_of(&self, rank: u32) -> String {
        let ending = match self.roster.of(rank) {
            Rank::Ended { ending, .. } => *ending,
            // Its program has failed, and a thread keeps its process.
            _ => self.run_dir.program_end_of(rank).unwrap_or(Ending::Exit(1)),
        };
        let cause = Cause::Ended { ending, error: self.run_dir.error_of(rank) };
        self.describe_loss(rank, &cause, self.console.output.last_line(rank))
    }

    /// The text that ranks raise who need this one, for this cause.
    pub(super) fn describe_loss(&self, rank: u32, cause: &Cause, last_line: Option<&str>) -> String {
        let (host, pid) = (self.host_of(rank), self.roster.of(rank).pid());
        last_words::describe(&Loss { rank, host, pid, cause, last_line })
    }

    /// Says so when no rank has known of another one.
    pub(super) fn say_who_was_alone(&mut self) {
        let alone: Option<Vec<_>> =
            self.job.here.clone().map(|rank| self.run_dir.libraries_alone(rank)).collect();
        if let Some(libraries) = alone.filter(|_| self.job.ranks > 1) {
            let line = alone::line(self.job.ranks, &libraries.concat());
            self.say(&line);
        }
    }

    /// Says so when the logs are incomplete, and returns whether they are.
    pub(super) fn say_lost_logs(&mut self) -> bool {
        let output = &self.console.output;
        let lost = output.log_error().or_else(|| self.run_dir.error()).map(ToString::to_string);
        let Some(error) = lost else { return false };
        let text = format!("error: the logs in {} are incomplete: {error}", self.shown_run());
        self.say(&text);
        true
    }
}
