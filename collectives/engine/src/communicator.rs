//! A communicator: a rank group at an epoch, and this rank's end of it.
//!
//! It has two lanes that never wait for each other, one for collectives and one for messages. A blocking
//! collective runs on the caller's own thread; an asynchronous one on the thread that waits for it, or on the
//! lane's progress thread, which exists from the first such operation on. No operation
//! of one communicator waits for another communicator (law I10 of `docs/invariants.md`).

pub(crate) mod sentinel;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::communicator::sentinel::{Sentinel, Watch};
use crate::execute::presence::Presence;
use crate::execute::rounds::{Posting, Shared};
use crate::hosts::network::Crossing;
use crate::join::survivors::Survivors;
use crate::join::{self, Bootstrap};
use crate::matching::validate::validate;
use crate::plan::sizes::window_bytes;
use crate::queue::engine::{CollectiveQueue, MessageThread, QUEUE_LENGTH, QueuedCollective};
use crate::queue::lane::Lane;
use crate::queue::p2p::Messages;
use crate::queue::work::{Carrier, OnDone, Outcome, Work};
use tpurun_memory::failure::{Failure, FailureKind};
use tpurun_memory::process::Owner;
use tpurun_memory::traffic::Traffic;
use tpurun_protocol::board::{Board, Recording, WaitKind};
use tpurun_protocol::config::Config;
use tpurun_protocol::control::ControlClient;
use tpurun_protocol::membership::Membership;
use tpurun_protocol::op::{Op, OpKind};
use tpurun_protocol::segment::{Segment, Settings, Verdict};

/// How an operation is posted.
pub enum Mode {
    /// On the caller's thread, to its end.
    Blocking,
    /// Returns at once; the callback is called when it ended, whatever its outcome, on any thread.
    Async(Option<OnDone>),
    /// As `Async`, and a small operation of which this rank has done its part may end as late as somebody
    /// waits for it or calls [`Communicator::attend`]. No other rank waits longer for that.
    Lazy(Option<OnDone>),
}

/// How long the first rank of a host waits for the others there, when it leaves a communicator of several hosts.
const LINGER: Duration = Duration::from_secs(10);

impl std::fmt::Debug for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Mode::Blocking => "Blocking",
            Mode::Async(_) => "Async",
            Mode::Lazy(_) => "Lazy",
        })
    }
}

/// This rank's end of a communicator.
#[derive(Debug)]
pub struct Communicator {
    segment: Arc<Segment>,
    presence: Arc<Presence>,
    lane: Arc<Mutex<Lane>>,
    /// Those that are posted before they are waited for, once there was one.
    collectives: Mutex<Option<Arc<CollectiveQueue>>>,
    messages: MessageThread,
    watch: Mutex<Option<Watch>>,
    /// No launcher watches over its ranks.
    watches_itself: bool,
    /// The way to other hosts, of the first rank of this one.
    crossing: Mutex<Option<Crossing>>,
    /// Asynchronous collectives that have not ended: a blocking one queues behind them.
    queued: Arc<AtomicUsize>,
    shared: Arc<Shared>,
    timeout_ms: AtomicU64,
    messages_posted: AtomicU64,
    /// A process that this one forks has a copy of us, but none of our threads, and is not the rank.
    owner: Owner,
}

impl Communicator {
    /// Creates this rank's end; returns when all ranks have.
    ///
    /// # Errors
    /// `Timeout` naming the missing ranks, `Transport` when the host refuses memory or descriptors,
    /// `InvalidUsage` for a bad membership or `TPURUN_*` variable.
    pub fn create(
        members: Membership,
        timeout: Duration,
        config: Config,
        bootstrap: &dyn Bootstrap,
        board: Option<&Board>,
        python_threads: u32,
    ) -> Result<Self, Failure> {
        let timeout = config.timeout.unwrap_or(timeout);
        let window_bytes = window_bytes(config.staging_bytes, members.size(), &config.tuning);
        // A rank that waits for the others is on the board as blocked already here, in no operation yet.
        let presence = Arc::new(Presence::new(board, &members));
        let blocked = presence.blocked(WaitKind::Creation, Some(python_threads));
        let Config { matching, results, cpus, tuning, .. } = config;
        let settings = Settings { window_bytes, matching, results, cpus, tuning };
        let (segment, crossing) = join::rendezvous(members, settings, bootstrap, timeout)?;
        drop(blocked);
        let shared = Arc::<Shared>::default();
        let lane = Lane::new(segment.clone(), config, presence.clone(), shared.clone())?;
        Ok(Self {
            lane: Arc::new(Mutex::new(lane)),
            collectives: Mutex::new(None),
            messages: MessageThread::new(
                Messages::new(segment.clone(), presence.clone()),
                segment.clone(),
                presence.clone(),
            ),
            segment,
            presence,
            watch: Mutex::new(None),
            watches_itself: false,
            crossing: Mutex::new(crossing),
            queued: Arc::new(AtomicUsize::new(0)),
            shared,
            timeout_ms: AtomicU64::new(timeout.as_millis() as u64),
            messages_posted: AtomicU64::new(0),
            owner: Owner::here(),
        })
    }

    /// Has `sentinel` watch over the next rank, so that all ranks learn of a death at once: for jobs without
    /// an agent, on every rank.
    pub fn watched_by(mut self, sentinel: &Sentinel) -> Self {
        self.watches_itself = true;
        *self.watch.lock().unwrap_or_else(PoisonError::into_inner) = sentinel.watch(self.segment.clone());
        self
    }

    /// Whether a launcher watches over its ranks.
    pub(crate) fn has_agent(&self) -> bool {
        !self.watches_itself
    }

    /// Whether this process is the rank, and no fork of it.
    pub fn is_own(&self) -> bool {
        self.owner.is_here()
    }

    /// # Errors
    /// `InvalidUsage` in a fork of the rank, which says what was tried. It would take the place of the rank in the
    /// operations of the group.
    pub fn check_process(&self, what: &dyn std::fmt::Display) -> Result<(), Failure> {
        if self.is_own() {
            return Ok(());
        }
        let rank = self.segment.roster().describe(&[self.segment.rank()]);
        let text = format!(
            "{what} of {}: expected the process that is {rank}, given process {}, a fork of it, which has no part in \
             its groups; call it in the rank, or have the fork leave its parent's world with destroy_process_group() \
             and make one of its own",
            self.segment.members().title(),
            std::process::id()
        );
        Err(Failure::new(FailureKind::InvalidUsage, text))
    }

    /// Posts one operation, and returns at once, with its handle; a blocking one has ended then, and has none.
    ///
    /// # Errors
    /// `InvalidUsage` before anything happened; for a blocking operation whatever made it fail.
    pub fn post(&self, op: Op, mode: Mode) -> Result<Option<Arc<Work>>, Failure> {
        self.check_process(&op.kind)?;
        validate(&op, self.segment.members())?;
        if self.shared.closing.load(Ordering::Relaxed) {
            return Err(self.shut_down());
        }
        if let Some(failure) = self.segment.failure() {
            return Err(failure);
        }
        match op.kind {
            OpKind::Send | OpKind::Recv => self.post_message(op, mode),
            _ => self.post_collective(op, mode),
        }
    }

    fn post_message(&self, op: Op, mode: Mode) -> Result<Option<Arc<Work>>, Failure> {
        let seq = self.messages_posted.fetch_add(1, Ordering::Relaxed);
        let recording = self.presence.posted(seq, &op);
        let carrier = Carrier::Messages(wait_kind(&op));
        let threads = op.python_threads;
        match mode {
            Mode::Blocking => {
                let work = Arc::new(Work::new(carrier, seq, None));
                self.messages.post(op, work.clone(), self.timeout(), recording)?;
                self.messages
                    .wait(&work, None, threads)
                    .expect("a wait without a deadline has an outcome")?;
                Ok(None)
            }
            Mode::Async(on_done) | Mode::Lazy(on_done) => {
                let work = Arc::new(Work::new(carrier, seq, on_done));
                self.messages.post(op, work.clone(), self.timeout(), recording)?;
                self.messages.drive_in_background();
                Ok(Some(work))
            }
        }
    }

    fn post_collective(&self, op: Op, mode: Mode) -> Result<Option<Arc<Work>>, Failure> {
        let seq = self.segment.roster().count_posted();
        let recording = self.presence.posted(seq, &op);
        let threads = op.python_threads;
        let (on_done, lazy) = match mode {
            Mode::Async(on_done) => (on_done, false),
            Mode::Lazy(on_done) => (on_done, true),
            Mode::Blocking => {
                self.presence.attended(seq);
                if self.queued.load(Ordering::Acquire) == 0 {
                    let mut lane = self.lane.lock().unwrap_or_else(PoisonError::into_inner);
                    // Another thread may have queued one since.
                    if !lane.has_begun() {
                        let posted = Posting { recording, caller: Some(threads) };
                        return lane.run(&op, self.timeout(), posted).map(|()| None);
                    }
                }
                let work = self.queue(op, seq, recording, None, true)?;
                self.wait(&work, None, threads).expect("a wait without a deadline has an outcome")?;
                return Ok(None);
            }
        };
        self.queue(op, seq, recording, on_done, lazy).map(Some)
    }

    fn queue(
        &self,
        op: Op,
        seq: u64,
        recording: Option<Recording>,
        on_done: Option<OnDone>,
        lazy: bool,
    ) -> Result<Arc<Work>, Failure> {
        let work = Arc::new(Work::new(Carrier::Lane, seq, on_done));
        let timeout = self.timeout();
        let jobs = {
            let mut jobs = self.collectives.lock().unwrap_or_else(PoisonError::into_inner);
            let new = || {
                let tuning = *self.segment.tuning();
                CollectiveQueue::new(self.lane.clone(), self.queued.clone(), self.presence.clone(), tuning)
            };
            jobs.get_or_insert_with(new).clone()
        };
        let job = QueuedCollective { op, work: work.clone(), timeout, recording };
        if !jobs.push(job, lazy, Instant::now() + timeout)? {
            if self.shared.closing.load(Ordering::Acquire) {
                return Err(self.shut_down());
            }
            // The others have this operation, so without it nothing after it would match.
            let text = format!(
                "Timed out after {timeout:?}: {QUEUE_LENGTH} asynchronous operations of {} are pending on {}",
                self.segment.members().title(),
                self.segment.roster().describe(&[self.segment.rank()])
            );
            let verdict = Verdict::new(FailureKind::Timeout, text).blaming([self.segment.rank()]);
            return Err(self.segment.failure_word().fail_by(&verdict));
        }
        Ok(work)
    }

    /// Waits for an operation; `None` when `deadline` passed. Without a deadline it runs what is queued before
    /// it, and when it is a message it moves messages. `python_threads` are those of the process; 0 when the calling thread is
    /// none.
    pub fn wait(&self, work: &Work, deadline: Option<Instant>, python_threads: u32) -> Option<Outcome> {
        if let Some(outcome) = work.outcome() {
            return Some(outcome);
        }
        if let Err(failure) = self.check_process(&"a wait for an operation") {
            return Some(Err(failure));
        }
        match work.carrier() {
            Carrier::Lane => {
                if deadline.is_none()
                    && let Some(jobs) = self.jobs()
                {
                    jobs.run_until(work, python_threads);
                }
                self.attend(work);
                work.outcome().or_else(|| {
                    let kind = WaitKind::Collective { seq: work.seq() };
                    let _waiting = self.presence.waiting(kind, python_threads);
                    self.shared.sleepers.fetch_add(1, Ordering::Relaxed);
                    let outcome = work.wait(deadline);
                    self.shared.sleepers.fetch_sub(1, Ordering::Relaxed);
                    outcome
                })
            }
            Carrier::Messages(_) => self.messages.wait(work, deadline, python_threads),
        }
    }

    /// Sees to it that an operation ends although nobody waits for it.
    pub fn attend(&self, work: &Work) {
        if work.carrier() == Carrier::Lane
            && !work.is_done()
            && let Some(jobs) = self.jobs()
        {
            jobs.attend(work.seq());
        }
    }

    fn jobs(&self) -> Option<Arc<CollectiveQueue>> {
        if !self.is_own() {
            return None;
        }
        self.collectives.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Fails every pending and future operation of this communicator, on all its ranks.
    pub fn abort(&self, reason: &str) {
        if !self.is_own() {
            return;
        }
        let segment = &self.segment;
        let who = segment.roster().describe(&[segment.rank()]);
        let why = if reason.is_empty() { String::new() } else { format!(": {reason}") };
        let text = format!("{} was aborted by {who}{why}", segment.members().title());
        segment.failure_word().fail_by(&Verdict::new(FailureKind::Aborted, text).blaming([segment.rank()]));
    }

    /// The failure of this communicator, if it has failed.
    pub fn failure(&self) -> Option<Failure> {
        self.segment.failure()
    }

    /// Makes the communicator of those that are left, of a later epoch: all of them must call this. This one
    /// fails first, if it has not yet. `lost` are ranks of the world that are not waited for, besides those
    /// whose processes are gone and those that the failure names as lost.
    ///
    /// # Errors
    /// `Timeout` naming who did not come, `RankLost` when the others have given up this rank, `InvalidUsage`
    /// for a lost rank that is this one or no member.
    pub fn shrink(
        &self,
        lost: &[u32],
        timeout: Duration,
        config: &Config,
        control: Option<&ControlClient>,
        board: Option<&Board>,
        python_threads: u32,
    ) -> Result<Self, Failure> {
        self.check_process(&"a shrink")?;
        let segment = &*self.segment;
        if segment.is_bridged() {
            let text = format!(
                "{} has ranks on several hosts: they can not go on without some",
                segment.members().title()
            );
            return Err(Failure::new(FailureKind::InvalidUsage, text));
        }
        let mut survivors = Survivors::new(segment, lost, timeout)?;
        if segment.failure().is_none() {
            let (name, who) = (segment.members().title(), segment.roster().describe(&[segment.rank()]));
            segment
                .failure_word()
                .fail(FailureKind::Aborted, &format!("{name} was given up by {who}, which shrinks it"));
        }
        loop {
            let members = survivors.agree()?;
            let left = survivors.left().max(Duration::from_millis(1));
            let config = Config { timeout: None, ..config.clone() };
            let bootstrap = survivors.bootstrap(&members, control);
            match Self::create(members.clone(), left, config, &bootstrap, board, python_threads) {
                Ok(communicator) => {
                    communicator.set_timeout(self.timeout());
                    return Ok(communicator);
                }
                // One more has died on the way: those that are left come here, too.
                Err(failure) if failure.kind() == FailureKind::RankLost => {}
                Err(failure) => return Err(failure),
            }
        }
    }

    fn shut_down(&self) -> Failure {
        let text = format!("{} was shut down by this rank", self.segment.members().title());
        Failure::new(FailureKind::Aborted, text)
    }

    /// Frees every waiter of this rank, and joins the threads. Collectives that all ranks have posted end as
    /// they would have; all others, and pending messages, fail for this rank alone, or for all of them where an
    /// operation had begun that uses tensors in place. Ranks that wait for this one, now or later, fail at once.
    pub fn shutdown(&self) {
        // A fork may have a copy of a lock that is never released.
        if !self.is_own() {
            return;
        }
        self.shared.closing.store(true, Ordering::Release);
        let watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner).take();
        let jobs = self.collectives.lock().unwrap_or_else(PoisonError::into_inner).take();
        let crossing = self.crossing.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.segment.meeting().nudge();
        self.messages.stop();
        if let Some(jobs) = jobs {
            jobs.join();
        }
        drop(watch);
        self.presence.close();
        self.lane.lock().unwrap_or_else(PoisonError::into_inner).leave();
        if let Some(crossing) = crossing {
            // The other ranks of this host reach others through this one.
            crossing.wait(LINGER.min(self.timeout()));
        }
    }

    /// The default time limit of operations posted from now on.
    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout_ms.store(timeout.as_millis().max(1) as u64, Ordering::Relaxed);
    }

    /// The default time limit of operations.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed))
    }

    /// Collectives posted so far.
    pub fn seq(&self) -> u64 {
        self.segment.roster().posted(self.segment.rank()).load(Ordering::Relaxed)
    }

    /// Returns what this rank has moved for collectives of this communicator so far, for others as well.
    pub fn traffic(&self) -> Traffic {
        self.shared.traffic.total()
    }

    /// The ranks that are in it.
    pub fn members(&self) -> &Membership {
        self.segment.members()
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.shutdown();
    }
}

fn wait_kind(op: &Op) -> WaitKind {
    match (op.kind, op.root) {
        (OpKind::Send, Some(to)) => WaitKind::Send { to },
        (_, from) => WaitKind::Recv { from },
    }
}
