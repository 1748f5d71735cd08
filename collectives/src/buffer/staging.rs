//! The user's memory against a shared region: what flat executions and messages do with it.

use super::Spans;
use crate::reduce::{self, Copying, Reduction, Sources};
use crate::region::Region;

impl Spans {
    /// Bytes of one chunk; 0 for one that is not there.
    pub(crate) fn chunk_bytes(&self, chunk: usize) -> usize {
        if chunk < self.chunks() { self.chunk(chunk).total() } else { 0 }
    }

    pub(crate) fn chunk_sizes(&self) -> Vec<usize> {
        (0..self.chunks()).map(|chunk| self.chunk_bytes(chunk)).collect()
    }

    pub(crate) fn longest_chunk(&self) -> usize {
        (0..self.chunks()).map(|chunk| self.chunk_bytes(chunk)).max().unwrap_or(0)
    }

    /// Copies `bytes` bytes of a chunk from `offset` on to place `at` of a region.
    pub(crate) fn stage(
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
    pub(crate) fn fetch(
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

    /// Folds the bytes at `sources` of a region, in this order, into a stretch of a chunk.
    pub(crate) fn fold(
        &self,
        chunk: usize,
        offset: usize,
        bytes: usize,
        reduction: Reduction,
        region: &Region,
        sources: impl Iterator<Item = usize> + Clone,
    ) {
        if bytes == 0 {
            return;
        }
        self.chunk(chunk).each(offset, bytes, |at, piece, bytes| {
            let (at, needed) = (reduction.bytes_for(at), reduction.bytes_for(bytes));
            let source = |source: usize| region.pointer(source + at, needed).cast_const();
            let sources: Sources = sources.clone().map(source).collect();
            // SAFETY: the sources are valid for so many elements (checked by `pointer`) and no tensors; the piece is
            // writable by the promise of `Spans::new`; all hold whole elements.
            unsafe { reduce::fold(reduction, &sources, piece, bytes / reduction.out().size()) };
        });
    }

    /// Makes a chunk of `to` what a group of one rank makes of a chunk of ours.
    pub(crate) fn fold_alone(&self, reduction: Reduction, to: &Spans) {
        let size = reduction.dtype().size();
        let count = self.total() / size;
        self.each_pair((0, to, 0), (size, size), count, |from, to, count| {
            // SAFETY: `each_pair` gives `count` elements on both sides, the same memory or apart.
            unsafe { reduce::fold(reduction, &[from], to, count) };
        });
    }
}
