//! Which pages of the arena may take memory of the host: those handed out since they were last discarded.

use std::ops::Range;

const PAGE: u64 = 4096;

/// A bit per page.
#[derive(Debug)]
pub(crate) struct Pages {
    /// From the system, zeroed, and touched as the arena is.
    words: Vec<u64>,
    /// The arena's size: behind it nothing keeps the last page.
    end: u64,
    reserved: u64,
}

impl Pages {
    /// For an arena of `bytes`.
    pub(crate) fn new(bytes: u64) -> Self {
        Self { words: vec![0; bytes.div_ceil(PAGE * 64) as usize], end: bytes, reserved: 0 }
    }

    /// In bytes of whole pages.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Every page that a block touches may take memory from now on.
    pub(crate) fn reserve(&mut self, start: u64, bytes: u64) {
        let mut added = 0;
        self.each_word(start / PAGE..(start + bytes).div_ceil(PAGE), |word, mask| {
            added += (mask & !*word).count_ones();
            *word |= mask;
        });
        self.reserved += u64::from(added) * PAGE;
    }

    /// The pages that hold bytes of this free range alone, (start, bytes).
    pub(crate) fn whole(&self, start: u64, bytes: u64) -> (u64, u64) {
        let from = start.next_multiple_of(PAGE);
        let end = start + bytes;
        let to = if end == self.end { end.next_multiple_of(PAGE) } else { end / PAGE * PAGE };
        (from, to.saturating_sub(from))
    }

    /// Whole pages take none any more. Returns how many bytes of them did.
    pub(crate) fn release(&mut self, (start, bytes): (u64, u64)) -> u64 {
        let mut removed = 0;
        self.each_word(start / PAGE..(start + bytes) / PAGE, |word, mask| {
            removed += (mask & *word).count_ones();
            *word &= !mask;
        });
        let bytes = u64::from(removed) * PAGE;
        self.reserved -= bytes;
        bytes
    }

    fn each_word(&mut self, pages: Range<u64>, mut change: impl FnMut(&mut u64, u64)) {
        let mut page = pages.start;
        while page < pages.end {
            let first = page % 64;
            let count = (64 - first).min(pages.end - page);
            change(&mut self.words[(page / 64) as usize], (u64::MAX >> (64 - count)) << first);
            page += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_reserve_pages_they_touch_and_ranges_release_pages_they_hold() {
        let mut pages = Pages::new(1 << 20);
        pages.reserve(512, 512);
        pages.reserve(1024, PAGE);
        assert_eq!(pages.reserved(), 2 * PAGE);
        assert_eq!(
            pages.whole(512, 2 * PAGE - 512),
            (PAGE, PAGE),
            "the first page has bytes before the range"
        );
        assert_eq!(pages.release((PAGE, PAGE)), PAGE);
        assert_eq!(pages.release((0, 1 << 20)), PAGE);
        pages.reserve(0, 1 << 20);
        pages.reserve(PAGE * 63, PAGE * 2);
        assert_eq!(pages.reserved(), 1 << 20);
        assert_eq!(pages.release((PAGE * 60, PAGE * 100)), PAGE * 100);
        assert_eq!(pages.whole(10, 20).1, 0, "no page lies wholly in 20 bytes");
    }

    #[test]
    fn nothing_keeps_the_page_that_the_end_cuts() {
        let pages = Pages::new(PAGE + 512);
        assert_eq!(pages.whole(PAGE, 512), (PAGE, PAGE));
        assert_eq!(pages.whole(1, PAGE + 511), (PAGE, PAGE));
        assert_eq!(pages.whole(PAGE, 511).1, 0);
    }
}
