//! The traffic of a communicator with its other hosts, as far as it goes over one protocol.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::time::Instant;

use bytes::Bytes;

use super::address::Address;
use super::greeting::Greeting;
use super::streams::Carries;
use super::timeouts::SILENCE;
use crate::hosts::bridge::{Bridge, Frames, Outbox};

/// The session of a communicator with one of its hosts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SessionId {
    pub(super) communicator: u64,
    pub(super) host: u32,
}

/// A communicator, with its sessions.
pub(super) struct Communicator<Stream> {
    pub(super) bridge: Bridge,
    /// The sessions with the other hosts, by host.
    pub(super) sessions: Vec<Session<Stream>>,
    /// Whether nothing more will happen here that others must be told.
    pub(super) is_quiet: bool,
    /// Whether no more streams are opened.
    pub(super) is_stopped: bool,
}

/// The traffic to and from one host.
pub(super) struct Session<Stream> {
    pub(super) address: Address,
    pub(super) state: State<Stream>,
    /// The bytes to be sent.
    pub(super) out: VecDeque<Bytes>,
    /// The stream that frames come over, if any have come.
    pub(super) from: Option<Stream>,
    pub(super) frames: Frames,
    pub(super) is_reading: bool,
    /// The time when this began, or when something was last said or done because it takes long.
    pub(super) since: Instant,
    /// When a stream has broken, and why, where the protocol does not tell whether the host is lost. A session that is
    /// still here long after that is cut off.
    pub(super) broken: Option<(Instant, String)>,
}

/// The state of the stream that frames are sent over.
#[derive(Debug)]
pub(super) enum State<Stream> {
    /// The other side opens the stream.
    Awaited,
    /// Nothing has been sent yet.
    Unused,
    /// The next look connects.
    Apart,
    /// The stream is opened once the connection allows it.
    Connecting,
    /// The greeting is sent, and so much of the answer is here.
    Greeting(Stream, Vec<u8>),
    Open(Stream),
    /// Everything is written. This lasts until the other side has it, or needs none of it any more, or until this
    /// time.
    Finishing(Stream, Instant),
    Closed,
}

impl<Stream: Copy> State<Stream> {
    pub(super) fn stream(&self) -> Option<Stream> {
        match self {
            Self::Greeting(stream, _) | Self::Open(stream) | Self::Finishing(stream, _) => Some(*stream),
            Self::Awaited | Self::Unused | Self::Apart | Self::Connecting | Self::Closed => None,
        }
    }
}

impl<Stream> Communicator<Stream> {
    /// A communicator whose hosts have their first ranks at `addresses`, by host.
    pub(super) fn new(now: Instant, bridge: Bridge, addresses: Vec<Address>, carries: Carries) -> Self {
        let own = bridge.segment().host();
        let sessions = (0_u32..).zip(addresses).map(|(host, address)| Session {
            address,
            state: match (host.cmp(&own), carries) {
                (Ordering::Equal, _) => State::Closed,
                (_, Carries::OneWay) => State::Unused,
                (Ordering::Less, Carries::BothWays) => State::Awaited,
                (Ordering::Greater, Carries::BothWays) => State::Apart,
            },
            out: VecDeque::new(),
            from: None,
            frames: Frames::default(),
            is_reading: true,
            since: now,
            broken: None,
        });
        Self { sessions: sessions.collect(), bridge, is_quiet: false, is_stopped: false }
    }

    /// The greeting of the streams that this host opens.
    pub(super) fn greeting(&self, id: u64) -> Greeting {
        Greeting { communicator: id, host: self.bridge.segment().host() }
    }

    /// Has the bridge look at what has happened here.
    pub(super) fn look(&mut self, look: fn(&mut Bridge) -> Outbox) {
        for (session, parcel) in self.sessions.iter_mut().zip(look(&mut self.bridge)) {
            session.out.extend(parcel.into_chunks());
        }
        self.is_quiet = self.bridge.is_over();
    }

    /// Whether everything is said on all sides.
    pub(super) fn is_over(&self) -> bool {
        self.is_quiet && self.sessions.iter().all(|session| matches!(session.state, State::Closed))
    }

    /// Whether all ranks of a host have left or are lost.
    pub(super) fn has_nobody(&self, host: u32) -> bool {
        let segment = self.bridge.segment();
        let is_gone = |rank: &u32| segment.roster().left(*rank).is_some() || segment.roster().is_lost(*rank);
        segment.hosts().ranks(host).iter().all(is_gone)
    }

    /// Gives up a host that is not lost: nothing more comes over a stream, or goes over one.
    pub(super) fn cut_off(&mut self, host: u32, stream: &str, why: &str) {
        if self.has_nobody(host) {
            return self.bridge.end(host);
        }
        let socket = self.sessions[host as usize].address.socket;
        self.bridge.cut_off(host, &format!("{stream} to {socket}: {why}"));
    }
}

impl<Stream> Session<Stream> {
    /// Whether the other side may open a stream.
    pub(super) fn takes_stream(&self, carries: Carries) -> bool {
        match carries {
            Carries::BothWays => matches!(self.state, State::Awaited),
            Carries::OneWay => self.from.is_none(),
        }
    }

    /// Whether something may be due here that no stream tells of.
    pub(super) fn needs_look(&self) -> bool {
        let waits = matches!(self.state, State::Apart | State::Greeting(..) | State::Finishing(..));
        waits || self.broken.is_some()
    }

    /// Logs why there is no stream, once for a silence.
    pub(super) fn say_why(&mut self, now: Instant, error: &str) {
        if now.saturating_duration_since(self.since) > SILENCE {
            tracing::warn!(to = %self.address.socket, %error, "cannot connect yet");
            self.since = now;
        }
    }
}
