//! The agent's part of the flight recorder: it says where the board is, and keeps a copy when ranks fail.

use std::io;
use std::os::fd::AsRawFd;

use super::Agent;
use crate::flight::Flight;
use crate::flight::capture::{self, Known};
use crate::flight::dump::Writing;
use crate::flight::notice::{NodeRanks, Notice};
use crate::flight::processes::RankStory;
use crate::nodes::Nodes;
use crate::rank_set::RankSet;
use crate::ranks::{Ending, Rank};

/// The agent's own state for the flight recorder.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    /// The notice of the ranks that run now; None until they start.
    notice: Option<Notice>,
    dump: Dump,
}

/// The state of the copy of the board.
#[derive(Debug, Default)]
enum Dump {
    #[default]
    None,
    Writing(io::Result<Writing>),
    Written,
}

impl Recorder {
    pub(super) fn has_dump(&self) -> bool {
        matches!(self.dump, Dump::Written)
    }

    /// Forgets the copy: other ranks follow, with failures of their own.
    pub(super) fn close_world(&mut self) {
        self.dump = Dump::None;
    }
}

impl Agent {
    /// From now on `tpurun status` finds the job, with the board of these ranks.
    pub(super) fn publish(&mut self) {
        let (run, programs) = (self.run_dir.id(), &self.job.programs);
        let (board_fd, age) = (self.board_fd.as_raw_fd(), self.started.elapsed());
        let others = self.others.as_ref().map_or_else(Vec::new, |others| others_of(others.nodes()));
        let notice = Notice::of_this_agent(&run, self.job.ranks, programs, board_fd, age, others);
        if let Err(error) = notice.write(self.run_dir.path()) {
            self.say(&format!("tpurun status will not find this job: cannot write its job.json: {error}"));
        }
        self.recorder.notice = Some(notice);
    }

    /// Copies the board as it is now; the files are written meanwhile, in place of those of an earlier failure.
    pub(super) fn record_flight(&mut self, reason: &'static str) {
        let Some(flight) = self.flight(reason) else { return };
        self.finish_flight();
        self.recorder.dump = Dump::Writing(Writing::start(self.run_dir.path(), flight));
    }

    /// None where no rank has used the backend: then there is nothing to look at.
    fn flight(&self, reason: &'static str) -> Option<Flight> {
        self.look(reason).filter(|flight| flight.ranks.iter().any(|rank| !rank.lanes.is_empty()))
    }

    /// Returns what all ranks here do, and what is known of others; None before they start.
    pub(super) fn look(&self, reason: &'static str) -> Option<Flight> {
        let notice = self.recorder.notice.as_ref()?;
        let stories: Vec<RankStory> = self.ranks.iter().map(story).collect();
        let server = self.server.as_ref().map(|server| server.pid);
        let parents: Vec<i32> = server.into_iter().chain([notice.job.agent_pid]).collect();
        let known = Known { notice, stories: &stories, parents: &parents };
        Some(capture::take(&self.board, &known, reason))
    }

    /// Waits until the files are written.
    pub(super) fn finish_flight(&mut self) {
        match std::mem::take(&mut self.recorder.dump) {
            Dump::Writing(writing) => match writing.and_then(Writing::finish) {
                Ok(()) => self.recorder.dump = Dump::Written,
                Err(error) => self.say(&format!("what the ranks had posted could not be kept: {error}")),
            },
            dump => self.recorder.dump = dump,
        }
    }
}

fn others_of(nodes: &Nodes) -> Vec<Option<NodeRanks>> {
    let of_node = |node: u32| {
        let ranks = nodes.ranks_of(node).collect::<RankSet>().to_string();
        (node != nodes.node).then(|| NodeRanks { host: nodes.host(node).to_owned(), ranks })
    };
    (0..nodes.count()).map(of_node).collect()
}

fn story(rank: &Rank) -> RankStory {
    let ending = match rank {
        Rank::Ended { ending: Ending::Exit(code), .. } => Some(format!("exit {code}")),
        Rank::Ended { ending: Ending::Signal(number), .. } => Some(format!("signal {number}")),
        _ => None,
    };
    RankStory { pid: rank.pid(), ending }
}
