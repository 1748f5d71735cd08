//! The figures that an accelerator's allocator counts.

/// `TpurunMemoryStats`, in bytes unless it says otherwise. A block counts what it takes after rounding.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stats {
    /// The bytes that blocks may take in all: the `--hbm` figure.
    pub limit: u64,
    /// By live blocks.
    pub allocated: u64,
    /// The most there ever was, or was since the last reset.
    pub allocated_peak: u64,
    /// Ever, or since the last reset.
    pub allocated_total: u64,
    /// As above.
    pub freed_total: u64,
    /// The bytes that the arena takes of the host's memory at most: live blocks, and free ones kept for
    /// reuse.
    pub reserved: u64,
    /// The most there ever was, or was since the last reset.
    pub reserved_peak: u64,
    /// Live blocks, a count.
    pub live: u64,
    /// A count, as the totals.
    pub allocations: u64,
    /// A count, as the totals.
    pub frees: u64,
    /// Allocations that did not fit, a count.
    pub refused: u64,
}

// The C++ side asserts the same number.
const _: () = assert!(size_of::<Stats>() == 88);

impl Stats {
    pub(crate) fn took(&mut self, bytes: u64) {
        self.allocated += bytes;
        self.allocated_peak = self.allocated_peak.max(self.allocated);
        self.allocated_total += bytes;
        self.live += 1;
        self.allocations += 1;
    }

    pub(crate) fn gave(&mut self, bytes: u64) {
        self.allocated -= bytes;
        self.freed_total += bytes;
        self.live -= 1;
        self.frees += 1;
    }

    pub(crate) fn reserves(&mut self, bytes: u64) {
        self.reserved = bytes;
        self.reserved_peak = self.reserved_peak.max(bytes);
    }

    /// The peaks become what is now.
    pub(crate) fn reset_peak(&mut self) {
        self.allocated_peak = self.allocated;
        self.reserved_peak = self.reserved;
    }

    /// Sets the figures that count from the beginning to zero.
    pub(crate) fn reset_totals(&mut self) {
        self.allocated_total = 0;
        self.freed_total = 0;
        self.allocations = 0;
        self.frees = 0;
        self.refused = 0;
    }
}
