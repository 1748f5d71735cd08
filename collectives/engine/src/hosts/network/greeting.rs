//! The first words of a stream or connection, and the streams that have said them before their communicator is made
//! here.

use std::collections::HashMap;
use std::time::Duration;

/// A stream or connection that has not greeted after this time is closed.
pub(super) const GREETING: Duration = Duration::from_secs(5);
/// Communicators that are not made here yet and have streams waiting for them, at most.
const MOST_EARLY: usize = 4096;
/// Streams or connections that may wait with the same greeting, at most.
const MOST_ALIKE: usize = 8;

/// The greeting: it names a stream.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Greeting {
    /// The number of the communicator, the same on all of its hosts and another one for each communicator.
    pub(crate) communicator: u64,
    /// The host whose stream it is.
    pub(crate) host: u32,
}

pub(super) const GREETING_BYTES: usize = 16;
const GREETING_MAGIC: u32 = u32::from_le_bytes(*b"TPNB");

impl Greeting {
    pub(crate) fn encode(self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        bytes[..4].copy_from_slice(&GREETING_MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.host.to_le_bytes());
        bytes[8..].copy_from_slice(&self.communicator.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; GREETING_BYTES]) -> Option<Self> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four"));
        let communicator = u64::from_le_bytes(bytes[8..].try_into().expect("eight"));
        (word(0) == GREETING_MAGIC).then_some(Self { communicator, host: word(4) })
    }
}

/// Streams or connections that wait for their communicator to be made here, whoever they are from.
#[derive(Debug)]
pub(super) struct Early<T> {
    waiting: HashMap<Greeting, Vec<T>>,
    /// How many may wait.
    most: usize,
}

impl<T: PartialEq> Early<T> {
    pub(super) fn new(most: usize) -> Self {
        Self { waiting: HashMap::new(), most }
    }

    /// Keeps one that may wait; says whether it may.
    pub(super) fn keep(&mut self, greeting: Greeting, waiting: T) -> bool {
        let alike = self.waiting.get(&greeting).map_or(0, Vec::len);
        let may_wait = self.waiting.len() < MOST_EARLY && alike < MOST_ALIKE && self.count() < self.most;
        if may_wait {
            self.waiting.entry(greeting).or_default().push(waiting);
        }
        may_wait
    }

    /// Takes all that wait with this greeting.
    pub(super) fn take(&mut self, greeting: Greeting) -> Vec<T> {
        self.waiting.remove(&greeting).unwrap_or_default()
    }

    /// Forgets one that is gone.
    pub(super) fn forget(&mut self, greeting: Greeting, gone: &T) {
        if let Some(early) = self.waiting.get_mut(&greeting) {
            early.retain(|other| other != gone);
            if early.is_empty() {
                self.waiting.remove(&greeting);
            }
        }
    }

    /// How many of them wait.
    pub(super) fn count(&self) -> usize {
        self.waiting.values().map(Vec::len).sum()
    }
}
