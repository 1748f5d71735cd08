//! The last runs of compiled programs in a rank: what it computed between its collectives, and around them.
//!
//! Runs lie in one ring for each rank, whatever the program, and are written as records of operations are
//! (`record.rs`).

use super::{Board, Outcome, RUN_RING_WORDS, RUN_WORDS, RUNS, RankWriter, now_ns, record, run_ring_at};
use tpurun_memory::sync::Ordering;
use tpurun_memory::text::tail;

/// Bytes kept of the line that a program comes from.
pub const LINE_BYTES: usize = 80;

/// A run of a program that begins now.
#[derive(Clone, Copy, Debug)]
pub struct ProgramRun<'a> {
    /// The fingerprint of the program.
    pub program: u64,
    /// Operations of the program.
    pub operations: u64,
    /// The first line of the user's program that is in it, as `train.py:28`. The end is kept when it is too
    /// long.
    pub line: &'a str,
}

/// A run as read from the board.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunView {
    /// Running number among all runs of this rank, from 0.
    pub number: u64,
    /// The fingerprint of the program.
    pub program: u64,
    /// Operations of the program.
    pub operations: u64,
    /// A line of the user's program; control characters are replaced.
    pub line: String,
    /// CLOCK_MONOTONIC.
    pub begun_ns: u64,
    /// When it ended, well or not; 0: not yet.
    pub done_ns: u64,
    /// How it ended.
    pub outcome: Outcome,
}

impl RankWriter {
    /// Begins the record of a run; the number is for [`RankWriter::run_ended`].
    pub fn run_begun(&self, run: &ProgramRun<'_>) -> u64 {
        let (board, ring) = (&self.board, run_ring_at(self.rank));
        let number = board.word(ring + NEXT_RUN).fetch_add(1, Ordering::Relaxed);
        let at = run_at(ring, number);
        board.store(at, record::writing(number));
        // No word of the record may be seen before the odd generation is.
        std::sync::atomic::fence(Ordering::Release);
        board.store(at + PROGRAM, run.program);
        board.store(at + OPERATIONS, run.operations);
        board.store(at + OUTCOME, record::PENDING);
        board.store(at + BEGUN_NS, now_ns());
        board.store(at + DONE_NS, 0);
        board.write_text(at + LINE, LINE_BYTES, tail(run.line, LINE_BYTES).as_bytes());
        board.word(at).store(record::written(number), Ordering::Release);
        number
    }

    /// The run has ended. Does nothing where a later one has taken its place.
    pub fn run_ended(&self, number: u64, outcome: Outcome) {
        let at = run_at(run_ring_at(self.rank), number);
        if self.board.load(at) == record::written(number) {
            self.board.store(at + OUTCOME, record::code_of(outcome));
            self.board.store(at + DONE_NS, now_ns());
        }
    }
}

impl Board {
    /// The last runs of programs in `rank`, oldest first; torn ones are left out.
    pub fn runs(&self, rank: u32) -> Vec<RunView> {
        if rank >= self.world {
            return Vec::new();
        }
        let ring = run_ring_at(rank);
        // Reading a page that was never written would take memory for it.
        let written = self.load(ring + NEXT_RUN).min(RUNS as u64);
        let read = |index: u64| {
            let at = run_at(ring, index);
            self.read_whole(at, |generation| self.copy_run(at, generation))
        };
        let mut runs: Vec<RunView> = (0..written).filter_map(read).collect();
        runs.sort_by_key(|run| run.number);
        runs
    }

    fn copy_run(&self, at: usize, generation: u64) -> RunView {
        RunView {
            number: record::number_of(generation),
            program: self.load(at + PROGRAM),
            operations: self.load(at + OPERATIONS),
            line: self.read_text(at + LINE, LINE_BYTES),
            begun_ns: self.load(at + BEGUN_NS),
            done_ns: self.load(at + DONE_NS),
            outcome: record::outcome_of(self.load(at + OUTCOME)),
        }
    }
}

fn run_at(ring: usize, number: u64) -> usize {
    ring + HEAD_WORDS + (number % RUNS as u64) as usize * RUN_WORDS
}

const NEXT_RUN: usize = 0;
const HEAD_WORDS: usize = RUN_RING_WORDS - RUNS * RUN_WORDS;

const PROGRAM: usize = 1;
const OPERATIONS: usize = 2;
const OUTCOME: usize = 3;
const BEGUN_NS: usize = 4;
const DONE_NS: usize = 5;
const LINE: usize = 6;
const _: () = assert!(LINE + LINE_BYTES / 8 <= RUN_WORDS);
