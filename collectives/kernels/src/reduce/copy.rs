//! Copies of what is larger than the caches.
//!
//! A processor that copies one stretch after the other waits for memory at every page, where it can not know what
//! will be read next, and fetches each line of the destination only to overwrite it. Reading four pages in turn
//! keeps more lines on their way; stores past the caches fetch nothing. (Both as in glibc's `memmove` above its
//! `x86_non_temporal_threshold`, which goes by the size of one copy; here it goes by the whole operation.)
//!
//! Stores past the caches are also for what others hold copies of. An ordinary store waits until they have given them
//! up, and so do those after it: 27 ns a line, measured, where other cores share no cache with this one, and no fetch
//! ahead makes it less. Stores past the caches wait for each other in no order.
#![allow(unsafe_code)]

use super::kernel::{self, Kernel, VectorUnit};
use super::unit::Unit;
use crate::LINE;

/// Where what is copied is, and where its copy is to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Copying {
    /// In the caches.
    Cached,
    /// In memory; the copy in the caches, where it is read soon.
    Loading,
    /// In memory or in the caches; the copy in memory, since it would be displaced before it is read, or since many
    /// hold copies of what is overwritten.
    Streaming,
}

/// A copy past the caches that is made while something else is read: memory then reads and writes at once, which it
/// does faster than first the one and then the other.
#[derive(Debug)]
pub struct Beside {
    from: *const u8,
    to: *mut u8,
    left: usize,
}

impl Beside {
    /// No copy.
    pub const NOTHING: Self = Self { from: std::ptr::dangling(), to: std::ptr::dangling_mut(), left: 0 };

    /// # Safety
    /// Until it is made, `from` is readable and `to` writable for `bytes` bytes, and they are apart from each other;
    /// `to` is also apart from all that is read or written meanwhile.
    pub unsafe fn new(from: *const u8, to: *mut u8, bytes: usize) -> Self {
        Self { from, to, left: bytes }
    }

    /// This one, and nothing is left of it here.
    pub fn take(&mut self) -> Self {
        std::mem::replace(self, Self::NOTHING)
    }

    /// Makes it all at once.
    pub fn make(self) {
        if self.left > 0 {
            // SAFETY: the promise of `new`.
            unsafe { copy(Copying::Streaming, self.from, self.to, self.left) };
        }
    }

    /// Up to where a line of the destination begins.
    #[inline(always)]
    pub(super) fn begin(&mut self) {
        let head = (self.to.addr().wrapping_neg() % LINE).min(self.left);
        // SAFETY: the promise of `new`.
        unsafe { self.to.copy_from(self.from, head) };
        self.advance(head);
    }

    /// The next line, if a whole one is left. Only after [`begin`](Self::begin).
    #[inline(always)]
    pub(super) fn copy_line<U: Unit>(&mut self) {
        if self.left >= LINE {
            // SAFETY: the promise of `new`; it is where a line begins.
            unsafe { U::stream_line(self.from, self.to) };
            self.advance(LINE);
        }
    }

    /// Copies the rest. Nothing that was streamed, here or by the loop that had this beside, comes later than the
    /// stores that follow: others are told of copies by ordinary stores, which could overtake them.
    #[inline(always)]
    pub(super) fn finish<U: Unit>(mut self) {
        while self.left >= LINE {
            self.copy_line::<U>();
        }
        // SAFETY: the promise of `new`.
        unsafe { self.to.copy_from(self.from, self.left) };
        U::fence();
    }

    #[inline(always)]
    fn advance(&mut self, bytes: usize) {
        self.from = self.from.wrapping_add(bytes);
        self.to = self.to.wrapping_add(bytes);
        self.left -= bytes;
    }
}

/// Copies `bytes` bytes.
///
/// # Safety
/// `from` must be readable and `to` writable for `bytes` bytes, and they are the same memory or apart.
pub unsafe fn copy(how: Copying, from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { copy_beside((how, Beside::NOTHING), from, to, bytes) }
}

/// As [`copy`], and makes another copy meanwhile.
///
/// # Safety
/// As [`copy`].
pub unsafe fn copy_beside(how: (Copying, Beside), from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise; this processor has its own widest unit.
    unsafe { copy_on(VectorUnit::widest(), how, from, to, bytes) }
}

/// # Safety
/// As [`copy`], and this processor must have `unit`.
unsafe fn copy_on(
    unit: VectorUnit,
    (how, beside): (Copying, Beside),
    from: *const u8,
    to: *mut u8,
    bytes: usize,
) {
    if how == Copying::Cached || bytes < PAGE || from == to.cast_const() {
        beside.make();
        // SAFETY: the caller's promise.
        return unsafe { to.copy_from(from, bytes) };
    }
    match how {
        // SAFETY: the caller's promise; they are not the same memory.
        Copying::Streaming => unsafe { kernel::run(Copy::<true> { from, to, bytes, beside }, unit) },
        // SAFETY: as above.
        _ => unsafe { kernel::run(Copy::<false> { from, to, bytes, beside }, unit) },
    }
}

/// The bytes of a page, beyond which prefetchers do not look.
pub(super) const PAGE: usize = 4096;
/// Read in turn.
pub(super) const PAGES: usize = 4;
/// The bytes ahead of a read that are fetched now: they are in other pages, which the processor does not fetch by
/// itself.
pub(super) const AHEAD: usize = 2 * PAGES * PAGE;

/// `bytes` bytes from `from` to `to`, which are apart; past the caches if `STREAM`.
struct Copy<const STREAM: bool> {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
    beside: Beside,
}

impl<const STREAM: bool> Kernel for Copy<STREAM> {
    const VECTORISED: bool = true;

    #[inline(always)]
    unsafe fn run<U: Unit>(self) {
        let Self { from, to, bytes, mut beside } = self;
        let line = |at: usize| {
            let (from, to) = (from.wrapping_add(at), to.wrapping_add(at));
            if STREAM {
                // SAFETY: whoever calls stays below `bytes`, for which the caller promised both, and begins with a
                // line of the destination.
                unsafe { U::stream_line(from, to) };
            } else {
                // SAFETY: as above.
                unsafe { U::copy_line(from, to) };
            }
        };
        let plain = |at: usize, bytes: usize| {
            // SAFETY: as above. They are apart, unless a rank lies about where its tensors are.
            unsafe { to.wrapping_add(at).copy_from(from.wrapping_add(at), bytes) };
        };
        let head = to.addr().wrapping_neg() % LINE;
        let head = head.min(bytes);
        plain(0, head);
        beside.begin();
        let mut done = head;
        while bytes - done >= PAGES * PAGE {
            for at in (done..done + PAGE).step_by(LINE) {
                for at in (0..PAGES).map(|page| at + page * PAGE) {
                    U::prefetch(from.wrapping_add(at + AHEAD));
                    line(at);
                    beside.copy_line::<U>();
                }
            }
            done += PAGES * PAGE;
        }
        while bytes - done >= LINE {
            line(done);
            done += LINE;
        }
        plain(done, bytes - done);
        beside.finish::<U>();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Shorter than a page to several rounds of pages, and the lengths next to where the loops change.
    fn length() -> impl Strategy<Value = usize> {
        let near = prop::sample::select(vec![PAGE, PAGES * PAGE, 2 * PAGES * PAGE, PAGES * PAGE + LINE]);
        prop_oneof![0..3 * PAGES * PAGE, (near, 0..2 * LINE + 1).prop_map(|(near, less)| near + LINE - less)]
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..ProptestConfig::default()
        })]

        #[test]
        fn all_bytes_and_no_others_are_copied(
            bytes in length(),
            beside in prop_oneof![Just(0), length()],
            from_at in 0usize..2 * LINE,
            to_at in 0usize..2 * LINE,
            how in prop::sample::select(vec![Copying::Cached, Copying::Loading, Copying::Streaming]),
            seed in any::<u64>(),
        ) {
            let from: Vec<u8> =
                (0..from_at + bytes.max(beside)).map(|i| (seed.wrapping_mul(2 * i as u64 + 1) >> 32) as u8).collect();
            for unit in VectorUnit::all() {
                let mut copied = vec![0xa5; to_at + beside + LINE];
                // SAFETY: both are long enough, apart, and used by nobody else.
                let other = unsafe { Beside::new(from[from_at..].as_ptr(), copied[to_at..].as_mut_ptr(), beside) };
                let mut to = vec![0xa5; to_at + bytes + LINE];
                let into = to[to_at..].as_mut_ptr();
                // SAFETY: both are long enough, and apart.
                unsafe { copy_on(unit, (how, other), from[from_at..].as_ptr(), into, bytes) };
                for (to, bytes) in [(to, bytes), (copied, beside)] {
                    prop_assert!(to[to_at..to_at + bytes] == from[from_at..from_at + bytes], "{unit:?}");
                    let others = to[..to_at].iter().chain(&to[to_at + bytes..]);
                    prop_assert!(others.clone().all(|byte| *byte == 0xa5), "{unit:?}");
                }
            }
        }
    }

    #[test]
    fn memory_may_be_copied_to_itself() {
        let mut bytes: Vec<u8> = (0..4 * PAGE).map(|at| at as u8).collect();
        let expected = bytes.clone();
        let data = bytes.as_mut_ptr();
        // SAFETY: readable and writable for its length.
        unsafe { copy(Copying::Streaming, data, data, bytes.len()) };
        assert_eq!(bytes, expected);
    }
}
