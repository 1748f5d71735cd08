//! Everything that a process and others tell each other for the communicators of their hosts, without a socket and a
//! clock: which stream is whose, and the bridges at the ends of streams. The mesh is told what has happened and when,
//! and says what is to be sent.
//!
//! A stream begins with a greeting that says which communicator it is of and from which host. Nothing is believed
//! before TLS has shown that the host's first rank is at the other end (`tls.rs`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use quinn_proto::{ConnectionError, ConnectionHandle, EcnCodepoint, Event, StreamEvent, StreamId, Transmit};

use super::address::Address;
use super::connections::{Connections, QuicFlow, QuicStream};
use super::greeting::{Early, GREETING, GREETING_BYTES, Greeting};
use super::timeouts::{LOOK, SILENCE};
use super::tls::{Expected, Identity};
use crate::hosts::bridge::{Bridge, Frames, Outbox};
use tpurun_memory::failure::Failure;

pub(super) struct Mesh {
    connections: Connections,
    communicators: BTreeMap<u64, Communicator>,
    /// The purpose of each stream.
    streams: BTreeMap<QuicStream, StreamPurpose>,
    early: Early<QuicStream>,
    /// Streams for which something may have come.
    readable: BTreeSet<QuicStream>,
    next_look: Option<Instant>,
    /// Communicators that are over, which nobody has been told yet.
    over: Vec<u64>,
    /// Communicators whose other bridges on this host must look, and have not been told yet.
    calls: Vec<u64>,
}

#[derive(Debug)]
enum StreamPurpose {
    /// The purpose is not known yet: the bytes that have come so far, and since when the stream is there.
    Unknown(Vec<u8>, Instant),
    /// The stream waits for its communicator to be made here.
    Early(Greeting),
    Host {
        communicator: u64,
        host: u32,
    },
}

struct Communicator {
    bridge: Bridge,
    /// The streams with the other hosts, by host.
    links: Vec<HostStream>,
    /// Whether nothing more will happen here that others must be told.
    is_quiet: bool,
    /// Whether no more connections are made.
    is_stopped: bool,
}

/// The stream with one host, and what goes over it.
struct HostStream {
    address: Address,
    state: State,
    /// The bytes to be sent.
    out: VecDeque<Bytes>,
    frames: Frames,
    is_reading: bool,
    /// The time when this began, or when something was last said or done because it takes long.
    told: Instant,
}

#[derive(Debug)]
enum State {
    /// The other side opens the stream.
    Awaited,
    /// The next look connects.
    Apart,
    Connecting(ConnectionHandle),
    /// The greeting is sent, and so much of the answer is here.
    Greeted(QuicStream, Vec<u8>),
    Open(QuicStream),
    /// Everything is written. This lasts until the other side has it, or needs none of it any more, or until this
    /// time.
    Finishing(QuicStream, Instant),
    Closed,
}

impl State {
    fn stream(&self) -> Option<QuicStream> {
        match self {
            Self::Greeted(stream, _) | Self::Open(stream) | Self::Finishing(stream, _) => Some(*stream),
            _ => None,
        }
    }
}

impl Mesh {
    pub(super) fn new(
        identity: Arc<Identity>,
        expected: Expected,
        seed: Option<[u8; 32]>,
    ) -> Result<Self, Failure> {
        Ok(Self {
            connections: Connections::new(identity, expected, seed)?,
            communicators: BTreeMap::new(),
            streams: BTreeMap::new(),
            early: Early::new(),
            readable: BTreeSet::new(),
            next_look: None,
            over: vec![],
            calls: vec![],
        })
    }

    /// Has `bridge` talk to the other hosts of its communicator, whose first ranks are at `addresses`, by host.
    pub(super) fn add(&mut self, now: Instant, id: u64, bridge: Bridge, addresses: Vec<Address>) {
        let own = bridge.segment().host();
        let links = (0_u32..).zip(addresses).map(|(host, address)| {
            let state = match host.cmp(&own) {
                std::cmp::Ordering::Less => State::Awaited,
                std::cmp::Ordering::Equal => State::Closed,
                std::cmp::Ordering::Greater => State::Apart,
            };
            let (out, frames) = (VecDeque::new(), Frames::default());
            HostStream { address, state, out, frames, is_reading: true, told: now }
        });
        let links: Vec<HostStream> = links.collect();
        let hosts = links.len() as u32;
        self.communicators.insert(id, Communicator { bridge, links, is_quiet: false, is_stopped: false });
        self.next_look.get_or_insert(now + LOOK);
        for host in own + 1..hosts {
            self.connect(now, id, host);
        }
        for host in 0..own {
            let greeting = Greeting { communicator: id, host };
            for stream in self.early.take(greeting) {
                self.introduce(now, greeting, stream);
            }
        }
        self.rung(now, id);
    }

    /// Ends the streams that are not connected; those that are get everything they were to be told.
    pub(super) fn stop(&mut self, now: Instant, id: u64) {
        let Some(communicator) = self.communicators.get_mut(&id) else { return };
        communicator.is_stopped = true;
        communicator.bridge.stop();
        self.look(now, id, Bridge::look_closely);
    }

    /// Something has happened in a communicator here.
    pub(super) fn rung(&mut self, now: Instant, id: u64) {
        self.look(now, id, Bridge::look);
    }

    fn look(&mut self, now: Instant, id: u64, look: fn(&mut Bridge) -> Outbox) {
        let Some(communicator) = self.communicators.get_mut(&id) else { return };
        if !communicator.is_quiet {
            let out = look(&mut communicator.bridge);
            for (link, parcel) in communicator.links.iter_mut().zip(out) {
                link.out.extend(parcel.into_chunks());
            }
            communicator.is_quiet = communicator.bridge.is_over();
            if communicator.bridge.calls() {
                self.calls.push(id);
            }
        }
        for host in 0..communicator.links.len() as u32 {
            self.advance(now, id, host);
        }
        self.end_if_over(id);
    }

    /// Writes everything that is to be sent, and finishes if that is all.
    fn advance(&mut self, now: Instant, id: u64, host: u32) {
        let Some(communicator) = self.communicators.get_mut(&id) else { return };
        let link = &mut communicator.links[host as usize];
        let State::Open(stream) = link.state else {
            let waits = matches!(link.state, State::Awaited | State::Apart | State::Connecting(_));
            if communicator.is_stopped && (waits || matches!(link.state, State::Greeted(..))) {
                self.close(id, host);
            }
            return;
        };
        if !link.out.is_empty() && self.connections.write(stream, &mut link.out) == QuicFlow::Ended {
            link.out.clear();
        }
        if communicator.is_quiet && link.out.is_empty() {
            link.state = State::Finishing(stream, now + SILENCE);
            if self.connections.finish(stream) == QuicFlow::Ended {
                self.close(id, host);
            }
        }
    }

    fn close(&mut self, id: u64, host: u32) {
        let Some(communicator) = self.communicators.get_mut(&id) else { return };
        let link = &mut communicator.links[host as usize];
        if let Some(stream) = std::mem::replace(&mut link.state, State::Closed).stream() {
            self.streams.remove(&stream);
            self.connections.drop_stream(stream);
        }
        link.out.clear();
    }

    fn end_if_over(&mut self, id: u64) {
        let is_closed = |link: &HostStream| matches!(link.state, State::Closed);
        let is_over =
            |communicator: &Communicator| communicator.is_quiet && communicator.links.iter().all(is_closed);
        if self.communicators.get(&id).is_some_and(is_over) {
            self.communicators.remove(&id);
            self.over.push(id);
        }
    }

    /// Communicators that are over.
    pub(super) fn over(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.over)
    }

    /// Communicators whose other bridges on this host must look.
    pub(super) fn calls(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.calls)
    }

    fn connect(&mut self, now: Instant, id: u64, host: u32) {
        let Some(communicator) = self.communicators.get_mut(&id) else { return };
        let link = &mut communicator.links[host as usize];
        match self.connections.to(now, &link.address) {
            Ok(handle) => {
                link.state = State::Connecting(handle);
                if self.connections.is_connected(handle) {
                    self.greet(id, host, handle);
                }
            }
            Err(error) => link.say_why(now, &error),
        }
    }

    fn greet(&mut self, id: u64, host: u32, handle: ConnectionHandle) {
        let Some(communicator) = self.communicators.get_mut(&id) else { return };
        // Without a stream, the other side allows more of them later, and says so.
        let Some(stream) = self.connections.open(handle) else { return };
        let own = communicator.bridge.segment().host();
        let greeting = Greeting { communicator: id, host: own }.encode();
        communicator.links[host as usize].state = State::Greeted(stream, vec![]);
        self.streams.insert(stream, StreamPurpose::Host { communicator: id, host });
        self.connections.write(stream, &mut VecDeque::from([Bytes::copy_from_slice(&greeting)]));
    }

    /// Takes in a stream that another process has opened, once it has said what it is for.
    fn introduce(&mut self, now: Instant, greeting: Greeting, stream: QuicStream) {
        let Greeting { communicator: id, host } = greeting;
        let Some(communicator) = self.communicators.get_mut(&id) else {
            if !self.early.keep(greeting, stream) {
                return self.drop_unknown(stream);
            }
            self.streams.insert(stream, StreamPurpose::Early(greeting));
            return;
        };
        let link = communicator.links.get_mut(host as usize);
        let link = link.filter(|link| matches!(link.state, State::Awaited));
        let shown = self.connections.certificate(stream.connection);
        let Some(link) = link.filter(|link| shown.is_some_and(|shown| link.address.who.has_shown(shown)))
        else {
            // The process is of this job, but not the one that it says it is.
            tracing::warn!(host, "refused a stream from another process than the host's first rank");
            return self.drop_unknown(stream);
        };
        link.state = State::Open(stream);
        // The answer repeats the greeting.
        link.out.push_front(Bytes::copy_from_slice(&greeting.encode()));
        self.streams.insert(stream, StreamPurpose::Host { communicator: id, host });
        self.advance(now, id, host);
        self.readable.insert(stream);
    }

    fn drop_unknown(&mut self, stream: QuicStream) {
        self.streams.remove(&stream);
        self.connections.drop_stream(stream);
    }

    pub(super) fn datagram(
        &mut self,
        now: Instant,
        from: SocketAddr,
        ecn: Option<EcnCodepoint>,
        bytes: BytesMut,
    ) {
        self.connections.datagram(now, from, ecn, bytes);
    }

    /// Does everything that follows from the bytes that have come, until nothing more follows.
    pub(super) fn settle(&mut self, now: Instant) {
        loop {
            self.take_events(now);
            // Each stream is read once for everything that has come for it.
            let readable = std::mem::take(&mut self.readable);
            if readable.is_empty() {
                return;
            }
            for stream in readable {
                self.read(now, stream);
            }
        }
    }

    fn take_events(&mut self, now: Instant) {
        while let Some((handle, event)) = self.connections.event() {
            let stream = |id: StreamId| QuicStream { connection: handle, id };
            match event {
                Event::Connected => self.connected(handle),
                Event::ConnectionLost { reason } => {
                    let is_unreachable = matches!(reason, ConnectionError::TimedOut);
                    self.lost(now, handle, &reason.to_string(), is_unreachable);
                }
                Event::Stream(StreamEvent::Opened { .. }) => {
                    while let Some(stream) = self.connections.accept(handle) {
                        self.streams.insert(stream, StreamPurpose::Unknown(vec![], now));
                        self.readable.insert(stream);
                    }
                }
                Event::Stream(StreamEvent::Readable { id }) => drop(self.readable.insert(stream(id))),
                Event::Stream(StreamEvent::Writable { id }) => self.writable(now, stream(id)),
                Event::Stream(StreamEvent::Finished { id } | StreamEvent::Stopped { id, .. }) => {
                    self.needs_no_more(stream(id));
                }
                Event::Stream(StreamEvent::Available { .. }) => self.connected(handle),
                Event::HandshakeDataReady | Event::DatagramReceived | Event::DatagramsUnblocked => {}
            }
        }
    }

    /// Has everything go on that waits for a connection.
    fn connected(&mut self, handle: ConnectionHandle) {
        for (id, host) in self.links_where(|link| matches!(link.state, State::Connecting(on) if on == handle))
        {
            self.greet(id, host, handle);
        }
    }

    fn lost(&mut self, now: Instant, handle: ConnectionHandle, why: &str, is_unreachable: bool) {
        let was_connected = self.connections.is_connected(handle);
        let from = self.connections.address(handle).filter(|_| !was_connected);
        let to = self.connections.lost(handle);
        if to.is_none()
            && let Some(from) = from
        {
            self.connections.refuse(now, from, why);
        }
        let waits = |link: &HostStream| match link.state {
            State::Connecting(on) => on == handle,
            State::Awaited => !was_connected && Some(link.address.socket) == to,
            _ => false,
        };
        for (id, host) in self.links_where(waits) {
            if is_unreachable && !was_connected {
                self.give_up(id, host);
            } else if self.link(id, host).is_some_and(|link| !matches!(link.state, State::Awaited)) {
                self.apart(now, id, host, why);
            }
        }
        let gone: Vec<QuicStream> =
            self.streams.keys().copied().filter(|stream| stream.connection == handle).collect();
        for stream in gone {
            match self.streams.remove(&stream) {
                Some(StreamPurpose::Host { communicator, host }) => {
                    self.ended(communicator, host, Bridge::lose);
                    let link = self.link(communicator, host);
                    if link.is_some_and(|link| matches!(link.state, State::Greeted(..))) {
                        self.apart(now, communicator, host, why);
                    } else {
                        self.close(communicator, host);
                        self.end_if_over(communicator);
                    }
                }
                Some(StreamPurpose::Early(greeting)) => self.early.forget(greeting, &stream),
                Some(StreamPurpose::Unknown(..)) | None => {}
            }
        }
    }

    fn links_where(&self, wanted: impl Fn(&HostStream) -> bool) -> Vec<(u64, u32)> {
        let all = self.communicators.iter().flat_map(|(id, communicator)| {
            (0_u32..).zip(&communicator.links).map(move |(host, link)| (*id, host, link))
        });
        all.filter(|(_, _, link)| wanted(link)).map(|(id, host, _)| (id, host)).collect()
    }

    fn link(&mut self, id: u64, host: u32) -> Option<&mut HostStream> {
        self.communicators.get_mut(&id).map(|communicator| &mut communicator.links[host as usize])
    }

    fn apart(&mut self, now: Instant, id: u64, host: u32, why: &str) {
        if let Some(link) = self.link(id, host) {
            link.state = State::Apart;
            link.say_why(now, why);
        }
    }

    /// Gives up a host that cannot be reached: it has said where it is, so it has been there.
    fn give_up(&mut self, id: u64, host: u32) {
        if let Some(communicator) = self.communicators.get_mut(&id) {
            communicator.bridge.lose(host);
        }
        self.close(id, host);
        self.end_if_over(id);
    }

    /// Nothing more will come from a host.
    fn ended(&mut self, id: u64, host: u32, end: fn(&mut Bridge, u32)) {
        let Some(communicator) = self.communicators.get_mut(&id) else { return };
        let link = &mut communicator.links[host as usize];
        let is_open = matches!(link.state, State::Open(_) | State::Finishing(..));
        if is_open && std::mem::replace(&mut link.is_reading, false) {
            end(&mut communicator.bridge, host);
        }
    }

    /// A stream may have something to be read.
    fn read(&mut self, now: Instant, stream: QuicStream) {
        match self.streams.get_mut(&stream) {
            Some(StreamPurpose::Unknown(said, _)) => {
                let flow = read_greeting(&mut self.connections, stream, said);
                match (said[..].try_into().ok().map(|said| Greeting::decode(&said)), flow) {
                    (Some(Some(greeting)), _) => self.introduce(now, greeting, stream),
                    (None, QuicFlow::Open) => {}
                    _ => {
                        tracing::warn!("closed a stream that does not say what it is for");
                        self.drop_unknown(stream);
                    }
                }
            }
            Some(StreamPurpose::Host { communicator, host }) => {
                let (id, host) = (*communicator, *host);
                self.read_link(now, id, host, stream);
            }
            Some(StreamPurpose::Early(_)) | None => {}
        }
    }

    fn read_link(&mut self, now: Instant, id: u64, host: u32, stream: QuicStream) {
        let Some(communicator) = self.communicators.get_mut(&id) else { return };
        let (own, link) = (communicator.bridge.segment().host(), &mut communicator.links[host as usize]);
        if let State::Greeted(_, answer) = &mut link.state {
            let flow = read_greeting(&mut self.connections, stream, answer);
            if let Ok(answer) = answer[..].try_into() {
                if Greeting::decode(&answer) == Some(Greeting { communicator: id, host: own }) {
                    link.state = State::Open(stream);
                    self.advance(now, id, host);
                    return self.read_link(now, id, host, stream);
                }
            } else if flow == QuicFlow::Open {
                return;
            }
            self.drop_unknown(stream);
            return self.apart(now, id, host, "the stream is refused");
        }
        if !link.is_reading {
            return;
        }
        let (bridge, frames) = (&mut communicator.bridge, &mut link.frames);
        let mut wrong = None;
        let flow = self.connections.read(stream, usize::MAX, |bytes| {
            wrong = frames.feed(bytes, |header, payload| bridge.take(host, header, payload)).err();
            wrong.is_none()
        });
        if bridge.calls() {
            self.calls.push(id);
        }
        if let Some(wrong) = wrong {
            bridge.refuse(host, wrong);
            link.is_reading = false;
        } else if flow == QuicFlow::Ended {
            self.ended(id, host, Bridge::end);
            self.needs_no_more(stream);
        }
    }

    fn writable(&mut self, now: Instant, stream: QuicStream) {
        if let Some(StreamPurpose::Host { communicator, host }) = self.streams.get(&stream) {
            let (id, host) = (*communicator, *host);
            self.advance(now, id, host);
            self.end_if_over(id);
        }
    }

    /// Closes a stream whose other side has everything, or has ended.
    fn needs_no_more(&mut self, stream: QuicStream) {
        if let Some(StreamPurpose::Host { communicator, host }) = self.streams.get(&stream) {
            let (id, host) = (*communicator, *host);
            if self.link(id, host).is_some_and(|link| matches!(link.state, State::Finishing(..))) {
                self.close(id, host);
                self.end_if_over(id);
            }
        }
    }

    /// When [`tick`](Self::tick) has something to do.
    pub(super) fn deadline(&self) -> Option<Instant> {
        [self.connections.deadline(), self.next_look].into_iter().flatten().min()
    }

    /// Does everything that is due.
    pub(super) fn tick(&mut self, now: Instant) {
        self.connections.timeouts(now);
        if self.next_look.is_none_or(|look| now < look) {
            return;
        }
        for id in self.communicators.keys().copied().collect::<Vec<_>>() {
            self.look(now, id, Bridge::look_closely);
        }
        for (id, host) in self.links_where(|link| matches!(link.state, State::Apart)) {
            self.connect(now, id, host);
        }
        // A host that is to open a stream may be out of reach, which a connection to it shows.
        for (id, host) in
            self.links_where(|link| matches!(link.state, State::Awaited) && link.told + SILENCE <= now)
        {
            if let Some(link) = self.link(id, host) {
                link.told = now;
                let address = link.address.clone();
                // An error here is no reason to give up the host.
                let _ = self.connections.to(now, &address);
            }
        }
        for (id, host) in
            self.links_where(|link| matches!(link.state, State::Finishing(_, until) if until <= now))
        {
            self.close(id, host);
            self.end_if_over(id);
        }
        let is_late = |(stream, used): (&QuicStream, &StreamPurpose)| match used {
            StreamPurpose::Unknown(_, since) if *since + GREETING <= now => Some(*stream),
            _ => None,
        };
        for stream in self.streams.iter().filter_map(is_late).collect::<Vec<_>>() {
            tracing::warn!("closed a stream that does not say what it is for");
            self.drop_unknown(stream);
        }
        let is_needed = !self.communicators.is_empty() || !self.streams.is_empty();
        self.next_look = is_needed.then_some(now + LOOK);
    }

    /// Ends all connections; what says so to their other sides is to be sent.
    pub(super) fn part(&mut self, now: Instant) {
        self.connections.close(now);
    }

    pub(super) fn has_more_to_send(&self) -> bool {
        self.connections.has_more_to_send()
    }

    /// The next datagrams to send, in `bytes`, which is empty before: at most `most` of them at once.
    pub(super) fn transmit(&mut self, now: Instant, most: usize, bytes: &mut Vec<u8>) -> Option<Transmit> {
        self.connections.transmit(now, most, bytes)
    }
}

#[cfg(test)]
impl Mesh {
    /// Whether a communicator talks to a host.
    pub(super) fn is_open(&self, id: u64, host: u32) -> bool {
        let communicator = self.communicators.get(&id);
        communicator
            .is_some_and(|communicator| matches!(communicator.links[host as usize].state, State::Open(_)))
    }

    /// Streams that somebody keeps.
    pub(super) fn streams(&self) -> usize {
        self.streams.len()
    }

    /// Connections that something is kept of.
    pub(super) fn connections(&self) -> usize {
        self.connections.count()
    }

    /// Says these words on a new stream to the process of a host.
    pub(super) fn say(&mut self, id: u64, host: u32, words: Bytes) {
        let on = self.communicators[&id].links[host as usize].state.stream().expect("it is open").connection;
        let stream = self.connections.open(on).expect("streams are allowed");
        self.connections.write(stream, &mut VecDeque::from([words]));
    }
}

impl HostStream {
    fn say_why(&mut self, now: Instant, error: &str) {
        if now.saturating_duration_since(self.told) > SILENCE {
            tracing::warn!(to = %self.address.socket, %error, "cannot connect yet");
            self.told = now;
        }
    }
}

/// Reads the missing bytes of a greeting, and nothing behind it.
fn read_greeting(connections: &mut Connections, stream: QuicStream, said: &mut Vec<u8>) -> QuicFlow {
    loop {
        let missing = GREETING_BYTES - said.len();
        if missing == 0 {
            return QuicFlow::Open;
        }
        let before = said.len();
        let flow = connections.read(stream, missing, |bytes| {
            said.extend(bytes);
            false
        });
        if flow == QuicFlow::Ended || said.len() == before {
            return flow;
        }
    }
}
