//! The last operations of a communicator: the flight recorder of a rank.
//!
//! A record is begun when the program posts the operation and completed as the operation goes on. Records
//! lie in a ring; one that was overwritten meanwhile is no longer completed.

use super::{Board, BoardLane, MAX_DIMS, Mark, SITE_BYTES, now_ns, pack, unpack};
use tpurun_memory::sync::Ordering;
use tpurun_memory::text::tail;

use crate::strategy::Strategy;

/// Operations kept per communicator and rank.
pub const RECORDS: usize = 64;

/// An operation as its program posts it. The codes are those of the C ABI.
#[derive(Clone, Copy, Debug)]
pub struct OpRecord<'a> {
    /// Number of the collective, from 0, or of the message among this rank's.
    pub seq: u64,
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
    /// Bytes that this rank contributes.
    pub input_bytes: u64,
    /// Shape of the first tensor; at most [`MAX_DIMS`] dimensions are kept.
    pub shape: &'a [i64],
    /// Where the user's program called, as `train.py:28`. The end is kept when it is too long.
    pub site: &'a str,
}

/// How far an operation has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// Not ended.
    #[default]
    Pending,
    /// Ended well.
    Done,
    /// Ended with an error.
    Failed,
}

/// An operation as read from the board.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpView {
    /// Running number among all operations of this rank in the communicator, from 0.
    pub number: u64,
    /// Number of the collective, from 0, or of the message among this rank's.
    pub seq: u64,
    /// `TpurunCollective`, unchecked.
    pub collective: u8,
    /// `TpurunDtype`, unchecked.
    pub dtype: u8,
    /// `TpurunReduceOp`, unchecked.
    pub reduce_op: u8,
    /// Code of a [`Strategy`], unchecked; 255 while there is none.
    pub strategy: u8,
    /// How it ended.
    pub outcome: Outcome,
    /// Root or peer, unchecked.
    pub root: i32,
    /// Tag.
    pub tag: i32,
    /// Elements.
    pub count: u64,
    /// Bytes that this rank contributes.
    pub input_bytes: u64,
    /// At most [`MAX_DIMS`] dimensions.
    pub shape: Vec<i64>,
    /// Call site; control characters are replaced.
    pub site: String,
    /// CLOCK_MONOTONIC, as all times: when the program posted it.
    pub posted_ns: u64,
    /// When all ranks had come and their keys were equal; of a message, when its other end was met. 0: not
    /// yet.
    pub matched_ns: u64,
    /// When the first byte of a result moved; 0: not yet.
    pub first_byte_ns: u64,
    /// When it ended, well or not; 0: not yet.
    pub done_ns: u64,
}

impl OpView {
    /// A send or receive.
    #[inline]
    pub fn is_message(&self) -> bool {
        is_message(self.collective)
    }
}

/// A record to be completed later.
#[derive(Clone, Copy, Debug)]
pub struct Recording {
    number: u64,
}

impl BoardLane {
    /// Begins the record of an operation that the program has just posted.
    pub fn posted(&self, op: &OpRecord<'_>) -> Recording {
        let now = now_ns();
        if !is_message(op.collective) {
            self.count_posted(op.seq.saturating_add(1));
            self.mark_first(Mark::FirstPosted, || now);
        }
        let number = self.next_record();
        let at = record_at(self.at, number);
        let board = &self.board;
        board.store(at, writing(number));
        // No word of the record may be seen before the odd generation is.
        std::sync::atomic::fence(Ordering::Release);
        let dims = op.shape.len().min(MAX_DIMS);
        let codes = [op.collective, op.dtype, op.reduce_op, dims as u8, 0, 0, 0, 0];
        board.store(at + SEQ, op.seq);
        board.store(at + CODES, u64::from_le_bytes(codes));
        board.store(at + STRATEGY, NO_STRATEGY);
        board.store(at + OUTCOME, PENDING);
        board.store(at + ROOT_TAG, pack(op.root as u32, op.tag as u32));
        board.store(at + COUNT, op.count);
        board.store(at + INPUT_BYTES, op.input_bytes);
        for (index, dim) in op.shape.iter().take(MAX_DIMS).enumerate() {
            board.store(at + DIMS + index, *dim as u64);
        }
        board.store(at + POSTED_NS, now);
        for word in [MATCHED_NS, FIRST_BYTE_NS, DONE_NS] {
            board.store(at + word, 0);
        }
        board.write_text(at + SITE, SITE_BYTES, tail(op.site, SITE_BYTES).as_bytes());
        board.word(at).store(written(number), Ordering::Release);
        Recording { number }
    }

    /// All ranks have come with equal keys: bytes move from now on.
    pub fn agreed(&self, recording: Recording, strategy: Option<Strategy>) {
        let Some(at) = self.still(recording) else { return };
        // Reading the clock is much of what a record costs.
        let now = now_ns();
        self.board.store(at + MATCHED_NS, now);
        self.board.store(at + FIRST_BYTE_NS, now);
        if let Some(strategy) = strategy {
            self.board.store(at + STRATEGY, strategy as u64);
        }
    }

    /// A message has met its other end.
    #[inline]
    pub fn matched(&self, recording: Recording) {
        if let Some(at) = self.still(recording) {
            self.board.store(at + MATCHED_NS, now_ns());
        }
    }

    /// The first byte of a message moves now; only the first call counts.
    #[inline]
    pub fn first_byte(&self, recording: Recording) {
        if let Some(at) = self.still(recording)
            && self.board.load(at + FIRST_BYTE_NS) == 0
        {
            self.board.store(at + FIRST_BYTE_NS, now_ns());
        }
    }

    /// The operation has ended.
    #[inline]
    pub fn ended(&self, recording: Recording, outcome: Outcome) {
        let Some(at) = self.still(recording) else { return };
        self.board.store(at + OUTCOME, code_of(outcome));
        self.board.store(at + DONE_NS, now_ns());
    }

    /// Where the record lies, unless a later one has taken its place.
    fn still(&self, recording: Recording) -> Option<usize> {
        let at = record_at(self.at, recording.number);
        (self.board.load(at) == written(recording.number)).then_some(at)
    }
}

impl Board {
    /// Records of the lane at `lane`, oldest first; torn ones are left out.
    #[inline]
    pub(super) fn read_records(&self, lane: usize) -> Vec<OpView> {
        // Reading a page that was never written would take memory for it.
        let written = self.written_records(lane).min(RECORDS as u64);
        let mut records: Vec<OpView> =
            (0..written).filter_map(|index| self.read_record(record_at(lane, index))).collect();
        records.sort_by_key(|record| record.number);
        records
    }

    /// The record with this running number, if it is still there.
    #[inline]
    pub(super) fn read_numbered(&self, lane: usize, number: u64) -> Option<OpView> {
        self.read_record(record_at(lane, number)).filter(|record| record.number == number)
    }

    fn read_record(&self, at: usize) -> Option<OpView> {
        self.read_whole(at, |generation| self.copy_record(at, generation))
    }

    /// Reads the record at `at` with `copy`, which is given its generation; `None` where nothing lies there, or
    /// where it changes all the time.
    pub(super) fn read_whole<T>(&self, at: usize, copy: impl Fn(u64) -> T) -> Option<T> {
        for _ in 0..READ_ATTEMPTS {
            let before = self.word(at).load(Ordering::Acquire);
            if before == 0 {
                return None;
            }
            let view = copy(before);
            // Pairs with the release store of a writer: a reader that sees a later word sees a later generation.
            std::sync::atomic::fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.load(at) == before {
                return Some(view);
            }
            std::hint::spin_loop();
        }
        None
    }

    fn copy_record(&self, at: usize, generation: u64) -> OpView {
        let load = |word: usize| self.load(at + word);
        let codes = load(CODES).to_le_bytes();
        let (root, tag) = unpack(load(ROOT_TAG));
        let dims = usize::from(codes[3]).min(MAX_DIMS);
        OpView {
            number: number_of(generation),
            seq: load(SEQ),
            collective: codes[0],
            dtype: codes[1],
            reduce_op: codes[2],
            strategy: load(STRATEGY).min(NO_STRATEGY) as u8,
            outcome: outcome_of(load(OUTCOME)),
            root: root as i32,
            tag: tag as i32,
            count: load(COUNT),
            input_bytes: load(INPUT_BYTES),
            shape: (0..dims).map(|dim| load(DIMS + dim) as i64).collect(),
            site: self.read_text(at + SITE, SITE_BYTES),
            posted_ns: load(POSTED_NS),
            matched_ns: load(MATCHED_NS),
            first_byte_ns: load(FIRST_BYTE_NS),
            done_ns: load(DONE_NS),
        }
    }
}

fn is_message(collective: u8) -> bool {
    MESSAGES.contains(&collective)
}

fn record_at(lane: usize, number: u64) -> usize {
    lane + super::lane::HEAD_WORDS + (number % RECORDS as u64) as usize * WORDS
}

// A generation says which record lies there; 0 is none, odd is being written.
pub(super) fn writing(number: u64) -> u64 {
    number.wrapping_mul(2).wrapping_add(1)
}

pub(super) fn written(number: u64) -> u64 {
    number.wrapping_mul(2).wrapping_add(2)
}

pub(super) fn number_of(generation: u64) -> u64 {
    (generation / 2).saturating_sub(1)
}

pub(super) fn code_of(outcome: Outcome) -> u64 {
    match outcome {
        Outcome::Pending => PENDING,
        Outcome::Done => DONE,
        Outcome::Failed => FAILED,
    }
}

pub(super) fn outcome_of(code: u64) -> Outcome {
    match code {
        PENDING => Outcome::Pending,
        DONE => Outcome::Done,
        _ => Outcome::Failed,
    }
}

/// `TPURUN_SEND` and `TPURUN_RECV`.
const MESSAGES: [u8; 2] = [9, 10];
const READ_ATTEMPTS: usize = 64;
const NO_STRATEGY: u64 = 255;
pub(super) const PENDING: u64 = 0;
const DONE: u64 = 1;
const FAILED: u64 = 2;

pub(super) const WORDS: usize = 32;
const SEQ: usize = 1;
const CODES: usize = 2;
const STRATEGY: usize = 3;
const OUTCOME: usize = 4;
const ROOT_TAG: usize = 5;
const COUNT: usize = 6;
const INPUT_BYTES: usize = 7;
const POSTED_NS: usize = 8;
const MATCHED_NS: usize = 9;
const FIRST_BYTE_NS: usize = 10;
const DONE_NS: usize = 11;
const DIMS: usize = 12;
const SITE: usize = DIMS + MAX_DIMS;
const _: () = assert!(SITE + SITE_BYTES / 8 <= WORDS);
