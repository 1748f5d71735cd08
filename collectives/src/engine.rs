//! The progress threads: they exist for asynchronous operations, and are joined.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::failure::{Failure, FailureKind};
use crate::lane::Lane;
use crate::op::Op;
use crate::p2p::Messages;
use crate::segment::Segment;
use crate::sync::{OpQueue, Pop};
use crate::work::{Outcome, Work};

/// Operations that may wait for the progress thread; a caller that is further ahead waits for room.
const QUEUE_LENGTH: usize = 1024;

/// A collective on its way to the progress thread.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) op: Op,
    pub(crate) work: Arc<Work>,
    pub(crate) timeout: Duration,
}

/// Runs queued collectives one after the other.
#[derive(Debug)]
pub(crate) struct CollectiveThread {
    queue: Arc<OpQueue<Job>>,
    thread: JoinHandle<()>,
}

impl CollectiveThread {
    pub(crate) fn start(lane: Arc<Mutex<Lane>>, queued: Arc<AtomicUsize>) -> Result<Self, Failure> {
        let queue = Arc::new(OpQueue::<Job>::new(QUEUE_LENGTH));
        let jobs = queue.clone();
        let run = move || {
            while let Pop::Item(Job { op, work, timeout }) = jobs.pop() {
                let result = lane.lock().expect("a lane does not panic").run(&op, timeout);
                // The operation's memory is the user's again from here on.
                drop(op);
                queued.fetch_sub(1, Ordering::AcqRel);
                work.finish(result.map(|()| None));
            }
        };
        Ok(Self { queue, thread: spawn("tpurun-coll", run)? })
    }

    pub(crate) fn push(&self, job: Job, timeout: Duration) -> Result<(), Failure> {
        self.queue.push(job, Some(Instant::now() + timeout)).map_err(|_| {
            let text =
                format!("Timed out after {timeout:?}: {QUEUE_LENGTH} asynchronous operations are pending");
            Failure::new(FailureKind::Timeout, text)
        })
    }

    /// Lets the queue run dry and joins the thread.
    pub(crate) fn join(self) {
        self.queue.close();
        self.thread.join().expect("the progress thread does not panic");
    }
}

/// Moves messages, on whichever thread waits for one, else on its own.
#[derive(Debug)]
pub(crate) struct MessageThread {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    segment: Arc<Segment>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    messages: Messages,
    /// Threads in `wait`: while there are any, they move the bytes.
    drivers: usize,
    stopped: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("moving messages does not panic")
    }

    /// One turn of whoever drives: moves what can move, then sleeps until something rings.
    fn drive<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        until: Option<Instant>,
    ) -> MutexGuard<'a, State> {
        let doorbell = self.segment.doorbell(self.segment.rank());
        let seen = doorbell.rings();
        state.messages.progress();
        state.messages.check();
        if state.messages.is_idle() {
            return state;
        }
        let look = state.messages.next_look();
        drop(state);
        doorbell.wait(seen, Some(until.map_or(look, |until| until.min(look))));
        self.lock()
    }
}

impl MessageThread {
    pub(crate) fn new(messages: Messages, segment: Arc<Segment>) -> Self {
        let state = State { messages, drivers: 0, stopped: false };
        let shared = Shared { segment, state: Mutex::new(state), changed: Condvar::new() };
        Self { shared: Arc::new(shared), thread: Mutex::new(None) }
    }

    /// Posts a message; `driven` when the caller goes on to wait for it.
    pub(crate) fn post(
        &self,
        op: Op,
        work: Arc<Work>,
        timeout: Duration,
        driven: bool,
    ) -> Result<(), Failure> {
        let mut state = self.shared.lock();
        if state.stopped {
            return Err(stopped(&self.shared.segment));
        }
        state.messages.post(op, work, timeout);
        if driven || state.messages.is_idle() {
            return Ok(());
        }
        let drivers = state.drivers;
        drop(state);
        let mut thread = self.thread.lock().expect("starting a thread does not panic");
        if thread.is_none() {
            let shared = self.shared.clone();
            *thread = Some(spawn("tpurun-p2p", move || progress(&shared))?);
        } else if drivers == 0 {
            self.shared.changed.notify_one();
        } else {
            // A driver asleep on the doorbell does not know of this message's deadline yet.
            self.shared.segment.doorbell(self.shared.segment.rank()).ring();
        }
        Ok(())
    }

    /// Waits for any work of this communicator, moving messages meanwhile.
    pub(crate) fn wait(&self, work: &Work, deadline: Option<Instant>) -> Option<Outcome> {
        let mut state = self.shared.lock();
        if state.messages.is_idle() {
            // Nothing to drive: a collective's work, or a message that just ended.
            drop(state);
            return work.wait(deadline);
        }
        state.drivers += 1;
        let outcome = loop {
            if let Some(outcome) = work.outcome() {
                break Some(outcome);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break None;
            }
            if state.messages.is_idle() {
                drop(state);
                let outcome = work.wait(deadline);
                state = self.shared.lock();
                break outcome;
            }
            state = self.shared.drive(state, deadline);
        };
        state.drivers -= 1;
        if state.drivers == 0 && !state.messages.is_idle() {
            self.shared.changed.notify_one();
        }
        outcome
    }

    /// Fails what is pending and joins the thread.
    pub(crate) fn stop(&self) {
        let mut state = self.shared.lock();
        state.stopped = true;
        state.messages.fail_all(&stopped(&self.shared.segment));
        drop(state);
        self.shared.changed.notify_all();
        self.shared.segment.doorbell(self.shared.segment.rank()).ring();
        let thread = self.thread.lock().expect("starting a thread does not panic").take();
        if let Some(thread) = thread {
            thread.join().expect("the progress thread does not panic");
        }
    }
}

fn progress(shared: &Shared) {
    let mut state = shared.lock();
    while !state.stopped {
        state = if state.drivers > 0 || state.messages.is_idle() {
            shared.changed.wait(state).expect("moving messages does not panic")
        } else {
            shared.drive(state, None)
        };
    }
}

fn stopped(segment: &Segment) -> Failure {
    Failure::new(FailureKind::Aborted, format!("{} was shut down by this rank", segment.members().name))
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Failure> {
    thread::Builder::new().name(name.to_owned()).spawn(run).map_err(|error| {
        let text = format!("cannot start a progress thread: {error}; raise the limit with `ulimit -u`");
        Failure::new(FailureKind::Transport, text)
    })
}
