//! The things that time brings: sessions to try again, and streams that are late.

use std::time::{Duration, Instant};

use super::super::session::{Session, State};
use super::super::streams::{Streams, Unwelcome};
use super::super::timeouts::{NextLook, SILENCE};
use super::Sessions;
use crate::hosts::bridge::Bridge;

impl<S: Streams> Sessions<S> {
    /// Does everything that is due.
    pub(in super::super) fn tick(&mut self, now: Instant) {
        if !self.next_look.is_due(now) {
            return;
        }
        match S::GIVES_UP_AFTER {
            // Other processes may have written to a segment and not rung.
            None => {
                let ids = self.communicators.ids();
                ids.into_iter().for_each(|id| self.look(now, id, Bridge::look_closely));
            }
            Some(limit) => {
                self.cut_off_broken(now, limit);
                self.leave_hosts_without_ranks(now);
                self.cut_off_silent(now, limit);
            }
        }
        for at in self.communicators.sessions_where(|session| matches!(session.state, State::Apart)) {
            self.connect(now, at);
        }
        self.probe(now);
        let is_over =
            |session: &Session<S::Id>| matches!(session.state, State::Finishing(_, until) if until <= now);
        for at in self.communicators.sessions_where(is_over) {
            self.needs_no_more(now, at);
        }
        self.close_late(now);
        self.next_look = if self.needs_look() { NextLook::after(now) } else { NextLook::default() };
    }

    /// Cuts off hosts whose connections have broken long ago, though the hosts are not lost.
    fn cut_off_broken(&mut self, now: Instant, limit: Duration) {
        let is_late = |broken: &mut (Instant, String)| broken.0 + limit <= now;
        for at in self.communicators.sessions_where(|session| session.broken.is_some()) {
            if let Some((_, why)) =
                self.communicators.session(at).and_then(|session| session.broken.take_if(is_late))
            {
                self.cut_off(at, &why);
            }
        }
    }

    /// Closes sessions in which everything is said here, and nobody is there any more who needs it.
    fn leave_hosts_without_ranks(&mut self, now: Instant) {
        for at in self.communicators.sessions_where(|session| !matches!(session.state, State::Closed)) {
            let communicator = self.communicators.get(at.communicator);
            if communicator
                .is_some_and(|communicator| communicator.is_quiet && communicator.has_nobody(at.host))
            {
                self.needs_no_more(now, at);
            }
        }
    }

    /// Gives up hosts that have let no connection in for long.
    fn cut_off_silent(&mut self, now: Instant, limit: Duration) {
        let is_silent = |session: &Session<S::Id>| match session.state {
            State::Greeting(stream, _) => {
                session.since + limit <= now && self.streams.certificate(stream).is_none()
            }
            _ => false,
        };
        for at in self.communicators.sessions_where(is_silent) {
            if let Some(stream) = self.communicators.session(at).and_then(|session| session.state.stream()) {
                self.open_again(now, at, stream, "nothing answers");
            }
        }
    }

    /// A host that is to open a stream may be out of reach, which a connection to it shows.
    fn probe(&mut self, now: Instant) {
        let is_silent = |session: &Session<S::Id>| {
            matches!(session.state, State::Awaited) && session.since + SILENCE <= now
        };
        for at in self.communicators.sessions_where(is_silent) {
            if let Some(communicator) = self.communicators.get_mut(at.communicator) {
                let session = &mut communicator.sessions[at.host as usize];
                session.since = now;
                self.streams.probe(now, &session.address);
            }
        }
    }

    /// Closes streams that have not said in time what they are for, or are to end now.
    fn close_late(&mut self, now: Instant) {
        for stream in self.purposes.streams_where(|purpose| purpose.is_silent(now)) {
            self.turn_away(now, stream, Unwelcome::Silent);
        }
        for stream in self.purposes.streams_where(|purpose| purpose.has_ended(now)) {
            self.drop_stream(stream);
        }
    }

    /// Whether something may be due that nobody tells of. A protocol that gives up no hosts also carries what nobody
    /// rings for.
    pub(super) fn needs_look(&self) -> bool {
        if S::GIVES_UP_AFTER.is_none() {
            return !self.communicators.is_empty() || !self.purposes.is_empty();
        }
        self.communicators.any(|communicator| {
            communicator.is_quiet || communicator.sessions.iter().any(Session::needs_look)
        }) || self.purposes.any(|purpose| purpose.is_unknown() || purpose.is_ending())
    }
}
