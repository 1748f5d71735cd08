//! The parts of a segment for the bridge to other hosts, and the data that the bridge puts in for their
//! ranks. Where all ranks share one host none of it is used.

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::frame::{Failed, Status};
use crate::hosts::Hosts;
use crate::layout::{FAILURE_TEXT_BYTES, LINE, WRITTEN_WORDS};
use crate::match_key::SLOT_BYTES;
use tpurun_memory::arena::ArenaKind;
use tpurun_memory::failure::{Failure, FailureKind};
use tpurun_memory::process::Liveness;
use tpurun_memory::sync::{AtomicU32, AtomicU64, Ordering, Publication, Writer};

use super::{
    H_DECIDED, H_HOSTS, H_LOCAL, H_MOVES, H_READY, H_RUNG, H_STAGED, M_ARRIVED, M_CLOSED, M_LEFT, M_PID,
    M_PLACE, PLACE_BYTES, Segment,
};

/// The bytes that a rank has written for a round, from the beginning of each place.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Written {
    /// Bytes of the slot.
    pub slot: usize,
    /// Bytes of the keys that are offered behind it.
    pub behind: usize,
    /// Bytes of the counts per peer.
    pub splits: usize,
    /// The bytes of its window, for all ranks alike.
    pub for_all: usize,
    /// Distance of what its window has for each rank; 0 when it has nothing for one alone.
    pub stride: usize,
    /// The bytes that all ranks of its host together have, in the place of its window; the first one's to
    /// say.
    pub partial: usize,
    /// Whether the bytes for each rank are not in its window but among those of all ranks of its host, too.
    pub is_partial: bool,
    /// The bytes of the result of the round before, of which each host has folded the stretches of its ranks;
    /// as above.
    pub folded: Gathered,
}

/// Stretches of a result, one for each rank, each folded on the rank's host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Gathered {
    /// Distance of the stretches.
    pub stride: usize,
    /// The bytes of all of them.
    pub bytes: usize,
}

impl Gathered {
    /// The stretches of `bytes` bytes among `ranks` ranks.
    pub fn among(bytes: usize, ranks: u32) -> Self {
        Self { stride: bytes.div_ceil(ranks as usize).next_multiple_of(LINE), bytes }
    }

    /// The stretch of one rank, which may be empty.
    pub fn of(&self, rank: u32) -> Range<usize> {
        let at = |rank: usize| rank.saturating_mul(self.stride).min(self.bytes);
        at(rank as usize)..at(rank as usize + 1)
    }
}

/// The place of a stretch of a tensor in an arena of its rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Which arena of the rank.
    pub kind: ArenaKind,
    /// Offset in the arena.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

/// The time that a rank waits for the hosts to agree on why a communicator has failed: they need two
/// messages.
pub const AGREEMENT: Duration = Duration::from_secs(1);

impl Segment {
    /// The hosts of the ranks.
    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Where this rank is.
    pub fn host(&self) -> u32 {
        self.hosts.of(self.rank())
    }

    /// Whether `rank` is on the host of this rank.
    pub fn is_here(&self, rank: u32) -> bool {
        self.hosts.of(rank) == self.host()
    }

    /// The ranks of this host, in order.
    pub fn ranks_here(&self) -> &[u32] {
        self.hosts.ranks(self.host())
    }

    /// Whether ranks are on other hosts, too.
    pub fn is_bridged(&self) -> bool {
        self.hosts.count() > 1
    }

    /// The same, for a reader that was not told where they are.
    pub fn says_it_is_bridged(&self) -> bool {
        self.region().at::<AtomicU32>(self.layout().header() + H_HOSTS).load(Ordering::Relaxed) > 1
    }

    /// Not 0 while a ring of the bell is on its way.
    pub fn rung(&self) -> &AtomicU32 {
        self.region().at(self.layout().header() + H_RUNG)
    }

    /// Has the bridge look.
    pub fn ring_bridge(&self) {
        if let Some(bell) = &self.bell {
            bell.ring(self.rung());
        }
    }

    /// Says that this rank has written all it has for the round that it is about to arrive at. The last one here
    /// does what is left to do before other hosts are told.
    pub fn count_written(&self, last: impl FnOnce()) {
        let ranks = self.ranks_here().len() as u64;
        let count: &AtomicU64 = self.region().at(self.layout().header() + H_LOCAL);
        // Acquire and release, through all of them: what the ranks here have written.
        let count = count.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
        if count.is_multiple_of(ranks) {
            last();
            // Release, and acquire by the bridge: as above.
            self.ready().store(count / ranks, Ordering::Release);
            self.ring_bridge();
        }
    }

    /// Says where the next stretch of a fold is that this rank has: in one of its arenas, or in its window.
    pub fn set_place(&self, parity: usize, place: Option<Place>) {
        let words = place.map_or([0; 3], |Place { kind, offset, bytes }| [kind as u64 + 1, offset, bytes]);
        for (index, word) in words.into_iter().enumerate() {
            self.place_word(self.rank(), parity, index).store(word, Ordering::Relaxed);
        }
    }

    /// Where that is of a rank here.
    pub fn place(&self, rank: u32, parity: usize) -> Option<Place> {
        let word = |index| self.place_word(rank, parity, index).load(Ordering::Relaxed);
        let kind = ArenaKind::ALL.into_iter().find(|kind| *kind as u64 + 1 == word(0))?;
        Some(Place { kind, offset: word(1), bytes: word(2) })
    }

    fn place_word(&self, rank: u32, parity: usize, index: usize) -> &AtomicU64 {
        self.region().at(self.layout().member(rank) + M_PLACE + PLACE_BYTES * parity + 8 * index)
    }

    /// Says that this rank has staged its stretch of a fold for the next round of this parity, and whether it is the
    /// last one here. A rank may be a round ahead of the others, and so each parity has a count.
    pub fn count_staged(&self, parity: usize) -> bool {
        let ranks = self.ranks_here().len() as u64;
        // Acquire and release, through all of them: what the ranks here have staged.
        self.staged(parity).fetch_add(1, Ordering::AcqRel).wrapping_add(1).is_multiple_of(ranks)
    }

    /// Whether all other ranks here have said so, and what they have staged is there to be read.
    pub fn stages_last(&self, parity: usize) -> bool {
        let ranks = self.ranks_here().len() as u64;
        self.staged(parity).load(Ordering::Acquire).wrapping_add(1).is_multiple_of(ranks)
    }

    fn staged(&self, parity: usize) -> &AtomicU64 {
        self.region().at(self.layout().header() + H_STAGED + 8 * parity)
    }

    /// Rounds for which all that other hosts are to be sent is there.
    pub fn local_rounds(&self) -> u64 {
        self.ready().load(Ordering::Acquire)
    }

    fn ready(&self) -> &AtomicU64 {
        self.region().at(self.layout().header() + H_READY)
    }

    /// Notes what this rank has written for the round of this parity; `each` has the bytes for every rank.
    pub fn set_written(&self, parity: usize, written: Written, each: &[usize]) {
        self.set_written_by(self.rank(), parity, written, each);
    }

    /// The same, of another rank.
    pub fn set_written_by(&self, rank: u32, parity: usize, written: Written, each: &[usize]) {
        let at = self.layout().written(rank, parity);
        let Written { slot, behind, splits, for_all, stride, partial, is_partial, folded } = written;
        let Gathered { stride: folded_stride, bytes: folded } = folded;
        let words: [usize; WRITTEN_WORDS] =
            [slot, behind, splits, for_all, stride, partial, is_partial.into(), folded_stride, folded];
        for (index, word) in words.iter().chain(each).enumerate() {
            self.region().at::<AtomicU64>(at + 8 * index).store(*word as u64, Ordering::Relaxed);
        }
    }

    /// Returns what a rank here has written, which never is more than there is room for.
    pub fn written(&self, rank: u32, parity: usize) -> Written {
        let layout = self.layout();
        let word = |index: usize, most: usize| self.written_word(rank, parity, index).min(most);
        Written {
            slot: word(0, SLOT_BYTES),
            behind: word(1, crate::match_key::OFFERS_BYTES),
            splits: word(2, layout.splits_bytes()),
            for_all: word(3, layout.window_bytes()),
            stride: word(4, layout.window_bytes()),
            partial: word(5, layout.window_bytes()),
            is_partial: word(6, 1) == 1,
            folded: Gathered {
                stride: word(7, layout.window_bytes()),
                bytes: word(8, layout.window_bytes()),
            },
        }
    }

    /// The bytes of it that are for one rank alone.
    pub fn written_for(&self, rank: u32, parity: usize, to: u32) -> usize {
        self.written_word(rank, parity, WRITTEN_WORDS + to as usize)
    }

    fn written_word(&self, rank: u32, parity: usize, index: usize) -> usize {
        let at = self.layout().written(rank, parity) + 8 * index;
        let word = self.region().at::<AtomicU64>(at).load(Ordering::Relaxed);
        usize::try_from(word).unwrap_or(usize::MAX)
    }

    /// Tells `rank` that something happened on a ring between it and this one.
    pub fn notify(&self, rank: u32) {
        if self.is_here(rank) {
            self.doorbell(rank).ring();
        } else {
            // Release pairs with the bridge, which reads it before it looks at the rings.
            self.moves().fetch_add(1, Ordering::AcqRel);
            self.ring_bridge();
        }
    }

    /// How often something happened on a ring to or from another host.
    pub fn moves(&self) -> &AtomicU32 {
        self.region().at(self.layout().header() + H_MOVES)
    }

    /// A rank of another host is there.
    pub fn attach_remote(&self, rank: u32, pid: u32) {
        self.member_word(rank, M_PID).store(pid, Ordering::Release);
        self.attendance().count(self.size());
    }

    /// Ranks of another host have come to a round, and what they wrote for it is here.
    pub fn arrive_for(&self, ranks: &[u32], round: u32) {
        for rank in ranks {
            self.arrived(*rank).store(u64::from(round) + 1, Ordering::Relaxed);
        }
        self.meeting().arrive_for(ranks.len() as u32, self.size());
    }

    /// How far a rank here is.
    pub fn status(&self, rank: u32) -> Status {
        Status {
            arrived: self.arrived(rank).load(Ordering::Relaxed),
            posted: self.posted(rank).load(Ordering::Relaxed),
            left: self.left(rank).map_or(0, |seq| seq.saturating_add(1)),
            lost: self.lost(rank).load(Ordering::Acquire).into(),
        }
    }

    /// How far a rank of another host is.
    pub fn put_status(&self, rank: u32, status: &Status) {
        self.arrived(rank).fetch_max(status.arrived, Ordering::Relaxed);
        self.posted(rank).fetch_max(status.posted, Ordering::Relaxed);
        if status.left > 0 && self.left(rank).is_none() {
            let left: &AtomicU64 = self.region().at(self.layout().member(rank) + M_LEFT);
            left.store(status.left, Ordering::Release);
            self.member_word(rank, M_CLOSED).store(1, Ordering::Release);
            self.announce_departure();
        }
        if status.lost > 0 && self.lost(rank).load(Ordering::Acquire) == 0 {
            self.mourn(rank);
        }
    }

    fn arrived(&self, rank: u32) -> &AtomicU64 {
        self.region().at(self.layout().member(rank) + M_ARRIVED)
    }

    /// The failure as this host would have it, for the others: its ranks by their number in the communicator.
    pub fn candidate(&self) -> Option<Failed> {
        let failure = self.own_failure()?;
        let blamed = self.ranks().filter(|rank| failure.ranks().contains(&self.world_rank(*rank))).collect();
        Some(Failed { kind: failure.kind() as u32, blamed, text: failure.to_string() })
    }

    /// Says what the hosts have agreed on; by the bridge, or by the agent, who has asked the other agents. Where one of
    /// them has begun to say it, the other one leaves it to that; unless it has died over it.
    pub fn decide(&self, failed: &Failed) {
        let bytes = failed.encode();
        let write = || {
            // A text that is too long loses its end, as it does without other hosts.
            let room = FAILURE_TEXT_BYTES.min(bytes.len());
            self.region().write(self.layout().decided() + 8, &bytes[..room]);
            self.region().at::<AtomicU32>(self.layout().decided()).store(room as u32, Ordering::Relaxed);
        };
        let look_at = |writer| {
            let is_rank = writer < self.size();
            if is_rank && self.liveness(writer) == Liveness::Gone { Writer::Gone } else { Writer::Silent }
        };
        // In the place of what a dead one has left, too.
        self.decided().publish(self.writer(), write, || true, look_at, |_| write());
    }

    /// Ranks of several hosts need not wait until these agree on its failure, if it has failed: their agents have, or
    /// nothing joins the hosts over which they could.
    pub fn decide_alone(&self) {
        if self.says_it_is_bridged()
            && let Some(failed) = self.candidate()
        {
            self.decide(&failed);
        }
    }

    /// Returns the failure that the hosts have agreed on; `None` when they do not in time.
    pub(super) fn agreed_failure(&self) -> Option<Failure> {
        let deadline = *self.seen_failed.get_or_init(Instant::now) + AGREEMENT;
        if !self.decided().await_standing(Some(deadline)) {
            return None;
        }
        let bytes = self.region().at::<AtomicU32>(self.layout().decided()).load(Ordering::Relaxed) as usize;
        let mut bytes = vec![0; bytes.min(FAILURE_TEXT_BYTES)];
        self.region().read(self.layout().decided() + 8, &mut bytes);
        let Failed { kind, mut blamed, text } = Failed::decode(&bytes)?;
        blamed.retain(|rank| *rank < self.size());
        Some(Failure::new(FailureKind::from_code(kind), text).blaming(self.in_world(&blamed)))
    }

    #[cfg(any(test, feature = "testing"))]
    /// Whether the hosts have agreed on a failure.
    pub fn has_decided(&self) -> bool {
        self.decided().await_standing(Some(Instant::now()))
    }

    /// The text that the hosts have agreed on, if they have.
    #[cfg(any(test, feature = "testing"))]
    pub fn decided_now(&self) -> Option<String> {
        self.has_decided().then(|| self.agreed_failure().expect("it is there").to_string())
    }

    fn decided(&self) -> &Publication {
        self.region().at(self.layout().header() + H_DECIDED)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// The number of a process that has ended.
    fn pid_of_nobody() -> u32 {
        let mut child = Command::new("true").spawn().expect("there is true");
        child.wait().expect("it ends");
        child.id()
    }

    /// A segment of two hosts, of which the first rank is this process or a dead one.
    fn segment(pid: u32) -> Segment {
        let hosts = Hosts::parse("0 1\nn0\nn1", 2).expect("two hosts");
        let segment = Segment::alone("dp0", 2, 4096).with_hosts(hosts);
        segment.member_word(0, M_PID).store(pid, Ordering::Relaxed);
        segment
    }

    fn failed(text: &str) -> Failed {
        Failed { kind: FailureKind::RankLost as u32, blamed: vec![1], text: text.to_owned() }
    }

    /// As a process leaves it that dies after so many bytes of its text.
    fn begin(segment: &Segment, bytes: usize) {
        assert!(segment.decided().claims(0));
        let text = failed("what the dead one would have said, and more of it").encode();
        segment.region().write(segment.layout().decided() + 8, &text[..bytes.min(text.len())]);
        let length: &AtomicU32 = segment.region().at(segment.layout().decided());
        length.store(text.len() as u32, Ordering::Relaxed);
    }

    #[test]
    fn who_dies_over_what_the_hosts_agreed_on_is_spoken_for() {
        let nobody = pid_of_nobody();
        for bytes in [0, 1, 20, usize::MAX] {
            let segment = segment(nobody);
            begin(&segment, bytes);
            assert!(!segment.has_decided());
            segment.decide(&failed("what the agent says"));
            assert_eq!(segment.decided_now().as_deref(), Some("what the agent says"));
            // It stays.
            segment.decide(&failed("what comes later"));
            assert_eq!(segment.decided_now().as_deref(), Some("what the agent says"));
        }
    }

    #[test]
    fn who_lives_is_left_to_finish() {
        let segment = segment(std::process::id());
        begin(&segment, 5);
        segment.decide(&failed("what the agent says"));
        assert!(!segment.has_decided(), "the other one still writes");
    }
}
