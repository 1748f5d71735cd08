//! The board: what every rank of this host is doing, in shared memory that the agent can read at any time.
//!
//! The agent makes one memfd and every rank inherits it. A rank writes only its own slot; it takes no lock
//! and makes no system call, so a rank that dies in the middle of a write leaves at worst one torn record,
//! which the reader recognises. The reader trusts no byte: every count is clamped, every text is cleaned.
//!
//! The board is for people and verdicts. No collective reads it to decide anything.
#![allow(unsafe_code)]

#[cfg(test)]
mod tests;

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU64, fence};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::text::{head, tail};

/// The variable that carries the number of the inherited descriptor.
pub const BOARD_FD_VAR: &str = "TPURUN_BOARD_FD";
/// Communicators recorded per rank; more of them work, but are not shown.
pub const LANES: usize = 24;
/// Dimensions kept of a tensor's shape.
pub const MAX_DIMS: usize = 6;
/// Bytes kept of a communicator's name.
pub const NAME_BYTES: usize = 32;
/// Bytes kept of a call site.
pub const SITE_BYTES: usize = 96;
/// Ranks that one board can hold.
pub const MAX_RANKS: u32 = 65_536;

/// The shared table; cheap to clone.
#[derive(Clone, Debug)]
pub struct Board {
    map: Arc<Mapping>,
    world: u32,
}

/// The slot of one rank, for that rank to write.
#[derive(Clone, Debug)]
pub struct RankWriter {
    board: Board,
    rank: u32,
}

/// One communicator of the rank that claimed it.
///
/// Its methods may be called from any thread of the rank; when two collide, one record is lost, never torn.
#[derive(Debug)]
pub struct Lane {
    board: Board,
    at: usize,
}

/// The operation a rank is in. The codes are those of the C ABI.
#[derive(Clone, Copy, Debug)]
pub struct OpRecord<'a> {
    /// `TpurunCollective`.
    pub collective: u8,
    /// `TpurunDtype`.
    pub dtype: u8,
    /// `TpurunReduceOp`; 255 where it does not apply.
    pub reduce_op: u8,
    /// Root, or the peer of a send or receive; -1 when there is none. A rank of the communicator.
    pub root: i32,
    /// Tag of a send or receive.
    pub tag: i32,
    /// Elements.
    pub count: u64,
    /// Shape of the first tensor; at most [`MAX_DIMS`] dimensions are kept.
    pub shape: &'a [i64],
    /// Where the user's program called, as `train.py:28`. The end is kept when it is too long.
    pub site: &'a str,
}

/// What the board says about one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankView {
    /// 0 until the rank has created its first communicator.
    pub pid: u32,
    /// In the order of their creation.
    pub lanes: Vec<LaneView>,
}

/// What the board says about one communicator of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneView {
    /// The same number on all ranks of the communicator.
    pub comm_id: u64,
    /// Control characters are replaced.
    pub name: String,
    /// Ranks of the communicator.
    pub size: u32,
    /// This rank's rank in it; always below `size`.
    pub comm_rank: u32,
    /// The communicator was destroyed by this rank.
    pub closed: bool,
    /// Collectives posted so far.
    pub posted: u64,
    /// Collectives that succeeded so far; one that failed stays the last one for good.
    pub completed: u64,
    /// CLOCK_MONOTONIC; `None` when no thread of the rank waits here.
    pub blocked_since_ns: Option<u64>,
    /// The last operation posted; `None` when there was none or its record is torn.
    pub op: Option<OpView>,
}

/// A copy of an [`OpRecord`] as read from the board.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpView {
    /// Number of the collective, from 0; whatever the engine passed for a send or receive.
    pub seq: u64,
    /// `TpurunCollective`, unchecked.
    pub collective: u8,
    /// `TpurunDtype`, unchecked.
    pub dtype: u8,
    /// `TpurunReduceOp`, unchecked.
    pub reduce_op: u8,
    /// Root or peer, unchecked.
    pub root: i32,
    /// Tag.
    pub tag: i32,
    /// Elements.
    pub count: u64,
    /// At most [`MAX_DIMS`] dimensions.
    pub shape: Vec<i64>,
    /// Call site; control characters are replaced.
    pub site: String,
}

impl Board {
    /// Makes an empty board for `world` ranks; the descriptor is what ranks inherit.
    ///
    /// # Errors
    /// `InvalidInput` for a world of 0 or more than [`MAX_RANKS`] ranks, else what the host refused.
    pub fn create(world: u32) -> io::Result<(Board, OwnedFd)> {
        if world == 0 || world > MAX_RANKS {
            return Err(invalid(format!("board: expected 1 to {MAX_RANKS} ranks, given {world}")));
        }
        let fd = rustix::fs::memfd_create("tpurun-board", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&fd, (words(world) * 8) as u64)?;
        // Nobody can shrink it under a reader, who would die of SIGBUS.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let map = Mapping::new(fd.as_fd(), words(world))?;
        map.word(HEADER_WORLD).store(u64::from(world), Relaxed);
        map.word(HEADER_MAGIC).store(MAGIC, Release);
        Ok((Board { map: Arc::new(map), world }, fd))
    }

    /// Maps a board made by [`Board::create`]; the descriptor may be closed afterwards.
    ///
    /// # Errors
    /// `InvalidData` when it is not a board of this version.
    pub fn open(fd: impl AsFd) -> io::Result<Board> {
        let fd = fd.as_fd();
        let sealed = rustix::fs::fcntl_get_seals(fd).map_err(|_| corrupt("not a sealed memfd"))?;
        if !sealed.contains(SealFlags::SHRINK) {
            return Err(corrupt("the memory can shrink"));
        }
        let bytes = u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0);
        if bytes < (HEADER_WORDS * 8) as u64 || bytes > (words(MAX_RANKS) * 8) as u64 {
            return Err(corrupt("the size is out of range"));
        }
        let map = Mapping::new(fd, bytes as usize / 8)?;
        if map.word(HEADER_MAGIC).load(Acquire) != MAGIC {
            return Err(corrupt("another layout"));
        }
        let world = u32::try_from(map.word(HEADER_WORLD).load(Relaxed)).unwrap_or(0);
        if world == 0 || world > MAX_RANKS || map.words < words(world) {
            return Err(corrupt("the number of ranks does not fit the size"));
        }
        Ok(Board { map: Arc::new(map), world })
    }

    /// The board this process inherited, when it runs under `tpurun`.
    pub fn from_env() -> Option<Board> {
        let fd: i32 = std::env::var(BOARD_FD_VAR).ok()?.parse().ok().filter(|fd| *fd >= 0)?;
        // SAFETY: the launcher opened this descriptor for us and nobody else owns it; when a program has
        // closed it or reused its number, `open` sees that the bytes behind it are no board.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        Board::open(fd).ok()
    }

    /// Ranks of the world.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// The slot of `rank`, to write to; only that rank may.
    ///
    /// # Panics
    /// When `rank` is not in the world.
    pub fn rank(&self, rank: u32) -> RankWriter {
        assert!(rank < self.world, "rank {rank} of {}", self.world);
        RankWriter { board: self.clone(), rank }
    }

    /// What `rank` has written so far; empty for a rank outside the world.
    pub fn read(&self, rank: u32) -> RankView {
        if rank >= self.world {
            return RankView::default();
        }
        let slot = slot_at(rank);
        let pid = self.map.word(slot + SLOT_PID).load(Relaxed) as u32;
        let lanes = (0..LANES).filter_map(|lane| self.read_lane(lane_at(rank, lane))).collect();
        RankView { pid, lanes }
    }

    fn read_lane(&self, at: usize) -> Option<LaneView> {
        let state = self.map.word(at + STATE).load(Acquire);
        if state != STATE_OPEN && state != STATE_CLOSED {
            return None;
        }
        let load = |word: usize| self.map.word(at + word).load(Relaxed);
        let (size, comm_rank) = unpack(load(SIZE_RANK));
        if size == 0 || comm_rank >= size {
            return None;
        }
        Some(LaneView {
            comm_id: load(COMM_ID),
            name: self.read_text(at + NAME, NAME_BYTES),
            size,
            comm_rank,
            closed: state == STATE_CLOSED,
            posted: load(POSTED),
            completed: load(COMPLETED),
            blocked_since_ns: Some(load(BLOCKED_SINCE)).filter(|ns| *ns != 0),
            op: self.read_op(at),
        })
    }

    fn read_op(&self, at: usize) -> Option<OpView> {
        let load = |word: usize| self.map.word(at + word).load(Relaxed);
        for _ in 0..READ_ATTEMPTS {
            let before = self.map.word(at + GENERATION).load(Acquire);
            if before == 0 {
                return None;
            }
            let codes = load(OP_CODES).to_le_bytes();
            let (root, tag) = unpack(load(OP_ROOT_TAG));
            let dims = usize::from(codes[3]).min(MAX_DIMS);
            let op = OpView {
                seq: load(OP_SEQ),
                collective: codes[0],
                dtype: codes[1],
                reduce_op: codes[2],
                root: root as i32,
                tag: tag as i32,
                count: load(OP_COUNT),
                shape: (0..dims).map(|dim| load(OP_DIMS + dim) as i64).collect(),
                site: self.read_text(at + OP_SITE, SITE_BYTES),
            };
            // Pairs with the release store in `posted`: whoever sees a later word sees a later generation.
            fence(Acquire);
            if before.is_multiple_of(2) && load(GENERATION) == before {
                return Some(op);
            }
            std::hint::spin_loop();
        }
        None
    }

    fn read_text(&self, at: usize, bytes: usize) -> String {
        let raw: Vec<u8> =
            (0..bytes / 8).flat_map(|i| self.map.word(at + i).load(Relaxed).to_le_bytes()).collect();
        let end = raw.iter().position(|byte| *byte == 0).unwrap_or(raw.len());
        String::from_utf8_lossy(&raw[..end])
            .chars()
            .map(|c| if c.is_control() { '\u{fffd}' } else { c })
            .collect()
    }

    fn write_text(&self, at: usize, bytes: usize, text: &[u8]) {
        for (index, chunk) in text.chunks(8).chain(std::iter::repeat(&[][..])).take(bytes / 8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.map.word(at + index).store(u64::from_le_bytes(word), Relaxed);
            // Readers stop at the first NUL.
            if chunk.len() < 8 {
                break;
            }
        }
    }
}

impl RankWriter {
    /// Opens a lane for a new communicator; `None` when [`LANES`] of them are open already.
    pub fn claim_lane(&self, comm_id: u64, name: &str, size: u32, comm_rank: u32) -> Option<Lane> {
        let map = &self.board.map;
        map.word(slot_at(self.rank) + SLOT_PID).store(u64::from(std::process::id()), Relaxed);
        let at = self.free_lane()?;
        let store = |word: usize, value: u64| map.word(at + word).store(value, Relaxed);
        store(COMM_ID, comm_id);
        store(SIZE_RANK, pack(size, comm_rank));
        for word in [POSTED, COMPLETED, BLOCKED_SINCE, GENERATION] {
            store(word, 0);
        }
        self.board.write_text(at + NAME, NAME_BYTES, head(name, NAME_BYTES).as_bytes());
        map.word(at + STATE).store(STATE_OPEN, Release);
        Some(Lane { board: self.board.clone(), at })
    }

    /// A lane never used, else the one closed first: the record of a closed one is kept while there is room.
    fn free_lane(&self) -> Option<usize> {
        let claimed = self.board.map.word(slot_at(self.rank) + SLOT_CLAIMED);
        if claimed.load(Relaxed) < LANES as u64 {
            let index = claimed.fetch_add(1, AcqRel) as usize;
            if index < LANES {
                return Some(lane_at(self.rank, index));
            }
        }
        (0..LANES).map(|index| lane_at(self.rank, index)).find(|at| {
            let state = self.board.map.word(at + STATE);
            state.compare_exchange(STATE_CLOSED, STATE_CLAIMED, AcqRel, Relaxed).is_ok()
        })
    }
}

impl Lane {
    /// This rank has posted `op` as collective number `seq` (from 0) of the communicator.
    ///
    /// A send or receive is recorded but not counted.
    pub fn posted(&self, seq: u64, op: &OpRecord<'_>) {
        if !POINT_TO_POINT.contains(&op.collective) {
            self.word(POSTED).fetch_max(seq.saturating_add(1), Relaxed);
        }
        let generation = self.word(GENERATION).load(Relaxed);
        let mine = generation.is_multiple_of(2)
            && self.word(GENERATION).compare_exchange(generation, generation + 1, Acquire, Relaxed).is_ok();
        if !mine {
            return;
        }
        // No word of the record may be seen before the odd generation is.
        fence(Release);
        let dims = op.shape.len().min(MAX_DIMS);
        let codes = [op.collective, op.dtype, op.reduce_op, dims as u8, 0, 0, 0, 0];
        self.word(OP_SEQ).store(seq, Relaxed);
        self.word(OP_CODES).store(u64::from_le_bytes(codes), Relaxed);
        self.word(OP_ROOT_TAG).store(pack(op.root as u32, op.tag as u32), Relaxed);
        self.word(OP_COUNT).store(op.count, Relaxed);
        for (index, dim) in op.shape.iter().take(MAX_DIMS).enumerate() {
            self.word(OP_DIMS + index).store(*dim as u64, Relaxed);
        }
        self.board.write_text(self.at + OP_SITE, SITE_BYTES, tail(op.site, SITE_BYTES).as_bytes());
        self.word(GENERATION).store(generation + 2, Release);
    }

    /// A thread of this rank waits in the posted operation, since `now_ns` of CLOCK_MONOTONIC.
    pub fn blocked(&self, now_ns: u64) {
        self.word(BLOCKED_SINCE).store(now_ns.max(1), Relaxed);
    }

    /// Nobody waits any more.
    pub fn unblocked(&self) {
        self.word(BLOCKED_SINCE).store(0, Relaxed);
    }

    /// Collective number `seq` has succeeded on this rank.
    pub fn completed(&self, seq: u64) {
        self.word(COMPLETED).fetch_max(seq.saturating_add(1), Relaxed);
    }

    /// The communicator was destroyed in order; its counts stay readable. Dropping the lane does the same.
    pub fn close(self) {
        drop(self);
    }

    fn word(&self, word: usize) -> &AtomicU64 {
        self.board.map.word(self.at + word)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.unblocked();
        self.word(STATE).store(STATE_CLOSED, Release);
    }
}

/// A shared mapping seen as words; every access is atomic, so no writer elsewhere can break a reader here.
#[derive(Debug)]
struct Mapping {
    base: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the memory is reached only through atomics and unmapped only when the last owner drops.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, words: usize) -> io::Result<Mapping> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address the kernel chooses overlaps no Rust object.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), words * 8, protection, MapFlags::SHARED, fd, 0)
        }?;
        let base = NonNull::new(base.cast()).expect("the kernel maps nothing at address 0");
        Ok(Mapping { base, words })
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.words, "word {index} of {}", self.words);
        // SAFETY: in range by the line above.
        let word = unsafe { self.base.add(index) };
        // SAFETY: mapped, page-aligned at the base and sealed against shrinking; atomics may be shared.
        unsafe { word.as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made in `new`, and no reference into it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.words * 8) };
    }
}

fn words(world: u32) -> usize {
    slot_at(world)
}

fn slot_at(rank: u32) -> usize {
    HEADER_WORDS + rank as usize * SLOT_WORDS
}

fn lane_at(rank: u32, lane: usize) -> usize {
    slot_at(rank) + SLOT_HEADER_WORDS + lane * LANE_WORDS
}

fn pack(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

fn unpack(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

fn corrupt(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not a board of this tpurun: {why}"))
}

const MAGIC: u64 = u64::from_le_bytes(*b"TPUBRD\0\x01");
const READ_ATTEMPTS: usize = 64;
/// `TPURUN_SEND` and `TPURUN_RECV`.
const POINT_TO_POINT: [u8; 2] = [9, 10];

// All offsets are in words of 8 bytes. Slots and lanes start on cache lines.
const HEADER_WORDS: usize = 8;
const HEADER_MAGIC: usize = 0;
const HEADER_WORLD: usize = 1;

const SLOT_HEADER_WORDS: usize = 8;
const SLOT_PID: usize = 0;
const SLOT_CLAIMED: usize = 1;
const SLOT_WORDS: usize = SLOT_HEADER_WORDS + LANES * LANE_WORDS;

const LANE_WORDS: usize = 40;
const GENERATION: usize = 0;
const STATE: usize = 1;
const COMM_ID: usize = 2;
const SIZE_RANK: usize = 3;
const POSTED: usize = 4;
const COMPLETED: usize = 5;
const BLOCKED_SINCE: usize = 6;
const OP_SEQ: usize = 7;
const OP_CODES: usize = 8;
const OP_ROOT_TAG: usize = 9;
const OP_COUNT: usize = 10;
const OP_DIMS: usize = 11;
const OP_SITE: usize = OP_DIMS + MAX_DIMS;
const NAME: usize = OP_SITE + SITE_BYTES / 8;
const _: () = assert!(NAME + NAME_BYTES / 8 <= LANE_WORDS);

const STATE_CLAIMED: u64 = 1;
const STATE_OPEN: u64 = 2;
const STATE_CLOSED: u64 = 3;
