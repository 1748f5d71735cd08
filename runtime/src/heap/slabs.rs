//! Small blocks, carved from slabs of 2 MiB that hold blocks of one size class each. Taking and giving one
//! are a few words of a bitmap, whatever their number.

use super::classes::{COUNT, SizeClass, UNIT};

/// The size of a slab, and what it is aligned to.
pub(crate) const SLAB: u64 = 2 << 20;
const WORDS: usize = (SLAB / UNIT / 64) as usize;

/// All slabs of an arena.
#[derive(Debug)]
pub(crate) struct Slabs {
    /// By their place in the arena, in slabs.
    at: Vec<Option<Box<Slab>>>,
    /// Per class the slabs with free blocks; the last one is taken from.
    partial: [Vec<u32>; COUNT],
    /// Bytes of slabs that are in no live block.
    unused: u64,
}

#[derive(Debug)]
struct Slab {
    class: SizeClass,
    /// In its class's list of partial ones, while it has free blocks.
    listed: u32,
    free: u32,
    /// A bit per word that has free blocks.
    words_with_free: u64,
    /// A bit per block that is free.
    words: [u64; WORDS],
}

/// The size of a block that was freed, and its slab if the block was the last of one that nobody needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FreedBlock {
    pub(crate) bytes: u64,
    pub(crate) empty_slab: Option<u64>,
}

impl Slabs {
    /// For an arena of `bytes`.
    pub(crate) fn new(bytes: u64) -> Self {
        let at = std::iter::repeat_with(|| None).take(bytes.div_ceil(SLAB) as usize).collect();
        Self { at, partial: std::array::from_fn(|_| Vec::new()), unused: 0 }
    }

    /// A block of this class from the slabs there are.
    pub(crate) fn take(&mut self, class: SizeClass) -> Option<u64> {
        let &place = self.partial[class.index()].last()?;
        let slab = self.at[place as usize].as_mut().expect("listed slabs exist");
        let offset = slab.take();
        if slab.free == 0 {
            self.partial[class.index()].pop();
        }
        self.unused -= u64::from(class.bytes());
        Some(u64::from(place) * SLAB + u64::from(offset))
    }

    /// Adds a slab at `start`, a multiple of its size.
    pub(crate) fn add(&mut self, class: SizeClass, start: u64) {
        let place = (start / SLAB) as u32;
        let listed = self.partial[class.index()].len() as u32;
        self.partial[class.index()].push(place);
        self.at[place as usize] = Some(Box::new(Slab::new(class, listed)));
        self.unused += SLAB;
    }

    /// Returns the bytes that slabs take besides live blocks.
    pub(crate) fn unused(&self) -> u64 {
        self.unused
    }

    /// The size of the live block that starts at `offset`.
    pub(crate) fn bytes(&self, offset: u64) -> Option<u64> {
        let slab = self.at.get((offset / SLAB) as usize)?.as_ref()?;
        slab.live_block(offset % SLAB).map(|_| u64::from(slab.class.bytes()))
    }

    /// Gives the live block at `offset` back; none when there is none. A slab that becomes empty while its
    /// class has another one with free blocks is given up.
    pub(crate) fn give(&mut self, offset: u64) -> Option<FreedBlock> {
        let place = offset / SLAB;
        let slab = self.at.get_mut(place as usize)?.as_mut()?;
        let block = slab.live_block(offset % SLAB)?;
        let partial = &mut self.partial[slab.class.index()];
        if slab.free == 0 {
            slab.listed = partial.len() as u32;
            partial.push(place as u32);
        }
        slab.give(block);
        let bytes = u64::from(slab.class.bytes());
        self.unused += bytes;
        let unneeded = slab.is_empty() && partial.len() > 1;
        if unneeded {
            self.drop_slab(place as u32);
        }
        Some(FreedBlock { bytes, empty_slab: unneeded.then_some(place * SLAB) })
    }

    /// Gives up all slabs without live blocks, and returns where they were.
    pub(crate) fn drop_empty(&mut self) -> Vec<u64> {
        let places = self.partial.iter().flatten().copied();
        let is_empty = |place: &u32| self.at[*place as usize].as_ref().is_some_and(|slab| slab.is_empty());
        let empty: Vec<u32> = places.filter(is_empty).collect();
        empty.iter().for_each(|place| self.drop_slab(*place));
        empty.into_iter().map(|place| u64::from(place) * SLAB).collect()
    }

    /// (bytes, count) of the live blocks of each slab.
    pub(crate) fn live(&self) -> impl Iterator<Item = (u64, u64)> {
        self.at.iter().flatten().map(|slab| {
            let live = slab.capacity() - slab.free;
            (u64::from(slab.class.bytes()), u64::from(live))
        })
    }

    fn drop_slab(&mut self, place: u32) {
        let slab = self.at[place as usize].take().expect("listed slabs exist");
        self.unused -= SLAB;
        let partial = &mut self.partial[slab.class.index()];
        partial.swap_remove(slab.listed as usize);
        if let Some(moved) = partial.get(slab.listed as usize) {
            self.at[*moved as usize].as_mut().expect("listed slabs exist").listed = slab.listed;
        }
    }
}

impl Slab {
    fn new(class: SizeClass, listed: u32) -> Self {
        let count = SLAB as u32 / class.bytes();
        let mut slab = Self { class, listed, free: count, words_with_free: 0, words: [0; WORDS] };
        for word in 0..count.div_ceil(64) {
            let left = (count - word * 64).min(64);
            slab.words[word as usize] = u64::MAX >> (64 - left);
            slab.words_with_free |= 1 << word;
        }
        slab
    }

    fn capacity(&self) -> u32 {
        SLAB as u32 / self.class.bytes()
    }

    fn is_empty(&self) -> bool {
        self.free == self.capacity()
    }

    /// The offset in the slab of its first free block, which is live from now on.
    fn take(&mut self) -> u32 {
        let word = self.words_with_free.trailing_zeros();
        let bits = &mut self.words[word as usize];
        let bit = bits.trailing_zeros();
        *bits &= *bits - 1;
        self.words_with_free ^= u64::from(*bits == 0) << word;
        self.free -= 1;
        (word * 64 + bit) * self.class.bytes()
    }

    /// The number of the live block that starts here.
    fn live_block(&self, offset: u64) -> Option<u32> {
        let offset = offset as u32;
        let block = offset / self.class.bytes();
        let starts = block * self.class.bytes() == offset && block < self.capacity();
        (starts && self.words[block as usize / 64] & (1 << (block % 64)) == 0).then_some(block)
    }

    fn give(&mut self, block: u32) {
        self.words[block as usize / 64] |= 1 << (block % 64);
        self.words_with_free |= 1 << (block / 64);
        self.free += 1;
    }
}

// The summary of a slab's words is one word.
const _: () = assert!(WORDS == 64);
