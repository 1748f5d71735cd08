//! Connections for large rounds, over loopback: which are let in, and what becomes of those that end.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use proptest::prelude::*;
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustls::{ServerConnection, Stream};

use super::super::address::Address;
use super::super::certificate::Who;
use super::super::flow::StreamFlow;
use super::super::greeting::GREETING_BYTES;
use super::super::invitation::PROOF_BYTES;
use super::super::protocol::Protocol;
use super::super::tcp_connection::TcpConnection;
use super::super::tcp_sessions::TcpSessions;
use super::super::timeouts::SILENCE;
use super::super::tls::{Expected, Identity};
use super::{HERE, ID};
use crate::hosts::bridge::{Bridge, Shares};
use tpurun_protocol::authority::{Authority, RankKey};
use tpurun_protocol::frame::{FrameHeader, FrameKind, RankStatus};
use tpurun_protocol::hosts::Hosts;
use tpurun_protocol::segment::Segment;

/// A thing that takes longer than this never happens.
const LIMIT: Duration = Duration::from_secs(20);
/// Time after which nothing more is expected over loopback.
const SHORT: Duration = Duration::from_millis(400);
/// The host that connects.
const HOST: u32 = 0;

/// One process of a test.
struct End {
    lanes: TcpSessions,
    epoll: Arc<OwnedFd>,
    address: Address,
    /// The bridge of its host over QUIC, which is not there.
    first: Option<Bridge>,
    /// Time by which the process is ahead of the clock.
    ahead: Duration,
}

impl End {
    fn new(identity: Identity, rank: u32) -> Self {
        let listener = TcpListener::bind((HERE, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = identity.at(listener.local_addr().unwrap(), rank);
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
        let lanes = TcpSessions::new(listener, epoll.clone(), identity.into(), Expected::default()).unwrap();
        Self { lanes, epoll, address, first: None, ahead: Duration::ZERO }
    }

    fn now(&self) -> Instant {
        Instant::now() + self.ahead
    }

    /// Makes the process that host of a communicator of two, with the other host at `other`.
    fn be(&mut self, host: u32, other: &Address) -> Arc<Segment> {
        let hosts = Hosts::parse("0 1\nn0\nn1", 2).unwrap();
        let segment = Arc::new(Segment::alone("dp0", 2, 4096).with_hosts(hosts).of_rank(host));
        let mut bridges = Bridge::all(&segment, Shares::AllButFirst(1));
        let (bridge, now) = (bridges.remove(1), self.now());
        self.first = Some(bridges.remove(0));
        self.lanes.sessions.add(now, ID, bridge, vec![other.clone(), other.clone()]);
        segment
    }

    /// Has something to send to the other host: that it has come to this round.
    fn send(&mut self, host: u32, round: u32) {
        let rank = 1 - host;
        let header = FrameHeader { kind: FrameKind::Arrived, rank, round, offset: 0, bytes: 0 };
        let now = self.now();
        self.lanes.sessions.say(now, ID, host, Bytes::copy_from_slice(&header.encode()));
    }

    /// Makes the process take part no more.
    fn leave(&mut self) {
        let first = self.first.as_mut().expect("it is a host");
        first.stop();
        drop(first.look());
        let now = self.now();
        self.lanes.sessions.stop(now, ID);
    }

    fn turn(&mut self) {
        let mut events = Vec::with_capacity(16);
        let wait = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        let _ = epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&wait));
        let now = self.now();
        events.iter().for_each(|event: &epoll::Event| self.lanes.ready(now, event.data.u64()));
        self.lanes.tick(now);
    }
}

/// Has both go on until a condition holds, or for that long.
fn until(limit: Duration, ends: &mut [&mut End], is_so: impl Fn(&[&mut End]) -> bool) -> bool {
    let end = Instant::now() + limit;
    while Instant::now() < end {
        if is_so(ends) {
            return true;
        }
        ends.iter_mut().for_each(|end| end.turn());
    }
    is_so(ends)
}

fn identity(authority: &Authority, rank: u32) -> Identity {
    let key = RankKey::new().unwrap();
    let certificate = authority.certify(rank, key.public()).unwrap();
    Identity::new(Some(key.certified(authority.certificate(), &certificate))).unwrap()
}

fn ranked(authority: &Authority, rank: u32) -> End {
    End::new(identity(authority, rank), rank)
}

/// Two hosts of one job, of which the second one knows the communicator.
fn two() -> (End, End, Arc<Segment>) {
    let authority = Authority::new().unwrap();
    let (one, mut other) = (ranked(&authority, 0), ranked(&authority, 1));
    let segment = other.be(1, &one.address);
    (one, other, segment)
}

/// Two hosts of one job, of which the first one has sent something.
fn connected() -> (End, End, Arc<Segment>) {
    let (mut one, mut other, segment) = two();
    connect(&mut one, &mut other);
    (one, other, segment)
}

/// Has the first host know the communicator, and send something that the other one takes.
fn connect(one: &mut End, other: &mut End) {
    one.be(0, &other.address);
    one.send(1, 0);
    assert!(until(LIMIT, &mut [one, other], |ends| ends[0].lanes.sessions.is_open(ID, 1)));
}

#[test]
fn who_has_something_to_send_is_let_in() {
    let (mut one, mut other, segment) = two();
    one.be(0, &other.address);
    assert!(
        !until(SHORT, &mut [&mut one, &mut other], |ends| ends[0].lanes.streams().count() > 0),
        "nothing is sent"
    );
    one.send(1, 0);
    assert!(until(LIMIT, &mut [&mut one, &mut other], |ends| ends[0].lanes.sessions.is_open(ID, 1)));
    other.send(0, 0);
    assert!(until(LIMIT, &mut [&mut one, &mut other], |ends| ends[1].lanes.sessions.is_open(ID, 0)));
    assert!(segment.failure().is_none());
}

/// The other side makes the communicator later.
#[test]
fn who_comes_early_waits() {
    let authority = Authority::new().unwrap();
    let (mut one, mut other) = (ranked(&authority, 0), ranked(&authority, 1));
    one.be(0, &other.address);
    one.send(1, 0);
    assert!(!until(SHORT, &mut [&mut one, &mut other], |ends| ends[0].lanes.sessions.is_open(ID, 1)));
    other.be(1, &one.address);
    assert!(until(LIMIT, &mut [&mut one, &mut other], |ends| ends[0].lanes.sessions.is_open(ID, 1)));
}

/// Processes of another job, of none, and of this job but another rank: each says that it is the first host.
#[test]
fn strangers_are_refused() {
    let authority = Authority::new().unwrap();
    let elsewhere = ranked(&Authority::new().unwrap(), 0);
    let nobody = End::new(Identity::new(None).unwrap(), 0);
    let liar = ranked(&authority, 2);
    for (mut stranger, is_of_job) in [(elsewhere, false), (nobody, false), (liar, true)] {
        let (mut one, mut other) = (ranked(&authority, 0), ranked(&authority, 1));
        let segment = other.be(1, &one.address);
        // A process without an authority can not even mean a rank.
        let meant = match stranger.address.who {
            Who::Rank(_) => other.address.clone(),
            Who::Shows(_) => Address { who: stranger.address.who.clone(), ..other.address.clone() },
        };
        stranger.be(0, &meant);
        stranger.send(1, 0);
        let is_in = |ends: &[&mut End]| {
            ends[0].lanes.sessions.is_open(ID, 1) || ends[1].lanes.sessions.hears(ID, HOST)
        };
        assert!(!until(SHORT, &mut [&mut stranger, &mut other], is_in), "{is_of_job}");
        // The right process is let in after that.
        connect(&mut one, &mut other);
        assert!(segment.failure().is_none());
    }
}

/// Another process is where one was to be.
#[test]
fn who_answers_must_be_who_was_meant() {
    let authority = Authority::new().unwrap();
    let (mut one, mut other) = (ranked(&authority, 0), ranked(&authority, 1));
    other.be(1, &one.address);
    let segment = one.be(0, &Address { who: Who::Rank(2), ..other.address.clone() });
    one.send(1, 0);
    assert!(!until(SHORT, &mut [&mut one, &mut other], |ends| ends[0].lanes.sessions.is_open(ID, 1)));
    one.ahead = 2 * SILENCE;
    assert!(until(LIMIT, &mut [&mut one, &mut other], |_| segment.failure().is_some()));
    let text = segment.failure().unwrap().text().to_owned();
    assert!(text.contains("large rounds do not reach host n1: TCP connection to 127.0.0.1:"), "{text}");
    assert!(text.ends_with("open TCP between the hosts, or set TPURUN_BULK=quic"), "{text}");
}

/// Nobody listens where the other host said it would.
#[test]
fn who_can_not_be_reached_is_named() {
    let authority = Authority::new().unwrap();
    let mut one = ranked(&authority, 0);
    let nowhere = TcpListener::bind((HERE, 0)).unwrap().local_addr().unwrap();
    let segment = one.be(0, &identity(&authority, 1).at(nowhere, 1));
    one.send(1, 0);
    assert!(!until(SHORT, &mut [&mut one], |_| segment.failure().is_some()), "it may come yet");
    one.ahead = 2 * SILENCE;
    assert!(until(LIMIT, &mut [&mut one], |_| segment.failure().is_some()));
    let text = segment.failure().unwrap().text().to_owned();
    assert!(text.contains("refused"), "{text}");
}

/// Bytes that prove nothing, and none at all.
#[test]
fn who_does_not_say_what_it_comes_for_is_sent_away() {
    let (_one, mut other, _segment) = two();
    let to = other.address.socket;
    let mut noise = TcpStream::connect(to).unwrap();
    noise.write_all(b"GET / HTTP/1.1\r\nHost: n0\r\n\r\n").unwrap();
    assert!(until(LIMIT, &mut [&mut other], |ends| ends[0].lanes.streams().count() == 1));
    assert!(until(LIMIT, &mut [&mut other], |ends| ends[0].lanes.streams().count() == 0));
    let silent = TcpStream::connect(to).unwrap();
    assert!(until(LIMIT, &mut [&mut other], |ends| ends[0].lanes.streams().count() == 1));
    other.ahead = SILENCE;
    assert!(until(LIMIT, &mut [&mut other], |ends| ends[0].lanes.streams().count() == 0));
    // Both connections were closed.
    for mut closed in [noise, silent] {
        closed.set_read_timeout(Some(LIMIT)).unwrap();
        let end = closed.read_to_end(&mut vec![]).map_err(|error| error.kind());
        assert!(!matches!(end, Err(ErrorKind::WouldBlock | ErrorKind::TimedOut)), "it is still open");
    }
}

/// Some connections are silent and some are not, all from the address that the host itself comes from.
#[test]
fn a_crowd_of_strangers_keeps_nobody_out() {
    let (mut one, mut other, segment) = two();
    let to = other.address.socket;
    let crowd: Vec<TcpStream> = (0..300)
        .map(|number| {
            let mut stranger = TcpStream::connect(to).unwrap();
            if number % 2 == 0 {
                stranger.write_all(&[7; PROOF_BYTES]).unwrap();
            }
            other.turn();
            stranger
        })
        .collect();
    connect(&mut one, &mut other);
    assert!(segment.failure().is_none());
    assert!(
        other.lanes.streams().count() <= crowd.len() / 2 + 1,
        "{} of {} are kept",
        other.lanes.streams().count(),
        crowd.len()
    );
}

/// A process of the job says something else than what it comes for.
#[test]
fn a_greeting_that_is_none_is_refused() {
    for words in [&[7_u8; GREETING_BYTES][..], &[0; 3 * GREETING_BYTES]] {
        let authority = Authority::new().unwrap();
        let (identity, mut other) = (identity(&authority, 0), ranked(&authority, 1));
        let segment = other.be(1, &Address { who: identity.known_as(0), ..other.address.clone() });
        let mut line = TcpConnection::connect(&identity, &other.address).unwrap();
        line.say(words);
        let end = Instant::now() + LIMIT;
        while !matches!(line.receive(|_| panic!("there is no answer")), StreamFlow::Broken(_)) {
            assert!(Instant::now() < end, "it was not closed");
            other.turn();
        }
        assert!(line.is_ready(), "it was let in before");
        assert!(!other.lanes.sessions.hears(ID, HOST) && segment.failure().is_none());
    }
}

/// Nothing says that all was sent. Where the host is gone, QUIC finds that out before.
#[test]
fn a_connection_that_breaks_is_cut_off_at_last() {
    let (one, mut other, segment) = connected();
    let before = other.lanes.streams().count();
    drop(one);
    assert!(until(LIMIT, &mut [&mut other], |ends| ends[0].lanes.streams().count() < before));
    assert!(!until(SHORT, &mut [&mut other], |_| segment.failure().is_some()));
    other.ahead = 2 * SILENCE;
    assert!(until(LIMIT, &mut [&mut other], |_| segment.failure().is_some()));
    let text = segment.failure().unwrap().text().to_owned();
    assert!(text.starts_with("large rounds do not reach host n0: TCP connection to 127.0.0.1:"), "{text}");
    assert!(!segment.roster().is_lost(0));
}

/// The ranks of a host have left, as QUIC has said: nothing is missed.
#[test]
fn a_connection_of_who_has_left_may_break() {
    let (one, mut other, segment) = connected();
    segment.roster().put_status(0, &RankStatus { arrived: 1, posted: 1, left: 2, lost: 0 });
    drop(one);
    assert!(until(LIMIT, &mut [&mut other], |ends| ends[0].lanes.streams().count() == 0));
    other.ahead = 2 * SILENCE;
    assert!(!until(SHORT, &mut [&mut other], |_| segment.failure().is_some()));
}

/// A connection that waited for an answer and leaves is forgotten, however many come after it.
#[test]
fn who_comes_early_may_go() {
    let authority = Authority::new().unwrap();
    let (mut one, mut other) = (ranked(&authority, 0), ranked(&authority, 1));
    for _ in 0..10 {
        one.be(0, &other.address);
        one.send(1, 0);
        assert!(until(LIMIT, &mut [&mut one, &mut other], |ends| ends[1].lanes.sessions.waiting() == 1));
        one.leave();
        assert!(until(LIMIT, &mut [&mut one, &mut other], |ends| ends[1].lanes.sessions.waiting() == 0));
        assert!(!one.lanes.sessions.knows(ID) && other.lanes.streams().count() == 0);
    }
    one.be(0, &other.address);
    one.send(1, 0);
    other.be(1, &one.address);
    assert!(until(LIMIT, &mut [&mut one, &mut other], |ends| ends[0].lanes.sessions.is_open(ID, 1)));
}

/// A process that was forked has the sockets of its parent, too.
#[test]
fn a_socket_that_somebody_else_has_is_no_trouble() {
    let (mut one, mut other, _segment) = connected();
    let copies = other.lanes.streams().copy_sockets();
    one.leave();
    other.leave();
    assert!(until(LIMIT, &mut [&mut one, &mut other], |ends| ends.iter().all(|end| end
        .lanes
        .streams()
        .count()
        == 0)));
    let mut events: Vec<epoll::Event> = Vec::with_capacity(16);
    let none = Timespec { tv_sec: 0, tv_nsec: 0 };
    let _ = epoll::wait(&other.epoll, spare_capacity(&mut events), Some(&none));
    assert!(events.is_empty() && !copies.is_empty());
}

/// A connection says that it will say no more before it has said what it comes for.
#[test]
fn who_ends_before_it_has_greeted_is_sent_away() {
    let authority = Authority::new().unwrap();
    let (identity, mut other) = (identity(&authority, 0), ranked(&authority, 1));
    let mut line = TcpConnection::connect(&identity, &other.address).unwrap();
    let end = Instant::now() + LIMIT;
    while !line.is_ready() {
        assert!(Instant::now() < end && line.receive(|_| true) == StreamFlow::Open);
        other.turn();
    }
    line.finish();
    assert!(until(LIMIT, &mut [&mut other], |ends| ends[0].lanes.streams().count() == 0));
}

/// A host that has nothing more to say is not lost, and neither is one that needs nothing more.
#[test]
fn who_leaves_is_not_lost() {
    let (mut one, mut other, segment) = two();
    let own = one.be(0, &other.address);
    one.send(1, 0);
    other.send(0, 0);
    let are_open =
        |ends: &[&mut End]| ends[0].lanes.sessions.is_open(ID, 1) && ends[1].lanes.sessions.is_open(ID, 0);
    assert!(until(LIMIT, &mut [&mut one, &mut other], are_open));
    one.leave();
    let is_left =
        |ends: &[&mut End]| !ends[0].lanes.sessions.knows(ID) && !ends[1].lanes.sessions.is_open(ID, 0);
    assert!(until(LIMIT, &mut [&mut one, &mut other], is_left));
    assert!(!segment.roster().is_lost(0) && !own.roster().is_lost(1));
    assert!(segment.failure().is_none() && own.failure().is_none());
    other.leave();
    assert!(until(LIMIT, &mut [&mut one, &mut other], |ends| ends.iter().all(|end| end
        .lanes
        .streams()
        .count()
        == 0)));
}

/// One way between two sockets, as a stranger on it sees it.
struct Wire {
    from: TcpStream,
    to: TcpStream,
    passed: usize,
}

impl Wire {
    /// Hands on at most `most` bytes; changes the one at `changed`.
    fn pass(&mut self, most: usize, changed: Option<usize>) {
        let mut bytes = vec![0; most];
        match self.from.read(&mut bytes) {
            Ok(0) => drop(self.to.shutdown(Shutdown::Write)),
            Ok(count) => {
                let at = changed.and_then(|changed| changed.checked_sub(self.passed));
                if let Some(byte) = at.and_then(|at| bytes[..count].get_mut(at)) {
                    *byte ^= 0x55;
                }
                self.passed += count;
                // Nobody reads the bytes that are said after an error.
                let _ = self.to.write_all(&bytes[..count]);
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
}

/// rustls alone at the other end understands all that is said, and is understood, also where keys change on the way.
#[test]
fn records_are_those_of_tls() {
    let authority = Authority::new().unwrap();
    let (client, server) = (identity(&authority, 0), identity(&authority, 1));
    let config = Arc::new(server.tcp_server(Expected::default()).unwrap());
    let listener = TcpListener::bind((HERE, 0)).unwrap();
    let to = server.at(listener.local_addr().unwrap(), 1);
    let echo = std::thread::spawn(move || {
        let mut socket = listener.accept().unwrap().0;
        let mut proof = [0; PROOF_BYTES];
        socket.read_exact(&mut proof).unwrap();
        assert!(server.invitation().is_proven_by(Protocol::Tcp, &proof));
        let mut tls = ServerConnection::new(config).unwrap();
        let mut some = vec![0; 50_000];
        loop {
            let bytes = Stream::new(&mut tls, &mut socket).read(&mut some).unwrap();
            if bytes == 0 {
                tls.send_close_notify();
                tls.complete_io(&mut socket).unwrap();
                return;
            }
            tls.refresh_traffic_keys().unwrap();
            Stream::new(&mut tls, &mut socket).write_all(&some[..bytes]).unwrap();
        }
    });
    let said: Vec<u8> = (0..300_000_u32).map(|at| (at % 251) as u8).collect();
    let mut chunks: VecDeque<Bytes> = said.chunks(41_000).map(Bytes::copy_from_slice).collect();
    let mut line = TcpConnection::connect(&client, &to).unwrap();
    let (mut heard, mut flow, end) = (Vec::<u8>::new(), StreamFlow::Open, Instant::now() + LIMIT);
    while flow == StreamFlow::Open {
        assert!(Instant::now() < end, "it goes on for ever");
        flow = line.receive(|bytes| {
            heard.extend(bytes);
            true
        });
        if flow == StreamFlow::Open && line.is_ready() {
            line.change_keys_after(3);
            flow = line.send(&mut chunks);
        }
        if flow == StreamFlow::Open && heard.len() == said.len() {
            flow = line.finish();
        }
    }
    assert_eq!(flow, StreamFlow::Ended);
    assert!(heard == said);
    echo.join().unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 60, ..ProptestConfig::default() })]

    /// The bytes between two processes are cut or changed. Still only a beginning of what was said comes, and all of
    /// it where nothing was changed.
    #[test]
    fn what_comes_is_what_was_said(
        to_server: bool,
        changed in proptest::option::of(0_usize..6000),
        cuts in proptest::collection::vec(1_usize..3000, 1..9),
        said in proptest::collection::vec(any::<u8>(), 0..40_000),
    ) {
        let authority = Authority::new().unwrap();
        let (client, server) = (identity(&authority, 0), identity(&authority, 1));
        let config = Arc::new(server.tcp_server(Expected::default()).unwrap());
        let [outer, inner] = [0, 1].map(|_| TcpListener::bind((HERE, 0)).unwrap());
        let to = server.at(outer.local_addr().unwrap(), 1);
        let mut client = TcpConnection::connect(&client, &to).unwrap();
        let from_client = outer.accept().unwrap().0;
        let to_line = TcpStream::connect(inner.local_addr().unwrap()).unwrap();
        let (accepted, from) = inner.accept().unwrap();
        let mut server = TcpConnection::accept(accepted, from, &config, server.invitation()).unwrap();
        from_client.set_nonblocking(true).unwrap();
        to_line.set_nonblocking(true).unwrap();
        let mut there = Wire { from: from_client.try_clone().unwrap(), to: to_line.try_clone().unwrap(), passed: 0 };
        let mut back = Wire { from: to_line, to: from_client, passed: 0 };
        let mut chunks = VecDeque::from([Bytes::copy_from_slice(&said)]);
        let (mut heard, mut cuts) = (vec![], cuts.into_iter().cycle());
        let (mut flows, end) = ((StreamFlow::Open, StreamFlow::Open), Instant::now() + LIMIT);
        while flows.0 == StreamFlow::Open && flows.1 == StreamFlow::Open {
            prop_assert!(Instant::now() < end, "it goes on for ever");
            let cut = cuts.next().unwrap();
            there.pass(cut, changed.filter(|_| to_server));
            back.pass(cut, changed.filter(|_| !to_server));
            flows.0 = client.receive(|_| panic!("the server says nothing"));
            if flows.0 == StreamFlow::Open && client.is_ready() {
                flows.0 = client.send(&mut chunks);
                if flows.0 == StreamFlow::Open && chunks.is_empty() {
                    flows.0 = client.finish();
                }
            }
            flows.1 = server.receive(|bytes| { heard.extend(bytes); true });
        }
        prop_assert!(said.starts_with(&heard));
        let reached = if to_server { there.passed } else { back.passed };
        if changed.is_none_or(|changed| changed >= reached) {
            prop_assert_eq!(flows.1, StreamFlow::Ended);
            prop_assert_eq!(heard, said);
        } else {
            prop_assert!(flows != (StreamFlow::Open, StreamFlow::Ended) || heard == said);
        }
        // Both say the same when asked again, and do not panic.
        let _ = (client.receive(|_| true), client.send(&mut chunks), client.finish());
        let _ = (server.receive(|_| true), server.finish());
    }
}
