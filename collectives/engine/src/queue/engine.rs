//! The progress threads: they exist while there are asynchronous operations, and are joined.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::execute::presence::Presence;
use crate::plan::strategy::is_small;
use crate::queue::lane::{BURST, Call, Lane, Progress};
use crate::queue::p2p::{Callbacks, Messages};
use crate::queue::work::{Carrier, OnDone, Outcome, Work};
use tpurun_memory::failure::{Failure, FailureKind, bug};
use tpurun_memory::joined::Joined;
use tpurun_memory::sync::{Consume, Consumer, Doorbell, OpQueue};
use tpurun_protocol::board::Recording;
use tpurun_protocol::op::Op;
use tpurun_protocol::segment::{Segment, Verdict};
use tpurun_protocol::tuning::Tuning;

/// Operations that may wait for the progress thread; a caller that is further ahead waits for room.
pub(crate) const QUEUE_LENGTH: usize = 1024;

/// How long the progress thread leaves a small operation that comes after a pause to its caller. A caller that goes
/// on posting has it share a meeting with more of them. A caller that waits for it runs it sooner than a thread that
/// has to wake up. Measured on 2 ranks: bursts of 2 take half as long, longer ones as long as without.
const GRACE: Duration = Duration::from_micros(50);

/// A progress thread that has had nothing to do for so long ends; the next operation starts another one. The number
/// of these threads in a process then depends on what its groups do, and not on how many groups there are.
const IDLE: Duration = Duration::from_secs(5);

/// A collective on its way to the thread that runs it.
#[derive(Debug)]
pub(crate) struct QueuedCollective {
    pub(crate) op: Op,
    pub(crate) work: Arc<Work>,
    pub(crate) timeout: Duration,
    pub(crate) recording: Option<Recording>,
}

impl QueuedCollective {
    fn call(&self) -> Call<'_> {
        Call { op: &self.op, timeout: self.timeout, recording: self.recording }
    }
}

/// Queued collectives: the progress thread runs them one after the other, or a thread that waits for one of them
/// does.
#[derive(Debug)]
pub(crate) struct CollectiveQueue {
    queue: OpQueue<QueuedCollective>,
    lane: Arc<Mutex<Lane>>,
    /// Those that have not ended.
    queued: Arc<AtomicUsize>,
    /// Somebody wants an end now.
    hurried: Doorbell,
    presence: Arc<Presence>,
    tuning: Tuning,
    server: Mutex<Server>,
}

#[derive(Debug, Default)]
struct Server {
    /// Whether the thread looks at the queue once more.
    serves: bool,
    /// The thread that closed the queue runs what is left.
    is_closed: bool,
    /// The last one, which may have ended for want of work.
    thread: Option<Joined>,
}

impl CollectiveQueue {
    pub(crate) fn new(
        lane: Arc<Mutex<Lane>>,
        queued: Arc<AtomicUsize>,
        presence: Arc<Presence>,
        tuning: Tuning,
    ) -> Arc<Self> {
        let (queue, hurried) = (OpQueue::new(QUEUE_LENGTH), Doorbell::default());
        Arc::new(Self { queue, lane, queued, hurried, presence, tuning, server: Mutex::default() })
    }

    /// False when the queue stays full until then, or is closed. A lazy collective is begun here if it can be, and
    /// then ends when somebody waits for it, or [`attend`](Self::attend)s to it.
    ///
    /// # Errors
    /// `Transport`, without a thread that could run it; then it is not queued.
    pub(crate) fn push(
        self: &Arc<Self>,
        job: QueuedCollective,
        lazy: bool,
        deadline: Instant,
    ) -> Result<bool, Failure> {
        self.have_server()?;
        self.queued.fetch_add(1, Ordering::AcqRel);
        let seq = job.work.seq();
        if self.queue.push(job, Some(deadline)).is_err() {
            self.queued.fetch_sub(1, Ordering::AcqRel);
            return Ok(false);
        }
        // It may have ended since. Whether it saw the collective or we see its end, the lock decides.
        if let Err(failure) = self.have_server() {
            tracing::warn!(%failure, "collectives run only while somebody waits");
        }
        if !(lazy && self.begin_all()) {
            self.presence.attended(seq);
            self.queue.announce();
        }
        Ok(true)
    }

    fn have_server(self: &Arc<Self>) -> Result<(), Failure> {
        let mut server = self.lock_server();
        if !server.serves && !server.is_closed {
            let jobs = self.clone();
            // The one before has said that it ends, and needs no lock for that any more.
            drop(server.thread.take());
            server.thread = Some(spawn("tpurun-coll", move || jobs.serve())?);
            server.serves = true;
        }
        Ok(())
    }

    fn lock_server(&self) -> MutexGuard<'_, Server> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The progress thread ends, unless there is something in the queue again.
    fn end_server(&self) -> bool {
        let mut server = self.lock_server();
        // Where somebody else consumes, there is.
        let is_empty = self.queue.try_consume().is_some_and(|mut jobs| jobs.front(1).is_empty());
        server.serves = !is_empty;
        is_empty
    }

    /// Lets the queue run dry and joins the thread.
    pub(crate) fn join(&self) {
        self.queue.close();
        self.hurried.ring();
        let thread = {
            let mut server = self.lock_server();
            server.is_closed = true;
            server.thread.take()
        };
        drop(thread);
        // Runs the operations that were pushed when there was no thread any more.
        self.serve();
    }

    /// Has the progress thread run what is queued up to number `seq`, now.
    pub(crate) fn attend(&self, seq: u64) {
        self.presence.attended(seq);
        self.hurried.ring();
        self.queue.announce();
    }

    /// Runs what is queued on the calling thread, which waits for `work`: it is here, the progress thread has
    /// to wake up first. Returns when that has ended, or somebody else runs it.
    pub(crate) fn run_until(&self, work: &Work, python_threads: u32) {
        self.presence.attended(work.seq());
        while !work.is_done()
            && let Some(jobs) = self.queue.try_consume()
            && self.run_some(jobs, Some(python_threads))
        {}
    }

    /// The progress thread: runs whatever nobody waits for, until the queue is closed and empty.
    fn serve(&self) {
        let mut was_idle = true;
        loop {
            let hurried = self.hurried.rings();
            let mut jobs = match self.queue.consume(Some(Instant::now() + IDLE)) {
                Consume::Some(jobs) => jobs,
                Consume::Closed => return,
                Consume::Late if self.end_server() => return,
                Consume::Late => continue,
            };
            if was_idle && jobs.front(1).iter().all(|job| is_small(&job.op, &self.tuning)) {
                drop(jobs);
                self.hurried.wait(hurried, Some(Instant::now() + GRACE));
                was_idle = false;
                continue;
            }
            self.run_some(jobs, None);
            was_idle = self.queued.load(Ordering::Relaxed) == 0;
        }
    }

    /// Ends and begins what can be without waiting. Whether nothing is left for the progress thread.
    fn begin_all(&self) -> bool {
        while let Some(mut jobs) = self.queue.try_consume() {
            // One more than can begin: then something is left.
            let calls: Vec<Call<'_>> = jobs.front(BURST + 1).iter().map(QueuedCollective::call).collect();
            if calls.is_empty() {
                return true;
            }
            let Ok(mut lane) = self.lane.try_lock() else { return false };
            let progress = lane.try_run_some(&calls);
            drop(lane);
            match progress {
                Progress::Ended(ran, result) => self.settle(jobs, ran, result),
                Progress::Begun => return true,
                Progress::Stuck => return false,
            }
        }
        false
    }

    /// Runs the oldest collective, and those that share a meeting with it; false when there is none.
    fn run_some(&self, mut jobs: Consumer<'_, QueuedCollective>, caller: Option<u32>) -> bool {
        let calls: Vec<Call<'_>> = jobs.front(BURST).iter().map(QueuedCollective::call).collect();
        if calls.is_empty() {
            return false;
        }
        let (ran, result) = self.lane.lock().unwrap_or_else(PoisonError::into_inner).run_some(&calls, caller);
        self.settle(jobs, ran, result);
        true
    }

    /// The oldest of them, `ran` in number, have ended.
    fn settle(&self, mut jobs: Consumer<'_, QueuedCollective>, ran: usize, result: Result<(), Failure>) {
        let outcome: Outcome = result.map(|()| None);
        let mut callbacks: Vec<OnDone> = vec![];
        for _ in 0..ran {
            let QueuedCollective { op, work, .. } = jobs.pop().expect("what ran was there");
            // The operation's memory is the user's again from here on.
            drop(op);
            self.queued.fetch_sub(1, Ordering::AcqRel);
            callbacks.extend(work.settle(outcome.clone()));
        }
        // Callbacks may post operations and wait for them.
        drop(jobs);
        callbacks.into_iter().for_each(|on_done| on_done(&outcome));
    }
}

/// Moves messages, on whichever thread waits for one, else on its own.
#[derive(Debug)]
pub(crate) struct MessageThread {
    shared: Arc<Shared>,
    /// The last one, which may have ended for want of work.
    thread: Mutex<Option<Joined>>,
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
    /// Whether the thread looks at the messages once more.
    is_driven: bool,
    stopped: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves what can move. Another thread's work may have ended with it: then that thread is woken. The callbacks of
    /// what has ended are the caller's to call without the lock.
    fn progress(&self, state: &mut State) -> Callbacks {
        let moved = catch_unwind(AssertUnwindSafe(|| {
            state.messages.progress();
            state.messages.check();
        }));
        if let Err(panic) = moved {
            let failure = self.segment.failure_word().fail(FailureKind::Internal, &bug(&*panic));
            state.messages.fail_all(&failure);
        }
        if state.messages.take_ended() && state.drivers > 0 {
            self.segment.doorbell(self.segment.rank()).ring();
        }
        state.messages.take_callbacks()
    }

    /// Calls callbacks, if there are any, without the lock.
    fn call<'a>(&'a self, state: MutexGuard<'a, State>, callbacks: Callbacks) -> MutexGuard<'a, State> {
        if callbacks.is_empty() {
            return state;
        }
        drop(state);
        callbacks.call();
        self.lock()
    }

    /// The calling thread moves no messages any more; where nobody else does, the progress thread takes over.
    fn stop_driving(&self, state: &mut State) {
        state.drivers -= 1;
        if state.drivers == 0 && !state.messages.is_idle() {
            self.changed.notify_one();
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
        let state = State { messages, drivers: 0, is_driven: false, stopped: false };
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
        let callbacks = self.shared.progress(&mut state);
        drop(state);
        // A thread that sleeps does not know of this message's deadline yet.
        self.shared.segment.doorbell(self.shared.segment.rank()).ring();
        callbacks.call();
        Ok(())
    }

    /// Sees to it that pending messages move although nobody waits for them.
    pub(crate) fn drive_in_background(&self) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.shared.lock();
        if state.messages.is_idle() || state.stopped {
            return;
        }
        if state.is_driven {
            self.shared.changed.notify_one();
            return;
        }
        let shared = self.shared.clone();
        // The one before has said that it ends, and needs no lock for that any more.
        drop(thread.take());
        // Without a thread, messages still move while somebody waits for one.
        match spawn("tpurun-p2p", move || drive(&shared)) {
            Ok(started) => {
                *thread = Some(started);
                state.is_driven = true;
            }
            Err(failure) => tracing::warn!(%failure, "messages move only while somebody waits"),
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
            let callbacks = self.shared.progress(&mut state);
            if !callbacks.is_empty() {
                // A callback may take long.
                self.shared.stop_driving(&mut state);
                state = self.shared.call(state, callbacks);
                state.drivers += 1;
            }
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
        self.shared.stop_driving(&mut state);
        outcome
    }

    /// Fails what is pending and joins the thread. A message that is half sent fails the communicator: its
    /// receiver could only wait for the rest.
    pub(crate) fn stop(&self) {
        let mut state = self.shared.lock();
        state.stopped = true;
        let mut failure = stopped(&self.shared.segment);
        if state.messages.has_torn_send() {
            let who = self.shared.segment.roster().describe(&[self.shared.segment.rank()]);
            let text =
                format!("{who} shut {} down in the middle of a send", self.shared.segment.members().title());
            let me = self.shared.segment.rank();
            failure = self
                .shared
                .segment
                .failure_word()
                .fail_by(&Verdict::new(FailureKind::Aborted, text).blaming([me]));
        }
        state.messages.fail_all(&failure);
        let callbacks = state.messages.take_callbacks();
        drop(state);
        self.shared.changed.notify_all();
        self.shared.segment.doorbell(self.shared.segment.rank()).ring();
        callbacks.call();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(thread);
    }
}

fn drive(shared: &Shared) {
    let mut state = shared.lock();
    while !state.stopped {
        if state.drivers > 0 || state.messages.is_idle() {
            let waited = shared.changed.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            let is_late = waited.1.timed_out();
            state = waited.0;
            if is_late && state.messages.is_idle() {
                break;
            }
            continue;
        }
        let seen = shared.rings();
        let callbacks = shared.progress(&mut state);
        state = shared.call(state, callbacks);
        if !state.messages.is_idle() {
            state = shared.sleep(state, seen, None);
        }
    }
    state.is_driven = false;
}

fn stopped(segment: &Segment) -> Failure {
    Failure::new(FailureKind::Aborted, format!("{} was shut down by this rank", segment.members().title()))
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<Joined, Failure> {
    thread::Builder::new().name(name.to_owned()).spawn(run).map(Joined::new).map_err(|error| {
        let text = format!("cannot start a progress thread: {error}; raise the limit with `ulimit -u`");
        Failure::new(FailureKind::Transport, text)
    })
}
