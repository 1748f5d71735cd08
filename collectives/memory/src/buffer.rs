//! Memory that an operation reads and writes: raw pieces of tensors, treated as one run of bytes.
//!
//! No Rust reference is ever made to this memory: the tensors belong to the caller, pieces of one operation
//! may be the same memory, and another process may map it. Every access is one bounded raw copy or kernel.
#![allow(unsafe_code)]

mod in_place;
mod staging;

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

pub use staging::{Fetch, Link};

use tpurun_kernels::reduce::{self, Copying, Reduction};

/// Pieces of memory in chunk-major order; chunks have the same number of pieces, of any sizes.
#[derive(Clone, Debug)]
pub struct Spans {
    pieces: Pieces,
    /// Which of `pieces` these spans are.
    range: Range<usize>,
    /// The bytes of all of them together; small operations ask for that often.
    bytes: usize,
    per_chunk: usize,
}

/// Most operations are about one tensor, which takes no memory of its own.
#[derive(Clone, Debug)]
enum Pieces {
    One(Piece),
    Many(Arc<[Piece]>),
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    data: *mut u8,
    bytes: usize,
    /// Where the piece begins in the concatenation of all pieces.
    start: usize,
}

// SAFETY: `Spans::new` demands memory that any thread may access.
unsafe impl Send for Spans {}
// SAFETY: as above; methods that write are as safe from two threads as two equal `Spans` are.
unsafe impl Sync for Spans {}

impl Spans {
    /// Borrows `pieces`, each a pointer and a number of bytes.
    ///
    /// # Safety
    /// Until the last clone or chunk of these spans is dropped, all pieces must be readable, and writable
    /// where they are written through these spans, from any thread. Nothing else in this process may access
    /// what is being written, nor write what is being read. Two pieces, also of different spans that are used
    /// in one operation, are the same memory or do not overlap.
    pub unsafe fn new(pieces: impl IntoIterator<Item = (*mut u8, usize)>, per_chunk: usize) -> Self {
        let mut start = 0;
        let mut pieces = pieces.into_iter().map(|(data, bytes)| {
            let piece = Piece { data, bytes, start };
            start += bytes;
            piece
        });
        let pieces = match (pieces.next(), pieces.next()) {
            (Some(one), None) => Pieces::One(one),
            (first, second) => Pieces::Many(first.into_iter().chain(second).chain(pieces).collect()),
        };
        Self { range: 0..pieces.all().len(), bytes: start, pieces, per_chunk }
    }

    /// No memory, in no chunks.
    #[inline]
    pub fn empty() -> Self {
        Self { pieces: Pieces::Many(Arc::default()), range: 0..0, bytes: 0, per_chunk: 0 }
    }

    /// Bytes of all pieces.
    #[inline]
    pub fn total(&self) -> usize {
        self.bytes
    }

    /// How many chunks there are.
    #[inline]
    pub fn chunks(&self) -> usize {
        self.range.len().checked_div(self.per_chunk).unwrap_or(0)
    }

    /// The pieces of chunk `index` alone.
    ///
    /// # Panics
    /// When there is no such chunk.
    #[inline]
    pub fn chunk(&self, index: usize) -> Self {
        assert!(index < self.chunks(), "chunk {index} of {}", self.chunks());
        let range = self.pieces_of(index);
        let (bytes, pieces) = (self.bytes_of(range.clone()), self.pieces.clone());
        Self { pieces, range, bytes, per_chunk: self.per_chunk }
    }

    /// Bytes of each piece.
    #[inline]
    pub fn piece_bytes(&self) -> impl Iterator<Item = usize> + '_ {
        self.own().iter().map(|piece| piece.bytes)
    }

    /// Copies `len` bytes from `offset` on to `to`.
    ///
    /// # Safety
    /// `to` must be writable for `len` bytes.
    ///
    /// # Panics
    /// When the range is not within [`Spans::total`].
    #[inline]
    pub unsafe fn copy_out(&self, offset: usize, to: *mut u8, len: usize) {
        self.each(offset, len, |at, piece, bytes| {
            // SAFETY: within the `len` bytes of the caller.
            let to = unsafe { to.add(at) };
            // SAFETY: the caller's promise, and that of `new` for the piece.
            unsafe { to.copy_from(piece, bytes) };
        });
    }

    /// Copies `len` bytes from `from` to `offset` on.
    ///
    /// # Safety
    /// `from` must be readable for `len` bytes, and these spans writable.
    ///
    /// # Panics
    /// When the range is not within [`Spans::total`].
    #[inline]
    pub unsafe fn copy_in(&self, offset: usize, from: *const u8, len: usize) {
        self.each(offset, len, |at, piece, bytes| {
            // SAFETY: within the `len` bytes of the caller.
            let from = unsafe { from.add(at) };
            // SAFETY: the caller's promise, and that of `new` for the piece.
            unsafe { piece.copy_from(from, bytes) };
        });
    }

    /// Fills `to` with the bytes from `offset` on.
    #[inline]
    pub fn read(&self, offset: usize, to: &mut [u8]) {
        // SAFETY: a slice is writable for its length.
        unsafe { self.copy_out(offset, to.as_mut_ptr(), to.len()) };
    }

    /// Writes the bytes of `from` to `offset` on.
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) {
        // SAFETY: a slice is readable for its length; `new` demands that what we write is writable.
        unsafe { self.copy_in(offset, from.as_ptr(), from.len()) };
    }

    /// Fills `to` with the elements from `offset` on as partial results, see [`reduce::widen`].
    pub fn read_widened(&self, reduction: Reduction, offset: usize, to: &mut [u8]) {
        let (size, wide) = (reduction.dtype().size(), reduction.wide().size());
        self.each(offset, to.len() / wide * size, |at, piece, bytes| {
            let (first, count) = whole(at, bytes, size);
            let to = to[first * wide..][..count * wide].as_mut_ptr();
            // SAFETY: `count` elements are in the piece and have room in `to`, which is apart.
            unsafe { reduce::widen(reduction, piece, to, count) };
        });
    }

    /// Folds the partial results `received` into those from `offset` on, as the first operand.
    pub fn accumulate(&self, reduction: Reduction, offset: usize, received: &[u8]) {
        let wide = reduction.wide().size();
        self.each(offset, received.len(), |at, piece, bytes| {
            let (first, count) = whole(at, bytes, wide);
            let received = received[first * wide..][..count * wide].as_ptr();
            // SAFETY: `count` partial results are in both, which are apart.
            unsafe { reduce::accumulate(reduction, received, piece, count) };
        });
    }

    /// Copies `len` bytes from `offset` on to other spans.
    #[inline]
    pub fn copy_to(&self, how: Copying, offset: usize, to: &Self, to_offset: usize, len: usize) {
        self.each_pair((offset, to, to_offset), (1, 1), len, |from, to, bytes| {
            // SAFETY: `each_pair` gives `bytes` bytes on both sides, the same memory or apart.
            unsafe { reduce::copy(how, from, to, bytes) };
        });
    }

    /// Makes partial results in `to` of `count` elements from `offset` on.
    #[inline]
    pub fn widen_to(&self, reduction: Reduction, offset: usize, to: &Self, to_offset: usize, count: usize) {
        let widths = (reduction.dtype().size(), reduction.wide().size());
        self.each_pair((offset, to, to_offset), widths, count, |from, to, count| {
            // SAFETY: `each_pair` gives `count` elements of either layout, the same memory or apart.
            unsafe { reduce::widen(reduction, from, to, count) };
        });
    }

    /// Makes results in `to` of `count` partial results from `offset` on.
    #[inline]
    pub fn finish_to(&self, reduction: Reduction, offset: usize, to: &Self, to_offset: usize, count: usize) {
        let widths = (reduction.wide().size(), reduction.dtype().size());
        self.each_pair((offset, to, to_offset), widths, count, |from, to, count| {
            // SAFETY: `each_pair` gives `count` elements of either layout, the same memory or apart.
            unsafe { reduce::finish(reduction, from, to, count) };
        });
    }

    fn own(&self) -> &[Piece] {
        &self.pieces.all()[self.range.clone()]
    }

    /// Which of `pieces` chunk `index` is.
    fn pieces_of(&self, index: usize) -> Range<usize> {
        let first = self.range.start + index * self.per_chunk;
        first..first + self.per_chunk
    }

    fn bytes_of(&self, pieces: Range<usize>) -> usize {
        match &self.pieces.all()[pieces] {
            [] => 0,
            [first, .., last] => last.start + last.bytes - first.start,
            [one] => one.bytes,
        }
    }

    fn origin(&self) -> usize {
        self.own().first().map_or(0, |first| first.start)
    }

    /// Calls `visit(at, pointer, bytes)` for every piece of a range, `at` counted from its beginning.
    fn each(&self, offset: usize, len: usize, mut visit: impl FnMut(usize, *mut u8, usize)) {
        let mut done = 0;
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.total()),
            "{offset}+{len} of {}",
            self.total()
        );
        while done < len {
            let (piece, available) = self.at(offset + done);
            let bytes = available.min(len - done);
            visit(done, piece, bytes);
            done += bytes;
        }
    }

    /// Calls `visit(ours, theirs, count)` for runs of elements that are contiguous on both sides.
    fn each_pair(
        &self,
        (offset, to, to_offset): (usize, &Self, usize),
        (width, to_width): (usize, usize),
        count: usize,
        mut visit: impl FnMut(*const u8, *mut u8, usize),
    ) {
        assert!(offset + count * width <= self.total() && to_offset + count * to_width <= to.total());
        let mut done = 0;
        while done < count {
            let (from, available) = self.at(offset + done * width);
            let (into, room) = to.at(to_offset + done * to_width);
            let run = (available / width).min(room / to_width).min(count - done);
            assert!(run > 0, "a piece ends within an element");
            visit(from, into, run);
            done += run;
        }
    }

    /// The pointer to byte `offset`, and how many bytes its piece has from there on. The byte must exist.
    fn at(&self, offset: usize) -> (*mut u8, usize) {
        let offset = self.origin() + offset;
        let own = self.own();
        // The last piece that begins here or before: earlier ones that begin here are empty.
        let index = own.partition_point(|piece| piece.start <= offset).checked_sub(1);
        let piece = own[index.expect("offsets begin with the first piece")];
        let within = offset - piece.start;
        assert!(within < piece.bytes);
        // SAFETY: within the piece, just asserted.
        (unsafe { piece.data.add(within) }, piece.bytes - within)
    }
}

impl Pieces {
    fn all(&self) -> &[Piece] {
        match self {
            Self::One(piece) => std::slice::from_ref(piece),
            Self::Many(pieces) => pieces,
        }
    }
}

/// Which elements of `size` the bytes `at..at + bytes` are.
fn whole(at: usize, bytes: usize, size: usize) -> (usize, usize) {
    assert!(at.is_multiple_of(size) && bytes.is_multiple_of(size), "a piece ends within an element");
    (at / size, bytes / size)
}

/// Memory of our own, for what has no place in the caller's.
#[derive(Debug)]
pub struct Scratch {
    memory: Option<(NonNull<u8>, Layout)>,
    spans: Spans,
}

// SAFETY: the memory is owned, and accessed through spans, which are `Send`.
unsafe impl Send for Scratch {}

impl Scratch {
    /// Zeroed memory; none is allocated for no bytes.
    pub fn new(bytes: usize) -> Self {
        if bytes == 0 {
            return Self { memory: None, spans: Spans::empty() };
        }
        let layout = Layout::from_size_align(bytes, ALIGNMENT).expect("a sum of sizes of existing tensors");
        // SAFETY: the size is not zero.
        let data = unsafe { alloc_zeroed(layout) };
        let Some(memory) = NonNull::new(data) else { handle_alloc_error(layout) };
        // SAFETY: `spans` lends these spans for no longer than the memory lives.
        let spans = unsafe { Spans::new([(data, bytes)], 1) };
        Self { memory: Some((memory, layout)), spans }
    }

    /// The memory as one piece; not to be cloned beyond the life of the scratch.
    #[inline]
    pub fn spans(&self) -> &Spans {
        &self.spans
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Some((memory, layout)) = self.memory {
            // SAFETY: allocated by `new` with this layout.
            unsafe { dealloc(memory.as_ptr(), layout) };
        }
    }
}

/// A cache line, so that slots of different channels share none.
const ALIGNMENT: usize = 64;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use tpurun_kernels::dtype::{Dtype, ReduceOp};

    fn spans(memory: &mut [Vec<u8>], per_chunk: usize) -> Spans {
        let pieces: Vec<_> = memory.iter_mut().map(|piece| (piece.as_mut_ptr(), piece.len())).collect();
        // SAFETY: the vectors outlive the spans in every test, and are not touched meanwhile.
        unsafe { Spans::new(pieces, per_chunk) }
    }

    #[test]
    fn chunks_are_runs_of_pieces() {
        let mut memory = [vec![1, 2], vec![], vec![3], vec![4, 5, 6]];
        let spans = spans(&mut memory, 2);
        assert_eq!((spans.chunks(), spans.total()), (2, 6));
        let second = spans.chunk(1);
        assert_eq!(second.total(), 4);
        let mut bytes = [0; 3];
        second.read(1, &mut bytes);
        assert_eq!(bytes, [4, 5, 6]);
        second.write(0, &[9, 8]);
        spans.read(1, &mut bytes);
        assert_eq!(bytes, [2, 9, 8]);
        assert_eq!(Spans::empty().total(), 0);
        assert_eq!(Spans::empty().chunks(), 0);
    }

    #[test]
    #[should_panic(expected = "4+3 of 6")]
    fn ranges_are_checked() {
        let mut memory = [vec![0; 6]];
        spans(&mut memory, 1).write(4, &[0; 3]);
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..ProptestConfig::default()
        })]

        #[test]
        fn pieces_are_one_run_of_bytes(
            mut memory in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 1..6),
            cut in any::<(prop::sample::Index, prop::sample::Index)>(),
        ) {
            let mut flat = memory.concat();
            let (a, b) = (cut.0.index(flat.len() + 1), cut.1.index(flat.len() + 1));
            let range = a.min(b)..a.max(b);
            let spans = spans(&mut memory, 1);
            let mut read = vec![0; range.len()];
            spans.read(range.start, &mut read);
            prop_assert_eq!(&read, &flat[range.clone()]);
            let written: Vec<u8> = read.iter().map(|byte| !byte).collect();
            spans.write(range.start, &written);
            flat[range].copy_from_slice(&written);
            prop_assert_eq!(memory.concat(), flat);
        }

        #[test]
        fn arithmetic_crosses_pieces(
            left in prop::collection::vec(-100i16..100, 0..20),
            cut in any::<(prop::sample::Index, prop::sample::Index)>(),
        ) {
            let avg = Reduction::new(Dtype::Bf16, ReduceOp::Avg, 1.0, 2).expect("defined");
            let bytes: Vec<u8> = left.iter().flat_map(|&x| half::bf16::from_f32(x.into()).to_le_bytes()).collect();
            let at = |index: prop::sample::Index| 2 * index.index(left.len() + 1);
            let pieces = |at| [&bytes[..at], &bytes[at..]].map(<[u8]>::to_vec);
            let (mut from, mut to) = (pieces(at(cut.0)), pieces(at(cut.1)));
            let (from, to) = (spans(&mut from, 1), spans(&mut to, 1));
            let scratch = Scratch::new(4 * left.len());
            from.widen_to(avg, 0, scratch.spans(), 0, left.len());
            let mut received = vec![0; 4 * left.len()];
            from.read_widened(avg, 0, &mut received);
            scratch.spans().accumulate(avg, 0, &received);
            scratch.spans().finish_to(avg, 0, &to, 0, left.len());
            let mut result = vec![0; bytes.len()];
            to.read(0, &mut result);
            prop_assert_eq!(result, bytes);
        }
    }
}
