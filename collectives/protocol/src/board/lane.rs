//! One communicator of one rank on the board: who is in it, how many collectives it has seen, what is pending.

use super::{
    Board, LANES, Mark, NAME_BYTES, OpView, RECORDS, RankWriter, SLOT_CLAIMED, SLOT_PID, lane_at, now_ns,
    pack, record, slot_at, unpack,
};
use tpurun_memory::sync::{AtomicU64, Ordering};
use tpurun_memory::text::head;

use std::sync::atomic::AtomicBool;

/// One communicator of the rank that claimed it.
///
/// Its methods may be called from any thread of the rank.
#[derive(Debug)]
pub struct BoardLane {
    pub(super) board: Board,
    pub(super) at: usize,
    /// The rank's slot.
    pub(super) slot: usize,
    /// The memory is another communicator's from then on.
    closed: AtomicBool,
}

/// The state of one communicator of one rank, as the board shows it.
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
    /// Collectives that the program has posted so far, asynchronous ones too.
    pub posted: u64,
    /// Collectives that succeeded so far; one that failed stays the last one for good.
    pub completed: u64,
    /// Collectives up to here are seen to, by a thread that waits or by the progress thread. Later ones may be
    /// left alone until then: that one of them has ended is news to nobody.
    pub attended: u64,
    /// Since when the collective in flight waits for others, CLOCK_MONOTONIC; `None` when none does.
    pub blocked_since_ns: Option<u64>,
    /// The collective in flight; without one, the last operation posted. `None` when there was none, or its
    /// record is torn or overwritten.
    pub op: Option<OpView>,
}

impl LaneView {
    /// Number of the collective that has not completed and comes first, if there is one.
    #[inline]
    pub fn in_flight(&self) -> Option<u64> {
        (self.posted > self.completed).then_some(self.completed)
    }

    /// As above, if anything could come of its end.
    #[inline]
    pub fn awaited(&self) -> Option<u64> {
        self.in_flight().filter(|seq| *seq < self.attended)
    }
}

impl RankWriter {
    /// Opens a lane for a new communicator; `None` when [`LANES`] of them are open already.
    pub fn claim_lane(&self, comm_id: u64, name: &str, size: u32, comm_rank: u32) -> Option<BoardLane> {
        let board = &self.board;
        board.store(slot_at(self.rank) + SLOT_PID, u64::from(std::process::id()));
        let at = self.unused_lane().or_else(|| self.closed_lane())?;
        board.store(at + COMM_ID, comm_id);
        board.store(at + SIZE_RANK, pack(size, comm_rank));
        for word in [POSTED, COMPLETED, ATTENDED, BLOCKED_SINCE, NEXT_RECORD] {
            board.store(at + word, 0);
        }
        board.write_text(at + NAME, NAME_BYTES, head(name, NAME_BYTES).as_bytes());
        board.word(at + STATE).store(STATE_OPEN, Ordering::Release);
        Some(BoardLane { board: board.clone(), at, slot: slot_at(self.rank), closed: AtomicBool::new(false) })
    }

    fn unused_lane(&self) -> Option<usize> {
        let claimed = self.board.word(slot_at(self.rank) + SLOT_CLAIMED);
        if claimed.load(Ordering::Relaxed) >= LANES as u64 {
            return None;
        }
        let index = claimed.fetch_add(1, Ordering::AcqRel) as usize;
        (index < LANES).then(|| lane_at(self.rank, index))
    }

    /// Takes the lane of a closed communicator, which is kept while there is room.
    fn closed_lane(&self) -> Option<usize> {
        let is_closed = |at: &usize| {
            let state = self.board.word(at + STATE);
            state.compare_exchange(STATE_CLOSED, STATE_CLAIMED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let at = (0..LANES).map(|index| lane_at(self.rank, index)).find(is_closed)?;
        // Not for a fresh lane: touching its records would take the memory for all of them.
        for index in 0..RECORDS {
            self.board.store(at + HEAD_WORDS + index * record::WORDS, 0);
        }
        Some(at)
    }
}

impl BoardLane {
    /// The collective in flight waits for others from now on.
    #[inline]
    pub fn blocked(&self) {
        self.word(BLOCKED_SINCE).store(now_ns().max(1), Ordering::Relaxed);
    }

    /// It does no longer.
    #[inline]
    pub fn unblocked(&self) {
        self.word(BLOCKED_SINCE).store(0, Ordering::Relaxed);
    }

    /// Collective number `seq` has succeeded on this rank.
    #[inline]
    pub fn completed(&self, seq: u64) {
        self.word(COMPLETED).fetch_max(seq.saturating_add(1), Ordering::Relaxed);
        self.mark_first(Mark::FirstDone, now_ns);
    }

    /// Somebody sees to collective number `seq` and those before it.
    #[inline]
    pub fn attended(&self, seq: u64) {
        self.word(ATTENDED).fetch_max(seq.saturating_add(1), Ordering::Relaxed);
    }

    /// The communicator was destroyed; its counts stay readable. Dropping the lane does the same.
    #[inline]
    pub fn close(&self) {
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.unblocked();
            self.word(STATE).store(STATE_CLOSED, Ordering::Release);
        }
    }

    #[inline]
    pub(super) fn count_posted(&self, posted: u64) {
        self.word(POSTED).fetch_max(posted, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn next_record(&self) -> u64 {
        self.word(NEXT_RECORD).fetch_add(1, Ordering::Relaxed)
    }

    fn word(&self, word: usize) -> &AtomicU64 {
        self.board.word(self.at + word)
    }
}

impl Drop for BoardLane {
    fn drop(&mut self) {
        self.close();
    }
}

impl Board {
    pub(super) fn read_lane(&self, rank: u32, lane: usize) -> Option<LaneView> {
        let at = lane_at(rank, lane);
        let state = self.word(at + STATE).load(Ordering::Acquire);
        if state != STATE_OPEN && state != STATE_CLOSED {
            return None;
        }
        let load = |word: usize| self.load(at + word);
        let (size, comm_rank) = unpack(load(SIZE_RANK));
        if size == 0 || comm_rank >= size {
            return None;
        }
        let mut view = LaneView {
            comm_id: load(COMM_ID),
            name: self.read_text(at + NAME, NAME_BYTES),
            size,
            comm_rank,
            closed: state == STATE_CLOSED,
            posted: load(POSTED),
            completed: load(COMPLETED),
            attended: load(ATTENDED),
            blocked_since_ns: Some(load(BLOCKED_SINCE)).filter(|ns| *ns != 0),
            op: None,
        };
        view.op = self.current(at, &view);
        Some(view)
    }

    #[inline]
    pub(super) fn written_records(&self, lane: usize) -> u64 {
        self.load(lane + NEXT_RECORD)
    }

    fn current(&self, at: usize, view: &LaneView) -> Option<OpView> {
        let next = self.load(at + NEXT_RECORD);
        let last = self.read_numbered(at, next.checked_sub(1)?);
        let Some(seq) = view.in_flight() else { return last };
        let is_it = |op: &OpView| op.seq == seq && !op.is_message();
        // Mostly the last one, or a few before it where operations are asynchronous.
        let before = (2..=RECORDS as u64).filter_map(|back| self.read_numbered(at, next.checked_sub(back)?));
        last.into_iter().chain(before).find(is_it)
    }
}

const ATTENDED: usize = 0;
const COMM_ID: usize = 1;
const STATE: usize = 2;
const SIZE_RANK: usize = 3;
const POSTED: usize = 4;
const COMPLETED: usize = 5;
const BLOCKED_SINCE: usize = 6;
const NEXT_RECORD: usize = 7;
const NAME: usize = 8;
pub(super) const HEAD_WORDS: usize = 16;
const _: () = assert!(NAME + NAME_BYTES / 8 <= HEAD_WORDS);
pub(super) const WORDS: usize = HEAD_WORDS + RECORDS * record::WORDS;

const STATE_CLAIMED: u64 = 1;
const STATE_OPEN: u64 = 2;
const STATE_CLOSED: u64 = 3;
