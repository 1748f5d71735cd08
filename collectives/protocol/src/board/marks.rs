//! When a rank reached the steps of its start, one word each: `tpurun --timings` shows them.
//!
//! The steps of the engine are marked where it records operations anyway. Those of the Python package are
//! written through the inherited descriptor, at an offset that the launcher tells (`python/tpurun/_marks.py`).

use super::{Board, BoardLane, SLOT_MARKS, slot_at};

/// A step of a rank's start. Each is marked once, whichever communicator is the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// The first line of a Python program is about to run; written by the package.
    ScriptEntered,
    /// Its first group exists, all ranks of it have come; written by the package.
    GroupCreated,
    /// The program has posted its first collective.
    FirstPosted,
    /// A collective has succeeded.
    FirstDone,
}

impl Board {
    /// When a rank reached a step, CLOCK_MONOTONIC and unchecked; `None` while it has not.
    #[inline]
    pub fn mark(&self, rank: u32, mark: Mark) -> Option<u64> {
        let at = (rank < self.world).then(|| at(slot_at(rank), mark))?;
        Some(self.load(at)).filter(|ns| *ns != 0)
    }

    /// Where in the memory of the board the word of a mark lies, in bytes.
    ///
    /// # Panics
    /// When `rank` is not in the world.
    #[inline]
    pub fn offset_of_mark(&self, rank: u32, mark: Mark) -> usize {
        assert!(rank < self.world, "rank {rank} of {}", self.world);
        at(slot_at(rank), mark) * 8
    }
}

impl BoardLane {
    /// Two threads that are first at the same time both write, and what they write is nearly the same.
    #[inline]
    pub(super) fn mark_first(&self, mark: Mark, now_ns: impl FnOnce() -> u64) {
        let at = at(self.slot, mark);
        if self.board.load(at) == 0 {
            self.board.store(at, now_ns());
        }
    }
}

fn at(slot: usize, mark: Mark) -> usize {
    slot + SLOT_MARKS + mark as usize
}

pub(super) const MARKS: usize = Mark::FirstDone as usize + 1;
