//! The arena: memory of one process that the other ranks of its host map and read in place.
//!
//! A process has up to two: that of device `tpu`, and that of CPU tensors which are to be shared.
//!
//! A sealed memfd of fixed size; pages take memory once they are touched. Its owner hands out an [`Export`],
//! 32 bytes that say where it is found, and [`PeerArena`] is the other side. The allocator (`runtime/`) decides what
//! lies where in it; ranks tell each other ranges by their offsets.
//!
//! ```text
//! data        `bytes` bytes
//! header      magic, id, bytes: one page behind the data
//! ```

mod export;
mod peer;

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::fs::FallocateFlags;
use rustix::rand::GetRandomFlags;

pub use self::export::Export;
pub use self::peer::PeerArena;
use crate::failure::{Failure, FailureKind};
use crate::invalid_usage;
use crate::region::{HUGE_PAGE, Region};

/// "tpurun-a", little endian.
const MAGIC: u64 = u64::from_le_bytes(*b"tpurun-a");
const PAGE: u64 = 4096;
const HEADER_BYTES: usize = 32;
/// Most bytes of an arena's data: as many as a process can address, with room for the arenas of others.
const MAX_BYTES: u64 = 1 << 44;

/// The arena of this process.
#[derive(Debug)]
pub struct Arena {
    region: Region,
    fd: OwnedFd,
    export: Export,
    forked: AtomicBool,
    /// By huge page of the data: whether it has been lent, and so been made one.
    lent: Box<[AtomicBool]>,
}

impl Arena {
    /// Makes an arena of `bytes` zeroed bytes that take no memory yet.
    ///
    /// # Errors
    /// That so many bytes can not be addressed (1 byte to 16 TiB can), or that the host refuses them.
    pub fn create(bytes: u64) -> Result<Self, Failure> {
        let size = size(bytes)
            .ok_or_else(|| invalid_usage!("expected an arena of 1 byte to 16 TiB, given {bytes} bytes"))?;
        let refused = |error: std::io::Error| {
            let text = format!("the host refuses an arena of {bytes} bytes: {error}");
            Failure::new(FailureKind::Transport, text)
        };
        let (region, fd) = Region::create("tpurun-arena", size).map_err(refused)?;
        let mut id = [0; 16];
        rustix::rand::getrandom(&mut id, GetRandomFlags::empty()).map_err(|error| refused(error.into()))?;
        let export = Export { pid: std::process::id(), fd: fd.as_raw_fd() as u32, bytes, id };
        region.write(size - PAGE as usize, &header(&export));
        let lent = (0..size / HUGE_PAGE).map(|_| AtomicBool::new(false)).collect();
        Ok(Self { region, fd, export, forked: AtomicBool::new(false), lent })
    }

    /// The size of its data.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.export.bytes
    }

    /// How another process finds it, as long as this one lives.
    pub fn export(&self) -> Export {
        self.export
    }

    /// Where `bytes` bytes at `data` are in the arena, when all of them are.
    #[inline]
    pub fn offset_of(&self, data: *const u8, bytes: u64) -> Option<u64> {
        let offset = self.region.offset_of(data, usize::try_from(bytes).ok()?)? as u64;
        (offset <= self.bytes() && bytes <= self.bytes() - offset).then_some(offset)
    }

    /// The first of `bytes` bytes at `offset`.
    ///
    /// # Panics
    /// When they are not in the arena.
    #[inline]
    pub fn pointer(&self, offset: u64, bytes: u64) -> *mut u8 {
        let end = offset.checked_add(bytes).filter(|end| *end <= self.bytes());
        assert!(end.is_some(), "{bytes} bytes at offset {offset} are outside of the arena");
        self.region.pointer(offset as usize, bytes as usize)
    }

    /// Gives the memory of whole pages back to the host: they read as zeroes again.
    ///
    /// # Errors
    /// The refusal of the host.
    pub fn discard(&self, offset: u64, bytes: u64) -> std::io::Result<()> {
        let pages = offset as usize / HUGE_PAGE..(offset + bytes).div_ceil(HUGE_PAGE as u64) as usize;
        self.lent[pages.start.min(self.lent.len())..pages.end.min(self.lent.len())]
            .iter()
            .for_each(|lent| lent.store(false, Ordering::Relaxed));
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.fd, hole, offset, bytes)?)
    }

    /// Prepares a range that other ranks are going to use where it is. Memory that is large comes to lie in huge
    /// pages, once: otherwise each rank would have hundreds of entries in its page tables for every such page, which
    /// take longer to make than the copy of the page.
    pub fn lend(&self, offset: u64, bytes: u64) {
        let (offset, bytes) = (offset as usize, bytes as usize);
        for page in offset.div_ceil(HUGE_PAGE)..(offset + bytes) / HUGE_PAGE {
            let is_news = self.lent.get(page).is_some_and(|lent| !lent.swap(true, Ordering::Relaxed));
            if is_news && !self.is_forked() {
                // Refused, it is as it was.
                let _ = self.region.make_huge(page * HUGE_PAGE..(page + 1) * HUGE_PAGE);
            }
        }
    }

    /// In the child of a fork: what the child writes stays its own. Makes system calls only, so it may run in
    /// a handler of `pthread_atfork`; once done it does nothing.
    pub fn after_fork_in_child(&self) {
        if !self.forked.swap(true, Ordering::Relaxed) {
            // Refused, the mapping is read-only, or as it was: nothing else can be done here.
            let _ = self.region.make_private(&self.fd);
        }
    }

    /// Whether this process is a fork of the one that made the arena.
    #[inline]
    pub fn is_forked(&self) -> bool {
        self.forked.load(Ordering::Relaxed)
    }
}

/// The tensors that lie in an arena.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ArenaKind {
    /// Tensors of device `tpu`.
    Device = 0,
    /// CPU tensors.
    Host = 1,
}

impl ArenaKind {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Device, Self::Host];
}

/// The arenas of a process, by their kind.
#[derive(Clone, Debug, Default)]
pub struct Arenas([Option<Arc<Arena>>; ArenaKind::ALL.len()]);

impl Arenas {
    /// The same, with this arena.
    #[must_use]
    pub fn with(mut self, kind: ArenaKind, arena: Arc<Arena>) -> Self {
        self.0[kind as usize] = Some(arena);
        self
    }

    /// The one of this kind.
    pub fn get(&self, kind: ArenaKind) -> Option<&Arc<Arena>> {
        self.0[kind as usize].as_ref()
    }
}

static CURRENT: [OnceLock<Arc<Arena>>; ArenaKind::ALL.len()] = [const { OnceLock::new() }; 2];

/// Makes this an arena that the communicators of this process use from now on; the first of a kind stays.
pub fn publish(kind: ArenaKind, arena: Arc<Arena>) {
    let _ = CURRENT[kind as usize].set(arena);
}

/// The arenas that this process has so far: those of the process it is a fork of are none.
pub fn current() -> Arenas {
    let current = |kind| CURRENT[kind as usize].get().filter(|arena| !arena.is_forked()).cloned();
    Arenas(ArenaKind::ALL.map(current))
}

/// The size of the memory behind an arena with this much data.
fn size(bytes: u64) -> Option<usize> {
    let fits = (1..=MAX_BYTES).contains(&bytes);
    fits.then(|| bytes.next_multiple_of(PAGE) + PAGE).and_then(|size| usize::try_from(size).ok())
}

/// Returns the bytes that the page behind the data begins with.
fn header(export: &Export) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC.to_le_bytes());
    header[8..24].copy_from_slice(&export.id);
    header[24..].copy_from_slice(&export.bytes.to_le_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_and_pointers_are_each_others_inverse() {
        let arena = Arena::create(10_000).expect("memfds work here");
        let base = arena.pointer(0, 10_000).cast_const();
        assert_eq!(arena.offset_of(base, 10_000), Some(0));
        assert_eq!(arena.offset_of(base.wrapping_add(9_999), 1), Some(9_999));
        assert_eq!(arena.offset_of(base.wrapping_add(9_999), 2), None, "the page behind is the header's");
        assert_eq!(arena.offset_of(base.wrapping_add(10_000), 0), Some(10_000));
        assert_eq!(arena.offset_of(base.wrapping_sub(1), 1), None);
        assert_eq!(arena.offset_of(base, u64::MAX), None);
        assert_eq!(arena.offset_of((&raw const arena).cast(), 1), None);
    }

    #[test]
    fn sizes_that_no_process_can_address_are_refused() {
        for bytes in [0, MAX_BYTES + 1, u64::MAX] {
            let error = Arena::create(bytes).expect_err("not addressable");
            assert_eq!(error.kind(), FailureKind::InvalidUsage);
            assert!(error.text().starts_with("expected an arena of 1 byte to 16 TiB"), "{error}");
        }
    }

    #[test]
    fn discarded_pages_are_zero_and_take_no_memory() {
        let arena = Arena::create(1 << 20).expect("memfds work here");
        let blocks = || rustix::fs::fstat(&arena.fd).unwrap().st_blocks;
        let before = blocks();
        arena.region.write(8192, &[7; 4096]);
        assert!(blocks() > before);
        arena.discard(8192, 4096).unwrap();
        assert_eq!(blocks(), before);
        let mut read = [1; 4096];
        arena.region.read(8192, &mut read);
        assert_eq!(read, [0; 4096]);
    }
}
