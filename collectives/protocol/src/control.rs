//! The control socket between a rank and the agent of its host: how the ranks of a communicator find the
//! shared segment that one of them made, without asking the c10d Store.
//!
//! One frame is one SOCK_SEQPACKET message: eight bytes of protocol, then an rkyv archive that is validated
//! before use. Descriptors travel beside it. The agent's half of the matching is in the launcher; this file
//! holds the frames, which both speak, and the rank's client.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rkyv::util::AlignedVec;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::Signal;

pub use frames::{AgentFrame, RankFrame};

use crate::authority::Credentials;
use tpurun_memory::failure::{Failure, FailureKind, INTERRUPTED};
use tpurun_memory::sync::interrupt;
use tpurun_memory::text::head;

/// The variable that carries the number of the inherited descriptor.
pub const CONTROL_FD_VAR: &str = "TPURUN_CONTROL_FD";
/// Longest key of a segment.
pub const MAX_KEY_BYTES: usize = 512;
/// Most bytes of the text that a rank has others raise.
const MAX_TEXT_BYTES: usize = 1024;
/// The variable that chooses on which signal a rank tells the Python stacks of its threads; 0 for none.
pub const STACK_SIGNAL_VAR: &str = "TPURUN_STACK_SIGNAL";
/// Which one it is unless that variable says otherwise, as in `python/tpurun/stacks.py`.
pub const STACK_SIGNAL: i32 = 54;

mod frames {
    // The derive macros write items of their own, which no comment can reach.
    #![allow(missing_docs)]

    use rkyv::{Archive, Deserialize, Serialize};

    /// From a rank to its agent.
    #[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
    pub enum RankFrame {
        /// The descriptor beside this frame is a segment, to be handed out `readers` times.
        Offer {
            /// Names the communicator; offers of one key are numbered by the agent.
            key: String,
            /// Ranks that will ask for it.
            readers: u32,
        },
        /// This rank needs a segment: its n-th request of a key gets the n-th offer of that key.
        Want {
            /// As in `Offer`.
            key: String,
            /// Chosen by the rank; the answer carries it.
            request: u64,
            /// The rank of the world that will offer it.
            from: u32,
        },
        /// This rank cannot make or join the communicator.
        GiveUp {
            /// As in `Offer`.
            key: String,
            /// Ranks that will ask for what it would have offered; 0 unless it is the one to offer.
            readers: u32,
            /// The rank itself and why, for what the others raise.
            text: String,
        },
        /// This rank needs what it shows to other hosts.
        Identify {
            /// Chosen by the rank; the answer carries it.
            request: u64,
        },
    }

    /// From the agent to a rank.
    #[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
    pub enum AgentFrame {
        /// The descriptor beside this frame is the segment that was wanted.
        Segment {
            /// The key of the `Want`.
            key: String,
            /// The request number of the `Want`.
            request: u64,
        },
        /// There will be no segment.
        Refused {
            /// The key of the `Want`.
            key: String,
            /// The request number of the `Want`.
            request: u64,
            /// For people.
            reason: String,
        },
        /// The rank that would offer it will not come, or cannot make it.
        Failed {
            /// The key of the `Want`.
            key: String,
            /// The request number of the `Want`.
            request: u64,
            /// `FailureKind` as a number.
            kind: u32,
            /// The text that every rank of the communicator raises.
            text: String,
            /// The ranks that it blames.
            ranks: Vec<u32>,
        },
        /// The certificate and key that the rank shows to other hosts, and the authority that it believes; see
        /// [`Credentials`](crate::authority::Credentials).
        Identity {
            /// The request number of the `Identify`.
            request: u64,
            /// DER.
            authority: Vec<u8>,
            /// DER.
            certificate: Vec<u8>,
            /// PKCS #8.
            key: Vec<u8>,
        },
    }
}

/// Why a segment could not be offered or fetched.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// Nobody offered it in time.
    #[error("no rank offered segment {key} in time")]
    Timeout {
        /// The key that was wanted.
        key: String,
    },
    /// The agent said no.
    #[error("the agent refused segment {key}: {reason}")]
    Refused {
        /// The key that was wanted.
        key: String,
        /// In the agent's words.
        reason: String,
    },
    /// Nobody will offer it.
    #[error("{0}")]
    Failed(Failure),
    /// The caller waits no longer.
    #[error("{INTERRUPTED}")]
    Interrupted,
    /// The agent is gone: the job is over.
    #[error("the agent closed the control socket")]
    Closed,
    /// The frame is not one of this protocol.
    #[error("malformed control frame: {0}")]
    Malformed(&'static str),
    /// The host refused.
    #[error("control socket")]
    Io(#[source] Arc<io::Error>),
}

impl From<Errno> for ControlError {
    fn from(errno: Errno) -> ControlError {
        match errno {
            Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => ControlError::Closed,
            errno => ControlError::Io(Arc::new(errno.into())),
        }
    }
}

/// This rank's end of the control socket. Threads may share it.
#[derive(Debug)]
pub struct ControlClient {
    socket: OwnedFd,
    inbox: Mutex<Inbox>,
    /// The reading thread has put an answer into the inbox, or stopped reading.
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct Inbox {
    next_request: u64,
    /// `None` while the answer is outstanding.
    answers: HashMap<u64, Option<Result<Answer, ControlError>>>,
    /// One of the waiting threads reads the socket for all.
    reading: bool,
    failed: Option<ControlError>,
}

#[derive(Debug)]
enum Answer {
    Segment(OwnedFd),
    Identity(Credentials),
}

impl ControlClient {
    /// The socket this process inherited, when it runs under `tpurun`.
    pub fn from_env() -> Option<ControlClient> {
        let fd: i32 = std::env::var(CONTROL_FD_VAR).ok()?.parse().ok().filter(|fd| *fd >= 0)?;
        // SAFETY: the launcher opened this descriptor for us and nobody else owns it; when a program has
        // closed it or reused its number, the check below fails or the first frame is refused.
        let inherited = unsafe { BorrowedFd::borrow_raw(fd) };
        rustix::net::sockopt::socket_type(inherited)
            .ok()
            .filter(|kind| *kind == rustix::net::SocketType::SEQPACKET)?;
        // Made by an agent of this user; one of root may have ranks of other users.
        let maker = rustix::net::sockopt::socket_peercred(inherited).ok()?;
        if maker.uid != rustix::process::geteuid() && !maker.uid.is_root() {
            return None;
        }
        // A program that this rank starts has no business here.
        rustix::io::fcntl_setfd(inherited, rustix::io::FdFlags::CLOEXEC).ok()?;
        Some(ControlClient::new(inherited.try_clone_to_owned().ok()?))
    }

    /// Speaks over `socket`, the rank's end of a SOCK_SEQPACKET pair.
    pub fn new(socket: OwnedFd) -> ControlClient {
        ControlClient { socket, inbox: Mutex::default(), arrived: Condvar::new() }
    }

    /// Hands `segment` to the agent, who gives it to the first `readers` ranks that ask for `key`.
    ///
    /// # Errors
    /// [`ControlError::Closed`] when the agent is gone.
    pub fn offer(&self, key: &str, readers: u32, segment: BorrowedFd<'_>) -> Result<(), ControlError> {
        let frame = RankFrame::Offer { key: key.to_owned(), readers };
        self.send(&frame.encode(), Some(segment), Instant::now() + SEND_LIMIT, key)
    }

    /// Asks for the segment of `key`, which rank `from` of the world will offer, and waits until `deadline`.
    ///
    /// # Errors
    /// [`ControlError::Timeout`] at the deadline, [`ControlError::Refused`] with the agent's reason,
    /// [`ControlError::Failed`] when that rank is lost, [`ControlError::Interrupted`] when the caller's check says so.
    pub fn fetch(&self, key: &str, from: u32, deadline: Instant) -> Result<OwnedFd, ControlError> {
        let want = |request| RankFrame::Want { key: key.to_owned(), request, from };
        match self.ask(want, key, deadline)? {
            Answer::Segment(fd) => Ok(fd),
            Answer::Identity(_) => Err(ControlError::Malformed("an answer to another question")),
        }
    }

    /// Tells those who make the communicator of `key` with this rank that it cannot: the first `readers` that ask for
    /// its segment, or with 0 those who have it already.
    ///
    /// # Errors
    /// As [`offer`](Self::offer).
    pub fn give_up(&self, key: &str, readers: u32, text: &str) -> Result<(), ControlError> {
        let frame =
            RankFrame::GiveUp { key: key.to_owned(), readers, text: head(text, MAX_TEXT_BYTES).to_owned() };
        self.send(&frame.encode(), None, Instant::now() + SEND_LIMIT, key)
    }

    /// Asks for what the job's authority has given this rank to show to other hosts.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch).
    pub fn identify(&self, deadline: Instant) -> Result<Credentials, ControlError> {
        match self.ask(|request| RankFrame::Identify { request }, "of credentials", deadline)? {
            Answer::Identity(credentials) => Ok(credentials),
            Answer::Segment(_) => Err(ControlError::Malformed("an answer to another question")),
        }
    }

    fn ask(
        &self,
        question: impl FnOnce(u64) -> RankFrame,
        key: &str,
        deadline: Instant,
    ) -> Result<Answer, ControlError> {
        let request = {
            let mut inbox = self.lock();
            inbox.next_request += 1;
            let request = inbox.next_request;
            inbox.answers.insert(request, None);
            request
        };
        let sent = self.send(&question(request).encode(), None, deadline, key);
        let answer = sent.and_then(|()| self.wait(request, key, deadline));
        self.lock().answers.remove(&request);
        answer
    }

    fn wait(&self, request: u64, key: &str, deadline: Instant) -> Result<Answer, ControlError> {
        let mut inbox = self.lock();
        loop {
            if let Some(answer) = inbox.answers.get_mut(&request).and_then(Option::take) {
                return answer;
            }
            if let Some(error) = &inbox.failed {
                return Err(error.clone());
            }
            if Instant::now() >= deadline {
                return Err(ControlError::Timeout { key: key.to_owned() });
            }
            if interrupt::is_stopped() {
                return Err(ControlError::Interrupted);
            }
            let until = interrupt::bound(Some(deadline)).unwrap_or(deadline);
            let left = until.saturating_duration_since(Instant::now());
            if inbox.reading {
                let waited = self.arrived.wait_timeout(inbox, left);
                inbox = waited.unwrap_or_else(PoisonError::into_inner).0;
            } else {
                inbox.reading = true;
                drop(inbox);
                let arrival = self.read_one(left);
                inbox = self.lock();
                inbox.reading = false;
                inbox.take_in(arrival);
                self.arrived.notify_all();
            }
            if Instant::now() >= until {
                drop(inbox);
                interrupt::check();
                inbox = self.lock();
            }
        }
    }

    /// The next answer, or nothing when `limit` passed first.
    fn read_one(&self, limit: Duration) -> Result<Option<(AgentFrame, Option<OwnedFd>)>, ControlError> {
        if !wait_until_ready(self.socket.as_fd(), PollFlags::IN, limit)? {
            return Ok(None);
        }
        match receive(self.socket.as_fd()) {
            Ok(message) => Ok(Some((AgentFrame::decode(&message.bytes)?, message.fd))),
            Err(ControlError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn send(
        &self,
        frame: &[u8],
        fd: Option<BorrowedFd<'_>>,
        deadline: Instant,
        key: &str,
    ) -> Result<(), ControlError> {
        loop {
            match send(self.socket.as_fd(), frame, fd) {
                Err(ControlError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if !wait_until_ready(self.socket.as_fd(), PollFlags::OUT, left)? {
                return Err(ControlError::Timeout { key: key.to_owned() });
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inbox {
    fn take_in(&mut self, arrival: Result<Option<(AgentFrame, Option<OwnedFd>)>, ControlError>) {
        let (request, answer) = match arrival {
            Ok(None) => return,
            Ok(Some((AgentFrame::Segment { request, .. }, Some(fd)))) => (request, Ok(Answer::Segment(fd))),
            Ok(Some((AgentFrame::Segment { request, key }, None))) => {
                (request, Err(ControlError::Refused { key, reason: OUT_OF_FDS.to_owned() }))
            }
            Ok(Some((AgentFrame::Identity { request, authority, certificate, key }, _))) => {
                (request, Ok(Answer::Identity(Credentials { authority, certificate, key })))
            }
            Ok(Some((AgentFrame::Refused { request, key, reason }, _))) => {
                (request, Err(ControlError::Refused { key, reason }))
            }
            Ok(Some((AgentFrame::Failed { request, kind, text, ranks, .. }, _))) => {
                let failure = Failure::new(FailureKind::from_code(kind), text).blaming(ranks);
                (request, Err(ControlError::Failed(failure)))
            }
            Err(error) => return self.failed = Some(error),
        };
        // An answer whose thread gave up is dropped here, and its descriptor closed.
        if let Some(slot) = self.answers.get_mut(&request) {
            *slot = Some(answer);
        }
    }
}

impl RankFrame {
    /// The bytes of one message.
    pub fn encode(&self) -> Vec<u8> {
        framed(&rkyv::to_bytes::<rkyv::rancor::Error>(self).expect("a small frame in memory can be archived"))
    }

    /// Validates one message.
    ///
    /// # Errors
    /// [`ControlError::Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<RankFrame, ControlError> {
        let frame: RankFrame = rkyv::from_bytes::<_, rkyv::rancor::Error>(&unframed(bytes)?)
            .map_err(|_| ControlError::Malformed("invalid archive"))?;
        match &frame {
            RankFrame::Offer { key, .. } | RankFrame::Want { key, .. } | RankFrame::GiveUp { key, .. }
                if key.len() > MAX_KEY_BYTES =>
            {
                Err(ControlError::Malformed("key too long"))
            }
            _ => Ok(frame),
        }
    }
}

impl AgentFrame {
    /// The bytes of one message.
    pub fn encode(&self) -> Vec<u8> {
        framed(&rkyv::to_bytes::<rkyv::rancor::Error>(self).expect("a small frame in memory can be archived"))
    }

    /// Validates one message.
    ///
    /// # Errors
    /// [`ControlError::Malformed`].
    pub fn decode(bytes: &[u8]) -> Result<AgentFrame, ControlError> {
        rkyv::from_bytes::<_, rkyv::rancor::Error>(&unframed(bytes)?)
            .map_err(|_| ControlError::Malformed("invalid archive"))
    }
}

/// One message as it came.
#[derive(Debug)]
pub struct Message {
    /// To be decoded.
    pub bytes: Vec<u8>,
    /// The descriptor beside it.
    pub fd: Option<OwnedFd>,
    /// A descriptor was sent but this process has no room for it.
    pub fd_lost: bool,
    /// The process that sent it, where the socket asks for that ([`ask_for_senders`]).
    pub sender: Option<Sender>,
}

/// The process that has sent a message, as the kernel knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sender {
    /// Its number in the PID namespace of the receiver; 0 of a process outside.
    pub pid: i32,
    /// Its effective user, unless it chose to show its real one.
    pub uid: u32,
}

/// Every message that is received from now on says who sent it.
///
/// # Errors
/// The refusal of the host.
pub fn ask_for_senders(socket: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::net::sockopt::set_socket_passcred(socket, true)?)
}

/// Sends one message without waiting.
///
/// # Errors
/// [`ControlError::Closed`] when nobody will read it, `Io` with `WouldBlock` when the socket is full.
pub fn send(socket: BorrowedFd<'_>, frame: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), ControlError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
    if !fds.is_empty() {
        let fits = ancillary.push(SendAncillaryMessage::ScmRights(&fds));
        assert!(fits, "the buffer has room for one descriptor");
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::io::retry_on_intr(|| sendmsg(socket, &[IoSlice::new(frame)], &mut ancillary, flags))?;
    Ok(())
}

/// Takes the next message without waiting.
///
/// # Errors
/// [`ControlError::Closed`] at the end, `Io` with `WouldBlock` when there is none yet.
pub fn receive(socket: BorrowedFd<'_>) -> Result<Message, ControlError> {
    let mut bytes = vec![0; MAX_FRAME_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1), ScmCredentials(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = rustix::io::retry_on_intr(|| {
        recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags)
    })?;
    let (mut fd, mut sender) = (None, None);
    for message in ancillary.drain() {
        match message {
            // More than one are closed again.
            RecvAncillaryMessage::ScmRights(fds) => fd = fds.into_iter().next(),
            RecvAncillaryMessage::ScmCredentials(who) => {
                sender =
                    Some(Sender { pid: rustix::process::Pid::as_raw(Some(who.pid)), uid: who.uid.as_raw() });
            }
            _ => {}
        }
    }
    if received.bytes == 0 {
        return Err(ControlError::Closed);
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(ControlError::Malformed("frame too long"));
    }
    bytes.truncate(received.bytes);
    Ok(Message { bytes, fd, fd_lost: received.flags.contains(ReturnFlags::CTRUNC), sender })
}

fn wait_until_ready(
    socket: BorrowedFd<'_>,
    events: PollFlags,
    limit: Duration,
) -> Result<bool, ControlError> {
    let limit = Timespec::try_from(limit).ok();
    match poll(&mut [PollFd::from_borrowed_fd(socket, events)], limit.as_ref()) {
        Ok(ready) => Ok(ready > 0),
        // The caller looks at its deadline and comes back.
        Err(Errno::INTR) => Ok(true),
        Err(errno) => Err(errno.into()),
    }
}

fn framed(archive: &[u8]) -> Vec<u8> {
    [&PROTOCOL[..], archive].concat()
}

fn unframed(bytes: &[u8]) -> Result<AlignedVec, ControlError> {
    let archive = bytes.strip_prefix(&PROTOCOL).ok_or(ControlError::Malformed("another protocol"))?;
    let mut aligned = AlignedVec::with_capacity(archive.len());
    aligned.extend_from_slice(archive);
    Ok(aligned)
}

const PROTOCOL: [u8; 8] = *b"tpurun\0\x01";
const MAX_FRAME_BYTES: usize = 2048;
const SEND_LIMIT: Duration = Duration::from_secs(10);
const OUT_OF_FDS: &str = "no file descriptor is free here to receive it (see ulimit -n)";

/// The real-time signal of this number; `None` outside 36 to 63, where a libc may have its own.
pub fn realtime_signal(number: i32) -> Option<Signal> {
    if !(36..=63).contains(&number) {
        return None;
    }
    // SAFETY: a valid number, and none of those that a libc keeps for itself (32 to 35, or 64).
    Some(unsafe { Signal::from_raw_unchecked(number) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::io::{Read, Seek, Write};

    fn pair() -> (ControlClient, OwnedFd) {
        let (rank, agent) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        (ControlClient::new(rank), agent)
    }

    fn segment(text: &str) -> OwnedFd {
        let fd = rustix::fs::memfd_create("segment", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        std::fs::File::from(fd.try_clone().unwrap()).write_all(text.as_bytes()).unwrap();
        fd
    }

    fn text_of(fd: OwnedFd) -> String {
        let mut file = std::fs::File::from(fd);
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    }

    fn next(agent: &OwnedFd) -> (RankFrame, Option<OwnedFd>) {
        assert!(wait_until_ready(agent.as_fd(), PollFlags::IN, Duration::from_secs(10)).unwrap());
        let message = receive(agent.as_fd()).unwrap();
        (RankFrame::decode(&message.bytes).unwrap(), message.fd)
    }

    fn answer(agent: &OwnedFd, key: &str, request: u64, segment: &OwnedFd) {
        let frame = AgentFrame::Segment { key: key.into(), request };
        send(agent.as_fd(), &frame.encode(), Some(segment.as_fd())).unwrap();
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn an_offer_carries_its_segment() {
        let (rank, agent) = pair();
        rank.offer("dp0", 3, segment("hello").as_fd()).unwrap();
        let (frame, fd) = next(&agent);
        assert_eq!(frame, RankFrame::Offer { key: "dp0".into(), readers: 3 });
        assert_eq!(text_of(fd.unwrap()), "hello");
    }

    #[test]
    fn threads_get_their_own_answers_in_any_order() {
        let (rank, agent) = pair();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|i| {
                    (
                        i,
                        scope.spawn({
                            let rank = &rank;
                            move || rank.fetch(&format!("group {i}"), 0, soon())
                        }),
                    )
                })
                .collect();
            let wants: Vec<_> = (0..4).map(|_| next(&agent).0).collect();
            for want in wants.iter().rev() {
                let RankFrame::Want { key, request, .. } = want else { panic!("{want:?}") };
                answer(&agent, key, *request, &segment(key));
            }
            for (i, thread) in threads {
                assert_eq!(text_of(thread.join().unwrap().unwrap()), format!("group {i}"));
            }
        });
    }

    #[test]
    fn a_late_answer_is_dropped_and_the_next_one_found() {
        let (rank, agent) = pair();
        let late = rank.fetch("a", 0, Instant::now() + Duration::from_millis(5));
        assert!(matches!(late, Err(ControlError::Timeout { .. })), "{late:?}");
        answer(&agent, "a", 1, &segment("late"));
        answer(&agent, "a", 2, &segment("in time"));
        assert_eq!(text_of(rank.fetch("a", 0, soon()).unwrap()), "in time");
    }

    #[test]
    fn refusal_and_the_end_of_the_agent_are_told_apart() {
        let (rank, agent) = pair();
        let refused = AgentFrame::Refused { key: "a".into(), request: 1, reason: "too many".into() };
        send(agent.as_fd(), &refused.encode(), None).unwrap();
        let error = rank.fetch("a", 0, soon()).unwrap_err();
        assert_eq!(error.to_string(), "the agent refused segment a: too many");
        drop(agent);
        assert!(matches!(rank.fetch("a", 0, soon()), Err(ControlError::Closed)));
        assert!(matches!(rank.offer("a", 1, segment("").as_fd()), Err(ControlError::Closed)));
    }

    #[test]
    fn hostile_frames_are_errors() {
        let good = RankFrame::Want { key: "a key longer than any inline string".into(), request: 1, from: 0 }
            .encode();
        for length in 0..good.len() {
            assert!(RankFrame::decode(&good[..length]).is_err(), "{length} bytes");
        }
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bad = good.clone();
                bad[at] ^= 1 << bit;
                // Some flips give another valid frame; none may panic or be read out of bounds.
                let _ = RankFrame::decode(&bad);
                let _ = AgentFrame::decode(&bad);
            }
        }
        let long = RankFrame::Offer { key: "k".repeat(MAX_KEY_BYTES + 1), readers: 1 }.encode();
        assert!(matches!(RankFrame::decode(&long), Err(ControlError::Malformed("key too long"))));
        let (rank, agent) = pair();
        send(agent.as_fd(), &vec![0; MAX_FRAME_BYTES + 1], None).unwrap();
        let error = rank.fetch("a", 0, soon()).unwrap_err();
        assert_eq!(error.to_string(), "malformed control frame: frame too long");
    }
}
