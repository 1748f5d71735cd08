//! Streams, and what comes over them.

use std::time::Instant;

use bytes::Bytes;

use super::super::flow::StreamFlow;
use super::super::greeting::{GREETING_BYTES, Greeting};
use super::super::purposes::Purpose;
use super::super::session::{Session, SessionId, State};
use super::super::streams::{Awaits, Carries, Streams, Unwelcome};
use super::Sessions;
use crate::hosts::bridge::Bridge;

impl<S: Streams> Sessions<S> {
    /// Another process has opened a stream.
    pub(in super::super) fn opened(&mut self, now: Instant, stream: S::Id) {
        self.purposes.set(stream, Purpose::Unknown(vec![], now));
        self.streams.watch(stream, Awaits::Bytes);
    }

    /// A stream may have something to be read.
    pub(in super::super) fn read(&mut self, now: Instant, stream: S::Id) {
        match self.purposes.get_mut(stream) {
            Some(Purpose::Unknown(..)) => self.hear_greeting(now, stream),
            Some(Purpose::Host(at)) => {
                let at = *at;
                self.hear_host(now, at, stream);
            }
            Some(Purpose::Ending(_)) => match self.streams.read(stream, |_| true) {
                StreamFlow::Open => self.streams.watch(stream, Awaits::Bytes),
                StreamFlow::Ended | StreamFlow::Broken(_) => self.drop_stream(stream),
            },
            Some(Purpose::Early(_)) | None => {}
        }
    }

    fn hear_greeting(&mut self, now: Instant, stream: S::Id) {
        let Some(Purpose::Unknown(said, _)) = self.purposes.get_mut(stream) else { return };
        let flow = self.streams.read_greeting(stream, said);
        let greeting = <&[u8; GREETING_BYTES]>::try_from(&said[..]).map(Greeting::decode);
        match (flow, greeting) {
            (StreamFlow::Broken(why), _) => self.turn_away(now, stream, Unwelcome::Broken(why)),
            (_, Ok(Some(greeting))) => self.introduce(now, greeting, stream),
            (_, Ok(None)) => self.turn_away(now, stream, Unwelcome::Silent),
            (StreamFlow::Open, Err(_)) => self.streams.watch(stream, Awaits::Bytes),
            (StreamFlow::Ended, Err(_)) => self.turn_away(now, stream, Unwelcome::Left),
        }
    }

    pub(super) fn turn_away(&mut self, now: Instant, stream: S::Id, why: Unwelcome) {
        self.streams.refuse(now, stream, why);
        self.drop_stream(stream);
    }

    /// Takes in a stream that another process has opened, once it has said what it is for.
    pub(super) fn introduce(&mut self, now: Instant, greeting: Greeting, stream: S::Id) {
        let Greeting { communicator: id, host } = greeting;
        let Some(communicator) = self.communicators.get_mut(id) else {
            if !self.purposes.have_wait(greeting, stream) {
                return self.drop_stream(stream);
            }
            return self.streams.watch(stream, Awaits::End);
        };
        let session = communicator.sessions.get_mut(host as usize);
        let session = session.filter(|session| session.takes_stream(S::CARRIES));
        let shown = self.streams.certificate(stream);
        let Some(session) =
            session.filter(|session| shown.is_some_and(|shown| session.address.who.has_shown(shown)))
        else {
            // The process is of this job, but not the one that it says it is.
            tracing::warn!(host, "refused a {} from another process than the host's first rank", S::NAME);
            return self.drop_stream(stream);
        };
        let at = SessionId { communicator: id, host };
        self.purposes.set(stream, Purpose::Host(at));
        session.from = Some(stream);
        // The answer repeats the greeting.
        self.streams.accept(stream, Bytes::copy_from_slice(&greeting.encode()), &mut session.out);
        if S::CARRIES == Carries::BothWays {
            session.state = State::Open(stream);
            return self.advance(now, at);
        }
        self.streams.watch(stream, Awaits::Bytes);
    }

    fn hear_host(&mut self, now: Instant, at: SessionId, stream: S::Id) {
        let Some(session) = self.communicators.session(at) else { return };
        match session.state {
            _ if session.from == Some(stream) => self.hear_frames(now, at, stream),
            State::Greeting(..) => self.hear_answer(now, at, stream),
            _ => self.hear_after_answer(now, at, stream),
        }
    }

    /// Takes in the frames that a host has sent.
    fn hear_frames(&mut self, now: Instant, at: SessionId, stream: S::Id) {
        let SessionId { communicator: id, host } = at;
        let Some(communicator) = self.communicators.get_mut(id) else { return };
        let (bridge, session) = (&mut communicator.bridge, &mut communicator.sessions[host as usize]);
        if !session.is_reading {
            return;
        }
        let (frames, mut wrong) = (&mut session.frames, None);
        let flow = self.streams.read(stream, |bytes| {
            wrong = frames.feed(bytes, |header, payload| bridge.take(host, header, payload)).err();
            wrong.is_none()
        });
        if flow == StreamFlow::Ended && S::CARRIES == Carries::OneWay {
            bridge.end(host);
        }
        if let Some(wrong) = wrong {
            bridge.refuse(host, wrong);
            session.is_reading = false;
        } else if let StreamFlow::Broken(why) = &flow {
            session.broken.get_or_insert((now, why.clone()));
        }
        self.communicators.note_calls(id);
        match (flow, S::CARRIES) {
            (StreamFlow::Open, _) => self.streams.watch(stream, Awaits::Bytes),
            (StreamFlow::Ended, Carries::OneWay) => self.end(now, stream),
            (StreamFlow::Ended, Carries::BothWays) => {
                self.communicators.ended(at, Bridge::end);
                self.finished(now, stream);
            }
            (StreamFlow::Broken(_), _) => {
                self.drop_stream(stream);
                self.next_look.wake(now);
            }
        }
    }

    /// Takes in the answer of a host, which opens the stream of the session.
    fn hear_answer(&mut self, now: Instant, at: SessionId, stream: S::Id) {
        let Some(communicator) = self.communicators.get_mut(at.communicator) else { return };
        let answer = communicator.greeting(at.communicator).encode();
        let session = &mut communicator.sessions[at.host as usize];
        let State::Greeting(_, said) = &mut session.state else { return };
        let flow = match self.streams.read_greeting(stream, said) {
            StreamFlow::Open if !answer.starts_with(said) => {
                StreamFlow::Broken("it answered something else".to_owned())
            }
            flow => flow,
        };
        let is_answered = *said == answer;
        match flow {
            StreamFlow::Open if is_answered => self.become_open(now, at, stream),
            StreamFlow::Open => self.streams.watch(stream, Awaits::Bytes),
            StreamFlow::Ended if is_answered => self.leave(now, at, stream),
            StreamFlow::Ended => self.open_again(now, at, stream, S::UNANSWERED),
            StreamFlow::Broken(why) => self.open_again(now, at, stream, &why),
        }
    }

    fn become_open(&mut self, now: Instant, at: SessionId, stream: S::Id) {
        let Some(session) = self.communicators.session(at) else { return };
        session.state = State::Open(stream);
        match S::CARRIES {
            Carries::BothWays => {
                session.from = Some(stream);
                self.advance(now, at);
                self.hear_frames(now, at, stream);
            }
            Carries::OneWay => {
                self.streams.watch(stream, Awaits::Bytes);
                self.advance(now, at);
                self.end_if_over(now, at.communicator);
            }
        }
    }

    pub(super) fn open_again(&mut self, now: Instant, at: SessionId, stream: S::Id, why: &str) {
        self.drop_stream(stream);
        self.apart(now, at, why);
    }

    /// Takes in that a host needs no more. It has nothing else to say on a stream that goes there alone.
    fn hear_after_answer(&mut self, now: Instant, at: SessionId, stream: S::Id) {
        let flow = self.streams.read(stream, <[u8]>::is_empty);
        let Some(session) = self.communicators.session(at) else { return };
        match flow {
            StreamFlow::Open => {
                self.streams.watch(stream, Awaits::Bytes);
                self.writable(now, stream);
            }
            _ if matches!(session.state, State::Finishing(..)) => self.needs_no_more(now, at),
            StreamFlow::Ended => self.leave(now, at, stream),
            StreamFlow::Broken(why) => {
                session.broken.get_or_insert((now, why));
                self.needs_no_more(now, at);
                self.next_look.wake(now);
            }
        }
    }

    /// Sends no more to a host that needs none of it.
    fn leave(&mut self, now: Instant, at: SessionId, stream: S::Id) {
        let Some(session) = self.communicators.session(at) else { return };
        session.state = State::Closed;
        session.out.clear();
        self.end(now, stream);
        self.end_if_over(now, at.communicator);
    }

    /// More can be sent on a stream.
    pub(in super::super) fn writable(&mut self, now: Instant, stream: S::Id) {
        if let Some(at) = self.purposes.host(stream) {
            self.advance(now, at);
            self.end_if_over(now, at.communicator);
        }
    }

    /// The other side of a stream has everything, or takes no more.
    pub(in super::super) fn finished(&mut self, now: Instant, stream: S::Id) {
        let Some(at) = self.purposes.host(stream) else { return };
        if let Some(Session { state: State::Finishing(..), .. }) = self.communicators.session(at) {
            self.needs_no_more(now, at);
        }
    }

    /// The connection of a stream is gone.
    pub(in super::super) fn lose_stream(&mut self, now: Instant, stream: S::Id, why: &str) {
        let Some(Purpose::Host(at)) = self.purposes.remove(stream) else { return };
        self.communicators.ended(at, Bridge::lose);
        match self.communicators.session(at).map(|session| &session.state) {
            Some(State::Greeting(..)) => self.apart(now, at, why),
            _ => self.needs_no_more(now, at),
        }
    }
}
