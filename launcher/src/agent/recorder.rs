//! The agent's part of the flight recorder: it says where the board is, and keeps a copy when ranks fail.

use std::io;
use std::os::fd::AsRawFd;

use super::world::World;
use crate::base::rank_set::RankSet;
use crate::nodes::Nodes;
use crate::observe::flight::Flight;
use crate::observe::flight::capture::{self, JobContext};
use crate::observe::flight::dump::DumpWriting;
use crate::observe::flight::notice::{JobNotice, NodeRanks};
use crate::observe::flight::processes::RankStory;
use crate::ranks::{Ending, Rank};

/// The agent's own state for the flight recorder.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    /// The notice of the ranks that run now; None until they start.
    notice: Option<JobNotice>,
    dump: Dump,
}

/// The state of the copy of the board.
#[derive(Debug, Default)]
enum Dump {
    #[default]
    None,
    Writing(io::Result<DumpWriting>),
    Written,
}

impl Recorder {
    /// From now on `tpurun status` finds the job, with the board of these ranks.
    pub(super) fn publish(&mut self, world: &mut World, nodes: Option<&Nodes>) {
        let (run, job) = (world.run_dir.id(), &world.job);
        let (board_fd, age) = (world.board_fd.as_raw_fd(), world.started.elapsed());
        let others = nodes.map_or_else(Vec::new, others_of);
        let notice = JobNotice::of_this_agent(&run, job.ranks, &job.programs, board_fd, age, others);
        if let Err(error) = notice.write(world.run_dir.path()) {
            world.say(&format!("tpurun status will not find this job: cannot write its job.json: {error}"));
        }
        self.notice = Some(notice);
    }

    /// Copies the board as it is now; the files are written meanwhile, in place of those of an earlier failure.
    pub(super) fn record(&mut self, world: &mut World, server: Option<i32>, reason: &'static str) {
        let flight = self.look(world, server, reason);
        // Where no rank has used the backend, there is nothing to look at.
        let has_lanes = |flight: &Flight| flight.ranks.iter().any(|rank| !rank.lanes.is_empty());
        let Some(flight) = flight.filter(has_lanes) else { return };
        self.finish(world);
        self.dump = Dump::Writing(DumpWriting::start(world.run_dir.path(), flight));
    }

    /// Returns what all ranks here do, and what is known of others; None before they start. `server` is the process
    /// of the fork server.
    pub(super) fn look(&self, world: &World, server: Option<i32>, reason: &'static str) -> Option<Flight> {
        let notice = self.notice.as_ref()?;
        let stories: Vec<RankStory> = world.roster.ranks.iter().map(story).collect();
        let parents: Vec<i32> = server.into_iter().chain([notice.job.agent_pid]).collect();
        let known = JobContext { notice, stories: &stories, parents: &parents };
        Some(capture::take(&world.board, &known, reason))
    }

    /// Waits until the files are written.
    pub(super) fn finish(&mut self, world: &mut World) {
        match std::mem::take(&mut self.dump) {
            Dump::Writing(writing) => match writing.and_then(DumpWriting::finish) {
                Ok(()) => self.dump = Dump::Written,
                Err(error) => world.say(&format!("what the ranks had posted could not be kept: {error}")),
            },
            dump => self.dump = dump,
        }
    }

    pub(super) fn has_dump(&self) -> bool {
        matches!(self.dump, Dump::Written)
    }

    /// Forgets the copy: other ranks follow, with failures of their own.
    pub(super) fn close_world(&mut self) {
        self.dump = Dump::None;
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
