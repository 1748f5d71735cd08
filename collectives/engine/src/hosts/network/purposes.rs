//! The purpose of each stream that is kept.

use std::collections::BTreeMap;
use std::time::Instant;

use super::greeting::{Early, GREETING, Greeting};
use super::session::SessionId;

#[derive(Debug)]
pub(super) enum Purpose {
    /// The purpose is not known yet: the bytes that have come so far, and since when the stream is there.
    Unknown(Vec<u8>, Instant),
    /// The stream waits for its communicator to be made here.
    Early(Greeting),
    /// The stream is one of the session with that host.
    Host(SessionId),
    /// Nothing is needed of the stream any more.
    Ending(Instant),
}

/// All streams of one protocol, with their purposes.
#[derive(Debug)]
pub(super) struct Purposes<Stream> {
    of: BTreeMap<Stream, Purpose>,
    early: Early<Stream>,
}

impl<Stream: Copy + Ord> Purposes<Stream> {
    /// No streams yet, of which at most so many may wait for their communicators.
    pub(super) fn new(most_waiting: usize) -> Self {
        Self { of: BTreeMap::new(), early: Early::new(most_waiting) }
    }

    pub(super) fn get_mut(&mut self, stream: Stream) -> Option<&mut Purpose> {
        self.of.get_mut(&stream)
    }

    /// The session that a stream is of.
    pub(super) fn host(&self, stream: Stream) -> Option<SessionId> {
        match self.of.get(&stream) {
            Some(Purpose::Host(at)) => Some(*at),
            _ => None,
        }
    }

    pub(super) fn set(&mut self, stream: Stream, purpose: Purpose) {
        self.of.insert(stream, purpose);
    }

    /// Has a stream wait for its communicator to be made here. Returns whether it may.
    pub(super) fn have_wait(&mut self, greeting: Greeting, stream: Stream) -> bool {
        let may_wait = self.early.keep(greeting, stream);
        if may_wait {
            self.set(stream, Purpose::Early(greeting));
        }
        may_wait
    }

    /// The streams that wait with this greeting, which wait no longer.
    pub(super) fn take_early(&mut self, greeting: Greeting) -> Vec<Stream> {
        self.early.take(greeting)
    }

    /// Forgets a stream.
    pub(super) fn remove(&mut self, stream: Stream) -> Option<Purpose> {
        let purpose = self.of.remove(&stream);
        if let Some(Purpose::Early(greeting)) = purpose {
            self.early.forget(greeting, &stream);
        }
        purpose
    }

    /// All streams, in the order of their names.
    pub(super) fn streams(&self) -> impl Iterator<Item = Stream> {
        self.of.keys().copied()
    }

    pub(super) fn streams_where(&self, wanted: impl Fn(&Purpose) -> bool) -> Vec<Stream> {
        self.of.iter().filter(|(_, purpose)| wanted(purpose)).map(|(stream, _)| *stream).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.of.is_empty()
    }

    pub(super) fn any(&self, wanted: impl Fn(&Purpose) -> bool) -> bool {
        self.of.values().any(wanted)
    }

    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.early.count()
    }
}

impl Purpose {
    pub(super) fn is_unknown(&self) -> bool {
        matches!(self, Self::Unknown(..))
    }

    pub(super) fn is_early(&self) -> bool {
        matches!(self, Self::Early(_))
    }

    pub(super) fn is_ending(&self) -> bool {
        matches!(self, Self::Ending(_))
    }

    /// Whether a stream has not said in time what it is for.
    pub(super) fn is_silent(&self, now: Instant) -> bool {
        matches!(self, Self::Unknown(_, since) if *since + GREETING <= now)
    }

    /// Whether a stream is to end now.
    pub(super) fn has_ended(&self, now: Instant) -> bool {
        matches!(self, Self::Ending(until) if *until <= now)
    }
}
