//! Everything that a process and others tell each other over QUIC for the communicators of their hosts, without a
//! socket and a clock. The mesh is told what has happened and when, and says what is to be sent. It brings together the
//! QUIC connections and the sessions that go over them.

#[cfg(test)]
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

#[cfg(test)]
use bytes::Bytes;
use bytes::BytesMut;
use quinn_proto::{ConnectionError, ConnectionHandle, EcnCodepoint, Event, StreamEvent, StreamId, Transmit};

use super::connections::{Connections, QuicStream};
use super::quic_streams::QuicStreams;
use super::session::{Session, State};
use super::sessions::Sessions;
use super::tls::{Expected, Identity};
use tpurun_memory::failure::Failure;

pub(super) struct Mesh {
    pub(super) sessions: Sessions<QuicStreams>,
}

impl Mesh {
    pub(super) fn new(
        identity: Arc<Identity>,
        expected: Expected,
        seed: Option<[u8; 32]>,
    ) -> Result<Self, Failure> {
        let connections = Connections::new(identity, expected, seed)?;
        Ok(Self { sessions: Sessions::new(QuicStreams::new(connections)) })
    }

    fn connections(&mut self) -> &mut Connections {
        &mut self.sessions.streams.connections
    }

    pub(super) fn datagram(
        &mut self,
        now: Instant,
        from: SocketAddr,
        ecn: Option<EcnCodepoint>,
        bytes: BytesMut,
    ) {
        self.connections().datagram(now, from, ecn, bytes);
    }

    /// Does everything that follows from the bytes that have come, until nothing more follows.
    pub(super) fn settle(&mut self, now: Instant) {
        loop {
            self.take_events(now);
            // Each stream is read once for everything that has come for it.
            let readable = std::mem::take(&mut self.sessions.streams.readable);
            if readable.is_empty() {
                return;
            }
            for stream in readable {
                self.sessions.read(now, stream);
            }
        }
    }

    fn take_events(&mut self, now: Instant) {
        while let Some((connection, event)) = self.connections().event() {
            match event {
                Event::Connected => self.connected(now, connection),
                Event::ConnectionLost { reason } => self.lost(now, connection, &reason),
                Event::Stream(event) => self.take_event_of_stream(now, connection, event),
                Event::HandshakeDataReady | Event::DatagramReceived | Event::DatagramsUnblocked => {}
            }
        }
    }

    fn take_event_of_stream(&mut self, now: Instant, connection: ConnectionHandle, event: StreamEvent) {
        let stream = |id: StreamId| QuicStream { connection, id };
        match event {
            StreamEvent::Opened { .. } => {
                while let Some(stream) = self.connections().accept(connection) {
                    self.sessions.opened(now, stream);
                    self.sessions.streams.readable.insert(stream);
                }
            }
            StreamEvent::Readable { id } => drop(self.sessions.streams.readable.insert(stream(id))),
            StreamEvent::Writable { id } => self.sessions.writable(now, stream(id)),
            StreamEvent::Finished { id } | StreamEvent::Stopped { id, .. } => {
                self.sessions.finished(now, stream(id));
            }
            StreamEvent::Available { .. } => self.connected(now, connection),
        }
    }

    /// Has everything go on that waits for a connection.
    fn connected(&mut self, now: Instant, connection: ConnectionHandle) {
        let Some(to) = self.connections().destination(connection) else { return };
        let waits =
            |session: &Session<_>| matches!(session.state, State::Connecting) && session.address.socket == to;
        for at in self.sessions.communicators.sessions_where(waits) {
            self.sessions.connect(now, at);
        }
    }

    fn lost(&mut self, now: Instant, connection: ConnectionHandle, reason: &ConnectionError) {
        let (why, is_unreachable) = (reason.to_string(), matches!(reason, ConnectionError::TimedOut));
        let was_connected = self.connections().is_connected(connection);
        let from = self.connections().address(connection).filter(|_| !was_connected);
        let to = self.connections().lost(connection);
        if to.is_none()
            && let Some(from) = from
        {
            self.connections().refuse(now, from, &why);
        }
        let waits = |session: &Session<_>| match session.state {
            State::Connecting => Some(session.address.socket) == to,
            State::Awaited => !was_connected && Some(session.address.socket) == to,
            _ => false,
        };
        for at in self.sessions.communicators.sessions_where(waits) {
            if is_unreachable && !was_connected {
                self.sessions.lose(now, at);
            } else if self
                .sessions
                .communicators
                .session(at)
                .is_some_and(|session| !matches!(session.state, State::Awaited))
            {
                self.sessions.apart(now, at, &why);
            }
        }
        let gone: Vec<QuicStream> =
            self.sessions.purposes.streams().filter(|stream| stream.connection == connection).collect();
        for stream in gone {
            self.sessions.lose_stream(now, stream, &why);
        }
    }

    /// When [`tick`](Self::tick) has something to do.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let of_connections = self.sessions.streams.connections.deadline();
        [of_connections, self.sessions.next_look.deadline()].into_iter().flatten().min()
    }

    /// Does everything that is due.
    pub(super) fn tick(&mut self, now: Instant) {
        self.connections().timeouts(now);
        self.sessions.tick(now);
    }

    /// Ends all connections; what says so to their other sides is to be sent.
    pub(super) fn part(&mut self, now: Instant) {
        self.connections().close(now);
    }

    pub(super) fn has_more_to_send(&self) -> bool {
        self.sessions.streams.connections.has_more_to_send()
    }

    /// The next datagrams to send, in `bytes`, which is empty before: at most `most` of them at once.
    pub(super) fn transmit(&mut self, now: Instant, most: usize, bytes: &mut Vec<u8>) -> Option<Transmit> {
        self.connections().transmit(now, most, bytes)
    }
}

#[cfg(test)]
impl Mesh {
    /// Connections that something is kept of.
    pub(super) fn count(&self) -> usize {
        self.sessions.streams.connections.count()
    }

    /// Says these words on a new stream to the process of a host.
    pub(super) fn say(&mut self, id: u64, host: u32, words: Bytes) {
        let stream = self.sessions.state(id, host).and_then(State::stream).expect("it is open");
        let stream = self.connections().open(stream.connection).expect("streams are allowed");
        self.connections().write(stream, &mut VecDeque::from([words]));
    }
}
