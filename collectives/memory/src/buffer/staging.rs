//! The user's memory against a shared region: what flat executions and messages do with it.

use std::mem::MaybeUninit;

use super::Spans;
use crate::region::Region;
use tpurun_kernels::reduce::{self, Beside, Copying, Reduction, Sources};

/// Where a rank is in a chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Link {
    /// The rank that begins a fold.
    First,
    /// A rank that goes on with it.
    Middle,
    /// The rank that ends it.
    Last,
}

impl Link {
    /// The place of `rank` of `ranks` ranks.
    pub fn of(rank: u32, ranks: u32) -> Self {
        match rank {
            0 => Self::First,
            _ if rank + 1 == ranks => Self::Last,
            _ => Self::Middle,
        }
    }

    /// The step that a rank makes from a partial result and its operand to the next one, or to a result.
    fn step(self, reduction: Reduction) -> Reduction {
        if self == Self::Last { reduction.second_half() } else { reduction.partial() }
    }
}

/// A fetch past the caches, of so many bytes from `at` of a region on to an offset of the first chunk.
#[derive(Clone, Copy, Debug)]
pub struct Fetch<'a> {
    /// The chunks that it goes to.
    pub to: &'a Spans,
    /// Offset in the first chunk, and bytes.
    pub place: (usize, usize),
    /// Where it begins in the region.
    pub at: usize,
}

impl Fetch<'_> {
    /// Splits off the bytes that are in one piece with its beginning; returns them, and the rest.
    fn split(self, region: &Region) -> (Beside, Self) {
        let (offset, bytes) = self.place;
        let chunk = self.to.chunk(0);
        let (to, in_one_piece) = chunk.at(offset);
        let together = bytes.min(in_one_piece);
        let from = region.pointer(self.at, together);
        // SAFETY: `pointer` has found it in the region. `Spans::new` demands that what is written is writable, and it
        // is no part of a region that is fetched from.
        let beside = unsafe { Beside::new(from, to, together) };
        (beside, Self { place: (offset + together, bytes - together), at: self.at + together, ..self })
    }

    fn make(self, region: &Region) {
        let (offset, bytes) = self.place;
        self.to.fetch(Copying::Streaming, (0, offset), bytes, region, self.at);
    }
}

/// Bytes that are folded before the next are looked at: they stay in a first-level cache.
const TILE: usize = 8 << 10;

/// A tile of elements that are in no memory of others; nobody pays for one that is not used.
#[repr(align(64))]
struct Tile(MaybeUninit<[u8; TILE]>);

impl Tile {
    fn new() -> Self {
        Self(MaybeUninit::uninit())
    }

    fn pointer(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}

impl Spans {
    /// Bytes of one chunk; 0 for one that is not there.
    pub fn chunk_bytes(&self, chunk: usize) -> usize {
        if chunk < self.chunks() { self.bytes_of(self.pieces_of(chunk)) } else { 0 }
    }

    /// The bytes of each chunk.
    pub fn chunk_sizes(&self) -> Vec<usize> {
        (0..self.chunks()).map(|chunk| self.chunk_bytes(chunk)).collect()
    }

    /// The bytes of the longest chunk.
    pub fn longest_chunk(&self) -> usize {
        (0..self.chunks()).map(|chunk| self.chunk_bytes(chunk)).max().unwrap_or(0)
    }

    /// Copies `bytes` bytes of a chunk from `offset` on to place `at` of a region.
    pub fn stage(
        &self,
        how: Copying,
        (chunk, offset): (usize, usize),
        bytes: usize,
        region: &Region,
        at: usize,
    ) {
        if bytes == 0 {
            return;
        }
        let to = region.pointer(at, bytes);
        self.chunk(chunk).each(offset, bytes, |at, piece, bytes| {
            // SAFETY: within what `pointer` found in the region; pieces are readable by the promise of `new`, and
            // are no part of a region that is staged in.
            unsafe { reduce::copy(how, piece, to.wrapping_add(at), bytes) };
        });
    }

    /// Copies `bytes` bytes from place `at` of a region to `offset` of a chunk.
    pub fn fetch(
        &self,
        how: Copying,
        (chunk, offset): (usize, usize),
        bytes: usize,
        region: &Region,
        at: usize,
    ) {
        if bytes == 0 {
            return;
        }
        let from = region.pointer(at, bytes);
        self.chunk(chunk).each(offset, bytes, |at, piece, bytes| {
            // SAFETY: as in `stage`; `Spans::new` demands that what is written is writable.
            unsafe { reduce::copy(how, from.wrapping_add(at), piece, bytes) };
        });
    }

    /// As [`fetch`](Self::fetch), for a rank that reads these bytes alone.
    pub fn fetch_alone(
        &self,
        how: Copying,
        (chunk, offset): (usize, usize),
        bytes: usize,
        region: &Region,
        at: usize,
    ) {
        region.read_alone(bytes, std::iter::once(at), |start, bytes| {
            self.fetch(how, (chunk, offset + start), bytes, region, at + start);
        });
    }

    /// Folds what is at `sources` of a region, which nobody else reads, in this order into a stretch of a chunk. One
    /// that is nowhere is what the stretch itself holds.
    pub fn fold(
        &self,
        chunk: usize,
        offset: usize,
        bytes: usize,
        reduction: Reduction,
        region: &Region,
        sources: impl Iterator<Item = Option<usize>> + Clone,
    ) {
        if bytes == 0 {
            return;
        }
        self.chunk(chunk).each(offset, bytes, |at, piece, bytes| {
            let stretch = (reduction.bytes_for(at), reduction.bytes_for(bytes));
            let out = |start: usize, _| piece.wrapping_add(reduction.bytes_of(start));
            // SAFETY: the piece is writable by the promise of `new`, and has room for so much.
            unsafe { fold_piece(reduction, region, sources.clone(), stretch, piece, out) };
        });
    }

    /// Folds a stretch of this memory and what is at `sources` of a region, which nobody else reads, in this order to
    /// place `to` of it. The source that is nowhere there is this memory.
    pub fn fold_with(
        &self,
        (offset, bytes): (usize, usize),
        reduction: Reduction,
        region: &Region,
        sources: impl Iterator<Item = Option<usize>> + Clone,
        to: usize,
    ) {
        self.each(offset, bytes, |at, piece, bytes| {
            let out = |start: usize, bytes| {
                region.pointer(to + reduction.bytes_of(at + start), reduction.bytes_of(bytes))
            };
            // SAFETY: the piece is readable by the promise of `new` and no part of a region; `pointer` has found the
            // room for the result, which is another place.
            unsafe { fold_piece(reduction, region, sources.clone(), (at, bytes), piece, out) };
        });
    }

    /// Folds a stretch of this memory, as the operand of the `link`-th rank of a chain, to the partial results that lie
    /// at place `at` of a region. The last one leaves results there instead. This memory is read, or copied by the first
    /// one, as `how` says, and `fetch`, of what is folded neither from nor to, is made meanwhile.
    pub fn fold_on(
        &self,
        link: Link,
        (how, fetch): (Copying, Option<Fetch<'_>>),
        (offset, bytes): (usize, usize),
        reduction: Reduction,
        region: &Region,
        at: usize,
    ) {
        let (size, wide) = (reduction.dtype().size(), reduction.wide().size());
        let (mut beside, rest) = match fetch.map(|fetch| fetch.split(region)) {
            Some((beside, rest)) => (beside, Some(rest)),
            None => (Beside::NOTHING, None),
        };
        self.each(offset, bytes, |start, piece, bytes| {
            let (start, count) = (start / size, bytes / size);
            let partial = region.pointer(at + start * wide, count * wide);
            match link {
                _ if reduction.is_lifted() => {
                    let results = (region, at + start * size);
                    // SAFETY: the piece is readable by the promise of `new` and no part of a region; `pointer` has
                    // found the room for partial results.
                    unsafe { fold_lifted(link, how, reduction, piece, (partial, count), results) };
                }
                Link::First => {
                    // SAFETY: as above.
                    unsafe { reduce::copy_beside((how, beside.take()), piece, partial, bytes) };
                }
                Link::Middle | Link::Last => {
                    let (how, sources) = ((how, beside.take()), [partial.cast_const(), piece.cast_const()]);
                    // SAFETY: as above; results, too, are as large as partial results then.
                    unsafe { reduce::fold_beside(how, link.step(reduction), &sources, partial, count) };
                }
            }
        });
        // Where every element is converted, memory is not what that waits for.
        beside.make();
        if let Some(rest) = rest {
            rest.make(region);
        }
    }

    /// Makes a chunk of `to` what a group of one rank makes of a chunk of ours.
    pub fn fold_alone(&self, reduction: Reduction, to: &Spans) {
        let size = reduction.dtype().size();
        let count = self.total() / size;
        self.each_pair((0, to, 0), (size, size), count, |from, to, count| {
            // SAFETY: `each_pair` gives `count` elements on both sides, the same memory or apart.
            unsafe { reduce::fold(reduction, &[from], to, count) };
        });
    }
}

/// Folds `count` elements of `own`, as the operands of the `link`-th rank of a chain, to the partial results at
/// `partial`, where these are of another type than the elements. The last rank leaves results from place `at` of the
/// region on instead. The first rank copies its operands as `how` says.
///
/// # Safety
/// `own` is readable for so many elements and apart from the region, of which `partial` is so many partial results. The
/// results begin no later than these do.
unsafe fn fold_lifted(
    link: Link,
    how: Copying,
    reduction: Reduction,
    own: *const u8,
    (partial, count): (*mut u8, usize),
    (region, at): (&Region, usize),
) {
    let (size, wide) = (reduction.dtype().size(), reduction.wide().size());
    let (mut operands, mut results) = (Tile::new(), Tile::new());
    for done in (0..count).step_by(TILE / wide) {
        let count = (count - done).min(TILE / wide);
        let partial = partial.wrapping_add(done * wide);
        // SAFETY: the caller's promise; a tile has room for so many partial results.
        unsafe { reduce::widen(reduction, own.wrapping_add(done * size), operands.pointer(), count) };
        let sources = [partial.cast_const(), operands.pointer().cast_const()];
        match link {
            // SAFETY: as above.
            Link::First => unsafe { reduce::copy(how, operands.pointer(), partial, count * wide) },
            // SAFETY: as above.
            Link::Middle => unsafe { reduce::fold(link.step(reduction), &sources, partial, count) },
            Link::Last => {
                let to = results.pointer();
                // SAFETY: as above; a result is no larger than a partial one, of which a tile has room for so many.
                unsafe { reduce::fold(link.step(reduction), &sources, to, count) };
                let place = region.pointer(at + done * size, count * size);
                // SAFETY: `pointer` has found the room, before the partial results that are yet to be read.
                unsafe { place.copy_from(to, count * size) };
            }
        }
    }
}

/// Folds `bytes` bytes from `at` on of the data at `sources` of a region, and of `own` where a source is nowhere
/// there. `out` says where the result of a number of bytes from a place in them on goes.
///
/// # Safety
/// `own` is readable for so many bytes, and `out` writable; the two are the same memory or apart.
unsafe fn fold_piece(
    reduction: Reduction,
    region: &Region,
    sources: impl Iterator<Item = Option<usize>> + Clone,
    (at, bytes): (usize, usize),
    own: *mut u8,
    out: impl Fn(usize, usize) -> *mut u8,
) {
    let places = sources.clone().flatten().map(|source| source + at);
    region.read_alone(bytes, places, |start, bytes| {
        let source = |source: Option<usize>| match source {
            Some(source) => region.pointer(source + at + start, bytes).cast_const(),
            None => own.wrapping_add(start).cast_const(),
        };
        let sources: Sources = sources.clone().map(source).collect();
        // SAFETY: `pointer` has checked the sources in the region, the caller the rest; all hold whole elements.
        unsafe { reduce::fold(reduction, &sources, out(start, bytes), bytes / reduction.dtype().size()) };
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use tpurun_kernels::dtype::{Dtype, ReduceOp};

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..ProptestConfig::default()
        })]

        /// Whether memory is staged before it is folded or not makes no difference.
        #[test]
        fn what_is_not_staged_is_folded_alike(
            values in prop::collection::vec((-100i16..100, -100i16..100, -100i16..100), 1..3000),
            cut in any::<(prop::sample::Index, prop::sample::Index)>(),
            own in 0usize..3,
            op in prop::sample::select(vec![ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max]),
        ) {
            // More than a page of them are handed back.
            const ROOM: usize = 1 << 14;
            let reduction = Reduction::new(Dtype::Bf16, op, 1.0, 3).expect("defined").first_half();
            let (region, _fd) = Region::create("test", 5 * ROOM).expect("memfds work here");
            let bytes = |pick: fn(&(i16, i16, i16)) -> i16| -> Vec<u8> {
                values.iter().flat_map(|value| half::bf16::from_f32(pick(value).into()).to_le_bytes()).collect()
            };
            let mut all = [bytes(|value| value.0), bytes(|value| value.1), bytes(|value| value.2)];
            for (index, bytes) in all.iter().enumerate() {
                region.write(index * ROOM, bytes);
            }
            let (left, right) = all[own].split_at_mut(2 * cut.0.index(values.len() + 1));
            // SAFETY: the vectors outlive the spans, and are not touched meanwhile.
            let spans = unsafe {
                Spans::new([(left.as_mut_ptr(), left.len()), (right.as_mut_ptr(), right.len())], 2)
            };
            let first = cut.1.index(values.len());
            let (offset, bytes) = (2 * first, 2 * (values.len() - first));
            let size = reduction.out().size();
            let (staged, unstaged) = (3 * ROOM, 3 * ROOM + size * 3000);
            region.fold(reduction, (0..3).map(|index| index * ROOM + offset), staged, bytes / 2);
            let sources = (0..3).map(|index| (index != own).then_some(index * ROOM + offset));
            spans.fold_with((offset, bytes), reduction, &region, sources, unstaged);
            let read = |at| {
                let mut result = vec![0; bytes / 2 * size];
                region.read(at, &mut result);
                result
            };
            prop_assert_eq!(read(unstaged), read(staged));
        }

        /// Ranks that fold one after the other get the same bits as one that folds all, of every type and operation
        /// and of any values; what they fetch meanwhile is as it was.
        #[test]
        fn a_chain_folds_as_one_rank_does(
            dtype in prop::sample::select(Dtype::ALL.to_vec()),
            op in prop::sample::select(ReduceOp::ALL.to_vec()),
            scale in prop::sample::select(vec![1.0, 0.3]),
            ranks in 2usize..5,
            cut in any::<(prop::sample::Index, prop::sample::Index)>(),
            how in prop::sample::select(vec![Copying::Cached, Copying::Loading]),
            fetched in any::<[prop::sample::Index; 3]>(),
            length in prop_oneof![1..20_000usize, 60_000..120_000usize],
            seed in any::<u64>(),
        ) {
            const ROOM: usize = 1 << 16;
            let Ok(reduction) = Reduction::new(dtype, op, scale, ranks as u32) else { return Ok(()) };
            let size = dtype.size();
            let count = length / size / ranks;
            prop_assume!(count > 0);
            let bytes: Vec<u8> = (0..length).map(|i| (seed.wrapping_mul(2 * i as u64 + 1) >> 32) as u8).collect();
            // From the sixth part on partial results lie, which take eight times as much of averages of bytes.
            let (region, _fd) = Region::create("test", 13 * ROOM).expect("memfds work here");
            let first = cut.1.index(count);
            let (offset, len) = (size * first, size * (count - first));
            for (rank, own) in bytes.chunks_exact(size * count).take(ranks).enumerate() {
                region.write(rank * ROOM, &own[offset..]);
                let mut own = own.to_vec();
                let (left, right) = own.split_at_mut(size * cut.0.index(count + 1));
                // SAFETY: the vector outlives the spans, and is not touched meanwhile.
                let spans = unsafe {
                    Spans::new([(left.as_mut_ptr(), left.len()), (right.as_mut_ptr(), right.len())], 2)
                };
                let link = Link::of(rank as u32, ranks as u32);
                // From where the operands of all lie, to two pieces of memory.
                let mut copy = vec![0; ROOM];
                let [start, end, cut] = fetched.map(|index| index.index(ROOM));
                let (start, end) = (start.min(end), start.max(end) + 1);
                let (left, right) = copy.split_at_mut(cut);
                // SAFETY: as above.
                let to = unsafe {
                    Spans::new([(left.as_mut_ptr(), left.len()), (right.as_mut_ptr(), right.len())], 2)
                };
                let fetch = Fetch { to: &to, place: (start, end - start), at: start };
                spans.fold_on(link, (how, Some(fetch)), (offset, len), reduction, &region, 5 * ROOM);
                drop(to);
                let mut expected = vec![0; ROOM];
                region.read(start, &mut expected[start..end]);
                prop_assert!(copy == expected);
            }
            region.fold(reduction, (0..ranks).map(|rank| rank * ROOM), 4 * ROOM, len / size);
            let read = |at| {
                let mut result = vec![0; len];
                region.read(at, &mut result);
                result
            };
            prop_assert_eq!(read(5 * ROOM), read(4 * ROOM));
        }
    }
}
