//! Sets of ranks in shared memory: one bit per rank of a communicator.

use crate::region::Region;
use crate::sync::{AtomicU64, Ordering};

/// A set of ranks in a region. Bits that stand for no rank are ignored.
#[derive(Clone, Copy, Debug)]
pub struct SharedRankSet<'a> {
    region: &'a Region,
    offset: usize,
    ranks: u32,
}

impl<'a> SharedRankSet<'a> {
    /// The set at `offset`, for a communicator of `ranks` ranks.
    #[inline]
    pub fn new(region: &'a Region, offset: usize, ranks: u32) -> Self {
        Self { region, offset, ranks }
    }

    /// The word with the bits of the ranks from `64 * index` on.
    #[inline]
    pub fn word(&self, index: usize) -> &'a AtomicU64 {
        assert!(index < self.words(), "word {index} of {}", self.words());
        self.region.at(self.offset + index * 8)
    }

    /// Only for the one rank that writes the set at the time.
    #[inline]
    pub fn clear(&self) {
        (0..self.words()).for_each(|index| self.word(index).store(0, Ordering::Relaxed));
    }

    /// Adds ranks; several ranks may do so at once.
    #[inline]
    pub fn add(&self, ranks: &[u32]) {
        for rank in ranks.iter().filter(|rank| **rank < self.ranks) {
            self.word(*rank as usize / 64).fetch_or(1 << (rank % 64), Ordering::AcqRel);
        }
    }

    /// Whether `rank` is in it.
    #[inline]
    pub fn has(&self, rank: u32) -> bool {
        rank < self.ranks && self.word(rank as usize / 64).load(Ordering::Acquire) & 1 << (rank % 64) != 0
    }

    /// The ranks in it, in order.
    #[inline]
    pub fn ranks(&self) -> Vec<u32> {
        (0..self.ranks).filter(|rank| self.has(*rank)).collect()
    }

    fn words(&self) -> usize {
        (self.ranks as usize).div_ceil(64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_added_is_in_it(
            size in 1u32..200, ranks in prop::collection::btree_set(0u32..250, 0..20), noise: u64,
        ) {
            let (region, _fd) = Region::create("test", 4096).expect("memfds work here");
            let set = SharedRankSet::new(&region, 64, size);
            set.word(size as usize / 65).store(noise, Ordering::Relaxed);
            set.clear();
            set.add(&ranks.iter().copied().collect::<Vec<_>>());
            let expected: Vec<u32> = ranks.into_iter().filter(|rank| *rank < size).collect();
            prop_assert_eq!(set.ranks(), expected);
            // Another process may write anything.
            set.word((size as usize - 1) / 64).store(noise, Ordering::Relaxed);
            prop_assert!(set.ranks().iter().all(|rank| *rank < size));
        }
    }
}
