//! TCP connections, as sessions use them: one goes from a host that has pieces to send to one that needs them.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::event::epoll::EventFlags;

use super::address::Address;
use super::certificate::Certificate;
use super::flow::StreamFlow;
use super::greeting::GREETING_BYTES;
use super::streams::{Awaits, Carries, Streams, Unwelcome};
use super::tcp_connection::TcpConnection;
use super::timeouts::SILENCE;
use super::tls::Identity;
use tpurun_protocol::refusals::Refusals;

/// The bit that marks events of these connections in epoll; the rest is the number of the connection.
pub(super) const SESSIONS: u64 = 1 << 63;

/// The TCP connections of one driver, by number.
pub(super) struct TcpStreams {
    epoll: Arc<OwnedFd>,
    identity: Arc<Identity>,
    lines: BTreeMap<u64, TcpConnection>,
    last: u64,
    refusals: Refusals,
}

impl TcpStreams {
    pub(super) fn new(epoll: Arc<OwnedFd>, identity: Arc<Identity>) -> Self {
        Self { epoll, identity, lines: BTreeMap::new(), last: 0, refusals: Refusals::default() }
    }

    /// Takes over a new connection.
    pub(super) fn keep(&mut self, line: TcpConnection) -> u64 {
        self.last += 1;
        self.lines.insert(self.last, line);
        self.last
    }

    /// The process at the other end of a connection that is here.
    pub(super) fn from(&self, stream: u64) -> Option<SocketAddr> {
        self.lines.get(&stream).map(TcpConnection::from)
    }

    /// Logs a refusal, once for many.
    pub(super) fn refuse_from(&mut self, now: Instant, from: SocketAddr, why: &str) {
        if let Some(line) = self.refusals.add(format!("refused {from}: {why}"), now) {
            tracing::warn!("{line}");
        }
    }

    fn with(&mut self, stream: u64, act: impl FnOnce(&mut TcpConnection) -> StreamFlow) -> StreamFlow {
        self.lines.get_mut(&stream).map_or_else(|| StreamFlow::Broken("it is gone".to_owned()), act)
    }
}

impl Streams for TcpStreams {
    type Id = u64;

    const CARRIES: Carries = Carries::OneWay;
    // QUIC notices a lost host before.
    const GIVES_UP_AFTER: Option<Duration> = Some(SILENCE.saturating_add(Duration::from_secs(5)));
    // Each has a socket.
    const MOST_WAITING: usize = 4096;
    const PROTOCOL: &'static str = "TCP";
    const NAME: &'static str = "connection";
    const UNANSWERED: &'static str = "it was closed";

    fn open(
        &mut self,
        _: Instant,
        to: &Address,
        greeting: [u8; GREETING_BYTES],
    ) -> Result<Option<u64>, String> {
        let mut line = TcpConnection::connect(&self.identity, to)?;
        line.say(&greeting);
        Ok(Some(self.keep(line)))
    }

    fn accept(&mut self, stream: u64, answer: Bytes, _: &mut VecDeque<Bytes>) {
        // The next event tells what comes of it.
        self.with(stream, |line| {
            line.say(&answer);
            line.send(&mut VecDeque::new())
        });
    }

    fn certificate(&self, stream: u64) -> Option<&Certificate> {
        self.lines.get(&stream)?.certificate()
    }

    /// More bytes than a greeting has break the connection: nothing is said before it is answered, or after an answer.
    fn read_greeting(&mut self, stream: u64, said: &mut Vec<u8>) -> StreamFlow {
        self.read(stream, |bytes| {
            said.extend(bytes);
            said.len() <= GREETING_BYTES
        })
    }

    fn read(&mut self, stream: u64, take: impl FnMut(&[u8]) -> bool) -> StreamFlow {
        self.with(stream, |line| line.receive(take))
    }

    fn write(&mut self, stream: u64, out: &mut VecDeque<Bytes>) -> StreamFlow {
        self.with(stream, |line| line.send(out))
    }

    fn finish(&mut self, stream: u64) -> StreamFlow {
        self.with(stream, TcpConnection::finish)
    }

    fn close(&mut self, stream: u64) {
        self.lines.remove(&stream);
    }

    fn refuse(&mut self, now: Instant, stream: u64, why: Unwelcome) {
        let Some(line) = self.lines.get(&stream) else { return };
        let (from, is_let_in) = (line.from(), line.is_ready());
        match why {
            Unwelcome::Silent => self.refuse_from(now, from, "it did not say what it is for"),
            // A process that is let in and leaves before it has said anything needs no warning.
            Unwelcome::Broken(why) if !is_let_in => self.refuse_from(now, from, &why),
            Unwelcome::Broken(_) | Unwelcome::Left => {}
        }
    }

    fn watch(&mut self, stream: u64, awaits: Awaits) {
        let Some(line) = self.lines.get_mut(&stream) else { return };
        // A connection that must wait may leave.
        let read = if awaits == Awaits::End { EventFlags::RDHUP } else { EventFlags::IN };
        let flags = if line.has_more_to_send() { read | EventFlags::OUT } else { read };
        if let Err(error) = line.watch(&self.epoll, SESSIONS | stream, flags) {
            // The connection will be late, and be closed.
            tracing::warn!(%error, "the network thread can not watch a connection");
        }
    }
}

#[cfg(test)]
impl TcpStreams {
    /// The sockets, as a process has them that is forked now.
    pub(super) fn copy_sockets(&self) -> Vec<OwnedFd> {
        self.lines.values().map(TcpConnection::copy_socket).collect()
    }

    /// Connections that are kept.
    pub(super) fn count(&self) -> usize {
        self.lines.len()
    }
}
