//! QUIC streams, as sessions use them: one carries all that two hosts say to each other in a communicator.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::address::Address;
use super::certificate::Certificate;
use super::connections::{Connections, QuicStream};
use super::flow::StreamFlow;
use super::greeting::GREETING_BYTES;
use super::streams::{Carries, Streams, Unwelcome};

/// The streams of all QUIC connections of a driver.
pub(super) struct QuicStreams {
    pub(super) connections: Connections,
    /// Streams for which something may have come.
    pub(super) readable: BTreeSet<QuicStream>,
}

impl QuicStreams {
    pub(super) fn new(connections: Connections) -> Self {
        Self { connections, readable: BTreeSet::new() }
    }
}

impl Streams for QuicStreams {
    type Id = QuicStream;

    const CARRIES: Carries = Carries::BothWays;
    const GIVES_UP_AFTER: Option<Duration> = None;
    // A stream costs a connection nothing that its limit of streams does not bound.
    const MOST_WAITING: usize = usize::MAX;
    const PROTOCOL: &'static str = "QUIC";
    const NAME: &'static str = "stream";
    const UNANSWERED: &'static str = "the stream is refused";

    fn open(
        &mut self,
        now: Instant,
        to: &Address,
        greeting: [u8; GREETING_BYTES],
    ) -> Result<Option<QuicStream>, String> {
        let connection = self.connections.to(now, to)?;
        if !self.connections.is_connected(connection) {
            return Ok(None);
        }
        // Without a stream, the other side allows more of them later, and says so.
        let stream = self.connections.open(connection);
        if let Some(stream) = stream {
            self.connections.write(stream, &mut VecDeque::from([Bytes::copy_from_slice(&greeting)]));
        }
        Ok(stream)
    }

    fn accept(&mut self, stream: QuicStream, answer: Bytes, out: &mut VecDeque<Bytes>) {
        out.push_front(answer);
        self.readable.insert(stream);
    }

    fn certificate(&self, stream: QuicStream) -> Option<&Certificate> {
        self.connections.certificate(stream.connection)
    }

    /// Reads nothing behind the greeting.
    fn read_greeting(&mut self, stream: QuicStream, said: &mut Vec<u8>) -> StreamFlow {
        loop {
            let missing = GREETING_BYTES - said.len();
            if missing == 0 {
                return StreamFlow::Open;
            }
            let before = said.len();
            let flow = self.connections.read(stream, missing, |bytes| {
                said.extend(bytes);
                false
            });
            if flow != StreamFlow::Open || said.len() == before {
                return flow;
            }
        }
    }

    fn read(&mut self, stream: QuicStream, take: impl FnMut(&[u8]) -> bool) -> StreamFlow {
        self.connections.read(stream, usize::MAX, take)
    }

    /// Nobody needs the bytes that the other side takes no more, so all of them count as written then.
    fn write(&mut self, stream: QuicStream, out: &mut VecDeque<Bytes>) -> StreamFlow {
        if !out.is_empty() && self.connections.write(stream, out) != StreamFlow::Open {
            out.clear();
        }
        StreamFlow::Open
    }

    fn finish(&mut self, stream: QuicStream) -> StreamFlow {
        self.connections.finish(stream)
    }

    fn close(&mut self, stream: QuicStream) {
        self.connections.drop_stream(stream);
    }

    fn refuse(&mut self, _: Instant, _: QuicStream, _: Unwelcome) {
        tracing::warn!("closed a stream that does not say what it is for");
    }

    fn probe(&mut self, now: Instant, to: &Address) {
        // An error here is no reason to give up the host.
        let _ = self.connections.to(now, to);
    }
}
