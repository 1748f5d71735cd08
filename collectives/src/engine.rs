//! The progress threads: they exist for asynchronous operations, and are joined.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::board::Recording;
use crate::failure::{Failure, FailureKind, bug};
use crate::lane::{Lane, Posting};
use crate::op::Op;
use crate::p2p::Messages;
use crate::presence::Presence;
use crate::segment::{Segment, Verdict};
use crate::sync::{OpQueue, Pop};
use crate::work::{Carrier, Outcome, Work};

/// Operations that may wait for the progress thread; a caller that is further ahead waits for room.
pub(crate) const QUEUE_LENGTH: usize = 1024;

/// A collective on its way to the progress thread.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) op: Op,
    pub(crate) work: Arc<Work>,
    pub(crate) timeout: Duration,
    pub(crate) recording: Option<Recording>,
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
            while let Pop::Item(Job { op, work, timeout, recording }) = jobs.pop() {
                let posted = Posting { recording, caller: None };
                let result = lane.lock().unwrap_or_else(PoisonError::into_inner).run(&op, timeout, posted);
                // The operation's memory is the user's again from here on.
                drop(op);
                queued.fetch_sub(1, Ordering::AcqRel);
                work.finish(result.map(|()| None));
            }
        };
        Ok(Self { queue, thread: spawn("tpurun-coll", run)? })
    }

    /// Where to push jobs.
    pub(crate) fn queue(&self) -> Arc<OpQueue<Job>> {
        self.queue.clone()
    }

    /// Lets the queue run dry and joins the thread.
    pub(crate) fn join(self) {
        self.queue.close();
        self.thread.join().expect("the lane catches what panics");
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
    presence: Arc<Presence>,
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves what can move. Another thread's work may have ended with it: then that thread is woken.
    fn progress(&self, state: &mut State) {
        let moved = catch_unwind(AssertUnwindSafe(|| {
            state.messages.progress();
            state.messages.check();
        }));
        if let Err(panic) = moved {
            let failure = self.segment.fail(FailureKind::Internal, &bug(&*panic));
            state.messages.fail_all(&failure);
        }
        if state.messages.take_ended() && state.drivers > 0 {
            self.segment.doorbell(self.segment.rank()).ring();
        }
    }

    /// Sleeps until something rings, at most until `until` or the next look.
    fn sleep<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        seen: u32,
        until: Option<Instant>,
    ) -> MutexGuard<'a, State> {
        let look = state.messages.next_look();
        drop(state);
        self.segment
            .doorbell(self.segment.rank())
            .wait(seen, Some(until.map_or(look, |until| until.min(look))));
        self.lock()
    }

    fn rings(&self) -> u32 {
        self.segment.doorbell(self.segment.rank()).rings()
    }
}

impl MessageThread {
    pub(crate) fn new(messages: Messages, segment: Arc<Segment>, presence: Arc<Presence>) -> Self {
        let state = State { messages, drivers: 0, stopped: false };
        let shared = Shared { segment, presence, state: Mutex::new(state), changed: Condvar::new() };
        Self { shared: Arc::new(shared), thread: Mutex::new(None) }
    }

    /// Posts a message, and moves what moves at once.
    pub(crate) fn post(
        &self,
        op: Op,
        work: Arc<Work>,
        timeout: Duration,
        recording: Option<Recording>,
    ) -> Result<(), Failure> {
        let mut state = self.shared.lock();
        if state.stopped {
            return Err(stopped(&self.shared.segment));
        }
        state.messages.post(op, work, timeout, recording);
        self.shared.progress(&mut state);
        // Who sleeps does not know of this message's deadline yet.
        self.shared.segment.doorbell(self.shared.segment.rank()).ring();
        Ok(())
    }

    /// Sees to it that pending messages move although nobody waits for them.
    pub(crate) fn drive_in_background(&self) {
        if self.shared.lock().messages.is_idle() {
            return;
        }
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let shared = self.shared.clone();
            // Without a thread, messages still move while somebody waits for one.
            match spawn("tpurun-p2p", move || drive(&shared)) {
                Ok(started) => *thread = Some(started),
                Err(failure) => tracing::warn!(%failure, "messages move only while somebody waits"),
            }
        } else {
            self.shared.changed.notify_one();
        }
    }

    /// Waits for a message, moving all of them meanwhile.
    pub(crate) fn wait(
        &self,
        work: &Work,
        deadline: Option<Instant>,
        python_threads: u32,
    ) -> Option<Outcome> {
        let mut waiting = None;
        let mut state = self.shared.lock();
        state.drivers += 1;
        let outcome = loop {
            let seen = self.shared.rings();
            self.shared.progress(&mut state);
            if let Some(outcome) = work.outcome() {
                break Some(outcome);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break None;
            }
            if let (None, Carrier::Messages(kind)) = (&waiting, work.carrier()) {
                waiting = self.shared.presence.waiting(kind, python_threads);
            }
            state = self.shared.sleep(state, seen, deadline);
        };
        drop(waiting);
        state.drivers -= 1;
        if state.drivers == 0 && !state.messages.is_idle() {
            self.shared.changed.notify_one();
        }
        outcome
    }

    /// Fails what is pending and joins the thread. A message that is half sent fails the communicator: its
    /// receiver could only wait for the rest.
    pub(crate) fn stop(&self) {
        let mut state = self.shared.lock();
        state.stopped = true;
        let mut failure = stopped(&self.shared.segment);
        if state.messages.has_torn_send() {
            let who = self.shared.segment.describe(&[self.shared.segment.rank()]);
            let text =
                format!("{who} shut {} down in the middle of a send", self.shared.segment.members().name);
            let me = self.shared.segment.rank();
            failure = self.shared.segment.fail_by(&Verdict::new(FailureKind::Aborted, text).blaming([me]));
        }
        state.messages.fail_all(&failure);
        drop(state);
        self.shared.changed.notify_all();
        self.shared.segment.doorbell(self.shared.segment.rank()).ring();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            thread.join().expect("the progress thread catches what panics");
        }
    }
}

fn drive(shared: &Shared) {
    let mut state = shared.lock();
    while !state.stopped {
        if state.drivers > 0 || state.messages.is_idle() {
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        let seen = shared.rings();
        shared.progress(&mut state);
        if !state.messages.is_idle() {
            state = shared.sleep(state, seen, None);
        }
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
