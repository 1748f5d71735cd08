//! The allocator: which bytes of the arena are whose. Pure: offsets in, offsets out, and the same calls give
//! the same offsets on every rank.
//!
//! Blocks up to 64 KiB come from slabs of one size class each (`slabs.rs`), from the arena's end on; larger
//! ones, and small ones where slabs would waste too much, are the best fit among the free ranges
//! (`ranges.rs`), from its start on. Freed memory is kept for reuse, pages and all, until [`Heap::trim`]
//! says which ranges the host may have back.

mod classes;
mod pages;
mod ranges;
mod slabs;

use std::collections::HashMap;
use std::sync::Arc;

use self::classes::{SizeClass, UNIT};
use self::pages::Pages;
use self::ranges::Ranges;
use self::slabs::{SLAB, Slabs};
use crate::accounts::Stats;
use crate::shortage::Shortage;
use crate::sites::{Held, SITE_BYTES, Sites};

/// A live block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block {
    /// Where it starts, a multiple of 512 bytes.
    pub offset: u64,
    /// The bytes it takes, a multiple of 512.
    pub bytes: u64,
}

/// The allocator of one arena.
#[derive(Debug)]
pub struct Heap {
    free: Ranges,
    slabs: Slabs,
    /// Blocks that are not in slabs, by offset.
    large: HashMap<u64, Large>,
    pages: Pages,
    sites: Sites,
    stats: Stats,
}

#[derive(Debug)]
struct Large {
    bytes: u64,
    site: Option<Arc<str>>,
}

/// Slabs may keep at most this part of the limit from large blocks; beyond, small blocks are taken like those.
const UNUSED_SHARE: u64 = 32;

/// The name of the site that a block from 1 MiB on is accounted to when nobody knows its line.
const NO_SITE: &str = "an unknown line";

impl Heap {
    /// For blocks that take at most `limit` bytes in all.
    pub fn new(limit: u64) -> Self {
        let mut free = Ranges::default();
        let bytes = limit / UNIT * UNIT;
        if bytes > 0 {
            free.give(0, bytes);
        }
        Self {
            free,
            slabs: Slabs::new(bytes),
            large: HashMap::new(),
            pages: Pages::new(bytes),
            sites: Sites::default(),
            stats: Stats { limit, ..Stats::default() },
        }
    }

    /// A block of at least `bytes` bytes, which `site` (a line of the user's program) is named for when it is
    /// of 1 MiB or more. No bytes take a block, too.
    ///
    /// # Errors
    /// When it would exceed the limit, or no free range is large enough.
    pub fn allocate(&mut self, bytes: u64, site: Option<&str>) -> Result<Block, Box<Shortage>> {
        let block = self.place(bytes, site).or_else(|| {
            // Free slabs are kept per class; as ranges they may do.
            self.coalesce();
            self.place(bytes, site)
        });
        if let Some(block) = block {
            self.stats.took(block.bytes);
            return Ok(block);
        }
        self.stats.refused += 1;
        Err(Box::new(self.shortage(bytes, site)))
    }

    /// Takes the live block that starts at `offset` back; none when there is none.
    pub fn free(&mut self, offset: u64) -> Option<u64> {
        let bytes = match self.slabs.give(offset) {
            Some(given) => {
                if let Some(start) = given.empty_slab {
                    self.free.give(start, SLAB);
                }
                given.bytes
            }
            None => {
                let Large { bytes, site } = self.large.remove(&offset)?;
                if let Some(site) = site {
                    self.sites.remove(&site, bytes);
                }
                self.free.give(offset, bytes);
                bytes
            }
        };
        self.stats.gave(bytes);
        Some(bytes)
    }

    /// Returns the bytes that the live block that starts at `offset` takes.
    pub fn bytes(&self, offset: u64) -> Option<u64> {
        self.slabs.bytes(offset).or_else(|| self.large.get(&offset).map(|large| large.bytes))
    }

    /// Forgets what was kept for reuse: `discard` is called for every range (start, bytes) of whole pages
    /// whose memory the host may have back. Returns how much of it was reserved, in bytes.
    pub fn trim(&mut self, mut discard: impl FnMut(u64, u64)) -> u64 {
        self.coalesce();
        let mut trimmed = 0;
        for (start, bytes) in self.free.iter() {
            let whole = self.pages.whole(start, bytes);
            let released = self.pages.release(whole);
            if released > 0 {
                discard(whole.0, whole.1);
            }
            trimmed += released;
        }
        self.stats.reserves(self.pages.reserved());
        trimmed
    }

    /// Slabs without live blocks become free ranges, which join their neighbours.
    pub fn coalesce(&mut self) {
        for start in self.slabs.drop_empty() {
            self.free.give(start, SLAB);
        }
    }

    /// The largest range that is free now, in bytes.
    pub fn largest_free(&self) -> u64 {
        self.free.largest()
    }

    /// The accounts as they stand.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The accounts, to reset.
    pub(crate) fn stats_mut(&mut self) -> &mut Stats {
        &mut self.stats
    }

    /// Live blocks from 1 MiB on, by line, those that hold most first.
    pub(crate) fn sites(&self) -> Vec<(Arc<str>, Held)> {
        self.sites.most_first()
    }

    /// (size, count) of live blocks, in no order; a size may come more than once.
    pub(crate) fn live(&self) -> impl Iterator<Item = (u64, u64)> {
        let large = self.large.values().map(|large| (large.bytes, 1));
        self.slabs.live().chain(large)
    }

    fn place(&mut self, bytes: u64, site: Option<&str>) -> Option<Block> {
        let left = self.stats.limit - self.stats.allocated;
        let small = SizeClass::of(bytes).and_then(|class| self.place_small(class, left));
        small.or_else(|| self.place_large(bytes, left, site))
    }

    fn place_small(&mut self, class: SizeClass, left: u64) -> Option<Block> {
        let bytes = u64::from(class.bytes());
        if bytes > left {
            return None;
        }
        if let Some(offset) = self.slabs.take(class) {
            return Some(Block { offset, bytes });
        }
        if self.slabs.unused() + SLAB > self.stats.limit / UNUSED_SHARE {
            return None;
        }
        let start = self.free.take_last(SLAB, SLAB)?;
        self.reserve(start, SLAB);
        self.slabs.add(class, start);
        self.slabs.take(class).map(|offset| Block { offset, bytes })
    }

    fn place_large(&mut self, asked: u64, left: u64, site: Option<&str>) -> Option<Block> {
        let bytes = asked.max(1).checked_next_multiple_of(UNIT).filter(|bytes| *bytes <= left)?;
        let offset = self.free.take_best(bytes)?;
        self.reserve(offset, bytes);
        let site = (asked >= SITE_BYTES).then(|| self.sites.add(site.unwrap_or(NO_SITE), bytes));
        self.large.insert(offset, Large { bytes, site });
        Some(Block { offset, bytes })
    }

    fn reserve(&mut self, start: u64, bytes: u64) {
        self.pages.reserve(start, bytes);
        self.stats.reserves(self.pages.reserved());
    }

    #[cold]
    fn shortage(&self, asked: u64, site: Option<&str>) -> Shortage {
        Shortage {
            limit: self.stats.limit,
            asked,
            site: site.map(str::to_owned),
            allocated: self.stats.allocated,
            live: self.stats.live,
            sites: self.sites(),
            largest_free: self.largest_free(),
        }
    }
}
