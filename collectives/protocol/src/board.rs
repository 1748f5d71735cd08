//! The board: what every rank of this host is doing, in shared memory that the agent can read at any time.
//!
//! The agent makes one memfd and every rank inherits it. A rank writes only its own slot; it takes no lock
//! and makes no system call, so a rank that dies in the middle of a write leaves at worst one torn record,
//! which the reader recognises. The reader trusts no byte: every count is clamped, every text is cleaned.
//!
//! A slot has the rank's blocked waits (`wait.rs`), and per communicator a lane (`lane.rs`) with counts and
//! the last operations (`record.rs`), and the last runs of compiled programs (`run.rs`): these are the flight
//! recorder, too. Its first words say when the rank reached the steps of its start (`marks.rs`).
//!
//! The board is for people and verdicts. No collective reads it to decide anything.

mod lane;
mod marks;
mod record;
mod run;
#[cfg(test)]
mod tests;
mod wait;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use tpurun_memory::region::Region;
use tpurun_memory::sync::{AtomicU64, Ordering};

pub use lane::{BoardLane, LaneView};
pub use marks::Mark;
pub use record::{OpRecord, OpView, Outcome, RECORDS, Recording};
pub use run::{LINE_BYTES, ProgramRun, RunView};
pub use wait::{Wait, WaitEntry, WaitKind, WaitView};

/// The variable that carries the number of the inherited descriptor.
pub const BOARD_FD_VAR: &str = "TPURUN_BOARD_FD";
/// Communicators recorded per rank; more of them work, but are not shown.
pub const LANES: usize = 24;
/// Runs of compiled programs kept per rank.
pub const RUNS: usize = 64;
/// Dimensions kept of a tensor's shape.
pub const MAX_DIMS: usize = 6;
/// Bytes kept of a communicator's name.
pub const NAME_BYTES: usize = 32;
/// Bytes kept of a call site.
pub const SITE_BYTES: usize = 96;
/// Nanoseconds for which a look at the board asks for what other hosts know.
const WATCHED_NS: u64 = 300_000_000;
/// Ranks that one board can hold.
pub const MAX_RANKS: u32 = 65_536;

/// The shared table; cheap to clone.
#[derive(Clone, Debug)]
pub struct Board {
    map: Arc<Region>,
    world: u32,
}

/// The slot of one rank, for that rank to write.
#[derive(Clone, Debug)]
pub struct RankWriter {
    board: Board,
    rank: u32,
}

/// The state of one rank, as the board shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankView {
    /// 0 until the rank has created its first communicator.
    pub pid: u32,
    /// Threads that wait in the engine.
    pub waits: Vec<WaitView>,
    /// In the order of their creation.
    pub lanes: Vec<LaneView>,
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
        let (map, fd) = Region::create("tpurun-board", words(world) * 8)?;
        let board = Board { map: Arc::new(map), world };
        board.store(HEADER_WORLD, u64::from(world));
        board.word(HEADER_MAGIC).store(MAGIC, Ordering::Release);
        Ok((board, fd))
    }

    /// Maps a board made by [`Board::create`]; the descriptor may be closed afterwards.
    ///
    /// # Errors
    /// `InvalidData` when it is not a board of this version.
    pub fn open(fd: impl AsFd) -> io::Result<Board> {
        let bytes = Region::size_of(fd.as_fd())?;
        if bytes < HEADER_WORDS * 8 || bytes > words(MAX_RANKS) * 8 {
            return Err(corrupt("the size is out of range"));
        }
        let map = Region::open(fd, bytes).map_err(|error| corrupt(&error.to_string()))?;
        let mut board = Board { map: Arc::new(map), world: 0 };
        if board.word(HEADER_MAGIC).load(Ordering::Acquire) != MAGIC {
            return Err(corrupt("another layout"));
        }
        board.world = u32::try_from(board.load(HEADER_WORLD)).unwrap_or(0);
        if board.world == 0 || board.world > MAX_RANKS || bytes < words(board.world) * 8 {
            return Err(corrupt("the number of ranks does not fit the size"));
        }
        Ok(board)
    }

    /// The board this process inherited, when it runs under `tpurun`.
    pub fn from_env() -> Option<Board> {
        let fd = tpurun_memory::region::inherited(BOARD_FD_VAR)?;
        Board::open(fd).ok()
    }

    /// Asks for what ranks on other hosts do, too, for a while from now; `now_ns` is [`now_ns`].
    pub fn watch(&self, now_ns: u64) {
        self.store(HEADER_WATCHED, now_ns + WATCHED_NS);
    }

    /// Whether somebody has asked for that a while ago at most.
    pub fn is_watched(&self, now_ns: u64) -> bool {
        // A watch is over soon, whatever is written there.
        self.load(HEADER_WATCHED).checked_sub(now_ns).is_some_and(|left| (1..=WATCHED_NS).contains(&left))
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

    /// Reads what `rank` has written so far; empty for a rank outside the world.
    pub fn read(&self, rank: u32) -> RankView {
        if rank >= self.world {
            return RankView::default();
        }
        let pid = self.load(slot_at(rank) + SLOT_PID) as u32;
        let lanes = (0..self.claimed(rank)).filter_map(|lane| self.read_lane(rank, lane)).collect();
        RankView { pid, waits: self.read_waits(rank), lanes }
    }

    /// The flight recorder of `rank`: its communicators, and of each the last operations, oldest first.
    pub fn records(&self, rank: u32) -> Vec<(LaneView, Vec<OpView>)> {
        if rank >= self.world {
            return Vec::new();
        }
        let lanes = (0..self.claimed(rank)).filter_map(|lane| Some((lane, self.read_lane(rank, lane)?)));
        lanes.map(|(lane, view)| (view, self.read_records(lane_at(rank, lane)))).collect()
    }

    fn claimed(&self, rank: u32) -> usize {
        (self.load(slot_at(rank) + SLOT_CLAIMED) as usize).min(LANES)
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        self.map.at(index * 8)
    }

    fn load(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::Relaxed)
    }

    fn store(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::Relaxed);
    }

    fn read_text(&self, at: usize, bytes: usize) -> String {
        let raw: Vec<u8> = (0..bytes / 8).flat_map(|i| self.load(at + i).to_le_bytes()).collect();
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
            self.store(at + index, u64::from_le_bytes(word));
            // Readers stop at the first NUL.
            if chunk.len() < 8 {
                break;
            }
        }
    }
}

/// CLOCK_MONOTONIC, which all times on the board are told in.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn words(world: u32) -> usize {
    slot_at(world)
}

fn slot_at(rank: u32) -> usize {
    HEADER_WORDS + rank as usize * SLOT_WORDS
}

fn wait_at(rank: u32, wait: usize) -> usize {
    slot_at(rank) + SLOT_HEADER_WORDS + wait * wait::WORDS
}

fn lane_at(rank: u32, lane: usize) -> usize {
    wait_at(rank, wait::WAITS) + lane * lane::WORDS
}

fn run_ring_at(rank: u32) -> usize {
    lane_at(rank, LANES)
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

const MAGIC: u64 = u64::from_le_bytes(*b"TPUBRD\0\x03");

// All offsets are in words of 8 bytes. Slots, waits, lanes and the ring of runs start on cache lines.
const HEADER_WORDS: usize = 8;
const HEADER_MAGIC: usize = 0;
const HEADER_WORLD: usize = 1;
const HEADER_WATCHED: usize = 2;

const SLOT_HEADER_WORDS: usize = 8;
const SLOT_PID: usize = 0;
const SLOT_CLAIMED: usize = 1;
const SLOT_TOKENS: usize = 2;
const SLOT_MARKS: usize = 3;
const _: () = assert!(SLOT_MARKS + marks::MARKS <= SLOT_HEADER_WORDS);
const SLOT_WORDS: usize =
    SLOT_HEADER_WORDS + wait::WAITS * wait::WORDS + LANES * lane::WORDS + RUN_RING_WORDS;
// A count on a line of its own, and the records.
const RUN_WORDS: usize = 16;
const RUN_RING_WORDS: usize = 8 + RUNS * RUN_WORDS;
