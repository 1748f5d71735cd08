//! The thread of the network: a UDP socket, the bells of communicators, and the time, for a [`Mesh`] that knows none
//! of them; and the TCP connections of [`TcpSessions`], if there are any.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::io::{self, ErrorKind, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use quinn_proto::{EcnCodepoint, Transmit};
use quinn_udp::{BATCH_SIZE, RecvMeta, UdpSocketState};
use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use super::address::Address;
use super::emulated_link::InFlight;
use super::heard::BellRings;
use super::mesh::Mesh;
use super::protocol::Protocol;
use super::purposes::Purpose;
use super::tcp_sessions::TcpSessions;
use super::tcp_streams::SESSIONS;
use crate::hosts::bridge::Bridge;
use tpurun_protocol::network::Link;

/// Bytes that the system receives or sends at once.
const ROOM: usize = 64 << 10;
/// So often at once, for one system call: what comes is still in the caches when it is decrypted.
const RECEIVED: usize = 8;
const _: () = assert!(RECEIVED <= BATCH_SIZE);
/// Bytes from which on a datagram is handed on with the room it was received in. Shorter ones are copied out of it.
/// Such room lives as long as any of its bytes, and is zeroed again.
const LEAST_HANDED_ON: usize = ROOM / 2;
/// Calls to send between two looks at what has come.
const SENDS: usize = 8;
/// The time that communicators have to tell other hosts what these were to be told, once the thread is to end. It
/// takes a few round trips. Whoever still has not heard by then learns from the end of the connection.
const PARTING: Duration = Duration::from_secs(2);

// The number of the socket in events of epoll; communicators have other numbers.
const SOCKET: u64 = 0;
const COMMANDS: u64 = 1;
const FIRST_BELL: u64 = 2;

/// A communicator, as far as it goes over the connections of one driver.
pub(super) struct Added {
    pub(super) id: u64,
    pub(super) carrier: Protocol,
    pub(super) bridge: Bridge,
    /// The rings of the ranks here, if they ring for this driver.
    pub(super) heard: Option<BellRings>,
    /// Addresses of the other hosts' first ranks, by host.
    pub(super) addresses: Vec<Address>,
    /// Drivers of this host's other bridges that have to know what this one gets or has cut into pieces.
    pub(super) calls: Vec<Arc<Commands>>,
    pub(super) over: Arc<Over>,
}

/// Where other threads say what the thread is to do.
pub(super) struct Commands {
    given: Mutex<Given>,
    wake: OwnedFd,
}

/// The commands that the thread has not carried out yet. A command that is given again and again is kept once, so
/// there is at most one of each for each communicator. Their order among each other does not matter, since a
/// communicator is added before anything else is said of it.
#[derive(Default)]
struct Given {
    added: Vec<Added>,
    /// Communicators of which another bridge of this host has something for the one here.
    looks: BTreeSet<u64>,
    stopped: BTreeSet<u64>,
    /// Nobody needs the thread any more.
    ends: bool,
}

impl fmt::Debug for Commands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Commands").field("wake", &self.wake).finish_non_exhaustive()
    }
}

impl Commands {
    pub(super) fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { given: Mutex::default(), wake })
    }

    pub(super) fn add(&self, added: Added) {
        self.give(|given| {
            given.added.push(added);
            true
        });
    }

    /// Another bridge of this host has something for the one here.
    fn look(&self, id: u64) {
        self.give(|given| given.looks.insert(id));
    }

    /// Nobody here needs the communicator any more.
    pub(super) fn stop(&self, id: u64) {
        self.give(|given| given.stopped.insert(id));
    }

    /// Nobody needs the thread any more.
    pub(super) fn end(&self) {
        self.give(|given| !std::mem::replace(&mut given.ends, true));
    }

    /// Whoever says something new wakes the thread; whoever has said it before has done so, or is about to.
    fn give(&self, say: impl FnOnce(&mut Given) -> bool) {
        if say(&mut self.given.lock().unwrap_or_else(PoisonError::into_inner)) {
            // A count that is full has woken enough.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }

    fn take(&self) -> Given {
        let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
        std::mem::take(&mut *self.given.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Whether a communicator's way to other hosts over one driver's connections has ended.
#[derive(Debug, Default)]
pub(super) struct Over {
    is_over: Mutex<bool>,
    changed: Condvar,
}

impl Over {
    fn say(&self) {
        *self.is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    pub(super) fn wait(&self, timeout: Duration) {
        let is_over = self.is_over.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.changed.wait_timeout_while(is_over, timeout, |is_over| !*is_over);
    }
}

pub(super) struct Driver {
    mesh: Mesh,
    lanes: Option<TcpSessions>,
    socket: UdpSocket,
    state: UdpSocketState,
    commands: Arc<Commands>,
    epoll: Arc<OwnedFd>,
    communicators: HashMap<(Protocol, u64), Driven>,
    /// The communicator of each bell.
    bells: HashMap<u64, u64>,
    next_bell: u64,
    received: Vec<BytesMut>,
    sent: Vec<u8>,
    /// The datagrams that the socket did not take yet, out of these bytes.
    unsent: Option<Transmit>,
    /// A link that is worse than the one there is.
    link: Option<InFlight<Datagram>>,
    /// Communicators that are over, and when the last of what they have sent is at the end of that link.
    over: Vec<(Instant, Protocol, u64)>,
    /// When the thread ends, whatever is still to be said.
    ends: Option<Instant>,
}

#[derive(Clone)]
struct Datagram {
    to: SocketAddr,
    ecn: Option<quinn_udp::EcnCodepoint>,
    bytes: Vec<u8>,
}

struct Driven {
    heard: Option<BellRings>,
    calls: Vec<Arc<Commands>>,
    over: Arc<Over>,
}

impl Driver {
    /// `epoll` watches the connections of `lanes`, too.
    pub(super) fn new(
        mesh: Mesh,
        lanes: Option<TcpSessions>,
        socket: UdpSocket,
        epoll: Arc<OwnedFd>,
        commands: Arc<Commands>,
        link: Option<Link>,
    ) -> io::Result<Self> {
        let state = UdpSocketState::new((&socket).into())?;
        let event = epoll::EventData::new_u64;
        epoll::add(&epoll, &socket, event(SOCKET), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &commands.wake, event(COMMANDS), epoll::EventFlags::IN)?;
        Ok(Self {
            mesh,
            lanes,
            socket,
            state,
            commands,
            epoll,
            communicators: HashMap::new(),
            bells: HashMap::new(),
            next_bell: FIRST_BELL,
            received: vec![BytesMut::new(); RECEIVED],
            sent: Vec::with_capacity(ROOM),
            unsent: None,
            // Others every time: what a program can stand does not depend on a seed.
            link: link.map(|link| InFlight::new(link, std::process::id().into())),
            over: vec![],
            ends: None,
        })
    }

    /// Until it is told to end, and all is said.
    pub(super) fn run(mut self) {
        let mut events = Vec::with_capacity(16);
        while !self.has_ended() {
            events.clear();
            let wait = self.wait().map(|wait| Timespec::try_from(wait).expect("waits are short"));
            // The next look finds everything that this one does not hear of.
            let _ = epoll::wait(&self.epoll, spare_capacity(&mut events), wait.as_ref());
            let now = Instant::now();
            for event in &events {
                match event.data.u64() {
                    SOCKET => self.receive(now),
                    COMMANDS => self.obey(now),
                    line if line >= SESSIONS => {
                        self.lanes.iter_mut().for_each(|lanes| lanes.ready(now, line))
                    }
                    bell => self.hear(now, bell),
                }
            }
            self.mesh.settle(now);
            self.mesh.tick(now);
            self.lanes.iter_mut().for_each(|lanes| lanes.tick(now));
            self.mesh.settle(now);
            self.call(now);
            self.send(now);
            self.mesh.settle(now);
            self.call(now);
            // A real link keeps what was sent when its process ends.
            let landed = self.link.as_ref().and_then(InFlight::last).unwrap_or(now);
            self.over.extend(
                self.mesh.sessions.communicators.over().into_iter().map(|id| (landed, Protocol::Quic, id)),
            );
            let lanes =
                self.lanes.as_mut().map(|lanes| lanes.sessions.communicators.over()).unwrap_or_default();
            self.over.extend(lanes.into_iter().map(|id| (now, Protocol::Tcp, id)));
            while let Some((landed, carrier, id)) = self.over.first().copied()
                && landed <= now
            {
                self.over.remove(0);
                self.forget(carrier, id);
            }
        }
        self.part();
    }

    fn has_ended(&self) -> bool {
        let has_said_all = self.communicators.is_empty()
            && !self.lanes.as_ref().is_some_and(|lanes| lanes.sessions.purposes.any(Purpose::is_ending));
        self.ends.is_some_and(|ends| has_said_all || ends <= Instant::now())
    }

    /// Tells the other processes that nothing more comes from here: they would notice by the silence alone.
    fn part(&mut self) {
        let now = Instant::now();
        self.mesh.part(now);
        while self.mesh.has_more_to_send() && self.unsent.is_none() {
            self.send(now);
        }
        // Nobody waits for what was still to be said.
        self.communicators.drain().for_each(|(_, known)| known.over.say());
    }

    fn wait(&self) -> Option<Duration> {
        // The socket says when it takes more.
        if self.unsent.is_none() && self.mesh.has_more_to_send() {
            return Some(Duration::ZERO);
        }
        let arrival = self.link.as_ref().and_then(InFlight::next);
        let landing = self.over.first().map(|(landed, ..)| *landed);
        let late = self.lanes.as_ref().and_then(|lanes| lanes.sessions.next_look.deadline());
        let deadline =
            self.mesh.deadline().into_iter().chain(arrival).chain(landing).chain(late).chain(self.ends).min();
        deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    fn obey(&mut self, now: Instant) {
        let Given { added, looks, stopped, ends } = self.commands.take();
        for added in added {
            self.add(now, added);
        }
        for id in looks {
            self.mesh.sessions.rung(now, id);
            self.lanes.iter_mut().for_each(|lanes| lanes.sessions.rung(now, id));
        }
        for id in stopped {
            self.mesh.sessions.stop(now, id);
            self.lanes.iter_mut().for_each(|lanes| lanes.sessions.stop(now, id));
        }
        if ends {
            self.ends.get_or_insert(now + PARTING);
        }
    }

    fn add(&mut self, now: Instant, added: Added) {
        let Added { id, carrier, bridge, heard, addresses, calls, over } = added;
        if let Some(heard) = &heard {
            let bell = self.next_bell;
            self.next_bell += 1;
            let event = epoll::EventData::new_u64(bell);
            if let Err(error) = epoll::add(&self.epoll, heard.as_fd(), event, epoll::EventFlags::IN) {
                // Looks come at intervals, too.
                tracing::warn!(%error, "the network thread hears no bell");
            }
            self.bells.insert(bell, id);
        }
        self.communicators.insert((carrier, id), Driven { heard, calls, over });
        match (carrier, &mut self.lanes) {
            (Protocol::Tcp, Some(lanes)) => lanes.sessions.add(now, id, bridge, addresses),
            _ => self.mesh.sessions.add(now, id, bridge, addresses),
        }
    }

    fn hear(&mut self, now: Instant, bell: u64) {
        let Some(id) = self.bells.get(&bell) else { return };
        if let Some(Driven { heard: Some(heard), .. }) = self.communicators.get(&(Protocol::Quic, *id)) {
            heard.clear();
            self.mesh.sessions.rung(now, *id);
        }
    }

    /// Has other bridges look, here and where other drivers have them, until none has anything for another one.
    fn call(&mut self, now: Instant) {
        loop {
            let of_mesh = self.mesh.sessions.communicators.calls();
            let of_lanes =
                self.lanes.as_mut().map(|lanes| lanes.sessions.communicators.calls()).unwrap_or_default();
            if of_mesh.is_empty() && of_lanes.is_empty() {
                return;
            }
            for id in of_mesh {
                self.call_others(Protocol::Quic, id);
                self.lanes.iter_mut().for_each(|lanes| lanes.sessions.rung(now, id));
            }
            for id in of_lanes {
                self.call_others(Protocol::Tcp, id);
                self.mesh.sessions.rung(now, id);
            }
        }
    }

    fn call_others(&self, carrier: Protocol, id: u64) {
        let called = self.communicators.get(&(carrier, id)).map_or(&[][..], |known| &known.calls);
        called.iter().for_each(|driver| driver.look(id));
    }

    fn forget(&mut self, carrier: Protocol, id: u64) {
        let Some(Driven { heard, over, .. }) = self.communicators.remove(&(carrier, id)) else { return };
        if let Some(heard) = heard {
            self.bells.retain(|_, of| *of != id);
            let _ = epoll::delete(&self.epoll, heard.as_fd());
        }
        over.say();
    }

    fn receive(&mut self, now: Instant) {
        for room in self.received.iter_mut().filter(|room| room.len() < ROOM) {
            // The same memory, if what was handed on is not needed any more.
            room.clear();
            room.reserve(ROOM);
            room.resize(ROOM, 0);
        }
        let mut metas = [RecvMeta::default(); RECEIVED];
        let mut buffers: Vec<IoSliceMut<'_>> =
            self.received.iter_mut().map(|room| IoSliceMut::new(room)).collect();
        // An error is what a host says of a datagram of ours; QUIC notices by itself.
        let Ok(count) = self.state.recv((&self.socket).into(), &mut buffers, &mut metas) else { return };
        for (meta, room) in metas[..count].iter().zip(&mut self.received) {
            let ecn = meta.ecn.and_then(|ecn| EcnCodepoint::from_bits(ecn as u8));
            let mut rest = match meta.len < LEAST_HANDED_ON {
                true => BytesMut::from(&room[..meta.len]),
                false => room.split_to(meta.len),
            };
            while !rest.is_empty() {
                let datagram = rest.split_to(meta.stride.clamp(1, rest.len()));
                self.mesh.datagram(now, meta.addr, ecn, datagram);
            }
            // And when it is copied to where it belongs.
            self.mesh.settle(now);
        }
    }

    /// Sends the datagrams that have come to the end of the emulated link.
    fn send_arrived(&mut self, now: Instant) {
        let Some(link) = &mut self.link else { return };
        while let Some(Datagram { to, ecn, bytes }) = link.arrived(now) {
            let datagram = quinn_udp::Transmit {
                destination: to,
                ecn,
                contents: &bytes,
                segment_size: None,
                src_ip: None,
            };
            // Datagrams that the socket does not take are lost, too.
            let _ = self.state.send((&self.socket).into(), &datagram);
        }
    }

    fn send(&mut self, now: Instant) {
        self.send_arrived(now);
        for _ in 0..SENDS {
            let was_blocked = self.unsent.is_some();
            let transmit = self.unsent.take().or_else(|| {
                self.sent.clear();
                self.mesh.transmit(now, self.state.max_gso_segments(), &mut self.sent)
            });
            let Some(transmit) = transmit else { return };
            let ecn = transmit.ecn.and_then(|ecn| quinn_udp::EcnCodepoint::from_bits(ecn as u8));
            if let Some(link) = &mut self.link {
                let size = transmit.segment_size.unwrap_or(transmit.size);
                for bytes in self.sent[..transmit.size].chunks(size) {
                    let datagram = Datagram { to: transmit.destination, ecn, bytes: bytes.to_vec() };
                    link.send(now, bytes.len(), datagram);
                }
                continue;
            }
            let datagrams = quinn_udp::Transmit {
                destination: transmit.destination,
                ecn,
                contents: &self.sent[..transmit.size],
                segment_size: transmit.segment_size,
                src_ip: transmit.src_ip,
            };
            let sent = self.state.send((&self.socket).into(), &datagrams);
            let is_blocked = sent.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
            if is_blocked != was_blocked {
                let room = if is_blocked { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
                let flags = epoll::EventFlags::IN | room;
                let _ = epoll::modify(&self.epoll, &self.socket, epoll::EventData::new_u64(SOCKET), flags);
            }
            if is_blocked {
                self.unsent = Some(transmit);
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_woken(commands: &Commands) -> bool {
        rustix::io::read(&commands.wake, &mut [0_u8; 8]).is_ok()
    }

    /// A request that comes again and again is kept once: the thread may be busy for long.
    #[test]
    fn what_is_asked_for_twice_is_kept_once() {
        let commands = Commands::new().unwrap();
        for _ in 0..100_000 {
            commands.look(7);
            commands.look(8);
            commands.stop(7);
            commands.end();
        }
        let Given { added, looks, stopped, ends } = commands.take();
        assert!(added.is_empty() && ends);
        assert_eq!((looks, stopped), (BTreeSet::from([7, 8]), BTreeSet::from([7])));
        assert!(!is_woken(&commands), "it has been taken");
    }

    /// No order of asking and taking loses a question.
    #[test]
    fn what_is_asked_for_again_after_it_was_taken_wakes_again() {
        let commands = Commands::new().unwrap();
        commands.look(7);
        assert!(is_woken(&commands), "somebody has asked");
        commands.look(7);
        assert!(!is_woken(&commands), "the question is the same");
        assert_eq!(commands.take().looks, BTreeSet::from([7]));
        commands.look(7);
        assert!(is_woken(&commands), "it is another question");
        assert_eq!(commands.take().looks, BTreeSet::from([7]));
        assert!(commands.take().looks.is_empty());
    }

    /// A thread that takes beside threads that ask sees the last question of each.
    #[test]
    fn questions_beside_a_taker_are_all_seen() {
        const ASKERS: u64 = 4;
        let commands = Commands::new().unwrap();
        std::thread::scope(|scope| {
            for asker in 0..ASKERS {
                let commands = &commands;
                scope.spawn(move || {
                    for number in 0..10_000 {
                        commands.look(number % 10);
                    }
                    commands.look(100 + asker);
                });
            }
            let mut seen = BTreeSet::new();
            while seen.iter().filter(|id| **id >= 100).count() < ASKERS as usize {
                // As the thread does, which sleeps until it is woken.
                let mut fds = [rustix::event::PollFd::new(&commands.wake, rustix::event::PollFlags::IN)];
                rustix::event::poll(&mut fds, None).expect("poll works");
                let Given { looks, .. } = commands.take();
                seen.extend(looks);
            }
            assert!((0..10).all(|id| seen.contains(&id)));
        });
    }
}
