//! A byte ring between one producer and one consumer in shared memory.
//!
//! Two counters that only grow: the producer's `tail` and the consumer's `head`, in bytes. Each side trusts
//! its own counter and checks the other's: a peer's value that cannot be is an error, never an index.

use super::{AtomicU64, Ordering};

/// The shared counters; all zeroes is an empty ring.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub struct RingCounters {
    head: AtomicU64,
    // Apart, so that the two sides do not share a cache line.
    _apart: [u64; 7],
    tail: AtomicU64,
}

/// The other side wrote a counter that cannot be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("ring counters {head}..{tail} do not fit a ring of {capacity} bytes")]
pub struct RingError {
    head: u64,
    tail: u64,
    capacity: u32,
}

/// One view of a ring; the bytes themselves are the caller's business.
#[derive(Clone, Copy, Debug)]
pub struct Ring<'a> {
    counters: &'a RingCounters,
    capacity: u32,
}

/// A run of bytes of the ring: at most two pieces, the second one from the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingRun {
    /// Where it begins in the ring's data.
    pub offset: u32,
    /// Its length.
    pub bytes: u32,
    capacity: u32,
}

impl RingRun {
    /// The first `bytes` of this run.
    #[inline]
    pub fn first(self, bytes: u32) -> RingRun {
        RingRun { bytes: self.bytes.min(bytes), ..self }
    }

    /// Returns the bytes that follow the first `bytes`.
    #[inline]
    pub fn after(self, bytes: u32) -> RingRun {
        let bytes = bytes.min(self.bytes);
        RingRun { offset: (self.offset + bytes) % self.capacity, bytes: self.bytes - bytes, ..self }
    }

    /// The contiguous pieces, as (offset in the ring, bytes); the second may be empty.
    #[inline]
    pub fn pieces(self) -> [(u32, u32); 2] {
        let first = self.bytes.min(self.capacity - self.offset);
        [(self.offset, first), (0, self.bytes - first)]
    }
}

impl<'a> Ring<'a> {
    /// A ring of `capacity` bytes whose counters lie elsewhere.
    #[inline]
    pub fn new(counters: &'a RingCounters, capacity: u32) -> Self {
        debug_assert!(capacity > 0);
        Self { counters, capacity }
    }

    /// Producer: the free run.
    #[inline]
    pub fn writable(&self) -> Result<RingRun, RingError> {
        let tail = self.counters.tail.load(Ordering::Relaxed);
        // Acquire pairs with `consume`: the consumer has read what is to be overwritten.
        let head = self.counters.head.load(Ordering::Acquire);
        let used = self.used(head, tail)?;
        Ok(self.run(tail, self.capacity - used))
    }

    /// Producer: the first `bytes` of the writable run are written.
    #[inline]
    pub fn publish(&self, bytes: u32) {
        let tail = self.counters.tail.load(Ordering::Relaxed);
        // A peer may have put it anywhere; past the end it fits no ring, which is an error and no panic.
        self.counters.tail.store(tail.wrapping_add(u64::from(bytes)), Ordering::Release);
    }

    /// Consumer: the filled run.
    #[inline]
    pub fn readable(&self) -> Result<RingRun, RingError> {
        let head = self.counters.head.load(Ordering::Relaxed);
        // Acquire pairs with `publish`: the bytes are there.
        let tail = self.counters.tail.load(Ordering::Acquire);
        let used = self.used(head, tail)?;
        Ok(self.run(head, used))
    }

    /// Consumer: the first `bytes` of the readable run are not needed any more.
    #[inline]
    pub fn consume(&self, bytes: u32) {
        let head = self.counters.head.load(Ordering::Relaxed);
        self.counters.head.store(head.wrapping_add(u64::from(bytes)), Ordering::Release);
    }

    fn run(&self, position: u64, bytes: u32) -> RingRun {
        let offset = (position % u64::from(self.capacity)) as u32;
        RingRun { offset, bytes, capacity: self.capacity }
    }

    fn used(&self, head: u64, tail: u64) -> Result<u32, RingError> {
        match tail.checked_sub(head) {
            Some(used) if used <= u64::from(self.capacity) => Ok(used as u32),
            _ => Err(RingError { head, tail, capacity: self.capacity }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::model::{Arc, Bytes, model, spawn};
    use crate::sync::{AtomicU32, Doorbell};

    #[derive(Default)]
    struct Shared {
        counters: RingCounters,
        values: [AtomicU32; 2],
        bytes: [Bytes; 2],
        changed: Doorbell,
    }

    /// Three values through a ring of two: all arrive, in order, none is overwritten before it was read.
    #[test]
    fn loom_values_pass_in_order() {
        model(|| {
            let shared = Arc::new(Shared::default());
            let producer = {
                let shared = shared.clone();
                spawn(move || {
                    let ring = Ring::new(&shared.counters, 2);
                    let mut value = 1;
                    while value <= 3 {
                        let seen = shared.changed.rings();
                        let free = ring.writable().expect("the consumer is honest");
                        if free.bytes == 0 {
                            shared.changed.wait(seen, None);
                            continue;
                        }
                        shared.bytes[free.offset as usize].write();
                        shared.values[free.offset as usize].store(value, Ordering::Relaxed);
                        ring.publish(1);
                        shared.changed.ring();
                        value += 1;
                    }
                })
            };
            let ring = Ring::new(&shared.counters, 2);
            let mut expected = 1;
            while expected <= 3 {
                let seen = shared.changed.rings();
                let filled = ring.readable().expect("the producer is honest");
                if filled.bytes == 0 {
                    shared.changed.wait(seen, None);
                    continue;
                }
                shared.bytes[filled.offset as usize].read();
                assert_eq!(shared.values[filled.offset as usize].load(Ordering::Relaxed), expected);
                ring.consume(1);
                shared.changed.ring();
                expected += 1;
            }
            producer.join().expect("the producer does not panic");
        });
    }

    #[cfg(not(tpurun_loom))]
    #[test]
    fn a_lying_peer_is_an_error() {
        let counters = RingCounters::default();
        let ring = Ring::new(&counters, 64);
        counters.tail.store(65, Ordering::Relaxed);
        assert!(ring.readable().is_err());
        counters.head.store(u64::MAX, Ordering::Relaxed);
        assert!(ring.writable().is_err());
    }

    #[cfg(not(tpurun_loom))]
    #[test]
    fn runs_wrap_around() {
        let run = RingRun { offset: 6, bytes: 5, capacity: 8 };
        assert_eq!(run.pieces(), [(6, 2), (0, 3)]);
        assert_eq!(run.after(3), RingRun { offset: 1, bytes: 2, capacity: 8 });
        assert_eq!(run.first(1).pieces(), [(6, 1), (0, 0)]);
    }
}
