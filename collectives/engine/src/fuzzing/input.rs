//! Decisions made from bytes: short input decides the rest as zero.

/// The rest of an input.
#[derive(Debug)]
pub(super) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// At most `count` bytes.
    pub(super) fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub(super) fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        usize::from(self.byte()) % bound
    }

    pub(super) fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    pub(super) fn u32(&mut self) -> u32 {
        self.u64_of(4) as u32
    }

    pub(super) fn u64(&mut self) -> u64 {
        self.u64_of(8)
    }

    fn u64_of(&mut self, bytes: usize) -> u64 {
        let mut word = [0; 8];
        let taken = self.take(bytes);
        word[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(word)
    }

    /// Mostly small, sometimes anything.
    pub(super) fn number(&mut self, small: u64) -> u64 {
        match self.byte() {
            0xff => self.u64(),
            byte => u64::from(byte) % small,
        }
    }
}
