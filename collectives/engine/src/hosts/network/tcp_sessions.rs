//! Large rounds between hosts: a TCP connection for each communicator and host that has sent one, and the bridges that
//! say what goes over them. QUIC carries everything else (`mesh.rs`), and also tells which hosts are lost.
//!
//! The host that sends makes the connection, when it first has something to send. The other side answers the greeting
//! once it has made the communicator, too. From then on it reads at once, so no communicator can hold up another one.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustls::ServerConfig;

use super::failures::refused;
use super::purposes::Purpose;
use super::sessions::Sessions;
use super::tcp_connection::TcpConnection;
use super::tcp_streams::{SESSIONS, TcpStreams};
use super::tls::{Expected, Identity};
use tpurun_memory::failure::Failure;

/// Connections that have not said yet what they are for, at most.
const MOST_UNKNOWN: usize = 256;
/// New connections that are taken between two looks at other connections.
const MOST_AT_ONCE: usize = 64;

/// The number of the listener in events of epoll.
const LISTENER: u64 = SESSIONS;

/// All TCP connections of one driver.
pub(super) struct TcpSessions {
    pub(super) sessions: Sessions<TcpStreams>,
    listener: TcpListener,
    epoll: Arc<OwnedFd>,
    identity: Arc<Identity>,
    server: Arc<ServerConfig>,
    /// Whether nobody is let in before the next look.
    is_deaf: bool,
}

impl TcpSessions {
    pub(super) fn new(
        listener: TcpListener,
        epoll: Arc<OwnedFd>,
        identity: Arc<Identity>,
        expected: Expected,
    ) -> Result<Self, Failure> {
        let server = Arc::new(identity.tcp_server(expected)?);
        let (event, flags) = (EventData::new_u64(LISTENER), EventFlags::IN);
        epoll::add(&epoll, &listener, event, flags).map_err(|error| refused("watch a socket", &error))?;
        let sessions = Sessions::new(TcpStreams::new(epoll.clone(), identity.clone()));
        Ok(Self { sessions, listener, epoll, identity, server, is_deaf: false })
    }

    /// Something has happened to a socket.
    pub(super) fn ready(&mut self, now: Instant, event: u64) {
        if event == LISTENER {
            return self.accept(now);
        }
        let stream = event & !SESSIONS;
        if self.sessions.purposes.get_mut(stream).is_some_and(|purpose| purpose.is_early()) {
            // A connection has nothing to say before it is answered, so it is gone.
            return self.sessions.drop_stream(stream);
        }
        self.sessions.read(now, stream);
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..MOST_AT_ONCE {
            match self.listener.accept() {
                Ok((socket, from)) => self.let_in(now, socket, from),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) => return self.become_deaf(now, &error),
            }
        }
    }

    fn let_in(&mut self, now: Instant, socket: TcpStream, from: SocketAddr) {
        self.make_room(now);
        match TcpConnection::accept(socket, from, &self.server, self.identity.invitation()) {
            Ok(line) => {
                let stream = self.sessions.streams.keep(line);
                self.sessions.opened(now, stream);
            }
            Err(error) => self.sessions.streams.refuse_from(now, from, &error),
        }
        self.sessions.next_look.wake(now);
    }

    /// Closes a connection, if too many have not said what they are for.
    fn make_room(&mut self, now: Instant) {
        let streams = &self.sessions.streams;
        let unknown = self.sessions.purposes.streams_where(Purpose::is_unknown).into_iter();
        let unknown: Vec<(u64, IpAddr)> =
            unknown.filter_map(|stream| Some((stream, streams.from(stream)?.ip()))).collect();
        if unknown.len() >= MOST_UNKNOWN
            && let Some(stream) = most_crowded(&unknown)
            && let Some(from) = streams.from(stream)
        {
            self.sessions.drop_stream(stream);
            self.sessions.streams.refuse_from(now, from, "too many have not said what they are for");
        }
    }

    /// Lets nobody in before the next look: this process has no room for a socket now.
    fn become_deaf(&mut self, now: Instant, error: &io::Error) {
        tracing::warn!(%error, "cannot take a connection now");
        self.is_deaf = true;
        self.listen(EventFlags::empty());
        self.sessions.next_look.wake(now);
    }

    fn listen(&self, flags: EventFlags) {
        let _ = epoll::modify(&self.epoll, &self.listener, EventData::new_u64(LISTENER), flags);
    }

    /// Does everything that is due.
    pub(super) fn tick(&mut self, now: Instant) {
        if self.sessions.next_look.is_due(now) && std::mem::take(&mut self.is_deaf) {
            self.listen(EventFlags::IN);
        }
        self.sessions.tick(now);
    }
}

/// Chooses among connections, oldest first, that have not said what they are for: the oldest one of the address that
/// has the most. A host of the job says at once what it comes for. So a stranger with many connections crowds out its
/// own alone.
fn most_crowded(unknown: &[(u64, IpAddr)]) -> Option<u64> {
    let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
    unknown.iter().for_each(|(_, address)| *counts.entry(*address).or_default() += 1);
    let most = counts.values().copied().max()?;
    unknown.iter().find(|(_, address)| counts[address] == most).map(|(token, _)| *token)
}

#[cfg(test)]
impl TcpSessions {
    pub(super) fn streams(&self) -> &TcpStreams {
        &self.sessions.streams
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crowd_of_one_address_makes_room_itself() {
        let at = |last: u8| IpAddr::from([10, 0, 0, last]);
        assert_eq!(most_crowded(&[]), None);
        // The first connection of all is of a host that has come once.
        let flood = (2..200).map(|token| (token, at(9)));
        let unknown: Vec<_> = [(1, at(1))].into_iter().chain(flood).chain([(300, at(2))]).collect();
        assert_eq!(most_crowded(&unknown), Some(2));
        // No address has more than others, so the oldest connection goes.
        assert_eq!(most_crowded(&[(4, at(3)), (5, at(1)), (6, at(2))]), Some(4));
    }
}
