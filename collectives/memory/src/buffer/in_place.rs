//! Tensors of several ranks against each other, where one process can reach all of them.

use smallvec::SmallVec;

use super::{Piece, Spans};
use crate::arena::{Arena, PeerArena};
use crate::region::Region;
use tpurun_kernels::reduce::{self, Copying, Reduction, Sources};

/// Bytes of a tile, which stays in the first-level cache while it goes to all that want it.
const TILE: usize = 16 << 10;
/// Bytes that the tiles of all sources take together at most: they stay in the second-level cache until they are
/// written.
const ALL_TILES: usize = 128 << 10;
/// Bytes of the shortest tile: each begins with the first lines of pages that are not in the TLB any more.
const LEAST_TILE: usize = 2 << 10;

impl Spans {
    /// Where the pieces are in an arena, as offsets and bytes; none when one of them is elsewhere.
    pub fn places(&self, arena: &Arena) -> Option<Vec<(u64, u64)>> {
        let place = |bytes: u64, data| if bytes == 0 { Some(0) } else { arena.offset_of(data, bytes) };
        let places = self.own().iter().map(|piece| {
            let bytes = piece.bytes as u64;
            Some((place(bytes, piece.data)?, bytes))
        });
        places.collect()
    }

    /// Pieces in the arena of another process, to be used for as long as that is mapped; none when they are not
    /// all in it, or can not be chunks.
    pub fn of_peer(arena: &PeerArena, places: &[(u64, u64)], per_chunk: usize) -> Option<Self> {
        let pieces: Option<Vec<(*mut u8, usize)>> = places
            .iter()
            .map(|(offset, bytes)| Some((arena.pointer(*offset, *bytes)?, usize::try_from(*bytes).ok()?)))
            .collect();
        let total = places.iter().try_fold(0u64, |total, (_, bytes)| total.checked_add(*bytes));
        let are_chunks =
            if per_chunk == 0 { places.is_empty() } else { places.len().is_multiple_of(per_chunk) };
        if !are_chunks || total.is_none_or(|total| usize::try_from(total).is_err()) {
            return None;
        }
        // SAFETY: mapped memory that the peer lends for this operation, as `Spans::new` demands of it; what it
        // or anybody else does to it meanwhile changes bytes, which are only ever copied and folded.
        pieces.map(|pieces| unsafe { Self::new(pieces, per_chunk) })
    }

    /// A stretch of a segment, to be used for no longer than that is mapped.
    pub fn of_region(region: &Region, at: usize, bytes: usize) -> Self {
        // SAFETY: mapped memory (checked by `pointer`) that ranks take turns with; as above.
        unsafe { Self::new([(region.pointer(at, bytes), bytes)], 1) }
    }

    /// Whether a write to one of these pieces could change what a piece of `inputs` is before it is read.
    pub fn overlaps(&self, inputs: &Self) -> bool {
        let ranges = |spans: &Self, is_input: bool| {
            let pieces = spans.own().iter().filter(|piece| piece.bytes > 0);
            let range =
                move |piece: &super::Piece| (piece.data.addr(), piece.data.addr() + piece.bytes, is_input);
            pieces.map(range).collect::<Vec<_>>()
        };
        let mut ranges = [ranges(self, false), ranges(inputs, true)].concat();
        ranges.sort_unstable();
        // The furthest end so far, of what is written and of what is read.
        let mut ends = [0, 0];
        ranges.into_iter().any(|(start, end, is_input)| {
            let hit = start < ends[usize::from(!is_input)];
            let own = &mut ends[usize::from(is_input)];
            *own = end.max(*own);
            hit
        })
    }

    /// Whether both are the same pieces of memory.
    pub fn is_same_memory(&self, other: &Self) -> bool {
        let place = |piece: &Piece| (piece.data, piece.bytes);
        self.own().iter().map(place).eq(other.own().iter().map(place))
    }

    /// Copies `len` bytes from `offset` on to the same bytes of each of `sinks`.
    pub fn copy_to_each(&self, how: Copying, sinks: &[Self], offset: usize, len: usize) {
        let mut done = 0;
        while done < len {
            let tile = TILE.min(len - done);
            for sink in sinks {
                self.copy_to(how, offset + done, sink, offset + done, tile);
            }
            done += tile;
        }
    }

    /// Folds `len` bytes from `offset` on of `sources`, in this order, into each of `sinks`, which may be some
    /// of the sources: tile by tile in the caches; line by line where they are not there (`how`).
    ///
    /// # Panics
    /// When there is no sink, or a piece ends within an element.
    pub fn fold_to_each(
        how: Copying,
        sources: &[Self],
        sinks: &[Self],
        reduction: Reduction,
        offset: usize,
        len: usize,
    ) {
        assert!(!sinks.is_empty(), "a fold has a result");
        let size = reduction.dtype().size();
        let by_line = how != Copying::Cached;
        let tile = (ALL_TILES / sources.len().max(1)).clamp(LEAST_TILE, TILE).next_power_of_two();
        let most = if by_line { len } else { tile };
        let mut from = Sources::with_capacity(sources.len());
        let mut to = SmallVec::<[*mut u8; 64]>::with_capacity(sinks.len());
        let mut at = offset;
        while at < offset + len {
            let mut run = most.min(offset + len - at);
            let mut place = |spans: &Self| {
                let (place, room) = spans.at(at);
                run = run.min(room);
                place
            };
            from.clear();
            from.extend(sources.iter().map(|source| place(source).cast_const()));
            to.clear();
            to.extend(sinks.iter().map(&mut place));
            assert!(run.is_multiple_of(size), "a piece ends within an element");
            if by_line {
                // SAFETY: `at` found `run` bytes behind every pointer; `Spans::new` demands that the pieces are the
                // same memory or apart.
                unsafe { reduce::fold_to_each(reduction, &from, &to, run / size) };
            } else {
                // SAFETY: as above.
                unsafe { reduce::fold(reduction, &from, to[0], run / size) };
                for other in &to[1..] {
                    // SAFETY: as above.
                    unsafe { other.copy_from(to[0], run) };
                }
            }
            at += run;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use proptest::prelude::*;

    use super::*;
    use tpurun_kernels::dtype::{Dtype, ReduceOp};

    const BYTES: u64 = 1 << 16;

    fn arena() -> &'static (Arena, PeerArena) {
        static ARENA: OnceLock<(Arena, PeerArena)> = OnceLock::new();
        ARENA.get_or_init(|| {
            let arena = Arena::create(BYTES).expect("memfds work here");
            let peer = PeerArena::open(&arena.export()).expect("our own is there");
            (arena, peer)
        })
    }

    fn spans(places: &[(usize, usize)]) -> Spans {
        let arena = &arena().0;
        let pieces = places.iter().map(|(at, bytes)| (arena.pointer(*at as u64, *bytes as u64), *bytes));
        // SAFETY: the arena lives as long as the process; these spans are only compared.
        unsafe { Spans::new(pieces, 1) }
    }

    /// Near what there is, and anything.
    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![0..BYTES, Just(BYTES), BYTES - 9..BYTES + 9, any::<u64>(), u64::MAX - 9..=u64::MAX]
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 8 } else { 512 }, failure_persistence: None, ..ProptestConfig::default()
        })]

        #[test]
        fn what_a_peer_says_is_in_its_arena_or_refused(
            places in prop::collection::vec((number(), number()), 0..5),
            per_chunk in 0usize..4,
        ) {
            let peer = &arena().1;
            let fits = |(at, bytes): &(u64, u64)| at.checked_add(*bytes).is_some_and(|end| end <= BYTES);
            let chunks = if per_chunk == 0 { places.is_empty() } else { places.len() % per_chunk == 0 };
            let found = Spans::of_peer(peer, &places, per_chunk);
            prop_assert_eq!(found.is_some(), chunks && places.iter().all(fits));
            if let Some(found) = found {
                prop_assert_eq!(found.total() as u64, places.iter().map(|(_, bytes)| bytes).sum::<u64>());
                let mut all = vec![0; found.total()];
                found.read(0, &mut all);
            }
        }

        #[test]
        fn overlaps_are_found(
            outputs in prop::collection::vec((0usize..60, 0usize..9), 0..5),
            inputs in prop::collection::vec((0usize..60, 0usize..9), 0..5),
        ) {
            let bytes = |places: &[(usize, usize)]| -> Vec<bool> {
                (0..80).map(|at| places.iter().any(|(from, len)| (*from..from + len).contains(&at))).collect()
            };
            let expected = bytes(&outputs).iter().zip(bytes(&inputs)).any(|(written, read)| *written && read);
            prop_assert_eq!(spans(&outputs).overlaps(&spans(&inputs)), expected);
        }

        #[test]
        fn places_and_pieces_are_each_others_inverse(
            places in prop::collection::vec((0usize..60_000, 1usize..900), 1..5),
        ) {
            let (arena, peer) = arena();
            let found = spans(&places).places(arena).expect("all are there");
            let expected: Vec<(u64, u64)> = places.iter().map(|(at, bytes)| (*at as u64, *bytes as u64)).collect();
            prop_assert_eq!(&found, &expected);
            let of_peer = Spans::of_peer(peer, &found, 1).expect("all are there");
            prop_assert_eq!(of_peer.piece_bytes().collect::<Vec<_>>(), spans(&places).piece_bytes().collect::<Vec<_>>());
            let elsewhere = [0u8; 8];
            // SAFETY: it is only looked for.
            let elsewhere = unsafe { Spans::new([(elsewhere.as_ptr().cast_mut(), 8)], 1) };
            prop_assert!(elsewhere.places(arena).is_none());
        }

        #[test]
        fn lines_and_tiles_have_the_same_results(
            elements in prop::collection::vec(any::<u32>(), 1..300),
            ranks in 2usize..=5,
            cuts in prop::collection::vec(prop::collection::vec(0usize..300, 0..4), 5),
            stretch in (0usize..300, 0usize..300),
        ) {
            let count = elements.len();
            let reduction = Reduction::new(Dtype::U32, ReduceOp::Sum, 1.0, ranks as u32).expect("defined");
            let first = stretch.0 % count;
            let len = 1 + stretch.1 % (count - first);
            let [tiles, lines] = [Copying::Cached, Copying::Streaming].map(|how| {
                let own = |rank: usize| elements.iter().map(|element| element.rotate_left(rank as u32)).collect();
                let mut tensors: Vec<Vec<u32>> = (0..ranks).map(own).collect();
                let spans: Vec<Spans> = tensors
                    .iter_mut()
                    .zip(&cuts)
                    .map(|(tensor, cuts)| {
                        let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (count + 1)).collect();
                        ends.extend([0, count]);
                        ends.sort_unstable();
                        let start = tensor.as_mut_ptr();
                        let piece = |ends: &[usize]| {
                            (start.wrapping_add(ends[0]).cast(), 4 * (ends[1] - ends[0]))
                        };
                        // SAFETY: pieces of the tensor, which outlives them.
                        unsafe { Spans::new(ends.windows(2).map(piece), 1 + cuts.len()) }
                    })
                    .collect();
                Spans::fold_to_each(how, &spans, &spans, reduction, 4 * first, 4 * len);
                tensors
            });
            prop_assert_eq!(tiles, lines);
        }
    }
}
