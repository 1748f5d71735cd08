#![allow(unsafe_code)]
//! Memory that several ranks map: a sealed memfd.
//!
//! Everything in it is either an atomic word or bytes that are only ever copied, so another process may
//! write anything at any time without breaking this one. All access is bounds-checked here; a bad offset is
//! a bug of ours and panics, a bad *value* in the memory is the business of whoever reads it.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FileType, MemfdFlags, SealFlags, fstat, fstatfs};
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};

use crate::sync::Word;
use tpurun_kernels::reduce::{self, Reduction, Sources};

/// Stretches that different ranks write begin at multiples of this.
pub use tpurun_kernels::LINE;
/// Bytes of a page.
pub const PAGE: usize = 4096;
/// The bytes that the processor can map as one page.
pub const HUGE_PAGE: usize = 2 << 20;

/// Types that live in a region: any bit pattern is a value, all access is atomic.
///
/// # Safety
/// Implementors are `repr(C)` or `repr(transparent)`, hold only atomics (or padding), and all zeroes is
/// their first state.
pub unsafe trait Shareable {}

// SAFETY: a `repr(transparent)` AtomicU32.
unsafe impl Shareable for Word {}
// SAFETY: an atomic.
unsafe impl Shareable for std::sync::atomic::AtomicU32 {}
// SAFETY: an atomic.
unsafe impl Shareable for AtomicU64 {}
// SAFETY: nothing but what may be shared, one after the other.
unsafe impl<T: Shareable, const COUNT: usize> Shareable for [T; COUNT] {}
// SAFETY: `repr(transparent)` over a `Word`.
unsafe impl Shareable for crate::sync::Publication {}
// SAFETY: `repr(transparent)` over a `Word`.
unsafe impl Shareable for crate::sync::Attendance {}
// SAFETY: `repr(transparent)` over a `Word`.
unsafe impl Shareable for crate::sync::Hands {}
// SAFETY: `repr(C)` over one `Word`.
unsafe impl Shareable for crate::sync::Doorbell {}
// SAFETY: `repr(C)` over a `Word` and atomics, each alone on its cache line.
unsafe impl Shareable for crate::sync::Meeting {}
// SAFETY: `repr(C)` over atomics and padding.
unsafe impl Shareable for crate::sync::RingCounters {}
// SAFETY: `repr(C)` over an atomic and padding.
unsafe impl Shareable for crate::sync::PieceCount {}

/// Bytes that are read before their lines are handed back: about what a first-level cache holds.
const KEPT: usize = 32 << 10;
/// The least bytes of one place; fewer are not worth a call.
const LEAST_KEPT: usize = 1 << 10;

/// A mapped region; unmapped on drop.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory is only reached through atomics and raw copies, see the module's head.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Creates a zeroed region of `bytes` that others can map through the descriptor. Its size is sealed, so
    /// that no process can cut it under the others; pages take memory only once they are touched.
    #[inline]
    pub fn create(name: &str, bytes: usize) -> io::Result<(Self, OwnedFd)> {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, bytes as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let region = Self::map(fd.as_fd(), bytes)?;
        Ok((region, fd))
    }

    /// Maps a region that another process created; its size must be sealed and exactly `bytes`.
    pub fn open(fd: impl AsFd, bytes: usize) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(fd.as_fd())?;
        // Without the last one, somebody may still forbid to write it.
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL) {
            return Err(io::Error::other("the shared memory's size is not sealed"));
        }
        // Sealed huge pages are there only as long as the host has some.
        if !is_plain_memory(fd.as_fd()) {
            return Err(io::Error::other("it is no memory of plain pages"));
        }
        let size = rustix::fs::fstat(fd.as_fd())?.st_size;
        if u64::try_from(size) != Ok(bytes as u64) {
            let text = format!("the shared memory has {size} bytes, expected {bytes}");
            return Err(io::Error::other(text));
        }
        Self::map(fd.as_fd(), bytes)
    }

    /// The size of the memory behind a descriptor.
    #[inline]
    pub fn size_of(fd: impl AsFd) -> io::Result<usize> {
        usize::try_from(rustix::fs::fstat(fd)?.st_size).map_err(io::Error::other)
    }

    fn map(fd: impl AsFd, bytes: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        if bytes < HUGE_PAGE {
            let anywhere = std::ptr::null_mut();
            // SAFETY: a fresh mapping at an address of the kernel's choice.
            let base = unsafe { rustix::mm::mmap(anywhere, bytes, access, MapFlags::SHARED, fd, 0) }?;
            let base = NonNull::new(base.cast::<u8>()).expect("mmap never returns null on success");
            return Ok(Self { base, bytes });
        }
        // Where a huge page of the memory can be mapped as one.
        let room = Reservation::new(bytes + HUGE_PAGE)?;
        let ahead = room.base.addr().get().wrapping_neg() % HUGE_PAGE;
        // SAFETY: fewer bytes than the reservation has more.
        let base = unsafe { room.base.add(ahead) };
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: replaces a part of the reservation, which nobody uses.
        unsafe { rustix::mm::mmap(base.as_ptr().cast(), bytes, access, flags, fd, 0) }?;
        room.give_back_around(ahead, bytes);
        Ok(Self { base, bytes })
    }

    /// Has huge pages back the whole huge pages of a range: its contents stay as they are, for all who map
    /// it. A process that uses it then has one entry in its page tables where it had 512.
    ///
    /// # Errors
    /// If the host has none to give; nothing has changed then.
    pub fn make_huge(&self, range: Range<usize>) -> io::Result<()> {
        let (start, end) = (range.start.next_multiple_of(HUGE_PAGE), range.end / HUGE_PAGE * HUGE_PAGE);
        if start >= end {
            return Ok(());
        }
        let (at, bytes) = (self.pointer(start, end - start).cast(), end - start);
        // Where pages are missing, the collapse below takes six times as long.
        // SAFETY: makes pages of this mapping present and changes no byte of them.
        unsafe { rustix::mm::madvise(at, bytes, Advice::LinuxPopulateWrite) }?;
        // SAFETY: changes how the bytes of this mapping are kept, and none of them.
        let refused = unsafe { libc::madvise(at, bytes, libc::MADV_COLLAPSE) } != 0;
        if refused { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Keeps all that this process writes from now on to itself: nobody else who maps the memory behind `fd`
    /// sees it. Where the host refuses that, every write is refused, too (SIGSEGV). Only system calls.
    pub fn make_private(&self, fd: impl AsFd) -> io::Result<()> {
        let base = self.base.as_ptr().cast();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // Not reserved: the whole of it may be more than the host has.
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: replaces exactly this mapping by one of the same bytes, so every pointer into it stays valid.
        let mapped = unsafe { rustix::mm::mmap(base, self.bytes, access, flags, fd, 0) };
        if let Err(error) = mapped {
            // SAFETY: as above.
            unsafe { rustix::mm::mprotect(base, self.bytes, MprotectFlags::READ) }?;
            return Err(error.into());
        }
        Ok(())
    }

    /// Where `bytes` bytes at `data` are in the region, when all of them are.
    #[inline]
    pub fn offset_of(&self, data: *const u8, bytes: usize) -> Option<usize> {
        let offset = data.addr().checked_sub(self.base.addr().get())?;
        let end = offset.checked_add(bytes)?;
        (end <= self.bytes).then_some(offset)
    }

    /// The atomic (or struct of atomics) at `offset`.
    #[inline]
    pub fn at<T: Shareable>(&self, offset: usize) -> &T {
        let pointer = self.pointer(offset, size_of::<T>()).cast::<T>();
        assert!(pointer.is_aligned(), "offset {offset} is not aligned for {}", std::any::type_name::<T>());
        // SAFETY: in bounds and aligned (checked above), zeroed or written through atomics only (`Shareable`),
        // and mapped for as long as `self` lives.
        unsafe { &*pointer }
    }

    /// The first byte of `bytes` bytes at `offset`, for copies and reduce kernels.
    #[inline]
    pub fn pointer(&self, offset: usize, bytes: usize) -> *mut u8 {
        let end = offset.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "{bytes} bytes at offset {offset} are outside of a region of {} bytes",
            self.bytes
        );
        // SAFETY: in bounds, checked above.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Folds so many elements at each of `sources` (offsets, in this order) into `out`, all in this region.
    #[inline]
    pub fn fold(&self, reduction: Reduction, sources: impl Iterator<Item = usize>, out: usize, count: usize) {
        let bytes = count * reduction.dtype().size();
        let sources: Sources = sources.map(|at| self.pointer(at, bytes).cast_const()).collect();
        let out = self.pointer(out, count * reduction.out().size());
        // SAFETY: every pointer is valid for so many elements (checked by `pointer`), the offsets of windows are
        // multiples of 64, and what is folded into is none of the sources.
        unsafe { reduce::fold(reduction, &sources, out, count) };
    }

    /// Has `read(start, bytes)` read those bytes of all these places, one stretch after the other, and gives
    /// their lines back to the ranks that wrote them. Only for a rank that reads them alone, until they are
    /// written again.
    ///
    /// Before a line that two processors share can be written, all of the machine are asked for it, which
    /// takes several times as long as the line itself. So the bytes read are written again as they are: then
    /// the line is shared no more, and goes straight to the one that writes it next. (The migratory lines of
    /// Stenstrom, Brorsson and Sandberg, "An adaptive cache coherence protocol optimized for migratory
    /// sharing", ISCA 1993, which processors do not find.)
    pub fn read_alone(
        &self,
        bytes: usize,
        places: impl Iterator<Item = usize> + Clone,
        mut read: impl FnMut(usize, usize),
    ) {
        if bytes < PAGE {
            return read(0, bytes);
        }
        let most = (KEPT / places.clone().count().max(1) / LINE * LINE).max(LEAST_KEPT);
        for start in (0..bytes).step_by(most) {
            let bytes = (bytes - start).min(most);
            read(start, bytes);
            places.clone().for_each(|place| self.hand_back(place + start, bytes));
        }
    }

    /// Writes the whole lines among these bytes as they are.
    fn hand_back(&self, offset: usize, bytes: usize) {
        let lines = offset.next_multiple_of(LINE)..(offset + bytes) / LINE * LINE;
        if lines.is_empty() {
            return;
        }
        let first = self.pointer(lines.start, lines.len()).cast::<AtomicU64>();
        assert!(first.is_aligned(), "a region begins with a page");
        for line in 0..lines.len() / LINE {
            // SAFETY: in bounds and aligned, as just checked; mapped for as long as `self` lives, and nobody
            // writes it but through atomics until the rank that reads it alone is done.
            let word = unsafe { &*first.wrapping_add(line * (LINE / size_of::<AtomicU64>())) };
            word.store(word.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Copies bytes into the region.
    #[inline]
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.pointer(offset, bytes.len());
        // SAFETY: `to` is valid for the length (checked by `pointer`); `bytes` is ours, so they are disjoint.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Has the processor fetch what will soon be written, where it can be told to.
    pub fn prefetch(&self, offset: usize, bytes: usize) {
        let from = self.pointer(offset, bytes).cast_const();
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        for line in (0..bytes).step_by(LINE) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: every processor of the architecture has it, and it touches nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(line).cast()) };
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = from;
    }

    /// Copies bytes out of the region.
    #[inline]
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        let from = self.pointer(offset, bytes.len());
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Bytes of the region that nobody writes while the caller needs them.
    #[inline]
    pub fn shared(&self, offset: usize, bytes: usize) -> &[u8] {
        let from = self.pointer(offset, bytes);
        // SAFETY: valid for the length (checked by `pointer`), and as long as `self`. Bytes that a process
        // writes meanwhile which breaks the protocol are copied as they are by the only reader, and are sent
        // to others as its ranks' data.
        unsafe { std::slice::from_raw_parts(from, bytes) }
    }
}

/// Memory of pages that are there when they are touched: files on disk may be cut, and huge pages may run out.
#[allow(clippy::useless_conversion, reason = "the type of f_type depends on the architecture")]
#[inline]
pub fn is_plain_memory(fd: BorrowedFd<'_>) -> bool {
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    let is_file =
        fstat(fd).is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::RegularFile);
    is_file && fstatfs(fd).is_ok_and(|found| i64::from(found.f_type) == TMPFS_MAGIC)
}

/// Addresses that nothing else of this process will have.
struct Reservation {
    base: NonNull<u8>,
    bytes: usize,
}

impl Reservation {
    fn new(bytes: usize) -> io::Result<Self> {
        let (anywhere, flags) = (std::ptr::null_mut(), MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe { rustix::mm::mmap_anonymous(anywhere, bytes, ProtFlags::empty(), flags) }?;
        let base = NonNull::new(base.cast::<u8>()).expect("mmap never returns null on success");
        Ok(Self { base, bytes })
    }

    /// All of them but `bytes` from `ahead` on, which are somebody's now.
    fn give_back_around(self, ahead: usize, bytes: usize) {
        let behind = ahead + bytes.next_multiple_of(PAGE);
        for (at, bytes) in [(0, ahead), (behind, self.bytes - behind)] {
            if bytes > 0 {
                // SAFETY: within the reservation, and whole pages.
                let base = unsafe { self.base.add(at) };
                // SAFETY: addresses of the reservation that nobody uses.
                let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), bytes) };
            }
        }
        std::mem::forget(self);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: exactly what was reserved, and nobody uses.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let base = self.base.as_ptr().cast();
        // SAFETY: exactly what was mapped; every reference into it borrows `self`.
        let _ = unsafe { rustix::mm::munmap(base, self.bytes) };
    }
}

/// A copy of the descriptor whose number is in this variable, which the launcher opened for us.
#[inline]
pub fn inherited(variable: &str) -> Option<OwnedFd> {
    let number: i32 = std::env::var(variable).ok()?.parse().ok().filter(|number| *number >= 0)?;
    // SAFETY: nobody else of us owns it. When the program has closed it or reused its number, the copy fails
    // or what is behind it is not what its reader checks for.
    let inherited = unsafe { BorrowedFd::borrow_raw(number) };
    inherited.try_clone_to_owned().ok()
}

#[cfg(test)]
#[cfg(not(tpurun_loom))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn two_maps_see_one_memory() {
        let (one, fd) = Region::create("test", 4096).expect("memfds work here");
        let two = Region::open(&fd, 4096).expect("the same descriptor maps again");
        one.at::<AtomicU64>(64).store(7, Ordering::Release);
        assert_eq!(two.at::<AtomicU64>(64).load(Ordering::Acquire), 7);
        one.write(100, b"abc");
        let mut read = [0; 3];
        two.read(100, &mut read);
        assert_eq!(&read, b"abc");
    }

    #[test]
    fn a_segment_of_another_size_is_refused() {
        let (_one, fd) = Region::create("test", 4096).expect("memfds work here");
        let error = Region::open(&fd, 8192).expect_err("the size differs").to_string();
        assert_eq!(error, "the shared memory has 4096 bytes, expected 8192");
        assert!(rustix::fs::ftruncate(&fd, 0).is_err(), "the size is sealed");
    }

    #[test]
    fn what_comes_to_lie_in_huge_pages_is_the_same() {
        let bytes = 3 * HUGE_PAGE + PAGE;
        let (one, fd) = Region::create("test", bytes).expect("memfds work here");
        let two = Region::open(&fd, bytes).expect("the same descriptor maps again");
        let pattern: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
        one.write(0, &pattern);
        for (region, other) in [(&one, &two), (&two, &one)] {
            assert!(region.base.addr().get().is_multiple_of(HUGE_PAGE));
            // No whole one, one, and as many as there are.
            for (range, count) in [(1..HUGE_PAGE, 0), (1..2 * HUGE_PAGE, 1), (0..bytes, 3)] {
                match region.make_huge(range) {
                    Ok(()) => assert!(huge_pages_at(region) >= count),
                    Err(error) => eprintln!("this host gives no huge pages: {error}"),
                }
            }
            other.at::<AtomicU64>(HUGE_PAGE).store(7, Ordering::Relaxed);
            let mut read = vec![0; bytes];
            region.read(0, &mut read);
            assert_eq!(read[HUGE_PAGE..HUGE_PAGE + 8], 7_u64.to_le_bytes());
            read[HUGE_PAGE..HUGE_PAGE + 8].copy_from_slice(&pattern[HUGE_PAGE..HUGE_PAGE + 8]);
            assert!(read == pattern);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn who_reads_alone_reads_every_byte_once_and_changes_none(
            places in prop::collection::vec(0..4 * LINE, 1..5),
            bytes in prop_oneof![0..2 * PAGE, 0..3 * KEPT],
        ) {
            let room = (bytes + 4 * LINE).next_multiple_of(PAGE);
            let (region, _fd) = Region::create("test", places.len() * room).expect("memfds work here");
            let pattern: Vec<u8> = (0..places.len() * room).map(|at| (at % 251) as u8).collect();
            region.write(0, &pattern);
            let places = places.iter().enumerate().map(|(index, at)| index * room + at);
            let mut done = 0;
            region.read_alone(bytes, places.clone(), |start, bytes| {
                assert_eq!(start, done);
                assert!(start.is_multiple_of(LINE), "elements are whole");
                done += bytes;
                for place in places.clone() {
                    let mut read = vec![0; bytes];
                    region.read(place + start, &mut read);
                    assert!(read == pattern[place + start..place + start + bytes]);
                }
            });
            prop_assert_eq!(done, bytes);
            let mut read = vec![0; pattern.len()];
            region.read(0, &mut read);
            prop_assert!(read == pattern);
        }
    }

    /// How many a mapping of this process has.
    fn huge_pages_at(region: &Region) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("it is there");
        let head = format!("{:x}-", region.base.addr());
        let mapping = maps.split(&head).nth(1).expect("it is mapped");
        let kib = mapping.lines().find_map(|line| line.strip_prefix("ShmemPmdMapped:")).expect("it is told");
        let kib: usize = kib.trim().trim_end_matches(" kB").parse().expect("a number");
        kib * 1024 / HUGE_PAGE
    }

    #[test]
    #[should_panic(expected = "outside of a region")]
    fn nothing_is_reached_outside() {
        let (region, _fd) = Region::create("test", 4096).expect("memfds work here");
        region.write(4095, b"ab");
    }
}
