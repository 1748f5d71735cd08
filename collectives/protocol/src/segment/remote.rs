//! The parts of a segment for the bridge to other hosts, and the data that the bridge puts in for their
//! ranks. Where all ranks share one host none of it is used.

use std::ops::Range;

use tpurun_memory::arena::ArenaKind;
use tpurun_memory::sync::{AtomicU32, AtomicU64, Ordering};

use crate::layout::{LINE, WRITTEN_WORDS};
use crate::match_key::SLOT_BYTES;

use super::base::Base;
use super::words::*;

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
    #[inline]
    pub fn among(bytes: usize, ranks: u32) -> Self {
        Self { stride: bytes.div_ceil(ranks as usize).next_multiple_of(LINE), bytes }
    }

    /// The stretch of one rank, which may be empty.
    #[inline]
    pub fn of(&self, rank: u32) -> Range<usize> {
        let at = |rank: usize| rank.saturating_mul(self.stride).min(self.bytes);
        at(rank as usize)..at(rank as usize + 1)
    }
}

/// The place of a stretch of a tensor in an arena of its rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArenaStretch {
    /// Which arena of the rank.
    pub kind: ArenaKind,
    /// Offset in the arena.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

/// The words and stretches that ranks write for other hosts.
#[derive(Clone, Copy, Debug)]
pub struct RemoteRanks<'a>(pub(super) &'a Base);

impl<'a> RemoteRanks<'a> {
    /// The same, for a reader that was not told where they are.
    #[inline]
    pub fn says_it_is_bridged(self) -> bool {
        self.0.region().at::<AtomicU32>(self.0.layout().header() + H_HOSTS).load(Ordering::Relaxed) > 1
    }

    /// Says that this rank has written all it has for the round that it is about to arrive at. The last one here
    /// does what is left to do before other hosts are told.
    pub fn count_written(self, last: impl FnOnce()) {
        let ranks = self.0.ranks_here().len() as u64;
        let count: &AtomicU64 = self.0.region().at(self.0.layout().header() + H_LOCAL);
        // Acquire and release, through all of them: what the ranks here have written.
        let count = count.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
        if count.is_multiple_of(ranks) {
            last();
            // Release, and acquire by the bridge: as above.
            self.ready().store(count / ranks, Ordering::Release);
            self.0.ring_bridge();
        }
    }

    /// Says where the next stretch of a fold is that this rank has: in one of its arenas, or in its window.
    #[inline]
    pub fn set_place(self, parity: usize, place: Option<ArenaStretch>) {
        let words =
            place.map_or([0; 3], |ArenaStretch { kind, offset, bytes }| [kind as u64 + 1, offset, bytes]);
        for (index, word) in words.into_iter().enumerate() {
            self.place_word(self.0.rank(), parity, index).store(word, Ordering::Relaxed);
        }
    }

    /// Where that is of a rank here.
    #[inline]
    pub fn place(self, rank: u32, parity: usize) -> Option<ArenaStretch> {
        let word = |index| self.place_word(rank, parity, index).load(Ordering::Relaxed);
        let kind = ArenaKind::ALL.into_iter().find(|kind| *kind as u64 + 1 == word(0))?;
        Some(ArenaStretch { kind, offset: word(1), bytes: word(2) })
    }

    fn place_word(self, rank: u32, parity: usize, index: usize) -> &'a AtomicU64 {
        self.0.region().at(self.0.layout().member(rank) + M_PLACE + PLACE_BYTES * parity + 8 * index)
    }

    /// Says that this rank has staged its stretch of a fold for the next round of this parity, and whether it is the
    /// last one here. A rank may be a round ahead of the others, and so each parity has a count.
    #[inline]
    pub fn count_staged(self, parity: usize) -> bool {
        let ranks = self.0.ranks_here().len() as u64;
        // Acquire and release, through all of them: what the ranks here have staged.
        self.staged(parity).fetch_add(1, Ordering::AcqRel).wrapping_add(1).is_multiple_of(ranks)
    }

    /// Whether all other ranks here have said so, and what they have staged is there to be read.
    #[inline]
    pub fn stages_last(self, parity: usize) -> bool {
        let ranks = self.0.ranks_here().len() as u64;
        self.staged(parity).load(Ordering::Acquire).wrapping_add(1).is_multiple_of(ranks)
    }

    fn staged(self, parity: usize) -> &'a AtomicU64 {
        self.0.region().at(self.0.layout().header() + H_STAGED + 8 * parity)
    }

    /// Rounds for which all that other hosts are to be sent is there.
    #[inline]
    pub fn local_rounds(self) -> u64 {
        self.ready().load(Ordering::Acquire)
    }

    fn ready(self) -> &'a AtomicU64 {
        self.0.region().at(self.0.layout().header() + H_READY)
    }

    /// Notes what this rank has written for the round of this parity; `each` has the bytes for every rank.
    #[inline]
    pub fn set_written(self, parity: usize, written: Written, each: &[usize]) {
        self.set_written_by(self.0.rank(), parity, written, each);
    }

    /// The same, of another rank.
    pub fn set_written_by(self, rank: u32, parity: usize, written: Written, each: &[usize]) {
        let at = self.0.layout().written(rank, parity);
        let Written { slot, behind, splits, for_all, stride, partial, is_partial, folded } = written;
        let Gathered { stride: folded_stride, bytes: folded } = folded;
        let words: [usize; WRITTEN_WORDS] =
            [slot, behind, splits, for_all, stride, partial, is_partial.into(), folded_stride, folded];
        for (index, word) in words.iter().chain(each).enumerate() {
            self.0.region().at::<AtomicU64>(at + 8 * index).store(*word as u64, Ordering::Relaxed);
        }
    }

    /// Returns what a rank here has written, which never is more than there is room for.
    pub fn written(self, rank: u32, parity: usize) -> Written {
        let layout = self.0.layout();
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
    #[inline]
    pub fn written_for(self, rank: u32, parity: usize, to: u32) -> usize {
        self.written_word(rank, parity, WRITTEN_WORDS + to as usize)
    }

    fn written_word(self, rank: u32, parity: usize, index: usize) -> usize {
        let at = self.0.layout().written(rank, parity) + 8 * index;
        let word = self.0.region().at::<AtomicU64>(at).load(Ordering::Relaxed);
        usize::try_from(word).unwrap_or(usize::MAX)
    }
}
