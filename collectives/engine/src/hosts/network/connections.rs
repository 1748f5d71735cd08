//! The QUIC connections of this process, without a socket and a clock: quinn's state machines, and the certificate of
//! the process at the other end of each.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use quinn_proto::{
    AcceptError, ClientConfig, Connection, ConnectionHandle, ConnectionId, DatagramEvent, Dir, EcnCodepoint,
    Endpoint, EndpointConfig, Event, Incoming, ReadError, ServerConfig, StreamId, Transmit, TransportConfig,
    VarInt,
};

use super::address::Address;
use super::certificate::Certificate;
use super::flow::StreamFlow;
use super::protocol::Protocol;
use super::quic_settings::{MOST_DATAGRAM, MOST_STREAMS, MOST_STREAMS_BEFORE, transport};
use super::tls::{self, Expected, Identity};
use tpurun_memory::failure::Failure;
use tpurun_protocol::refusals::Refusals;

/// Bytes that one call to the system sends, at most.
const MOST_BATCH: usize = 65_000;
/// Pieces of a stream that are dropped at once: the atomic count of each waits until what was copied before has
/// reached the memory.
const MOST_TAKEN: usize = 64;
/// Connections from elsewhere whose other end has not shown its certificate yet, at a time. All of them have proven
/// the invitation, but an eavesdropper could repeat what they have said.
const MOST_HANDSHAKES: usize = 1024;
/// Answers to datagrams of no connection that wait to be sent. Strangers could ask for any number of them.
const MOST_ANSWERS: usize = 64;
/// The reason why a stream ends early: nobody asks for it.
const NO_CODE: VarInt = VarInt::from_u32(0);

/// One stream of one connection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct QuicStream {
    pub(super) connection: ConnectionHandle,
    pub(super) id: StreamId,
}

/// A connection, with the state that this process keeps of it.
struct TrackedConnection {
    inner: Connection,
    from: SocketAddr,
    /// The certificate of the other end, once TLS has shown it.
    certificate: Option<Certificate>,
    deadline: Option<Instant>,
    /// Whether the connection may have something to send, and so is in the queue.
    is_ready: bool,
    /// Whether the connection may have events, and so is in that queue.
    is_touched: bool,
}

/// All connections of this process.
pub(super) struct Connections {
    endpoint: Endpoint,
    identity: Arc<Identity>,
    transport: Arc<TransportConfig>,
    known: BTreeMap<ConnectionHandle, TrackedConnection>,
    /// The connections that this process has made, which all communicators share.
    outgoing: BTreeMap<SocketAddr, ConnectionHandle>,
    deadlines: BTreeSet<(Instant, ConnectionHandle)>,
    ready: VecDeque<ConnectionHandle>,
    /// Connections on which events may have come up.
    touched: VecDeque<ConnectionHandle>,
    /// Answers to datagrams of no connection.
    answers: VecDeque<(Transmit, Vec<u8>)>,
    /// Pieces of a stream that have been handed on.
    taken: Vec<Bytes>,
    refusals: Refusals,
}

impl Connections {
    pub(super) fn new(
        identity: Arc<Identity>,
        expected: Expected,
        seed: Option<[u8; 32]>,
    ) -> Result<Self, Failure> {
        let transport = Arc::new(transport(MOST_STREAMS));
        let mut server = ServerConfig::with_crypto(Arc::new(identity.quic_server(expected)?));
        server.transport_config(Arc::new(self::transport(MOST_STREAMS_BEFORE))).migration(false);
        let mut config = EndpointConfig::default();
        config.max_udp_payload_size(MOST_DATAGRAM).expect("it is allowed");
        config.rng_seed(seed);
        Ok(Self {
            endpoint: Endpoint::new(Arc::new(config), Some(Arc::new(server)), true, None),
            identity,
            transport,
            known: BTreeMap::new(),
            outgoing: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            ready: VecDeque::new(),
            touched: VecDeque::new(),
            answers: VecDeque::new(),
            taken: vec![],
            refusals: Refusals::default(),
        })
    }

    /// The connection to another process. The first call makes it.
    pub(super) fn to(&mut self, now: Instant, address: &Address) -> Result<ConnectionHandle, String> {
        let Address { socket, who, invitation } = address;
        if let Some(handle) = self.outgoing.get(socket) {
            return Ok(*handle);
        }
        let crypto = self.identity.quic_client(who).map_err(|failure| failure.to_string())?;
        let mut config = ClientConfig::new(Arc::new(crypto));
        let invitation = invitation.clone();
        let first_id = move || ConnectionId::new(&invitation.proof(Protocol::Quic));
        config.transport_config(self.transport.clone()).initial_dst_cid_provider(Arc::new(first_id));
        let connected = self.endpoint.connect(now, config, *socket, &who.name());
        let (handle, inner) = connected.map_err(|error| error.to_string())?;
        self.outgoing.insert(*socket, handle);
        self.add(handle, inner, *socket);
        Ok(handle)
    }

    fn add(&mut self, handle: ConnectionHandle, inner: Connection, from: SocketAddr) {
        let known = TrackedConnection {
            inner,
            from,
            certificate: None,
            deadline: None,
            is_ready: false,
            is_touched: false,
        };
        self.known.insert(handle, known);
        self.touch(handle);
    }

    /// The certificate that TLS has shown the other end to have.
    pub(super) fn certificate(&self, handle: ConnectionHandle) -> Option<&Certificate> {
        self.known.get(&handle)?.certificate.as_ref()
    }

    pub(super) fn address(&self, handle: ConnectionHandle) -> Option<SocketAddr> {
        self.known.get(&handle).map(|known| known.from)
    }

    /// Takes in a datagram; [`event`](Self::event) has what comes of it.
    pub(super) fn datagram(
        &mut self,
        now: Instant,
        from: SocketAddr,
        ecn: Option<EcnCodepoint>,
        bytes: BytesMut,
    ) {
        let mut answer = vec![];
        match self.endpoint.handle(now, from, None, ecn, bytes, &mut answer) {
            Some(DatagramEvent::ConnectionEvent(handle, event)) => {
                if let Some(known) = self.known.get_mut(&handle) {
                    known.inner.handle_event(event);
                    self.touch(handle);
                }
            }
            Some(DatagramEvent::NewConnection(incoming)) => self.admit(now, incoming),
            Some(DatagramEvent::Response(transmit)) => self.answer(transmit, answer),
            None => {}
        }
    }

    /// Takes a connection that proves the invitation; any other gets no answer.
    fn admit(&mut self, now: Instant, incoming: Incoming) {
        let from = incoming.remote_address();
        let is_in_progress =
            |known: &&TrackedConnection| known.certificate.is_none() && known.inner.side().is_server();
        let refusal = if !self.identity.invitation().is_proven_by(Protocol::Quic, incoming.orig_dst_cid()) {
            Some("it is not of this job")
        } else if self.known.values().filter(is_in_progress).count() >= MOST_HANDSHAKES {
            Some("too many have not shown who they are")
        } else {
            None
        };
        if let Some(why) = refusal {
            self.endpoint.ignore(incoming);
            return self.refuse(now, from, why);
        }
        let mut answer = vec![];
        match self.endpoint.accept(incoming, now, &mut answer, None) {
            Ok((handle, inner)) => self.add(handle, inner, from),
            Err(AcceptError { cause, response }) => {
                self.refuse(now, from, &cause.to_string());
                if let Some(transmit) = response {
                    self.answer(transmit, answer);
                }
            }
        }
    }

    fn answer(&mut self, transmit: Transmit, answer: Vec<u8>) {
        if self.answers.len() < MOST_ANSWERS {
            self.answers.push_back((transmit, answer));
        }
    }

    /// Logs a refusal, once for many.
    pub(super) fn refuse(&mut self, now: Instant, from: SocketAddr, why: &str) {
        if let Some(line) = self.refusals.add(format!("refused {from}: {why}"), now) {
            tracing::warn!("{line}");
        }
    }

    fn touch(&mut self, handle: ConnectionHandle) {
        let Some(known) = self.known.get_mut(&handle) else { return };
        if !std::mem::replace(&mut known.is_ready, true) {
            self.ready.push_back(handle);
        }
        if !std::mem::replace(&mut known.is_touched, true) {
            self.touched.push_back(handle);
        }
    }

    /// The next event, until there is none.
    pub(super) fn event(&mut self) -> Option<(ConnectionHandle, Event)> {
        while let Some(handle) = self.touched.front().copied() {
            if let Some(known) = self.known.get_mut(&handle) {
                known.is_touched = false;
                while let Some(event) = known.inner.poll_endpoint_events() {
                    if let Some(event) = self.endpoint.handle_event(handle, event) {
                        known.inner.handle_event(event);
                    }
                }
                if let Some(event) = known.inner.poll() {
                    if matches!(event, Event::Connected) {
                        known.certificate = tls::other_end(&known.inner);
                        if known.inner.side().is_server() {
                            known.inner.set_max_concurrent_streams(Dir::Bi, VarInt::from_u32(MOST_STREAMS));
                        }
                    }
                    known.is_touched = true;
                    return Some((handle, event));
                }
                self.note_deadline(handle);
                self.forget_if_over(handle);
            }
            self.touched.pop_front();
        }
        None
    }

    fn note_deadline(&mut self, handle: ConnectionHandle) {
        let Some(known) = self.known.get_mut(&handle) else { return };
        let deadline = known.inner.poll_timeout();
        let before = std::mem::replace(&mut known.deadline, deadline);
        if before != deadline {
            before.map(|before| self.deadlines.remove(&(before, handle)));
            deadline.map(|deadline| self.deadlines.insert((deadline, handle)));
        }
    }

    fn forget_if_over(&mut self, handle: ConnectionHandle) {
        if self.known.get(&handle).is_some_and(|known| known.inner.is_drained()) {
            let known = self.known.remove(&handle).expect("it is there");
            known.deadline.map(|deadline| self.deadlines.remove(&(deadline, handle)));
        }
    }

    /// Takes note that nothing more goes over a connection. [`to`](Self::to) makes another one after that. Returns the
    /// address, if the connection was made from here.
    pub(super) fn lost(&mut self, handle: ConnectionHandle) -> Option<SocketAddr> {
        let to = self.destination(handle)?;
        self.outgoing.remove(&to);
        Some(to)
    }

    /// The address that a connection was made to, as long as [`to`](Self::to) returns this connection for it.
    pub(super) fn destination(&self, handle: ConnectionHandle) -> Option<SocketAddr> {
        self.outgoing.iter().find(|(_, outgoing)| **outgoing == handle).map(|(to, _)| *to)
    }

    /// Nothing more goes over any of them, which their other sides are told.
    pub(super) fn close(&mut self, now: Instant) {
        for handle in self.known.keys().copied().collect::<Vec<_>>() {
            let known = self.known.get_mut(&handle).expect("it is there");
            known.inner.close(now, NO_CODE, Bytes::new());
            self.touch(handle);
        }
    }

    pub(super) fn is_connected(&self, handle: ConnectionHandle) -> bool {
        self.known.get(&handle).is_some_and(|known| known.certificate.is_some())
    }

    /// When [`timeouts`](Self::timeouts) has something to do.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    pub(super) fn timeouts(&mut self, now: Instant) {
        let due = self.deadlines.iter().take_while(|(deadline, _)| *deadline <= now);
        for handle in due.map(|(_, handle)| *handle).collect::<Vec<_>>() {
            self.known.get_mut(&handle).expect("who is gone has no deadline").inner.handle_timeout(now);
            self.note_deadline(handle);
            self.touch(handle);
        }
    }

    pub(super) fn has_more_to_send(&self) -> bool {
        !(self.answers.is_empty() && self.ready.is_empty())
    }

    /// The next datagrams to send, in `bytes`, which is empty before: at most `most` of them at once, all to one process.
    pub(super) fn transmit(&mut self, now: Instant, most: usize, bytes: &mut Vec<u8>) -> Option<Transmit> {
        if let Some((transmit, answer)) = self.answers.pop_front() {
            *bytes = answer;
            return Some(transmit);
        }
        while let Some(handle) = self.ready.pop_front() {
            let Some(known) = self.known.get_mut(&handle) else { continue };
            let fit = MOST_BATCH / usize::from(known.inner.current_mtu());
            if let Some(transmit) = known.inner.poll_transmit(now, most.min(fit).max(1), bytes) {
                // The connection goes behind the others.
                self.ready.push_back(handle);
                return Some(transmit);
            }
            known.is_ready = false;
            if !std::mem::replace(&mut known.is_touched, true) {
                self.touched.push_back(handle);
            }
        }
        None
    }

    /// A new stream, unless the other side allows no more for now.
    pub(super) fn open(&mut self, connection: ConnectionHandle) -> Option<QuicStream> {
        let id = self.known.get_mut(&connection)?.inner.streams().open(Dir::Bi)?;
        Some(QuicStream { connection, id })
    }

    /// A stream that the other side has opened.
    pub(super) fn accept(&mut self, connection: ConnectionHandle) -> Option<QuicStream> {
        let id = self.known.get_mut(&connection)?.inner.streams().accept(Dir::Bi)?;
        Some(QuicStream { connection, id })
    }

    /// Takes as much from the front of `chunks` as may be sent now.
    pub(super) fn write(&mut self, stream: QuicStream, chunks: &mut VecDeque<Bytes>) -> StreamFlow {
        let Some(known) = self.known.get_mut(&stream.connection) else { return StreamFlow::Ended };
        while !chunks.is_empty() {
            match known.inner.send_stream(stream.id).write_chunks(chunks.make_contiguous()) {
                Ok(written) => drop(chunks.drain(..written.chunks)),
                Err(quinn_proto::WriteError::Blocked) => break,
                Err(_) => return StreamFlow::Ended,
            }
        }
        self.touch(stream.connection);
        StreamFlow::Open
    }

    /// Hands on the bytes that have come, in order, as long as they are taken; `most` bytes at a time.
    pub(super) fn read(
        &mut self,
        stream: QuicStream,
        most: usize,
        mut take: impl FnMut(&[u8]) -> bool,
    ) -> StreamFlow {
        let Some(known) = self.known.get_mut(&stream.connection) else { return StreamFlow::Ended };
        let mut receive = known.inner.recv_stream(stream.id);
        let Ok(mut chunks) = receive.read(true) else { return StreamFlow::Ended };
        let flow = loop {
            match chunks.next(most) {
                Ok(Some(chunk)) if take(&chunk.bytes) => {
                    if self.taken.len() == MOST_TAKEN {
                        self.taken.clear();
                    }
                    self.taken.push(chunk.bytes);
                }
                Ok(Some(_)) | Err(ReadError::Blocked) => break StreamFlow::Open,
                Ok(None) | Err(ReadError::Reset(_)) => break StreamFlow::Ended,
            }
        };
        let is_to_be_told = chunks.finalize().should_transmit();
        self.taken.clear();
        if is_to_be_told {
            self.touch(stream.connection);
        }
        flow
    }

    /// Ends this side of a stream: no more will be written.
    pub(super) fn finish(&mut self, stream: QuicStream) -> StreamFlow {
        let Some(known) = self.known.get_mut(&stream.connection) else { return StreamFlow::Ended };
        let finished = known.inner.send_stream(stream.id).finish();
        self.touch(stream.connection);
        if finished.is_ok() { StreamFlow::Open } else { StreamFlow::Ended }
    }

    /// Neither side needs it any more.
    pub(super) fn drop_stream(&mut self, stream: QuicStream) {
        if let Some(known) = self.known.get_mut(&stream.connection) {
            // Either may have ended before.
            let _ = known.inner.recv_stream(stream.id).stop(NO_CODE);
            let _ = known.inner.send_stream(stream.id).reset(NO_CODE);
            self.touch(stream.connection);
        }
    }
}

#[cfg(test)]
impl Connections {
    pub(super) fn count(&self) -> usize {
        self.known.len()
    }
}
