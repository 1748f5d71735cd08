//! The message lane of a communicator: send and recv between pairs of ranks.
//!
//! Each ordered pair has one byte ring. A message is a fixed header and its bytes, streamed as the ring has
//! room, so a large send makes progress only while the receiver takes part, and a small one completes at
//! once. A receive takes the first message from its source with its tag; messages with other tags that lie
//! in front of it are set aside in private memory, up to a bound.
//!
//! A waiting thread drives: a thread that waits for a message moves the bytes itself, and the progress thread
//! does it for works nobody waits for.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::execute::presence::Presence;
use crate::plan::copying;
use crate::queue::work::{OnDone, Outcome, Work};
use tpurun_memory::failure::{Failure, FailureKind};
use tpurun_memory::process::LOOK_PERIOD;
use tpurun_protocol::board::Recording;
use tpurun_protocol::layout::P2P_CHANNEL;
use tpurun_protocol::match_key::Posted;
use tpurun_protocol::message::{HEADER_BYTES, MessageHeader};
use tpurun_protocol::op::{Op, OpKind};
use tpurun_protocol::segment::{Segment, Verdict};

/// Bytes of messages nobody asked for yet that a rank keeps aside per communicator.
const UNEXPECTED_BYTES: usize = 256 << 20;

/// A posted send or receive.
#[derive(Debug)]
struct Pending {
    op: Op,
    work: Arc<Work>,
    deadline: Instant,
    timeout: Duration,
    recording: Option<Recording>,
    /// A send: bytes of header and payload in the ring so far. A receive: payload bytes that arrived.
    moved: usize,
}

/// The thing that a source's ring is in the middle of.
#[derive(Debug)]
enum Inbound {
    Header,
    /// The rest goes to the receive in this place.
    Into(Box<Pending>, u32),
    /// The rest goes aside.
    Aside {
        at: usize,
    },
}

/// A message set aside; complete once `bytes` has its full length.
#[derive(Debug)]
struct Unexpected {
    header: MessageHeader,
    bytes: Vec<u8>,
    moved: usize,
}

/// All pending messages of this rank in one communicator.
#[derive(Debug)]
pub(crate) struct Messages {
    segment: Arc<Segment>,
    presence: Arc<Presence>,
    sends: Vec<VecDeque<Pending>>,
    receives: VecDeque<Pending>,
    inbound: Vec<Inbound>,
    unexpected: Vec<VecDeque<Unexpected>>,
    aside_bytes: usize,
    /// When to look next whether peers are still there.
    look: Instant,
    /// How many ranks had left or were gone at the last look.
    /// Looks at the processes of others so far.
    looks: u32,
    departures: u32,
    /// Works that ended since somebody last asked.
    ended: usize,
    /// Callbacks of works that have ended, to be called.
    callbacks: Callbacks,
}

/// Callbacks of works that have ended, each with how its work has. They may post messages and wait for them, so
/// whoever calls them has no lock.
#[derive(Default)]
#[must_use]
pub(crate) struct Callbacks(Vec<(OnDone, Outcome)>);

impl Callbacks {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Calls them in the order in which their works have ended.
    pub(crate) fn call(self) {
        self.0.into_iter().for_each(|(on_done, outcome)| on_done(&outcome));
    }
}

impl fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Callbacks").field(&self.0.len()).finish()
    }
}

impl Messages {
    pub(crate) fn new(segment: Arc<Segment>, presence: Arc<Presence>) -> Self {
        let ranks = segment.size() as usize;
        Self {
            segment,
            presence,
            sends: (0..ranks).map(|_| VecDeque::new()).collect(),
            receives: VecDeque::new(),
            inbound: (0..ranks).map(|_| Inbound::Header).collect(),
            unexpected: (0..ranks).map(|_| VecDeque::new()).collect(),
            aside_bytes: 0,
            look: Instant::now() + LOOK_PERIOD,
            looks: 0,
            departures: 0,
            ended: 0,
            callbacks: Callbacks::default(),
        }
    }

    /// Adds a send or receive.
    pub(crate) fn post(&mut self, op: Op, work: Arc<Work>, timeout: Duration, recording: Option<Recording>) {
        let timeout = op.timeout.unwrap_or(timeout);
        let pending = Pending { op, work, deadline: Instant::now() + timeout, timeout, recording, moved: 0 };
        self.segment.rings().add_pending(pending.op.kind, pending.op.root);
        if self.segment.roster().departures() > 0 {
            // It may wait for one of those that are gone.
            self.look = Instant::now();
        }
        match pending.op.kind {
            OpKind::Send => {
                let to = pending.op.root.expect("a send has a destination, checked when posted") as usize;
                self.sends[to].push_back(pending);
            }
            _ => self.receives.push_back(pending),
        }
    }

    /// Completes what was pending; its callback is called later.
    fn end(&mut self, pending: Pending, outcome: Outcome) {
        self.ended += 1;
        self.segment.rings().remove_pending(pending.op.kind, pending.op.root);
        self.presence.ended(pending.recording, &outcome);
        let on_done = pending.work.settle(outcome.clone());
        self.callbacks.0.extend(on_done.map(|on_done| (on_done, outcome)));
    }

    /// Callbacks of works that have ended, for the caller to call when it has let go of the messages.
    pub(crate) fn take_callbacks(&mut self) -> Callbacks {
        std::mem::take(&mut self.callbacks)
    }

    /// Whether anything is pending.
    pub(crate) fn is_idle(&self) -> bool {
        self.receives.is_empty()
            && self.sends.iter().all(VecDeque::is_empty)
            && !self.inbound.iter().any(|inbound| matches!(inbound, Inbound::Into(..)))
    }

    /// Moves every byte that can move now.
    pub(crate) fn progress(&mut self) {
        if let Some(failure) = self.segment.failure() {
            self.fail_all(&failure);
            return;
        }
        let ranks = 0..self.segment.size();
        let moved = ranks.clone().try_for_each(|to| self.progress_sends(to)).and_then(|()| {
            self.take_set_aside();
            ranks.clone().try_for_each(|from| self.progress_receives(from))
        });
        if let Err(failure) = moved {
            self.fail_all(&failure);
        }
    }

    /// When a waiter has to look again even if nothing rings.
    pub(crate) fn next_look(&self) -> Instant {
        self.pending()
            .map(|pending| pending.deadline)
            .min()
            .map_or(self.look, |deadline| deadline.min(self.look))
    }

    /// Whether any work ended since the last call.
    pub(crate) fn take_ended(&mut self) -> bool {
        std::mem::take(&mut self.ended) > 0
    }

    /// Whether some send is in its ring in part: its receiver can not be left with that.
    pub(crate) fn has_torn_send(&self) -> bool {
        self.sends.iter().flatten().any(|send| send.moved > 0)
    }

    /// Fails what can no longer complete: its time is up, or the peer is gone.
    pub(crate) fn check(&mut self) {
        let now = Instant::now();
        let late = self.pending().find(|pending| now >= pending.deadline).map(|pending| {
            let (posted, name) = (Posted::of(&pending.op), self.segment.members().title());
            let note = self.segment.note();
            let text = format!("Timed out after {:?} in {posted} of {name}{note}", pending.timeout);
            Verdict::new(FailureKind::Timeout, text).blaming(Vec::from_iter(pending.op.root))
        });
        if let Some(verdict) = late {
            let failure = self.segment.failure_word().fail_by(&verdict);
            self.fail_all(&failure);
        } else if now >= self.look || self.segment.roster().departures() != self.departures {
            self.look = now + LOOK_PERIOD;
            self.departures = self.segment.roster().departures();
            self.look_after_peers();
        }
    }

    fn look_after_peers(&mut self) {
        let segment = self.segment.clone();
        let mut peers: Vec<u32> = self.pending().flat_map(|pending| self.peers(pending)).collect();
        peers.sort_unstable();
        peers.dedup();
        self.looks = self.looks.wrapping_add(1);
        let all: Vec<u32> = segment.ranks().collect();
        let lost = segment.roster().lost_among(&peers, &all, self.looks);
        peers.retain(|peer| lost.contains(peer) || segment.roster().left(*peer).is_some());
        if peers.is_empty() {
            return;
        }
        // Messages that they had sent before they were seen gone are received; those that are left then stay
        // for ever.
        self.progress();
        let gone = |peer: &u32| peers.contains(peer);
        let stuck = self.pending().find(|pending| {
            let mut needed = self.peers(pending).into_iter();
            if pending.op.kind == OpKind::Send {
                needed.any(|peer| gone(&peer))
            } else {
                needed.all(|peer| gone(&peer))
            }
        });
        let verdict = stuck.map(|pending| {
            let (posted, name) = (Posted::of(&pending.op), segment.members().title());
            let lost: Vec<u32> = self.peers(pending).into_iter().filter(gone).collect();
            let (kind, text) = if lost.iter().any(|peer| segment.roster().is_gone(*peer)) {
                let gone = segment.roster().describe_gone(&lost);
                (FailureKind::RankLost, format!("{gone}: {posted} of {name} can not complete"))
            } else {
                let who = segment.roster().describe(&lost);
                (FailureKind::Deadlock, format!("{who} destroyed {name} before {posted}"))
            };
            Verdict::new(kind, text).blaming(lost)
        });
        if let Some(verdict) = verdict {
            let failure = segment.failure_word().fail_by(&verdict);
            self.fail_all(&failure);
        }
    }

    /// The ranks that could complete a pending message.
    fn peers(&self, pending: &Pending) -> Vec<u32> {
        let bound = self.inbound.iter().find_map(|inbound| match inbound {
            Inbound::Into(into, source) if std::ptr::eq(&**into, pending) => Some(*source),
            _ => None,
        });
        match pending.op.root.or(bound) {
            Some(peer) => vec![peer],
            None => self.segment.ranks().filter(|rank| *rank != self.segment.rank()).collect(),
        }
    }

    /// Completes everything pending with this failure.
    pub(crate) fn fail_all(&mut self, failure: &Failure) {
        let into = self.inbound.iter_mut().filter_map(|inbound| match inbound {
            Inbound::Into(..) => match std::mem::replace(inbound, Inbound::Header) {
                Inbound::Into(pending, _) => Some(*pending),
                _ => None,
            },
            _ => None,
        });
        let pending: Vec<Pending> = self
            .sends
            .iter_mut()
            .flat_map(|sends| sends.drain(..))
            .chain(self.receives.drain(..))
            .chain(into)
            .collect();
        for pending in pending {
            self.end(pending, Err(failure.clone()));
        }
    }

    fn pending(&self) -> impl Iterator<Item = &Pending> {
        let into = self.inbound.iter().filter_map(|inbound| match inbound {
            Inbound::Into(pending, _) => Some(&**pending),
            _ => None,
        });
        self.sends.iter().flatten().chain(&self.receives).chain(into)
    }

    fn progress_sends(&mut self, to: u32) -> Result<(), Failure> {
        let segment = self.segment.clone();
        let ring = segment.rings().ring(P2P_CHANNEL, segment.rank(), to);
        let data = segment.layout().ring_data(P2P_CHANNEL, segment.rank(), to);
        while let Some(pending) = self.sends[to as usize].front_mut() {
            let run =
                ring.writable().map_err(|error| segment.failure_word().corrupt(to, &error.to_string()))?;
            let mut room = run;
            if pending.moved == 0 {
                if (run.bytes as usize) < HEADER_BYTES {
                    break;
                }
                let header = MessageHeader::of(&pending.op, segment.members().epoch).encode();
                segment.rings().write_run(data, run, &header);
                room = run.after(HEADER_BYTES as u32);
                pending.moved = HEADER_BYTES;
                self.presence.first_byte(pending.recording);
            }
            let payload = pending.moved - HEADER_BYTES;
            let left = pending.op.inputs.total() - payload;
            let now = room.first(left.min(u32::MAX as usize) as u32);
            let (how, _) = copying::message(&segment, &pending.op);
            let mut at = payload;
            for (offset, bytes) in now.pieces() {
                let from = data + offset as usize;
                pending.op.inputs.stage(how, (0, at), bytes as usize, segment.region(), from);
                at += bytes as usize;
            }
            pending.moved += now.bytes as usize;
            let moved = run.bytes - room.bytes + now.bytes;
            if moved > 0 {
                ring.publish(moved);
                segment.rings().notify(to);
            }
            if now.bytes as usize != left {
                break;
            }
            let done = self.sends[to as usize].pop_front().expect("its front was just looked at");
            self.end(done, Ok(None));
        }
        Ok(())
    }

    fn progress_receives(&mut self, from: u32) -> Result<(), Failure> {
        let segment = self.segment.clone();
        let ring = segment.rings().ring(P2P_CHANNEL, from, segment.rank());
        let data = segment.layout().ring_data(P2P_CHANNEL, from, segment.rank());
        loop {
            let run =
                ring.readable().map_err(|error| segment.failure_word().corrupt(from, &error.to_string()))?;
            let inbound = std::mem::replace(&mut self.inbound[from as usize], Inbound::Header);
            let taken = match inbound {
                Inbound::Header => {
                    if (run.bytes as usize) < HEADER_BYTES || !self.wants(from) {
                        return Ok(());
                    }
                    let mut bytes = [0; HEADER_BYTES];
                    segment.rings().read_run(data, run, &mut bytes);
                    let header = MessageHeader::decode(&bytes)
                        .map_err(|error| segment.failure_word().corrupt(from, &error.to_string()))?;
                    if !self.begin(from, header)? {
                        return Ok(());
                    }
                    HEADER_BYTES as u32
                }
                Inbound::Into(mut pending, source) => {
                    self.presence.first_byte(pending.recording);
                    let left = pending.op.outputs.total() - pending.moved;
                    let now = run.first(left.min(u32::MAX as usize) as u32);
                    let (_, how) = copying::message(&segment, &pending.op);
                    let mut at = pending.moved;
                    for (offset, bytes) in now.pieces() {
                        let from = data + offset as usize;
                        pending.op.outputs.fetch_alone(how, (0, at), bytes as usize, segment.region(), from);
                        at += bytes as usize;
                    }
                    pending.moved = at;
                    if now.bytes as usize == left {
                        self.end(*pending, Ok(Some(source)));
                    } else {
                        self.inbound[from as usize] = Inbound::Into(pending, source);
                    }
                    now.bytes
                }
                Inbound::Aside { at } => {
                    let message = &mut self.unexpected[from as usize][at];
                    let left = message.bytes.len() - message.moved;
                    let now = run.first(left.min(u32::MAX as usize) as u32);
                    let to = message.moved..message.moved + now.bytes as usize;
                    segment.rings().read_run(data, now, &mut message.bytes[to]);
                    message.moved += now.bytes as usize;
                    if message.moved == message.bytes.len() {
                        self.take_set_aside();
                    } else {
                        self.inbound[from as usize] = Inbound::Aside { at };
                    }
                    now.bytes
                }
            };
            if taken > 0 {
                ring.consume(taken);
                segment.rings().notify(from);
            } else if !matches!(self.inbound[from as usize], Inbound::Header) {
                return Ok(());
            }
        }
    }

    /// Whether a receive may take something from this source.
    fn wants(&self, from: u32) -> bool {
        self.receives.iter().any(|receive| receive.op.root.is_none_or(|root| root == from))
    }

    fn first_match(&self, from: u32, tag: i32) -> Option<usize> {
        self.receives
            .iter()
            .position(|receive| receive.op.tag == tag && receive.op.root.is_none_or(|root| root == from))
    }

    /// Decides where a message goes; false when it has to stay in the ring for now.
    fn begin(&mut self, from: u32, header: MessageHeader) -> Result<bool, Failure> {
        if let Some(index) = self.first_match(from, header.tag) {
            let receive = self.receives.remove(index).expect("its position was just found");
            if let Err(failure) = self.agree(from, &header, &receive) {
                self.receives.push_front(receive);
                return Err(failure);
            }
            self.presence.matched(receive.recording);
            if header.bytes == 0 {
                self.end(receive, Ok(Some(from)));
            } else {
                self.inbound[from as usize] = Inbound::Into(Box::new(receive), from);
            }
            return Ok(true);
        }
        let bytes = usize::try_from(header.bytes).unwrap_or(usize::MAX);
        // Messages without bytes take room, too.
        let room = bytes.saturating_add(HEADER_BYTES);
        if room > UNEXPECTED_BYTES.saturating_sub(self.aside_bytes) {
            return Ok(false);
        }
        self.aside_bytes += room;
        let at = self.unexpected[from as usize].len();
        self.unexpected[from as usize].push_back(Unexpected { header, bytes: vec![0; bytes], moved: 0 });
        if bytes > 0 {
            self.inbound[from as usize] = Inbound::Aside { at };
        }
        Ok(true)
    }

    /// Gives complete messages that were set aside to the receives that ask for them.
    fn take_set_aside(&mut self) {
        let mut index = 0;
        while index < self.receives.len() {
            let receive = &self.receives[index];
            let found = (0..self.segment.size())
                .filter(|from| receive.op.root.is_none_or(|root| root == *from))
                .find_map(|from| {
                    let messages = &self.unexpected[from as usize];
                    let at = messages.iter().position(|message| message.header.tag == receive.op.tag)?;
                    (messages[at].moved == messages[at].bytes.len()).then_some((from, at))
                });
            let Some((from, at)) = found else {
                index += 1;
                continue;
            };
            let receive = self.receives.remove(index).expect("its position was just found");
            let message = self.unexpected[from as usize].remove(at).expect("its position was just found");
            if let Inbound::Aside { at: current } = &mut self.inbound[from as usize]
                && *current > at
            {
                *current -= 1;
            }
            self.aside_bytes -= message.bytes.len() + HEADER_BYTES;
            self.presence.matched(receive.recording);
            let agreed = self.agree(from, &message.header, &receive);
            if agreed.is_ok() {
                self.presence.first_byte(receive.recording);
                receive.op.outputs.write(0, &message.bytes);
            }
            self.end(receive, agreed.map(|()| Some(from)));
        }
    }

    /// A message must be what its receive expects, before it is written (law I2 of `docs/invariants.md`).
    fn agree(&self, from: u32, header: &MessageHeader, receive: &Pending) -> Result<(), Failure> {
        let segment = &self.segment;
        let expected = MessageHeader::of(&receive.op, segment.members().epoch);
        if header.epoch != expected.epoch {
            let text = format!("a message of epoch {}, expected {}", header.epoch, expected.epoch);
            return Err(segment.failure_word().corrupt(from, &text));
        }
        if header.dtype == expected.dtype && header.bytes == expected.bytes {
            return Ok(());
        }
        let field = if header.dtype == expected.dtype { "element count" } else { "dtype" };
        let me = segment.rank();
        let text = format!(
            "message mismatch in {}, tag {}: the ranks differ in {field}\n  {} posted {}\n  {} posted {}",
            segment.members().title(),
            header.tag,
            segment.roster().describe(&[from]),
            header.describe(segment.world_rank(me)),
            segment.roster().describe(&[me]),
            Posted::of(&receive.op)
        );
        Err(segment.failure_word().fail(FailureKind::Mismatch, &text))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::sync::Mutex;

    use super::*;
    use crate::join::Bootstrap;
    use crate::queue::work::Carrier;
    use tpurun_kernels::dtype::{Dtype, ReduceOp};
    use tpurun_memory::buffer::Spans;
    use tpurun_protocol::board::WaitKind;
    use tpurun_protocol::membership::Membership;
    use tpurun_protocol::op::Shape;
    use tpurun_protocol::segment::Settings;

    #[derive(Default)]
    struct Handover(Mutex<Option<OwnedFd>>);

    impl Bootstrap for Handover {
        fn offer(&self, segment: BorrowedFd<'_>) -> Result<(), Failure> {
            *self.0.lock().expect("no thread panics") = segment.try_clone_to_owned().ok();
            Ok(())
        }

        fn fetch(&self, _deadline: Instant) -> Result<OwnedFd, Failure> {
            loop {
                if let Some(segment) = &*self.0.lock().expect("no thread panics") {
                    return Ok(segment.as_fd().try_clone_to_owned().expect("descriptors are free"));
                }
                std::thread::yield_now();
            }
        }
    }

    fn segment(handover: &Handover, rank: u32) -> Arc<Segment> {
        let members = Membership { name: "test".to_owned(), rank, world_ranks: vec![0, 1], epoch: 4 };
        let settings = Settings::default();
        let limit = Duration::from_secs(60);
        crate::join::rendezvous(members, settings, handover, limit).expect("both come").0
    }

    fn op(kind: OpKind) -> Op {
        Op {
            kind,
            dtype: Dtype::U8,
            reduce_op: ReduceOp::Sum,
            scale: 1.0,
            root: Some(if kind == OpKind::Send { 1 } else { 0 }),
            tag: 0,
            inputs: Spans::empty(),
            outputs: Spans::empty(),
            shape: Shape::new(&[0]),
            shape_hash: None,
            timeout: None,
            site: "test.py:1".into(),
            python_threads: 0,
        }
    }

    /// Returns what a rank says that receives a message which says that it is of `epoch`.
    fn receive(epoch: u32) -> Outcome {
        let handover = Handover::default();
        let (sender, receiver) = std::thread::scope(|scope| {
            let receiver = scope.spawn(|| segment(&handover, 1));
            (segment(&handover, 0), receiver.join().expect("it comes"))
        });
        let header = MessageHeader::of(&op(OpKind::Send), epoch).encode();
        let ring = sender.rings().ring(P2P_CHANNEL, 0, 1);
        let run = ring.writable().expect("nobody wrote nonsense");
        sender.rings().write_run(sender.layout().ring_data(P2P_CHANNEL, 0, 1), run, &header);
        ring.publish(HEADER_BYTES as u32);
        let presence = Arc::new(Presence::new(None, receiver.members()));
        let mut messages = Messages::new(receiver, presence);
        let work = Arc::new(Work::new(Carrier::Messages(WaitKind::Recv { from: Some(0) }), 0, None));
        messages.post(op(OpKind::Recv), work.clone(), Duration::from_secs(60), None);
        messages.progress();
        work.outcome().expect("it is there")
    }

    #[test]
    fn a_message_of_another_epoch_is_refused() {
        assert_eq!(receive(4), Ok(Some(0)));
        let failure = receive(3).expect_err("a message from before");
        assert_eq!((failure.kind(), failure.ranks()), (FailureKind::Internal, &[0_u32][..]));
        assert!(
            failure.text().ends_with("wrote what can not be: a message of epoch 3, expected 4"),
            "{failure}"
        );
    }
}
