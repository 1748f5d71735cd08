//! A running job seen from outside: its board is read where it lies, and its agent is not asked. The agents of other
//! nodes tell the agent here what their ranks do, while the board says that somebody looks.

use std::collections::BTreeMap;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tpurun_protocol::board::{self, Board};

use crate::observe::flight::Flight;
use crate::observe::flight::capture::{self, JobContext};
use crate::observe::flight::elsewhere;
use crate::observe::flight::notice::{NodeRanks, Run};
use crate::observe::flight::processes;

/// A job whose board is mapped.
#[derive(Debug)]
pub(crate) struct Live<'a> {
    run: &'a Run,
    board: Board,
    agent: OwnedFd,
}

impl<'a> Live<'a> {
    /// # Errors
    /// One line: the job is not ours, or has just ended.
    pub(crate) fn open(run: &'a Run) -> Result<Live<'a>, String> {
        let ended = || format!("job {} has just ended", run.notice.job.run);
        let pid = Pid::from_raw(run.notice.job.agent_pid).ok_or_else(ended)?;
        let agent = pidfd_open(pid, PidfdFlags::empty()).map_err(|_| ended())?;
        // Opening the board checks that the process behind the descriptor is the agent.
        let board = run.notice.open_board()?;
        Ok(Live { run, board, agent })
    }

    /// Returns what the ranks of this node are doing now.
    pub(crate) fn take(&self) -> Flight {
        let story = processes::story(&self.run.dir, self.board.world());
        let notice = &self.run.notice;
        let mut parents = story.servers;
        parents.push(notice.job.agent_pid);
        let known = JobContext { notice, stories: &story.ranks, parents: &parents };
        capture::take(&self.board, &known, "asked")
    }

    /// Returns what all ranks are doing, those of other nodes as these say in time, and the nodes that do not say it.
    pub(crate) fn take_all(&self) -> (Flight, Vec<NodeRanks>) {
        self.with_others(self.take())
    }

    /// Returns the same, with the CPU time that each rank used in a fifth of a second, or since it was told of last.
    pub(crate) fn take_measured(&self) -> (Flight, Vec<NodeRanks>) {
        // The other nodes measure from here, too.
        let (before, _) = self.take_all();
        self.ends_within(SAMPLE);
        self.take_since(&before).1
    }

    /// Returns what the ranks of this node are doing, with the CPU time that they have used since; and all ranks, as
    /// above.
    pub(crate) fn take_since(&self, before: &Flight) -> (Flight, (Flight, Vec<NodeRanks>)) {
        let mut flight = self.take();
        flight.measure_since(before);
        (flight.clone(), self.with_others(flight))
    }

    /// Adds what other nodes say of their ranks. It waits a short time for words from after `flight` was taken; of a
    /// node that sends none in time, it takes the last ones.
    fn with_others(&self, mut flight: Flight) -> (Flight, Vec<NodeRanks>) {
        let since_ns = flight.taken_ns;
        let others = (0..).zip(&self.run.notice.others);
        let others: Vec<(u32, &NodeRanks)> =
            others.filter_map(|(node, other)| Some((node, other.as_ref()?))).collect();
        let mut said: BTreeMap<u32, Flight> = BTreeMap::new();
        let silent = loop {
            let is_silent = |said: Option<&Flight>| said.is_none_or(|said| !is_since(said, since_ns));
            for (node, _) in &others {
                if is_silent(said.get(node)) {
                    said.extend(elsewhere::read(&self.run.dir, *node).map(|said| (*node, said)));
                }
            }
            let silent = others.iter().filter(|(node, _)| is_silent(said.get(node)));
            let silent: Vec<NodeRanks> = silent.map(|(_, other)| (*other).clone()).collect();
            let now_ns = board::now_ns();
            if silent.is_empty() || now_ns >= since_ns + PATIENCE_NS {
                break silent;
            }
            self.board.watch(now_ns);
            if self.ends_within(LOOK) {
                break silent;
            }
        };
        said.into_values().for_each(|said| flight.add(said));
        (flight, silent)
    }

    /// Waits this long, or until the job has ended; says whether it has.
    pub(crate) fn ends_within(&self, time: Duration) -> bool {
        let timeout = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        poll(&mut [PollFd::new(&self.agent, PollFlags::IN)], Some(&timeout)).is_ok_and(|ready| ready > 0)
    }
}

/// As in `n1 (ranks 4-7), n2 (ranks 8-11)`.
pub(crate) fn names(nodes: &[NodeRanks]) -> String {
    let names = nodes.iter().map(|node| format!("{} (ranks {})", node.host, node.ranks));
    names.collect::<Vec<_>>().join(", ")
}

/// Whether a document is from that time or later, and of this boot.
fn is_since(said: &Flight, since_ns: u64) -> bool {
    (since_ns..=board::now_ns()).contains(&said.taken_ns)
}

const SAMPLE: Duration = Duration::from_millis(200);
/// Time between two looks whether other nodes have said something.
const LOOK: Duration = Duration::from_millis(50);
/// Agents notice within a tenth of a second that somebody looks, here and then there.
const PATIENCE_NS: u64 = 1_000_000_000;
