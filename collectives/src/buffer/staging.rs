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

    /// As [`fetch`](Self::fetch), for who reads these bytes alone.
    pub(crate) fn fetch_alone(
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
    pub(crate) fn fold(
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
            let (at, needed) = (reduction.bytes_for(at), reduction.bytes_for(bytes));
            let places = sources.clone().flatten().map(|source| source + at);
            region.read_alone(needed, places, |start, bytes| {
                let out = piece.wrapping_add(reduction.bytes_of(start));
                let source = |source: Option<usize>| match source {
                    Some(source) => region.pointer(source + at + start, bytes).cast_const(),
                    None => out.cast_const(),
                };
                let sources: Sources = sources.clone().map(source).collect();
                // SAFETY: the sources are valid for so many elements (checked by `pointer`) and no tensors, or are
                // the piece, which is writable by the promise of `Spans::new`; all hold whole elements.
                unsafe { reduce::fold(reduction, &sources, out, bytes / reduction.dtype().size()) };
            });
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
