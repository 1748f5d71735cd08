//! Decides which connections node 0 takes up before it knows who makes them.
//!
//! A node of the job chooses the id in its first packet so that it proves the token (`Token::first_id`). That is
//! checked before any key is agreed on, and those packets are always taken up. Every other connection is a
//! stranger's: a few of them are answered, so that a node with a wrong token or version learns why it is refused,
//! and the rest are dropped unanswered. A flood of strangers therefore delays no node of the job.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use quinn::ConnectionId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::token::Token;

/// A connection that is taken up.
pub(super) enum Visitor {
    Node,
    /// The permit lasts as long as the stranger is dealt with.
    Stranger {
        _permit: OwnedSemaphorePermit,
    },
}

/// Decides about first packets.
pub(super) struct Admission {
    token: Token,
    /// Ids of nodes that have been taken up: a stranger that saw one on the wire cannot use it again. Only nodes that
    /// know the token add to the set.
    used: HashSet<ConnectionId>,
    strangers: Arc<Semaphore>,
    /// Strangers that may still be taken up, as of `counted`.
    allowance: f64,
    counted: Instant,
}

impl Admission {
    pub(super) fn new(token: Token, now: Instant) -> Admission {
        let strangers = Arc::new(Semaphore::new(MOST_STRANGERS));
        Admission { token, used: HashSet::new(), strangers, allowance: BURST, counted: now }
    }

    /// Decides about a first packet; None means that it is to be dropped.
    pub(super) fn admit(&mut self, first_id: ConnectionId, now: Instant) -> Option<Visitor> {
        if self.token.made(&first_id) && self.used.insert(first_id) {
            return Some(Visitor::Node);
        }
        let elapsed = now.saturating_duration_since(self.counted).as_secs_f64();
        (self.allowance, self.counted) = ((self.allowance + elapsed * EACH_SECOND).min(BURST), now);
        if self.allowance < 1.0 {
            return None;
        }
        let permit = self.strangers.clone().try_acquire_owned().ok()?;
        self.allowance -= 1.0;
        Some(Visitor::Stranger { _permit: permit })
    }
}

/// Strangers that are dealt with at the same time: each has a connection of its own in memory.
const MOST_STRANGERS: usize = 4;
/// Strangers that are taken up at once after a quiet time. A handshake costs about a millisecond of CPU.
const BURST: f64 = 16.0;
/// Strangers that are taken up in a second from then on.
const EACH_SECOND: f64 = 4.0;

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const WORD: &str = "a token that is long enough";

    #[test]
    fn a_node_comes_in_however_many_strangers_knock() {
        let (token, now) = (Token::new(WORD).unwrap(), Instant::now());
        let mut admission = Admission::new(token.clone(), now);
        let stranger = |byte: u16| ConnectionId::new(&[&byte.to_le_bytes()[..], &[0; 18]].concat());
        let held: Vec<_> = (0..1000).filter_map(|id| admission.admit(stranger(id), now)).collect();
        assert_eq!(held.len(), MOST_STRANGERS);
        let own = token.first_id();
        assert!(matches!(admission.admit(own, now), Some(Visitor::Node)));
        assert!(admission.admit(own, now).is_none(), "an id that was seen on the wire is a stranger's");
        let other = Token::new("another token, long enough as well").unwrap();
        assert!(admission.admit(other.first_id(), now).is_none());
        drop(held);
        let mut come = 0;
        while admission.admit(stranger(come), now).is_some() {
            come += 1;
        }
        assert_eq!(usize::from(come) + MOST_STRANGERS, BURST as usize);
        let later = now + Duration::from_secs(1);
        assert!(matches!(admission.admit(stranger(0), later), Some(Visitor::Stranger { .. })));
    }
}
