//! The sessions of communicators with their other hosts, whatever protocol carries them: which stream is whose, and the
//! bridges at the ends of streams. This knows no socket and no clock. It is told what has happened and when, and says
//! what is to be sent. The protocols have the rest (`mesh.rs` for QUIC, `tcp_sessions.rs` for TCP).
//!
//! A stream begins with a greeting that says which communicator it is of and from which host. The other side repeats
//! it once it has made the communicator, too. Nothing is believed before TLS has shown that the host's first rank is at
//! the other end (`tls.rs`). Streams and what comes over them are in `sessions/hearing.rs`, and what time brings is in
//! `sessions/looks.rs`.

mod hearing;
mod looks;

use std::time::Instant;

#[cfg(test)]
use bytes::Bytes;

use super::address::Address;
use super::communicators::Communicators;
use super::flow::StreamFlow;
use super::greeting::Greeting;
use super::purposes::{Purpose, Purposes};
use super::session::{Communicator, SessionId, State};
use super::streams::{Awaits, Streams};
use super::timeouts::{NextLook, SILENCE};
use crate::hosts::bridge::{Bridge, Outbox};

/// All sessions that go over one protocol, of one driver.
///
/// # Order of calls
///
/// A protocol calls these methods, in any order as far as nothing else is said:
///
/// - [`add`](Self::add) once for each communicator, before anything else is said of it; then [`rung`](Self::rung)
///   whenever something has happened in its segment, and [`stop`](Self::stop) once nobody here needs it. A call
///   before `add`, or after the communicator is over, is ignored.
/// - [`opened`](Self::opened) for a stream that another process has opened. From then on, and for the streams that
///   [`Streams::open`] has made, [`read`](Self::read) whenever something may have come, and
///   [`writable`](Self::writable) or `read` whenever more can be sent. [`connect`](Self::connect) for a session whose
///   connection allows a stream at last.
/// - [`finished`](Self::finished) when the other side has everything that was written to a stream, and
///   [`lose_stream`](Self::lose_stream) when its connection is gone, where the protocol finds that out.
/// - [`tick`](Self::tick) at the deadline of `next_look` or later; earlier it does nothing. Any other call may change
///   the deadline.
/// - [`calls`](Communicators::calls) and [`over`](Communicators::over) of `communicators` after all of that: they return
///   each thing once. A communicator that is over is forgotten here.
pub(super) struct Sessions<S: Streams> {
    pub(super) streams: S,
    pub(super) purposes: Purposes<S::Id>,
    pub(super) communicators: Communicators<S::Id>,
    pub(super) next_look: NextLook,
}

/// Communicators, and what happens in them here.
impl<S: Streams> Sessions<S> {
    pub(super) fn new(streams: S) -> Self {
        Self {
            streams,
            purposes: Purposes::new(S::MOST_WAITING),
            communicators: Communicators::new(),
            next_look: NextLook::default(),
        }
    }

    /// Has `bridge` talk to the other hosts of its communicator, whose first ranks are at `addresses`, by host.
    pub(super) fn add(&mut self, now: Instant, id: u64, bridge: Bridge, addresses: Vec<Address>) {
        let hosts = 0..addresses.len() as u32;
        self.communicators.add(id, Communicator::new(now, bridge, addresses, S::CARRIES));
        if self.needs_look() {
            self.next_look.wake(now);
        }
        for host in hosts.clone() {
            let at = SessionId { communicator: id, host };
            if self.communicators.session(at).is_some_and(|session| matches!(session.state, State::Apart)) {
                self.connect(now, at);
            }
        }
        for host in hosts {
            let at = SessionId { communicator: id, host };
            if self.communicators.session(at).is_some_and(|session| session.takes_stream(S::CARRIES)) {
                let greeting = Greeting { communicator: id, host };
                for stream in self.purposes.take_early(greeting) {
                    self.introduce(now, greeting, stream);
                }
            }
        }
        self.rung(now, id);
    }

    /// Ends the sessions that are not connected; those that are get everything they were to be told.
    pub(super) fn stop(&mut self, now: Instant, id: u64) {
        let Some(communicator) = self.communicators.get_mut(id) else { return };
        communicator.is_stopped = true;
        communicator.bridge.stop();
        self.look(now, id, Bridge::look_closely);
    }

    /// Something has happened in a communicator here.
    pub(super) fn rung(&mut self, now: Instant, id: u64) {
        self.look(now, id, Bridge::look);
    }

    fn look(&mut self, now: Instant, id: u64, look: fn(&mut Bridge) -> Outbox) {
        let Some(communicator) = self.communicators.get_mut(id) else { return };
        let was_quiet = communicator.is_quiet;
        if !was_quiet {
            communicator.look(look);
        }
        let (is_quiet, hosts) = (communicator.is_quiet, communicator.sessions.len() as u32);
        if !was_quiet {
            self.communicators.note_calls(id);
        }
        for host in 0..hosts {
            self.advance(now, SessionId { communicator: id, host });
        }
        self.end_if_over(now, id);
        if is_quiet && self.communicators.knows(id) {
            self.next_look.wake(now);
        }
    }

    fn end_if_over(&mut self, now: Instant, id: u64) {
        let Some(communicator) = self.communicators.take_if_over(id) else { return };
        for stream in communicator.sessions.iter().filter_map(|session| session.from) {
            self.end(now, stream);
        }
    }
}

/// The way of a session from one state to the next.
impl<S: Streams> Sessions<S> {
    /// Sends everything that is to be sent, and finishes if that is all.
    fn advance(&mut self, now: Instant, at: SessionId) {
        let Some(communicator) = self.communicators.get_mut(at.communicator) else { return };
        let session = &mut communicator.sessions[at.host as usize];
        match session.state {
            State::Unused if session.out.is_empty() => {
                if communicator.is_quiet {
                    session.state = State::Closed;
                }
            }
            State::Awaited | State::Unused | State::Apart | State::Connecting | State::Greeting(..)
                if communicator.is_stopped =>
            {
                self.close(at);
            }
            State::Unused => {
                session.since = now;
                self.connect(now, at);
            }
            State::Open(stream) => self.send(now, at, stream),
            State::Closed => session.out.clear(),
            State::Awaited
            | State::Apart
            | State::Connecting
            | State::Greeting(..)
            | State::Finishing(..) => {}
        }
    }

    fn send(&mut self, now: Instant, at: SessionId, stream: S::Id) {
        let Some(communicator) = self.communicators.get_mut(at.communicator) else { return };
        let session = &mut communicator.sessions[at.host as usize];
        let mut flow = self.streams.write(stream, &mut session.out);
        if flow == StreamFlow::Open && communicator.is_quiet && session.out.is_empty() {
            session.state = State::Finishing(stream, now + SILENCE);
            flow = self.streams.finish(stream);
            self.next_look.wake(now);
        }
        match flow {
            StreamFlow::Open => self.streams.watch(stream, Awaits::Bytes),
            StreamFlow::Ended => self.close(at),
            // The bytes that have come may say that no more is needed, so they are read first.
            StreamFlow::Broken(_) => {}
        }
    }

    /// Opens the stream of a session, now or once its connection allows it.
    pub(super) fn connect(&mut self, now: Instant, at: SessionId) {
        self.next_look.wake(now);
        let Some(communicator) = self.communicators.get_mut(at.communicator) else { return };
        let greeting = communicator.greeting(at.communicator).encode();
        let session = &mut communicator.sessions[at.host as usize];
        match self.streams.open(now, &session.address, greeting) {
            Ok(Some(stream)) => {
                session.state = State::Greeting(stream, vec![]);
                self.purposes.set(stream, Purpose::Host(at));
                self.streams.watch(stream, Awaits::Bytes);
            }
            Ok(None) => session.state = State::Connecting,
            Err(why) => self.apart(now, at, &why),
        }
    }

    /// Tries again later, unless the tries have gone on for long.
    pub(super) fn apart(&mut self, now: Instant, at: SessionId, why: &str) {
        self.next_look.wake(now);
        let Some(session) = self.communicators.session(at) else { return };
        session.state = State::Apart;
        match S::GIVES_UP_AFTER {
            None => session.say_why(now, why),
            Some(limit) if session.since + limit <= now => {
                self.cut_off(at, why);
                self.needs_no_more(now, at);
            }
            Some(_) => {}
        }
    }

    /// Gives up a host that is not lost: nothing more comes over a stream, or goes over one.
    fn cut_off(&mut self, at: SessionId, why: &str) {
        let Some(communicator) = self.communicators.get_mut(at.communicator) else { return };
        communicator.cut_off(at.host, &format!("{} {}", S::PROTOCOL, S::NAME), why);
        self.communicators.note_calls(at.communicator);
    }

    /// Gives up a host that cannot be reached: it has said where it is, so it has been there.
    pub(super) fn lose(&mut self, now: Instant, at: SessionId) {
        if let Some(communicator) = self.communicators.get_mut(at.communicator) {
            communicator.bridge.lose(at.host);
        }
        self.needs_no_more(now, at);
    }

    /// Nothing more has to go to a host.
    fn needs_no_more(&mut self, now: Instant, at: SessionId) {
        self.close(at);
        self.end_if_over(now, at.communicator);
    }

    fn close(&mut self, at: SessionId) {
        let Some(session) = self.communicators.session(at) else { return };
        session.out.clear();
        if let Some(stream) = std::mem::replace(&mut session.state, State::Closed).stream() {
            self.drop_stream(stream);
        }
    }

    pub(super) fn drop_stream(&mut self, stream: S::Id) {
        self.purposes.remove(stream);
        self.streams.close(stream);
    }

    /// Says on a stream that no more of it is needed, and reads what is still on its way. A process that closed it at
    /// once would look like one that is lost.
    fn end(&mut self, now: Instant, stream: S::Id) {
        if self.purposes.get_mut(stream).is_none() {
            return;
        }
        if self.streams.finish(stream) != StreamFlow::Open {
            return self.drop_stream(stream);
        }
        self.purposes.set(stream, Purpose::Ending(now + SILENCE));
        self.streams.watch(stream, Awaits::Bytes);
        self.next_look.wake(now);
    }
}

#[cfg(test)]
impl<S: Streams> Sessions<S> {
    pub(super) fn knows(&self, id: u64) -> bool {
        self.communicators.knows(id)
    }

    /// Whether frames for a host go there.
    pub(super) fn is_open(&self, id: u64, host: u32) -> bool {
        self.state(id, host).is_some_and(|state| matches!(state, State::Open(_)))
    }

    pub(super) fn state(&self, id: u64, host: u32) -> Option<&State<S::Id>> {
        self.communicators.get(id).map(|communicator| &communicator.sessions[host as usize].state)
    }

    /// Whether a host has been let in.
    pub(super) fn hears(&self, id: u64, host: u32) -> bool {
        let communicator = self.communicators.get(id);
        communicator.is_some_and(|communicator| communicator.sessions[host as usize].from.is_some())
    }

    /// Has these bytes be sent to a host.
    pub(super) fn say(&mut self, now: Instant, id: u64, host: u32, words: Bytes) {
        let at = SessionId { communicator: id, host };
        self.communicators.session(at).expect("it is there").out.push_back(words);
        self.advance(now, at);
    }

    /// Streams that wait for their communicators.
    pub(super) fn waiting(&self) -> usize {
        self.purposes.waiting()
    }
}
