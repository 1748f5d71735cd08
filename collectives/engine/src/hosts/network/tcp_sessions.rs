//! Large rounds between hosts: a TCP connection for each communicator and host that has sent one, and the bridges that
//! say what goes over them. QUIC carries everything else (`mesh.rs`), and also tells which hosts are lost.
//!
//! The host that sends makes the connection, when it first has something to send. The other side answers the greeting
//! once it has made the communicator, too. From then on it reads at once, so no communicator can hold up another one.

use std::collections::{BTreeMap, VecDeque};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustls::ServerConfig;

use super::address::Address;
use super::failures::refused;
use super::greeting::{Early, GREETING, GREETING_BYTES, Greeting};
use super::tcp_connection::{TcpConnection, TcpFlow};
use super::timeouts::{LOOK, SILENCE};
use super::tls::{Expected, Identity};
use crate::hosts::bridge::{Bridge, Frames, Outbox};
use tpurun_memory::failure::Failure;
use tpurun_protocol::refusals::Refusals;

/// Connections that have not said yet what they are for, at most.
const MOST_UNKNOWN: usize = 256;
/// New connections that are taken between two looks at other connections.
const MOST_AT_ONCE: usize = 64;
/// Connections that may wait for their communicators; each has a socket.
const MOST_WAITING: usize = 4096;
/// Time after which a host that cannot be reached is given up. QUIC notices a lost host before.
const UNREACHABLE: Duration = SILENCE.saturating_add(Duration::from_secs(5));

/// The reason why a connection that says nothing, or nothing that is known, is closed.
const SILENT: &str = "it did not say what it is for";

/// The bit that marks events of these connections in epoll; the rest is the number of the connection.
pub(super) const SESSIONS: u64 = 1 << 63;
const LISTENER: u64 = SESSIONS;

/// All TCP connections of one driver.
pub(super) struct TcpSessions {
    listener: TcpListener,
    epoll: Arc<OwnedFd>,
    identity: Arc<Identity>,
    server: Arc<ServerConfig>,
    lines: BTreeMap<u64, (TcpConnection, Purpose)>,
    last: u64,
    communicators: BTreeMap<u64, Communicator>,
    early: Early<u64>,
    next_look: Option<Instant>,
    /// Whether nobody is let in before the next look.
    is_deaf: bool,
    /// Communicators that are over, which nobody has been told yet.
    over: Vec<u64>,
    /// Communicators whose other bridges on this host must look, and have not been told yet.
    calls: Vec<u64>,
    refusals: Refusals,
}

/// The purpose of a connection.
#[derive(Debug)]
enum Purpose {
    /// The purpose is not known yet: the bytes that have come so far, and since when the connection is there.
    Unknown(Vec<u8>, Instant),
    /// The connection waits for its communicator to be made here.
    Early(Greeting),
    /// Pieces come from that host.
    From(RemoteHost),
    /// Pieces go to that host, which has answered so much.
    To(RemoteHost, Vec<u8>),
    /// Nothing is needed of the connection any more.
    Ending(Instant),
}

/// A host of a communicator.
#[derive(Clone, Copy, Debug)]
struct RemoteHost {
    communicator: u64,
    host: u32,
}

struct Communicator {
    bridge: Bridge,
    /// The sessions with the other hosts, by host.
    ways: Vec<Session>,
    /// Whether nothing more will happen here that others must be told.
    is_quiet: bool,
    /// Whether no more connections are made.
    is_stopped: bool,
}

impl Communicator {
    /// Whether all ranks of a host have left or are lost.
    fn has_nobody(&self, host: u32) -> bool {
        let segment = self.bridge.segment();
        let is_gone = |rank: &u32| segment.roster().left(*rank).is_some() || segment.roster().is_lost(*rank);
        segment.hosts().ranks(host).iter().all(is_gone)
    }
}

/// The traffic to and from one host.
struct Session {
    address: Address,
    /// The pieces to be sent.
    out: VecDeque<Bytes>,
    to: To,
    /// The connection that pieces come over, if any have come.
    from: Option<u64>,
    /// When a connection to or from there has broken, and why. QUIC finds out whether the host is lost. A session that
    /// is still here long after that is cut off.
    broken: Option<(Instant, String)>,
    frames: Frames,
}

#[derive(Clone, Copy, Debug)]
enum To {
    /// Nothing has been sent yet.
    Unused,
    /// The next look connects; since this time there is something to be sent.
    Apart(Instant),
    /// The greeting is not answered yet.
    Greeting(u64, Instant),
    Open(u64),
    /// Everything is written; the session lasts until the other side has it, or until this time.
    Finishing(u64, Instant),
    Closed,
}

impl TcpSessions {
    pub(super) fn new(
        listener: TcpListener,
        epoll: Arc<OwnedFd>,
        identity: Arc<Identity>,
        expected: Expected,
    ) -> Result<Self, Failure> {
        let server = Arc::new(identity.tcp_server(expected)?);
        let lanes = Self {
            listener,
            epoll,
            identity,
            server,
            lines: BTreeMap::new(),
            last: 0,
            communicators: BTreeMap::new(),
            early: Early::new(),
            next_look: None,
            is_deaf: false,
            over: vec![],
            calls: vec![],
            refusals: Refusals::default(),
        };
        let (event, flags) = (EventData::new_u64(LISTENER), EventFlags::IN);
        let watched = epoll::add(&lanes.epoll, &lanes.listener, event, flags);
        watched.map_err(|error| refused("watch a socket", &error))?;
        Ok(lanes)
    }

    /// Has `bridge` send its pieces to the other hosts of its communicator, whose first ranks are at `addresses`, by
    /// host.
    pub(super) fn add(&mut self, now: Instant, id: u64, bridge: Bridge, addresses: Vec<Address>) {
        let own = bridge.segment().host();
        let ways = (0_u32..).zip(addresses).map(|(host, address)| {
            let to = if host == own { To::Closed } else { To::Unused };
            Session { address, out: VecDeque::new(), to, from: None, broken: None, frames: Frames::default() }
        });
        let ways: Vec<Session> = ways.collect();
        let hosts = ways.len() as u32;
        self.communicators.insert(id, Communicator { bridge, ways, is_quiet: false, is_stopped: false });
        for host in 0..hosts {
            let greeting = Greeting { communicator: id, host };
            for token in self.early.take(greeting) {
                if let Some((line, _)) = self.lines.remove(&token) {
                    self.introduce(greeting, token, line);
                }
            }
        }
        self.rung(now, id);
    }

    /// Ends the sessions that are not connected; those that are get everything they were to be sent.
    pub(super) fn stop(&mut self, now: Instant, id: u64) {
        let Some(communicator) = self.communicators.get_mut(&id) else { return };
        communicator.is_stopped = true;
        communicator.bridge.stop();
        self.look(now, id, Bridge::look_closely);
    }

    /// Another bridge of this host has something for the one here.
    pub(super) fn rung(&mut self, now: Instant, id: u64) {
        self.look(now, id, Bridge::look);
    }

    fn look(&mut self, now: Instant, id: u64, look: fn(&mut Bridge) -> Outbox) {
        let Some(communicator) = self.communicators.get_mut(&id) else { return };
        if !communicator.is_quiet {
            let out = look(&mut communicator.bridge);
            for (way, parcel) in communicator.ways.iter_mut().zip(out) {
                way.out.extend(parcel.into_chunks());
            }
            communicator.is_quiet = communicator.bridge.is_over();
        }
        let is_quiet = communicator.is_quiet;
        for host in 0..communicator.ways.len() as u32 {
            self.advance(now, RemoteHost { communicator: id, host });
        }
        self.end_if_over(now, id);
        if is_quiet && self.communicators.contains_key(&id) {
            self.wake(now);
        }
    }

    fn way(&mut self, place: RemoteHost) -> Option<(&mut Communicator, u32)> {
        self.communicators.get_mut(&place.communicator).map(|communicator| (communicator, place.host))
    }

    /// Sends everything that is to be sent, and finishes if that is all.
    fn advance(&mut self, now: Instant, place: RemoteHost) {
        let Some(communicator) = self.communicators.get_mut(&place.communicator) else { return };
        let (is_quiet, is_stopped) = (communicator.is_quiet, communicator.is_stopped);
        let way = &mut communicator.ways[place.host as usize];
        match way.to {
            To::Unused if way.out.is_empty() => {
                if is_quiet {
                    way.to = To::Closed;
                }
            }
            To::Unused | To::Apart(_) | To::Greeting(..) if is_stopped => self.close(place),
            To::Unused => self.connect(now, place, now),
            To::Open(token) => {
                let Some((line, _)) = self.lines.get_mut(&token) else { return };
                let mut flow = line.send(&mut way.out);
                if flow == TcpFlow::Open && is_quiet && way.out.is_empty() {
                    way.to = To::Finishing(token, now + SILENCE);
                    flow = line.finish();
                    self.wake(now);
                }
                // Otherwise the bytes that have come may say that no more is needed, so they are read first.
                if flow == TcpFlow::Open {
                    self.watch(token);
                }
            }
            To::Closed => way.out.clear(),
            To::Apart(_) | To::Greeting(..) | To::Finishing(..) => {}
        }
    }

    fn connect(&mut self, now: Instant, place: RemoteHost, since: Instant) {
        self.wake(now);
        let identity = self.identity.clone();
        let Some((communicator, host)) = self.way(place) else { return };
        let own = communicator.bridge.segment().host();
        let way = &mut communicator.ways[host as usize];
        match TcpConnection::connect(&identity, &way.address) {
            Ok(mut line) => {
                line.say(&Greeting { communicator: place.communicator, host: own }.encode());
                let token = self.keep(line, Purpose::To(place, vec![]));
                if let Some((communicator, host)) = self.way(place) {
                    communicator.ways[host as usize].to = To::Greeting(token, since);
                }
            }
            Err(why) => self.apart(now, place, since, &why),
        }
    }

    /// Tries again later, unless the tries have gone on for long.
    fn apart(&mut self, now: Instant, place: RemoteHost, since: Instant, why: &str) {
        let Some((communicator, host)) = self.way(place) else { return };
        communicator.ways[host as usize].to = To::Apart(since);
        if since + UNREACHABLE <= now {
            self.give_up(place, why);
            self.needs_no_more(now, place);
        }
        self.wake(now);
    }

    fn close(&mut self, place: RemoteHost) {
        let Some((communicator, host)) = self.way(place) else { return };
        let way = &mut communicator.ways[host as usize];
        way.out.clear();
        if let To::Greeting(token, _) | To::Open(token) | To::Finishing(token, _) =
            std::mem::replace(&mut way.to, To::Closed)
        {
            self.lines.remove(&token);
        }
    }

    fn end_if_over(&mut self, now: Instant, id: u64) {
        let is_closed = |way: &Session| matches!(way.to, To::Closed);
        let is_over =
            |communicator: &Communicator| communicator.is_quiet && communicator.ways.iter().all(is_closed);
        if !self.communicators.get(&id).is_some_and(is_over) {
            return;
        }
        let communicator = self.communicators.remove(&id).expect("it was just there");
        for token in communicator.ways.iter().filter_map(|way| way.from) {
            if let Some((line, _)) = self.lines.remove(&token) {
                self.end(now, token, line);
            }
        }
        self.over.push(id);
    }

    /// Says on a connection that no more of it is needed, and reads what is still on its way. A process that closed it
    /// at once would look like one that is lost.
    fn end(&mut self, now: Instant, token: u64, mut line: TcpConnection) {
        if line.finish() == TcpFlow::Open {
            self.lines.insert(token, (line, Purpose::Ending(now + SILENCE)));
            self.watch(token);
            self.wake(now);
        }
    }

    /// Whether connections are read to their end, which their other sides bring about at once.
    pub(super) fn is_ending(&self) -> bool {
        self.lines.values().any(|(_, used)| matches!(used, Purpose::Ending(_)))
    }

    /// Communicators that are over.
    pub(super) fn over(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.over)
    }

    /// Communicators whose other bridges on this host must look.
    pub(super) fn calls(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.calls)
    }

    /// Keeps a new connection, and has epoll watch it.
    fn keep(&mut self, line: TcpConnection, used: Purpose) -> u64 {
        self.last += 1;
        self.lines.insert(self.last, (line, used));
        self.watch(self.last);
        self.last
    }

    fn watch(&mut self, token: u64) {
        let Some((line, used)) = self.lines.get_mut(&token) else { return };
        let flags = wanted(line, used);
        if let Err(error) = line.watch(&self.epoll, SESSIONS | token, flags) {
            // The connection will be late, and be closed.
            tracing::warn!(%error, "the network thread can not watch a connection");
        }
    }

    /// Something has happened to a socket.
    pub(super) fn ready(&mut self, now: Instant, event: u64) {
        if event == LISTENER {
            return self.accept(now);
        }
        let token = event & !SESSIONS;
        let Some((line, used)) = self.lines.remove(&token) else { return };
        match used {
            Purpose::Unknown(said, since) => self.hear_greeting(now, token, line, said, since),
            // A connection has nothing to say before it is answered.
            Purpose::Early(greeting) => self.early.forget(greeting, &token),
            Purpose::From(place) => self.hear(now, token, line, place),
            Purpose::To(place, said) => self.hear_answer(now, token, line, place, said),
            Purpose::Ending(until) => self.hear_end(token, line, until),
        }
    }

    /// Logs a refusal, once for many.
    fn refuse(&mut self, now: Instant, from: SocketAddr, why: &str) {
        if let Some(line) = self.refusals.add(format!("refused {from}: {why}"), now) {
            tracing::warn!("{line}");
        }
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..MOST_AT_ONCE {
            let (socket, from) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) =>
                {
                    continue;
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot take a connection now");
                    self.is_deaf = true;
                    let event = EventData::new_u64(LISTENER);
                    let _ = epoll::modify(&self.epoll, &self.listener, event, EventFlags::empty());
                    return self.wake(now);
                }
            };
            let unknown = self.lines.iter().filter(|(_, (_, used))| matches!(used, Purpose::Unknown(..)));
            let unknown: Vec<(u64, IpAddr)> =
                unknown.map(|(token, (line, _))| (*token, line.from().ip())).collect();
            if unknown.len() >= MOST_UNKNOWN
                && let Some(token) = most_crowded(&unknown)
                && let Some((line, _)) = self.lines.remove(&token)
            {
                self.refuse(now, line.from(), "too many have not said what they are for");
            }
            match TcpConnection::accept(socket, from, &self.server, self.identity.invitation()) {
                Ok(line) => drop(self.keep(line, Purpose::Unknown(vec![], now))),
                Err(error) => self.refuse(now, from, &error),
            }
            self.wake(now);
        }
    }

    fn hear_greeting(
        &mut self,
        now: Instant,
        token: u64,
        mut line: TcpConnection,
        mut said: Vec<u8>,
        since: Instant,
    ) {
        let flow = line.receive(|bytes| {
            said.extend(bytes);
            said.len() <= GREETING_BYTES
        });
        if let TcpFlow::Broken(error) = &flow {
            // A process that is let in and leaves before it has said anything needs no warning.
            if !line.is_ready() {
                self.refuse(now, line.from(), error);
            }
            return;
        }
        let Ok(words) = <[u8; GREETING_BYTES]>::try_from(&said[..]) else {
            if flow == TcpFlow::Ended {
                return;
            }
            self.lines.insert(token, (line, Purpose::Unknown(said, since)));
            return self.watch(token);
        };
        let Some(greeting) = Greeting::decode(&words) else {
            return self.refuse(now, line.from(), SILENT);
        };
        self.introduce(greeting, token, line);
    }

    fn introduce(&mut self, greeting: Greeting, token: u64, mut line: TcpConnection) {
        let Greeting { communicator: id, host } = greeting;
        let Some(communicator) = self.communicators.get_mut(&id) else {
            if self.early.count() < MOST_WAITING && self.early.keep(greeting, token) {
                self.lines.insert(token, (line, Purpose::Early(greeting)));
                self.watch(token);
            }
            return;
        };
        let way = communicator.ways.get_mut(host as usize).filter(|way| way.from.is_none());
        let shown = line.certificate();
        let Some(way) = way.filter(|way| shown.is_some_and(|shown| way.address.who.has_shown(shown))) else {
            // The process is of this job, but not the one that it says it is.
            tracing::warn!(host, "refused a connection from another process than the host's first rank");
            return;
        };
        way.from = Some(token);
        // The answer repeats the greeting. The next event tells what comes of it.
        line.say(&greeting.encode());
        line.send(&mut VecDeque::new());
        self.lines.insert(token, (line, Purpose::From(RemoteHost { communicator: id, host })));
        self.watch(token);
    }

    /// Takes in the pieces that a host has sent.
    fn hear(&mut self, now: Instant, token: u64, mut line: TcpConnection, place: RemoteHost) {
        let Some((communicator, host)) = self.way(place) else { return };
        let Communicator { bridge, ways, .. } = communicator;
        let way = &mut ways[host as usize];
        let mut wrong = None;
        let flow = line.receive(|bytes| {
            wrong = way.frames.feed(bytes, |header, payload| bridge.take(host, header, payload)).err();
            wrong.is_none()
        });
        match (wrong, &flow) {
            (Some(wrong), _) => bridge.refuse(host, wrong),
            (None, TcpFlow::Ended) => bridge.end(host),
            (None, TcpFlow::Broken(why)) => drop(way.broken.get_or_insert((now, why.clone()))),
            (None, TcpFlow::Open) => {}
        }
        if bridge.calls() {
            self.calls.push(place.communicator);
        }
        match flow {
            TcpFlow::Open => {
                self.lines.insert(token, (line, Purpose::From(place)));
                self.watch(token);
            }
            TcpFlow::Ended => self.end(now, token, line),
            TcpFlow::Broken(_) => self.wake(now),
        }
    }

    /// Takes in the answer of a host that pieces are sent to, or its word that it needs no more.
    fn hear_answer(
        &mut self,
        now: Instant,
        token: u64,
        mut line: TcpConnection,
        place: RemoteHost,
        mut said: Vec<u8>,
    ) {
        let Some((communicator, host)) = self.way(place) else { return };
        let own = communicator.bridge.segment().host();
        let to = communicator.ways[host as usize].to;
        let answer = Greeting { communicator: place.communicator, host: own }.encode();
        let flow = read_answer(&mut line, &answer, &mut said);
        let is_answered = said == answer;
        match (to, flow) {
            (To::Greeting(..), TcpFlow::Open) => {
                self.lines.insert(token, (line, Purpose::To(place, said)));
                self.watch(token);
                if is_answered {
                    self.become_open(now, place, token);
                }
            }
            (To::Greeting(_, since), flow) if !(is_answered && flow == TcpFlow::Ended) => {
                let why = if let TcpFlow::Broken(why) = flow { why } else { "it was closed".to_owned() };
                self.apart(now, place, since, &why);
            }
            (To::Finishing(..), TcpFlow::Ended | TcpFlow::Broken(_)) => self.needs_no_more(now, place),
            (_, TcpFlow::Open) => {
                self.lines.insert(token, (line, Purpose::To(place, said)));
                self.watch(token);
                self.advance(now, place);
                self.end_if_over(now, place.communicator);
            }
            (_, TcpFlow::Ended) => {
                self.needs_no_more(now, place);
                self.end(now, token, line);
            }
            (_, TcpFlow::Broken(why)) => {
                if let Some((communicator, host)) = self.way(place) {
                    communicator.ways[host as usize].broken.get_or_insert((now, why));
                }
                self.needs_no_more(now, place);
                self.wake(now);
            }
        }
    }

    fn become_open(&mut self, now: Instant, place: RemoteHost, token: u64) {
        if let Some((communicator, host)) = self.way(place) {
            communicator.ways[host as usize].to = To::Open(token);
        }
        self.advance(now, place);
        self.end_if_over(now, place.communicator);
    }

    fn needs_no_more(&mut self, now: Instant, place: RemoteHost) {
        self.close(place);
        self.end_if_over(now, place.communicator);
    }

    fn hear_end(&mut self, token: u64, mut line: TcpConnection, until: Instant) {
        if line.receive(|_| true) == TcpFlow::Open {
            self.lines.insert(token, (line, Purpose::Ending(until)));
            self.watch(token);
        }
    }

    fn wake(&mut self, now: Instant) {
        self.next_look.get_or_insert(now + LOOK);
    }

    /// When [`tick`](Self::tick) has something to do.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.next_look
    }

    /// Does everything that is due.
    pub(super) fn tick(&mut self, now: Instant) {
        if self.next_look.is_none_or(|look| now < look) {
            return;
        }
        self.next_look = None;
        if std::mem::take(&mut self.is_deaf) {
            let event = EventData::new_u64(LISTENER);
            let _ = epoll::modify(&self.epoll, &self.listener, event, EventFlags::IN);
        }
        let places = self.communicators.iter().flat_map(|(id, communicator)| {
            (0_u32..)
                .zip(&communicator.ways)
                .map(move |(host, way)| (RemoteHost { communicator: *id, host }, way.to))
        });
        for (place, to) in places.collect::<Vec<_>>() {
            self.cut_off_if_broken(now, place);
            match to {
                To::Closed => {}
                _ if self.is_for_nobody(place) => self.needs_no_more(now, place),
                To::Apart(since) => self.connect(now, place, since),
                To::Greeting(token, since) if since + UNREACHABLE <= now && !self.is_ready(token) => {
                    self.lines.remove(&token);
                    self.apart(now, place, since, "nothing answers");
                }
                To::Greeting(..) => self.wake(now),
                To::Finishing(_, until) if until <= now => self.needs_no_more(now, place),
                To::Finishing(..) => self.wake(now),
                To::Unused | To::Open(_) => {}
            }
        }
        if self.communicators.values().any(|communicator| communicator.is_quiet) {
            self.wake(now);
        }
        self.close_late(now);
    }

    /// Closes connections that have not said in time what they are for, or are to end now.
    fn close_late(&mut self, now: Instant) {
        let mut late = vec![];
        for (token, (line, used)) in &self.lines {
            match used {
                Purpose::Unknown(_, since) if *since + GREETING <= now => {
                    late.push((*token, Some(line.from())))
                }
                Purpose::Ending(until) if *until <= now => late.push((*token, None)),
                Purpose::Unknown(..) | Purpose::Ending(_) => self.next_look = Some(now + LOOK),
                Purpose::Early(_) | Purpose::From(_) | Purpose::To(..) => {}
            }
        }
        for (token, refused) in late {
            self.lines.remove(&token);
            if let Some(from) = refused {
                self.refuse(now, from, SILENT);
            }
        }
    }

    /// Cuts off a host whose connection has broken, though the host is not lost.
    fn cut_off_if_broken(&mut self, now: Instant, place: RemoteHost) {
        let Some((communicator, host)) = self.way(place) else { return };
        let way = &mut communicator.ways[host as usize];
        match way.broken.take() {
            Some((since, why)) if since + UNREACHABLE <= now => self.give_up(place, &why),
            Some(broken) => {
                way.broken = Some(broken);
                self.wake(now);
            }
            None => {}
        }
    }

    /// Gives up a host: no more pieces come from there or go there.
    fn give_up(&mut self, place: RemoteHost, why: &str) {
        let Some((communicator, host)) = self.way(place) else { return };
        if communicator.has_nobody(host) {
            communicator.bridge.end(host);
        } else {
            let socket = communicator.ways[host as usize].address.socket;
            communicator.bridge.cut_off(host, &format!("TCP connection to {socket}: {why}"));
        }
        if communicator.bridge.calls() {
            self.calls.push(place.communicator);
        }
    }

    /// Whether everything is said here, and nobody is there any more who needs it.
    fn is_for_nobody(&mut self, place: RemoteHost) -> bool {
        self.way(place)
            .is_none_or(|(communicator, host)| communicator.is_quiet && communicator.has_nobody(host))
    }

    fn is_ready(&self, token: u64) -> bool {
        self.lines.get(&token).is_some_and(|(line, _)| line.is_ready())
    }
}

/// Reads more of an answer, which must be these words.
fn read_answer(line: &mut TcpConnection, answer: &[u8], said: &mut Vec<u8>) -> TcpFlow {
    let flow = line.receive(|bytes| {
        said.extend(bytes);
        said.len() <= GREETING_BYTES
    });
    match flow {
        TcpFlow::Open if !answer.starts_with(said) => {
            TcpFlow::Broken("it answered something else".to_owned())
        }
        flow => flow,
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
    /// Has these bytes be sent to a host.
    pub(super) fn say(&mut self, now: Instant, id: u64, host: u32, words: Bytes) {
        self.communicators.get_mut(&id).expect("it is there").ways[host as usize].out.push_back(words);
        self.advance(now, RemoteHost { communicator: id, host });
    }

    pub(super) fn knows(&self, id: u64) -> bool {
        self.communicators.contains_key(&id)
    }

    /// Whether pieces for a host go there.
    pub(super) fn is_open(&self, id: u64, host: u32) -> bool {
        let communicator = self.communicators.get(&id);
        communicator.is_some_and(|communicator| matches!(communicator.ways[host as usize].to, To::Open(_)))
    }

    /// Whether a host has been let in.
    pub(super) fn hears(&self, id: u64, host: u32) -> bool {
        self.communicators
            .get(&id)
            .is_some_and(|communicator| communicator.ways[host as usize].from.is_some())
    }

    pub(super) fn early(&self) -> usize {
        self.early.count()
    }

    /// The sockets, as a process has them that is forked now.
    pub(super) fn copy_sockets(&self) -> Vec<OwnedFd> {
        self.lines.values().map(|(line, _)| line.copy_socket()).collect()
    }

    /// Connections that are kept.
    pub(super) fn lines(&self) -> usize {
        self.lines.len()
    }
}

fn wanted(line: &TcpConnection, used: &Purpose) -> EventFlags {
    // The connection must wait, and so must the bytes it sends; it may leave.
    let is_heard = !matches!(used, Purpose::Early(_));
    let read = if is_heard { EventFlags::IN } else { EventFlags::RDHUP };
    if line.has_more_to_send() { read | EventFlags::OUT } else { read }
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
