//! The sentinel: one thread per process that sleeps until a rank dies, where no agent watches over the job.
//!
//! In each communicator every rank watches the next one, so that a communicator costs one descriptor per
//! rank. When the next one dies, all ranks of the communicator are told to look again (they then find out
//! whether they wait for it), and the one behind it is watched. Where the host refuses such descriptors,
//! and while a watching rank is stopped itself, the waiters' own looks at /proc remain.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use tpurun_memory::process::Liveness;
use tpurun_protocol::segment::Segment;

/// Watches over the communicators of one process; the thread exists while there are any.
#[derive(Debug)]
pub struct Sentinel {
    /// The state of the process with this number. A process that it forks has a copy, but not the thread, and
    /// begins anew.
    shared: Mutex<(u32, Arc<Shared>)>,
}

/// One communicator's part; dropping it ends the watch.
#[derive(Debug)]
pub(crate) struct Watch {
    shared: Arc<Shared>,
    number: u64,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    guards: Vec<Guard>,
    next_number: u64,
    thread: Option<Running>,
    /// The number of the thread; one that finds another number is not needed any more.
    generation: u64,
}

#[derive(Debug)]
struct Running {
    thread: JoinHandle<()>,
    wake: Arc<OwnedFd>,
}

/// The watch of one communicator over its next rank.
#[derive(Debug)]
struct Guard {
    number: u64,
    segment: Arc<Segment>,
    /// The rank that is watched, and the descriptor of its process.
    next: u32,
    pidfd: Option<Arc<OwnedFd>>,
}

impl Sentinel {
    /// Watches nothing yet.
    pub fn new() -> Self {
        Self { shared: Mutex::new((std::process::id(), Arc::default())) }
    }

    fn shared(&self) -> Option<Arc<Shared>> {
        // Held for a moment only, but for ever where another thread had it when this process was forked.
        const TRIES: usize = 1000;
        let mut tries = (0..TRIES).map(|_| self.shared.try_lock());
        let mut shared = tries.find_map(|shared| shared.inspect_err(|_| thread::yield_now()).ok())?;
        if shared.0 != std::process::id() {
            let of_the_parent = std::mem::replace(&mut *shared, (std::process::id(), Arc::default()));
            std::mem::forget(of_the_parent);
        }
        Some(shared.1.clone())
    }

    /// Watches over a communicator whose ranks are all attached; `None` where that can not be.
    pub(crate) fn watch(&self, segment: Arc<Segment>) -> Option<Watch> {
        if segment.size() < 2 {
            return None;
        }
        let shared = self.shared()?;
        let mut state = shared.lock();
        let number = state.next_number;
        state.next_number += 1;
        let next = segment.rank();
        let mut guard = Guard { number, segment, next, pidfd: None };
        guard.advance();
        state.guards.push(guard);
        match state.running(&shared) {
            Ok(wake) => ring(&wake),
            Err(error) => {
                state.guards.pop();
                tracing::warn!(%error, "no thread to watch over other ranks: their deaths are seen later");
                return None;
            }
        }
        drop(state);
        Some(Watch { shared, number })
    }
}

impl Default for Sentinel {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let ended = {
            let mut state = self.shared.lock();
            state.guards.retain(|guard| guard.number != self.number);
            if state.guards.is_empty() {
                state.generation += 1;
                state.thread.take()
            } else {
                state.thread.iter().for_each(|running| ring(&running.wake));
                None
            }
        };
        if let Some(Running { thread, wake }) = ended {
            ring(&wake);
            thread.join().expect("the sentinel does not panic");
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The descriptor that wakes the thread, which is started if there is none.
    fn running(&mut self, shared: &Arc<Shared>) -> std::io::Result<Arc<OwnedFd>> {
        if let Some(running) = &self.thread {
            return Ok(running.wake.clone());
        }
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (shared, generation, bell) = (shared.clone(), self.generation, wake.clone());
        let run = move || while stand_guard(&shared, generation, &bell) {};
        let thread = thread::Builder::new().name("tpurun-sentinel".to_owned()).spawn(run)?;
        self.thread = Some(Running { thread, wake: wake.clone() });
        Ok(wake)
    }
}

fn ring(wake: &OwnedFd) {
    // It fails only when the counter is full: then it is rung.
    let _ = rustix::io::write(wake, &1_u64.to_ne_bytes());
}

/// Sleeps until something happens and deals with it; false when the thread is not needed any more.
fn stand_guard(shared: &Shared, generation: u64, wake: &OwnedFd) -> bool {
    let watched: Vec<(u64, Arc<OwnedFd>)> = {
        let state = shared.lock();
        if state.generation != generation {
            return false;
        }
        let watched = |guard: &Guard| Some((guard.number, guard.pidfd.clone()?));
        state.guards.iter().filter_map(watched).collect()
    };
    let fds = std::iter::once(wake.as_fd()).chain(watched.iter().map(|(_, pidfd)| pidfd.as_fd()));
    let mut fds: Vec<PollFd<'_>> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    if poll(&mut fds, None).is_err() {
        // A signal: look again.
        return true;
    }
    let _ = rustix::io::read(wake, &mut [0; 8]);
    let dead = fds[1..].iter().zip(&watched).filter(|(fd, _)| !fd.revents().is_empty());
    let mut state = shared.lock();
    for (_, (number, pidfd)) in dead {
        let same = |guard: &&mut Guard| {
            guard.number == *number && guard.pidfd.as_ref().is_some_and(|own| Arc::ptr_eq(own, pidfd))
        };
        if let Some(guard) = state.guards.iter_mut().find(same) {
            guard.segment.roster().mourn(guard.next);
            guard.advance();
        }
    }
    true
}

impl Guard {
    /// Watches the next rank that lives in another process; those that are gone by now are mourned.
    fn advance(&mut self) {
        self.pidfd = None;
        let (segment, ranks) = (&self.segment, self.segment.size());
        loop {
            self.next = (self.next + 1) % ranks;
            if self.next == segment.rank() {
                return;
            }
            let pid = segment.roster().pid(self.next);
            if pid == std::process::id() || !segment.is_here(self.next) {
                continue;
            }
            match open(pid) {
                // Opened first: a number that was given to another process since then is noticed here.
                Ok(pidfd) if segment.roster().liveness(self.next) != Liveness::Gone => {
                    self.pidfd = Some(Arc::new(pidfd));
                    return;
                }
                Ok(_) | Err(Errno::SRCH) => segment.roster().mourn(self.next),
                Err(error) => {
                    let rank = segment.world_rank(self.next);
                    tracing::debug!(rank, %error, "can not watch over a rank: its death is seen later");
                    return;
                }
            }
        }
    }
}

fn open(pid: u32) -> Result<OwnedFd, Errno> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::INVAL)?;
    pidfd_open(pid, PidfdFlags::empty())
}
