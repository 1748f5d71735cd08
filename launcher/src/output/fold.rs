//! Folds identical lines of different ranks into one.
//!
//! Open lines wait in the order in which they were first seen and leave in that order, so one rank's own
//! lines keep theirs as long as a rank never joins a line that was opened before its own latest one.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Stream;

/// How long a line waits for the same line of other ranks.
pub(super) const WINDOW: Duration = Duration::from_millis(50);

/// Open lines leave early when they hold more than this together.
const MAX_OPEN_BYTES: usize = 1024 * 1024;
const MAX_OPEN_LINES: usize = 4096;

/// One line and everybody who wrote it, in no particular order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Folded {
    pub(super) stream: Stream,
    pub(super) text: Arc<[u8]>,
    pub(super) ranks: Vec<u32>,
}

#[derive(Debug)]
pub(super) struct Folder {
    open: VecDeque<Open>,
    /// The number of `open[0]`; lines are numbered in the order in which they were opened.
    first_number: u64,
    open_bytes: usize,
    /// Numbers of the open lines with this text, ascending.
    by_text: HashMap<Key, VecDeque<u64>>,
    /// For each rank, one more than the number of the latest line that it is part of.
    next_allowed: Vec<u64>,
    /// How many ranks can still write.
    writers: usize,
}

impl Folder {
    pub(super) fn new(ranks: u32, writers: usize) -> Self {
        Self {
            open: VecDeque::new(),
            first_number: 0,
            open_bytes: 0,
            by_text: HashMap::new(),
            next_allowed: vec![0; ranks as usize],
            writers,
        }
    }

    /// Adds a line of one rank to the line that it repeats, or opens a new one.
    pub(super) fn push(&mut self, rank: u32, stream: Stream, text: &[u8], now: Instant) {
        let allowed = self.next_allowed[rank as usize];
        let key = Key { stream, text: Arc::from(text) };
        let same_text = self.by_text.entry(key.clone()).or_default();
        let place = same_text.partition_point(|&number| number < allowed);
        let number = match same_text.get(place) {
            Some(&number) => number,
            None => {
                let number = self.first_number + self.open.len() as u64;
                same_text.push_back(number);
                self.open_bytes += text.len();
                self.open.push_back(Open {
                    key,
                    ranks: Vec::new(),
                    missing: self.writers,
                    deadline: now + WINDOW,
                });
                number
            }
        };
        let index = usize::try_from(number - self.first_number).expect("open lines are counted in a usize");
        let open = &mut self.open[index];
        open.ranks.push(rank);
        open.missing = open.missing.saturating_sub(1);
        self.next_allowed[rank as usize] = number + 1;
    }

    /// A rank that ended can not join any line.
    pub(super) fn remove_writer(&mut self, rank: u32) {
        self.writers = self.writers.saturating_sub(1);
        for open in self.open.iter_mut().filter(|open| !open.ranks.contains(&rank)) {
            open.missing = open.missing.saturating_sub(1);
        }
    }

    /// When the next line has waited long enough.
    pub(super) fn poll_deadline(&self) -> Option<Instant> {
        self.open.front().map(|open| open.deadline)
    }

    /// The next line that need not wait any longer.
    pub(super) fn pop(&mut self, now: Instant) -> Option<Folded> {
        let front = self.open.front()?;
        let is_due = front.deadline <= now
            || front.missing == 0
            || self.open_bytes > MAX_OPEN_BYTES
            || self.open.len() > MAX_OPEN_LINES;
        if is_due { self.pop_front() } else { None }
    }

    /// The next line, due or not: somebody is about to write past it.
    pub(super) fn pop_front(&mut self) -> Option<Folded> {
        let Open { key, ranks, .. } = self.open.pop_front()?;
        self.first_number += 1;
        self.open_bytes -= key.text.len();
        let same_text = self.by_text.get_mut(&key).expect("every open line is in the map");
        same_text.pop_front();
        if same_text.is_empty() {
            self.by_text.remove(&key);
        }
        Some(Folded { stream: key.stream, text: key.text, ranks })
    }

    /// Whether a line of this rank is still waiting.
    pub(super) fn holds_line_of(&self, rank: u32) -> bool {
        self.next_allowed[rank as usize] > self.first_number
    }
}

#[derive(Debug)]
struct Open {
    key: Key,
    ranks: Vec<u32>,
    /// How many ranks could still join.
    missing: usize,
    deadline: Instant,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    stream: Stream,
    text: Arc<[u8]>,
}
