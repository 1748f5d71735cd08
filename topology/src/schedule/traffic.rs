//! Bytes moved by a collective: between each two ranks, and through shared memory.

use std::collections::BTreeMap;

/// Bytes that the ranks of one collective move.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ScheduleTraffic {
    between: BTreeMap<(u32, u32), u64>,
    memory: u64,
}

impl ScheduleTraffic {
    /// Bytes sent from one rank to another.
    pub fn between(&self, from: u32, to: u32) -> u64 {
        self.between.get(&(from, to)).copied().unwrap_or(0)
    }

    /// Every pair of ranks that sends something, with the bytes sent.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u32, u64)> + '_ {
        self.between.iter().map(|(&(from, to), &bytes)| (from, to, bytes))
    }

    /// The most bytes sent from one rank to another.
    pub fn busiest(&self) -> u64 {
        self.between.values().copied().max().unwrap_or(0)
    }

    /// Bytes sent by all ranks together.
    pub fn total(&self) -> u64 {
        self.between.values().sum()
    }

    /// Bytes that publishing, folding and fetching read and write, when windows are copies.
    pub fn memory(&self) -> u64 {
        self.memory
    }

    pub(crate) fn add(&mut self, from: u32, to: u32, bytes: u64) {
        // Nothing sent is no entry, so that equal traffic compares equal.
        if bytes > 0 {
            *self.between.entry((from, to)).or_default() += bytes;
        }
    }

    pub(crate) fn add_memory(&mut self, bytes: u64) {
        self.memory += bytes;
    }
}

/// The size of a tensor: what the cut into chunks needs to know of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tensor {
    /// Elements of all chunks together: of the tensor of an all-reduce or a broadcast, of the gathered
    /// output of an all-gather, of the input of a reduce-scatter, of all inputs of an all-to-all.
    pub elements: u64,
    /// Bytes of one element.
    pub element_bytes: u64,
}

impl Tensor {
    /// A tensor of single bytes.
    pub const fn of_bytes(bytes: u64) -> Self {
        Self { elements: bytes, element_bytes: 1 }
    }
}
