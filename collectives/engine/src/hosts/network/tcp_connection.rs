//! One TCP connection with TLS 1.3. Large pieces go over these: the system cuts them into segments and joins them
//! again, many at a time, which QUIC does packet by packet in this process.

use std::collections::VecDeque;
use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::{Buf, Bytes};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};
use rustls::ServerConfig;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, UnbufferedStatus};

use super::address::Address;
use super::certificate::Certificate;
use super::flow::StreamFlow;
use super::invitation::{Invitation, InvitationProof, PROOF_BYTES};
use super::protocol::Protocol;
use super::records::{OpenedRecord, RECORD, Records};
use super::timeouts::SILENCE;
use super::tls::Identity;

/// Bytes that are read or written at once. So few that encrypted or decrypted bytes are still in the caches when the
/// system copies them.
const ROOM: usize = 128 << 10;
/// Reads and writes between two looks at other connections.
const READS: usize = 8;
const WRITES: usize = 8;

enum Tls {
    /// Nothing is spent on the connection yet.
    Stranger(Box<Stranger>),
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
    /// Both sides have shown who they are.
    Ready(Records, Option<Certificate>),
    /// TLS has failed, after which it must not be asked anything.
    Broken(String),
}

/// A process that has not proven yet that it is invited.
struct Stranger {
    said: InvitationProof,
    heard: usize,
    invitation: Invitation,
    config: Arc<ServerConfig>,
}

impl Stranger {
    /// Reads the missing bytes of the proof, and nothing behind it.
    ///
    /// # Errors
    /// The error says that there is no proof.
    fn listen(&mut self, mut socket: &TcpStream) -> Result<Option<UnbufferedServerConnection>, String> {
        while self.heard < PROOF_BYTES {
            match socket.read(&mut self.said[self.heard..]) {
                Ok(0) => return Err("it was closed".to_owned()),
                Ok(bytes) => self.heard += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        if !self.invitation.is_proven_by(Protocol::Tcp, &self.said) {
            return Err("it is not of this job".to_owned());
        }
        UnbufferedServerConnection::new(self.config.clone()).map(Some).map_err(|error| error.to_string())
    }
}

/// The next thing to be done with TLS.
enum Step {
    Again,
    /// Something must come from the other side first.
    Wait,
    /// The handshake is over.
    Ready,
    Ended,
    /// The receiver of the data takes no more.
    Refused,
    Broken(String),
}

pub(super) struct TcpConnection {
    socket: TcpStream,
    tls: Tls,
    from: SocketAddr,
    is_connecting: bool,
    /// Whether no more will be written.
    is_finished: bool,
    has_ended: bool,
    /// Bytes to be sent before anything else.
    words: VecDeque<Bytes>,
    /// Whether there was more to be sent than goes in one turn.
    has_more: bool,
    /// The epoll that watches the socket, and the events that it watches for.
    watched: Option<(Arc<OwnedFd>, EventFlags)>,
    incoming: Buffer,
    outgoing: Buffer,
}

/// Bytes on their way between TLS and the socket.
struct Buffer {
    room: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Buffer {
    fn new() -> Self {
        Self { room: vec![0; ROOM + RECORD].into(), start: 0, end: 0 }
    }

    /// A buffer without memory, for a process that may be sent away before anything is read.
    fn none() -> Self {
        Self { room: Box::default(), start: 0, end: 0 }
    }

    fn filled(&mut self) -> &mut [u8] {
        &mut self.room[self.start..self.end]
    }

    fn take(&mut self, bytes: usize) {
        self.start += bytes;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// The free room behind the bytes that are there.
    fn free(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.room.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.room[self.end..]
    }
}

impl fmt::Debug for TcpConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line").field("from", &self.from).finish_non_exhaustive()
    }
}

impl TcpConnection {
    /// A connection to another process, which is not established yet.
    pub(super) fn connect(identity: &Identity, to: &Address) -> Result<Self, String> {
        let config = identity.tcp_client(&to.who).map_err(|failure| failure.to_string())?;
        let name = ServerName::try_from(to.who.name()).map_err(|error| error.to_string())?;
        let tls =
            UnbufferedClientConnection::new(Arc::new(config), name).map_err(|error| error.to_string())?;
        let family = if to.socket.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            socket_with(family, SocketType::STREAM, flags, None).map_err(|error| error.to_string())?;
        match connect(&socket, &to.socket) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error.to_string()),
        }
        let mut line = Self::new(socket.into(), Tls::Client(tls), to.socket);
        line.make_room();
        line.outgoing.free()[..PROOF_BYTES].copy_from_slice(&to.invitation.proof(Protocol::Tcp));
        line.outgoing.end += PROOF_BYTES;
        line.is_connecting = true;
        Ok(line)
    }

    /// A connection that another process has made.
    pub(super) fn accept(
        socket: TcpStream,
        from: SocketAddr,
        config: &Arc<ServerConfig>,
        invitation: &Invitation,
    ) -> Result<Self, String> {
        socket.set_nonblocking(true).map_err(|error| error.to_string())?;
        let (config, invitation) = (config.clone(), invitation.clone());
        let stranger = Stranger { said: [0; PROOF_BYTES], heard: 0, invitation, config };
        Ok(Self::new(socket, Tls::Stranger(stranger.into()), from))
    }

    fn make_room(&mut self) {
        (self.incoming, self.outgoing) = (Buffer::new(), Buffer::new());
    }

    fn new(socket: TcpStream, tls: Tls, from: SocketAddr) -> Self {
        // All of these settings only make the connection better. Firewalls forget a connection that is idle for long,
        // which keepalives prevent.
        let _ = sockopt::set_tcp_nodelay(&socket, true);
        let _ = sockopt::set_tcp_user_timeout(&socket, SILENCE.as_millis() as u32);
        let _ = sockopt::set_tcp_keepidle(&socket, SILENCE);
        let _ = sockopt::set_tcp_keepintvl(&socket, SILENCE / 4);
        let _ = sockopt::set_socket_keepalive(&socket, true);
        let (incoming, outgoing) = (Buffer::none(), Buffer::none());
        Self {
            socket,
            tls,
            from,
            is_connecting: false,
            is_finished: false,
            has_ended: false,
            words: VecDeque::new(),
            has_more: false,
            watched: None,
            incoming,
            outgoing,
        }
    }

    pub(super) fn from(&self) -> SocketAddr {
        self.from
    }

    /// Whether both sides have shown who they are.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.tls, Tls::Ready(..))
    }

    /// Whether epoll is to say when the socket takes more.
    pub(super) fn has_more_to_send(&self) -> bool {
        self.is_connecting
            || self.outgoing.end > 0
            || self.has_more
            || self.is_ready() && !self.words.is_empty()
    }

    /// Has epoll report these events with this number.
    pub(super) fn watch(
        &mut self,
        epoll: &Arc<OwnedFd>,
        number: u64,
        flags: EventFlags,
    ) -> rustix::io::Result<()> {
        let number = EventData::new_u64(number);
        match &mut self.watched {
            None => epoll::add(epoll, &self.socket, number, flags)?,
            Some((_, now)) if *now == flags => return Ok(()),
            Some(_) => epoll::modify(epoll, &self.socket, number, flags)?,
        }
        self.watched = Some((epoll.clone(), flags));
        Ok(())
    }

    /// The certificate of the other end, once it has shown one.
    pub(super) fn certificate(&self) -> Option<&Certificate> {
        match &self.tls {
            Tls::Ready(_, certificate) => certificate.as_ref(),
            _ => None,
        }
    }

    /// Hands on the bytes that have come, in order, as long as they are taken. Sends the answers of TLS.
    pub(super) fn receive(&mut self, mut take: impl FnMut(&[u8]) -> bool) -> StreamFlow {
        if self.is_connecting {
            match sockopt::socket_error(&self.socket) {
                Ok(Ok(())) if self.socket.peer_addr().is_ok() => self.is_connecting = false,
                Ok(Ok(())) => return StreamFlow::Open,
                Ok(Err(error)) | Err(error) => return StreamFlow::Broken(error.to_string()),
            }
        }
        if let Tls::Stranger(stranger) = &mut self.tls {
            match stranger.listen(&self.socket) {
                Ok(Some(tls)) => {
                    self.tls = Tls::Server(tls);
                    self.make_room();
                }
                Ok(None) => return StreamFlow::Open,
                Err(why) => return self.breaks(why),
            }
        }
        let mut flow = self.process(&mut take);
        for _ in 0..READS {
            if flow != StreamFlow::Open {
                break;
            }
            let room = self.incoming.free();
            let most = room.len();
            if most == 0 {
                flow = StreamFlow::Broken("a record that is too long".to_owned());
                break;
            }
            match self.socket.read(room) {
                Ok(0) => flow = StreamFlow::Broken("it was closed".to_owned()),
                Ok(bytes) => {
                    self.incoming.end += bytes;
                    flow = self.process(&mut take);
                    if bytes < most {
                        break;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => flow = StreamFlow::Broken(error.to_string()),
            }
        }
        match self.send(&mut VecDeque::new()) {
            StreamFlow::Broken(error) if flow == StreamFlow::Open => StreamFlow::Broken(error),
            _ => flow,
        }
    }

    /// Decrypts the bytes that have come, and answers. An error ends the connection at once, without an alert that
    /// says why. To make an alert, TLS would look again at the bytes that it has refused.
    fn process(&mut self, take: &mut impl FnMut(&[u8]) -> bool) -> StreamFlow {
        while !self.has_ended {
            match self.step(take) {
                Step::Again => continue,
                Step::Wait => {}
                Step::Ready => {
                    self.tls = std::mem::replace(&mut self.tls, Tls::Broken(String::new())).into_ready();
                    continue;
                }
                Step::Ended => self.has_ended = true,
                Step::Refused => self.tls = Tls::Broken("it said what was not expected".to_owned()),
                Step::Broken(error) => self.tls = Tls::Broken(error),
            }
            break;
        }
        match &self.tls {
            Tls::Broken(error) => StreamFlow::Broken(error.clone()),
            _ if self.has_ended => StreamFlow::Ended,
            _ => StreamFlow::Open,
        }
    }

    fn step(&mut self, take: &mut impl FnMut(&[u8]) -> bool) -> Step {
        let (incoming, outgoing) = (self.incoming.filled(), &mut self.outgoing);
        let (taken, step) = match &mut self.tls {
            Tls::Client(tls) => step(tls.process_tls_records(incoming), outgoing, take),
            Tls::Server(tls) => step(tls.process_tls_records(incoming), outgoing, take),
            Tls::Ready(records, _) => match records.open(incoming, take) {
                Ok(OpenedRecord::Taken(bytes)) => (bytes, Step::Again),
                Ok(OpenedRecord::Nothing) => (0, Step::Wait),
                Ok(OpenedRecord::Ended) => (0, Step::Ended),
                Ok(OpenedRecord::Refused) => (0, Step::Refused),
                Err(error) => (0, Step::Broken(error)),
            },
            Tls::Stranger(_) => (0, Step::Wait),
            Tls::Broken(error) => (0, Step::Broken(error.clone())),
        };
        self.incoming.take(taken);
        step
    }

    /// Sends words as soon as both sides have shown who they are, before anything else.
    pub(super) fn say(&mut self, words: &[u8]) {
        self.words.push_back(Bytes::copy_from_slice(words));
    }

    /// Takes as much from the front of `chunks` as may be sent now.
    pub(super) fn send(&mut self, chunks: &mut VecDeque<Bytes>) -> StreamFlow {
        self.has_more = false;
        for _ in 0..WRITES {
            let flow = self.flush();
            let is_full = self.outgoing.end > 0;
            if flow != StreamFlow::Open || is_full || self.is_finished {
                return flow;
            }
            let next = if self.words.is_empty() { &mut *chunks } else { &mut self.words };
            let records = match &mut self.tls {
                Tls::Ready(records, _) => records,
                Tls::Broken(error) => return StreamFlow::Broken(error.clone()),
                Tls::Stranger(_) | Tls::Client(_) | Tls::Server(_) => return StreamFlow::Open,
            };
            while let Some(chunk) = next.front_mut() {
                let sealed = records.seal(chunk, self.outgoing.free());
                let (taken, bytes) = match sealed {
                    Ok(sealed) => sealed,
                    Err(error) => return self.breaks(error),
                };
                chunk.advance(taken);
                self.outgoing.end += bytes;
                if !chunk.is_empty() {
                    break;
                }
                next.pop_front();
            }
            if self.outgoing.end == 0 {
                return StreamFlow::Open;
            }
        }
        self.has_more = !chunks.is_empty();
        self.flush()
    }

    fn breaks(&mut self, error: String) -> StreamFlow {
        self.tls = Tls::Broken(error.clone());
        StreamFlow::Broken(error)
    }

    /// Ends this side: no more will be written, and the other side is told so.
    pub(super) fn finish(&mut self) -> StreamFlow {
        if std::mem::replace(&mut self.is_finished, true) {
            return StreamFlow::Open;
        }
        let closed = match &mut self.tls {
            Tls::Ready(records, _) => records.close(self.outgoing.free()),
            Tls::Broken(error) => Err(error.clone()),
            Tls::Stranger(_) | Tls::Client(_) | Tls::Server(_) => Err("nothing has been said yet".to_owned()),
        };
        match closed {
            Ok(bytes) => self.outgoing.end += bytes,
            Err(error) => return self.breaks(error),
        }
        self.flush()
    }

    fn flush(&mut self) -> StreamFlow {
        if self.is_connecting {
            return StreamFlow::Open;
        }
        while self.outgoing.end > 0 {
            match self.socket.write(self.outgoing.filled()) {
                Ok(bytes) => self.outgoing.take(bytes),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return StreamFlow::Open,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return StreamFlow::Broken(error.to_string()),
            }
        }
        if self.is_finished {
            // The connection is gone already, or everything has been said.
            let _ = self.socket.shutdown(Shutdown::Write);
        }
        StreamFlow::Open
    }
}

#[cfg(test)]
impl TcpConnection {
    pub(super) fn change_keys_after(&mut self, sent: u64) {
        let Tls::Ready(records, _) = &mut self.tls else { panic!("it has no keys yet") };
        records.change_keys_after(sent);
    }

    pub(super) fn copy_socket(&self) -> OwnedFd {
        self.socket.try_clone().expect("a copy").into()
    }
}

impl Drop for TcpConnection {
    /// A forked process may have the socket, too. Closing it here would neither end the connection nor make epoll
    /// forget it.
    fn drop(&mut self) {
        if let Some((epoll, _)) = &self.watched {
            let _ = epoll::delete(epoll, &self.socket);
        }
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

impl Tls {
    /// The state after the handshake.
    fn into_ready(self) -> Self {
        let (certificate, records) = match self {
            Self::Client(tls) => {
                (tls.peer_certificates().and_then(Certificate::of_chain), Records::of_client(tls))
            }
            Self::Server(tls) => {
                (tls.peer_certificates().and_then(Certificate::of_chain), Records::of_server(tls))
            }
            other => return other,
        };
        match records {
            Ok(records) => Self::Ready(records, certificate),
            Err(error) => Self::Broken(error),
        }
    }
}

/// One step of the handshake, and how many of the bytes that have come it consumed.
fn step<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    outgoing: &mut Buffer,
    take: &mut impl FnMut(&[u8]) -> bool,
) -> (usize, Step) {
    let UnbufferedStatus { discard, state } = status;
    let step = match state {
        Ok(ConnectionState::ReadTraffic(mut traffic)) => loop {
            match traffic.next_record() {
                Some(Ok(record)) if take(record.payload) => {}
                Some(Ok(_)) => break Step::Refused,
                Some(Err(error)) => break Step::Broken(error.to_string()),
                None => break Step::Again,
            }
        },
        Ok(ConnectionState::EncodeTlsData(mut data)) => match data.encode(outgoing.free()) {
            Ok(bytes) => {
                outgoing.end += bytes;
                Step::Again
            }
            Err(EncodeError::InsufficientSize(_)) => Step::Broken("it asks and does not listen".to_owned()),
            Err(error) => Step::Broken(error.to_string()),
        },
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done();
            Step::Again
        }
        Ok(ConnectionState::BlockedHandshake) => Step::Wait,
        Ok(ConnectionState::WriteTraffic(_)) => Step::Ready,
        Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Step::Ended,
        Ok(state) => Step::Broken(format!("what was not asked for: {state:?}")),
        Err(error) => Step::Broken(error.to_string()),
    };
    (discard, step)
}
