//! Bytes that operations move, as this rank moves them: the floor of an all-reduce of S bytes on N ranks is N·S
//! read and N·S written, summed over the ranks.

use crate::sync::{AtomicU64, Ordering};

/// The bytes that were moved so far. Bytes that a kernel keeps in registers and in tiles of its own are not
/// counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Traffic {
    /// From tensors and from memory that ranks share.
    pub read: u64,
    /// To tensors and to memory that ranks share.
    pub written: u64,
    /// The bytes of both that went into and came out of windows and rings instead of a tensor.
    pub staged: u64,
}

/// Counts for one communicator, whose lane alone adds, on whichever thread; any thread may look.
#[derive(Debug, Default)]
pub struct Counter {
    read: AtomicU64,
    written: AtomicU64,
    staged: AtomicU64,
}

impl Counter {
    /// Adds what an operation has moved; one thread at a time.
    #[inline]
    pub fn add(&self, moved: Traffic) {
        // No fetch_add: there is one writer at a time, and every small operation comes here.
        let add =
            |count: &AtomicU64, more| count.store(count.load(Ordering::Relaxed) + more, Ordering::Relaxed);
        add(&self.read, moved.read);
        add(&self.written, moved.written);
        add(&self.staged, moved.staged);
    }

    /// A copy between a tensor and staged memory.
    #[inline]
    pub fn stage(&self, bytes: usize) {
        let bytes = bytes as u64;
        self.add(Traffic { read: bytes, written: bytes, staged: bytes });
    }

    /// A fold of so many staged stretches into a tensor.
    #[inline]
    pub fn fold_staged(&self, bytes: usize, stretches: usize) {
        let read = (bytes * stretches) as u64;
        self.add(Traffic { read, written: bytes as u64, staged: read });
    }

    /// From `sources` tensors to `sinks` others.
    #[inline]
    pub fn in_place(&self, bytes: usize, sources: usize, sinks: usize) {
        let (bytes, sources, sinks) = (bytes as u64, sources as u64, sinks as u64);
        self.add(Traffic { read: bytes * sources, written: bytes * sinks, staged: 0 });
    }

    /// The bytes that all operations have moved so far.
    #[inline]
    pub fn total(&self) -> Traffic {
        Traffic {
            read: self.read.load(Ordering::Relaxed),
            written: self.written.load(Ordering::Relaxed),
            staged: self.staged.load(Ordering::Relaxed),
        }
    }
}
