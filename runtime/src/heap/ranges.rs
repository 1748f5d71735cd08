//! Free ranges of the arena: disjoint, never adjacent, found by size and by place.

use std::collections::{BTreeMap, BTreeSet};

/// The free ranges.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    /// Start to bytes.
    by_start: BTreeMap<u64, u64>,
    /// (bytes, start).
    by_bytes: BTreeSet<(u64, u64)>,
}

impl Ranges {
    /// Takes `bytes` from the start of the smallest range that has them, of several the first.
    pub(crate) fn take_best(&mut self, bytes: u64) -> Option<u64> {
        let &(found, start) = self.by_bytes.range((bytes, 0)..).next()?;
        self.remove(start, found);
        self.insert(start + bytes, found - bytes);
        Some(start)
    }

    /// Takes the last `bytes` that are free and start at a multiple of `alignment`, a power of two.
    pub(crate) fn take_last(&mut self, bytes: u64, alignment: u64) -> Option<u64> {
        let aligned = |(&from, &free): (&u64, &u64)| {
            let start = (from + free).checked_sub(bytes)? & !(alignment - 1);
            (start >= from).then_some((from, free, start))
        };
        let (from, free, start) = self.by_start.iter().rev().find_map(aligned)?;
        self.remove(from, free);
        self.insert(from, start - from);
        self.insert(start + bytes, from + free - start - bytes);
        Some(start)
    }

    /// Gives a range back, which joins its neighbours.
    ///
    /// # Panics
    /// When some of it is free already.
    pub(crate) fn give(&mut self, start: u64, bytes: u64) {
        let (mut from, mut to) = (start, start + bytes);
        if let Some((&before, &size)) = self.by_start.range(..=start).next_back() {
            assert!(before + size <= start, "bytes at {start} are freed twice");
            if before + size == start {
                self.remove(before, size);
                from = before;
            }
        }
        if let Some((&after, &size)) = self.by_start.range(start..).next() {
            assert!(to <= after, "bytes at {after} are freed twice");
            if after == to {
                self.remove(after, size);
                to = after + size;
            }
        }
        self.insert(from, to - from);
    }

    /// The size of the largest.
    pub(crate) fn largest(&self) -> u64 {
        self.by_bytes.last().map_or(0, |(bytes, _)| *bytes)
    }

    /// (start, bytes) of each, from the first on.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.by_start.iter().map(|(start, bytes)| (*start, *bytes))
    }

    fn insert(&mut self, start: u64, bytes: u64) {
        if bytes > 0 {
            self.by_start.insert(start, bytes);
            self.by_bytes.insert((bytes, start));
        }
    }

    fn remove(&mut self, start: u64, bytes: u64) {
        self.by_start.remove(&start);
        self.by_bytes.remove(&(bytes, start));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(ranges: &[(u64, u64)]) -> Ranges {
        let mut free = Ranges::default();
        ranges.iter().for_each(|(start, bytes)| free.give(*start, *bytes));
        free
    }

    fn list(free: &Ranges) -> Vec<(u64, u64)> {
        assert_eq!(free.by_start.len(), free.by_bytes.len());
        free.iter().collect()
    }

    #[test]
    fn neighbours_join() {
        assert_eq!(list(&of(&[(0, 2), (4, 2), (2, 2)])), [(0, 6)]);
        assert_eq!(list(&of(&[(4, 2), (0, 2), (8, 1)])), [(0, 2), (4, 2), (8, 1)]);
    }

    #[test]
    fn the_smallest_that_fits_is_taken_from_its_start() {
        let mut free = of(&[(0, 8), (10, 3), (20, 3)]);
        assert_eq!(free.take_best(2), Some(10));
        assert_eq!(list(&free), [(0, 8), (12, 1), (20, 3)]);
        assert_eq!(free.take_best(3), Some(20));
        assert_eq!(free.take_best(9), None);
        assert_eq!(free.largest(), 8);
    }

    #[test]
    fn the_last_aligned_place_leaves_what_is_around_it() {
        let mut free = of(&[(0, 9), (13, 6)]);
        assert_eq!(free.take_last(4, 4), Some(4), "13 to 19 has no four bytes at a multiple of four but 16");
        assert_eq!(list(&free), [(0, 4), (8, 1), (13, 6)]);
        assert_eq!(free.take_last(2, 2), Some(16));
        assert_eq!(list(&free), [(0, 4), (8, 1), (13, 3), (18, 1)]);
        assert_eq!(free.take_last(5, 1), None);
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn what_is_free_is_not_given_again() {
        of(&[(0, 4), (2, 1)]);
    }
}
