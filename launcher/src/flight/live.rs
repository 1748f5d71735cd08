//! A running job seen from outside: its board is read where it lies, and its agent is not asked.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tpurun_collectives::board::Board;

use crate::flight::Flight;
use crate::flight::capture::{self, Known};
use crate::flight::notice::Run;
use crate::flight::processes;

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
        // It sees to it that the process behind the descriptor is the agent.
        let board = run.notice.open_board()?;
        Ok(Live { run, board, agent })
    }

    /// What the ranks are doing now.
    pub(crate) fn take(&self) -> Flight {
        let story = processes::story(&self.run.dir, self.board.world());
        let notice = &self.run.notice;
        let mut parents = story.servers;
        parents.push(notice.job.agent_pid);
        let known = Known { notice, stories: &story.ranks, parents: &parents };
        capture::take(&self.board, &known, "asked")
    }

    /// The same, with what each rank has used of the CPU for a fifth of a second.
    pub(crate) fn take_measured(&self) -> Flight {
        let before = self.take();
        self.ends_within(SAMPLE);
        let mut flight = self.take();
        flight.measure_since(&before);
        flight
    }

    /// Waits this long, or until the job has ended; says whether it has.
    pub(crate) fn ends_within(&self, time: Duration) -> bool {
        let timeout = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        poll(&mut [PollFd::new(&self.agent, PollFlags::IN)], Some(&timeout)).is_ok_and(|ready| ready > 0)
    }
}

const SAMPLE: Duration = Duration::from_millis(200);
