//! The agent's handle on a communicator of its ranks: it sees who waits for whom, and fails the communicator
//! for all its ranks at once when it knows that an operation can not complete.
//!
//! The agent never attaches: it is no member, and nothing waits for it.

use std::os::fd::OwnedFd;

use crate::failure::{Failure, FailureKind};
use crate::layout::P2P_CHANNEL;
use crate::segment::{Segment, Verdict};

/// A communicator seen from outside.
#[derive(Debug)]
pub struct Supervised {
    segment: Segment,
    comm_id: u64,
}

/// What is on its way between two ranks of a communicator.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Between {
    /// Sends that the source has posted and that have not ended.
    pub sends: u32,
    /// Receives from this source that the destination has posted and that have not ended.
    pub receives: u32,
    /// Receives from any source that the destination has posted and that have not ended.
    pub any_receives: u32,
    /// Whether bytes lie between the two that the destination has not taken.
    pub in_flight: bool,
}

impl Supervised {
    /// Maps the segment behind a descriptor that a rank has offered.
    ///
    /// # Errors
    /// When it is no segment of this version.
    pub fn open(fd: &OwnedFd) -> Result<Self, Failure> {
        let segment = Segment::inspect(fd)?;
        let comm_id = segment.members().id();
        Ok(Self { segment, comm_id })
    }

    /// The number that the board shows for it.
    pub fn comm_id(&self) -> u64 {
        self.comm_id
    }

    /// The process group's name.
    pub fn name(&self) -> &str {
        &self.segment.members().name
    }

    /// Its ranks by their rank in the world, unchecked.
    pub fn world_ranks(&self) -> &[u32] {
        &self.segment.members().world_ranks
    }

    /// Its failure, if it has failed.
    pub fn failure(&self) -> Option<Failure> {
        self.segment.failure()
    }

    /// Fails every pending and future operation on all its ranks; the first failure stands, and is returned.
    /// `world_ranks` are to blame.
    pub fn fail_blaming(&self, kind: FailureKind, text: &str, world_ranks: &[u32]) -> Failure {
        let failure = self.segment.fail_by(&self.verdict(kind, text, world_ranks));
        self.decide();
        failure
    }

    /// As [`fail_blaming`](Self::fail_blaming), but its sleeping ranks wake only on [`announce`](Self::announce):
    /// a verdict on several communicators stands in all of them before anybody acts on it in one.
    pub fn fail_quietly(&self, kind: FailureKind, text: &str, world_ranks: &[u32]) {
        self.segment.fail_quietly(&self.verdict(kind, text, world_ranks));
    }

    /// Wakes the ranks of a communicator that has failed.
    pub fn announce(&self) {
        self.decide();
        self.segment.announce();
    }

    /// Ranks of several hosts need not wait until these agree: their agents have.
    fn decide(&self) {
        if self.segment.says_it_is_bridged()
            && let Some(failed) = self.segment.candidate()
        {
            self.segment.decide(&failed);
        }
    }

    fn verdict(&self, kind: FailureKind, text: &str, world_ranks: &[u32]) -> Verdict {
        let is_guilty = |rank: &u32| world_ranks.contains(&self.segment.world_rank(*rank));
        let blamed: Vec<u32> = self.segment.ranks().filter(is_guilty).collect();
        Verdict::new(kind, text).blaming(blamed)
    }

    /// What every timeout of this communicator says from now on about the ranks it waits for: lines that the
    /// agent has written, cut to 1536 bytes; none when `text` is empty.
    pub fn note(&self, text: &str) {
        self.segment.set_note(text);
    }

    /// Whether this rank of the communicator has destroyed its end.
    pub fn is_closed(&self, rank: u32) -> bool {
        rank < self.segment.size() && self.segment.is_closed(rank)
    }

    /// Whether some of its ranks are on other hosts, with segments of their own.
    pub fn is_bridged(&self) -> bool {
        self.segment.says_it_is_bridged()
    }

    /// What this segment knows of what is between two ranks of the communicator; nothing for ranks that it does not
    /// have. Of ranks of several hosts the segment of each knows a part: what its own ranks have posted, and what
    /// they have not been known to take.
    pub fn between(&self, from: u32, to: u32) -> Between {
        let segment = &self.segment;
        if from >= segment.size() || to >= segment.size() || from == to {
            return Between::default();
        }
        let load = |word: &crate::sync::AtomicU32| word.load(crate::sync::Ordering::Acquire);
        let readable = segment.ring(P2P_CHANNEL, from, to).readable();
        Between {
            sends: load(segment.pending_sends(from, to)),
            receives: load(segment.pending_receives(from, to)),
            any_receives: load(segment.pending_receives(to, to)),
            // What can not be is no proof of anything.
            in_flight: readable.map_or(true, |run| run.bytes > 0),
        }
    }
}

impl Between {
    /// What two hosts know of the same ranks.
    #[must_use]
    pub fn and(self, other: Between) -> Between {
        Between {
            sends: self.sends.max(other.sends),
            receives: self.receives.max(other.receives),
            any_receives: self.any_receives.max(other.any_receives),
            in_flight: self.in_flight || other.in_flight,
        }
    }
}
