//! The part of a protocol that sessions need: opening, taking, reading, writing and closing streams. A stream is one of
//! a QUIC connection, or a TCP connection as a whole.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::address::Address;
use super::certificate::Certificate;
use super::flow::StreamFlow;
use super::greeting::GREETING_BYTES;

/// The traffic that one stream carries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Carries {
    /// Everything between two hosts. The host with the lower number opens the stream, as soon as it can.
    BothWays,
    /// All that the host sends which opens the stream, once it has something to send. The other side only answers.
    OneWay,
}

/// The thing that a stream waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Awaits {
    Bytes,
    /// Bytes that come must wait, too.
    End,
}

/// Why a stream is not taken that another process has opened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Unwelcome {
    /// It does not say what it is for.
    Silent,
    /// It has ended before it said that.
    Left,
    /// It is gone, or its process was not let in.
    Broken(String),
}

/// The streams of one protocol.
pub(super) trait Streams {
    /// The number or name of a stream.
    type Id: Copy + Ord + fmt::Debug;

    const CARRIES: Carries;
    /// Time after which a host that cannot be reached is given up. Without one, the protocol tells by itself which
    /// hosts are lost.
    const GIVES_UP_AFTER: Option<Duration>;
    /// Streams that may wait for their communicators, at most.
    const MOST_WAITING: usize;
    /// The name of the protocol, for people.
    const PROTOCOL: &'static str;
    /// The word for a stream, for people.
    const NAME: &'static str;
    /// Why a session has to open its stream again that ended before it was answered.
    const UNANSWERED: &'static str;

    /// Opens a stream, which begins with this greeting. There is none as long as the connection allows none; the
    /// protocol then has the session [connect](super::sessions::Sessions::connect) again once it does.
    ///
    /// # Errors
    /// The error says why there will be none, for people.
    fn open(
        &mut self,
        now: Instant,
        to: &Address,
        greeting: [u8; GREETING_BYTES],
    ) -> Result<Option<Self::Id>, String>;

    /// Takes a stream whose greeting has come: `answer` goes first, before everything in `out` if that goes over this
    /// stream, too.
    fn accept(&mut self, stream: Self::Id, answer: Bytes, out: &mut VecDeque<Bytes>);

    /// The certificate of the process at the other end, once TLS has shown it.
    fn certificate(&self, stream: Self::Id) -> Option<&Certificate>;

    /// Reads the missing bytes of a greeting.
    fn read_greeting(&mut self, stream: Self::Id, said: &mut Vec<u8>) -> StreamFlow;

    /// Hands on the bytes that have come, in order, as long as they are taken.
    fn read(&mut self, stream: Self::Id, take: impl FnMut(&[u8]) -> bool) -> StreamFlow;

    /// Takes as much from the front of `out` as may be sent now.
    fn write(&mut self, stream: Self::Id, out: &mut VecDeque<Bytes>) -> StreamFlow;

    /// Ends this side: no more will be written.
    fn finish(&mut self, stream: Self::Id) -> StreamFlow;

    /// Ends both sides: neither needs the stream any more.
    fn close(&mut self, stream: Self::Id);

    /// Says why a stream is closed that another process has opened.
    fn refuse(&mut self, now: Instant, stream: Self::Id, why: Unwelcome);

    /// Has the protocol tell when something happens to a stream, unless it does so anyway.
    fn watch(&mut self, _stream: Self::Id, _awaits: Awaits) {}

    /// Finds out whether the process of a host that is to open a stream can be reached.
    fn probe(&mut self, _now: Instant, _to: &Address) {}
}
