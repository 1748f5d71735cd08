//! The flight recorder's document: what every rank of a job had posted, at one moment.
//!
//! `capture.rs` makes it from the board, `run_dir` keeps it as `flight/flight.json`, and `status`, `trace` and
//! the report are made from it. The keys are described in docs/flight-recorder.md; they are only added to.
//! All times are CLOCK_MONOTONIC in nanoseconds unless they say `unix`.

pub(crate) mod capture;
pub(crate) mod dump;
pub(crate) mod elsewhere;
pub(crate) mod live;
pub(crate) mod notice;
pub(crate) mod perfetto;
pub(crate) mod processes;
#[cfg(test)]
pub(crate) mod samples;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Flight {
    /// [`FORMAT`]; a reader refuses what is newer.
    pub(crate) format: u32,
    pub(crate) job: JobFacts,
    /// Why it was taken: `asked`, `failed`, `stopped`.
    pub(crate) reason: Cow<'static, str>,
    pub(crate) taken_ns: u64,
    /// The same moment since 1970.
    pub(crate) taken_unix_ns: u64,
    pub(crate) communicators: Vec<Communicator>,
    /// One for each rank of the job, in order.
    pub(crate) ranks: Vec<RankFlight>,
}

/// The facts that do not change while a job runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JobFacts {
    /// The name of the run directory.
    pub(crate) run: String,
    pub(crate) host: String,
    pub(crate) agent_pid: i32,
    pub(crate) ranks: u32,
    /// As it could be typed.
    pub(crate) command: Vec<String>,
    pub(crate) started_unix_ms: u64,
}

/// A group of ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Communicator {
    /// Hexadecimal: JSON numbers have 53 bits.
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) size: u32,
    /// By rank of the communicator the rank of the world; null for one that has not joined.
    pub(crate) members: Vec<Option<u32>>,
}

/// One rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RankFlight {
    pub(crate) rank: u32,
    pub(crate) pid: Option<i32>,
    /// The role of the rank in a job of several programs.
    pub(crate) program: Option<String>,
    pub(crate) state: RankState,
    /// `exit 0`, `exit 3`, `signal 9`; null while it runs.
    pub(crate) ending: Option<String>,
    /// User and system time of the process so far.
    pub(crate) cpu_ms: Option<u64>,
    /// The share of one core, since the sample before this one; null in a dump.
    pub(crate) cpu_percent: Option<f64>,
    pub(crate) rss_bytes: Option<u64>,
    /// State of the process as in `ps`.
    pub(crate) process: Option<char>,
    /// It has begun to create a communicator.
    pub(crate) has_joined: bool,
    /// Threads of it that wait in an operation.
    pub(crate) waits: Vec<WaitFlight>,
    /// One for each communicator that the rank has joined.
    pub(crate) lanes: Vec<LaneFlight>,
    /// The last runs of its compiled programs, oldest first. Earlier documents have none.
    #[serde(default)]
    pub(crate) runs: Vec<RunFlight>,
}

/// The state of a rank, as far as the board and the kernel tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RankState {
    /// No process yet.
    #[default]
    Starting,
    /// In its own code.
    Running,
    /// A thread of it waits in an operation.
    Waiting,
    /// Stopped by SIGSTOP or a terminal.
    Stopped,
    Ended,
}

/// A thread that waits in the engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WaitFlight {
    /// Index into `communicators`; null for one that the rank has no lane of.
    pub(crate) communicator: Option<usize>,
    /// The operation that is waited for: `collective #11`, `recv from rank 2`, ..
    pub(crate) text: String,
    /// The number of the collective.
    pub(crate) seq: Option<u64>,
    pub(crate) since_ns: u64,
}

/// The operation that a rank does now, or did last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Doing<'a> {
    pub(crate) lane: Option<&'a LaneFlight>,
    pub(crate) record: Option<&'a Record>,
    /// The thing that is waited for, where there is no record.
    pub(crate) wait: Option<&'a WaitFlight>,
}

/// One communicator of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LaneFlight {
    /// Index into `communicators`.
    pub(crate) communicator: usize,
    /// This rank's rank in it.
    pub(crate) comm_rank: u32,
    /// The rank has destroyed it.
    pub(crate) closed: bool,
    /// Collectives posted and completed so far.
    pub(crate) posted: u64,
    pub(crate) completed: u64,
    pub(crate) blocked_since_ns: Option<u64>,
    /// The last ones, oldest first.
    pub(crate) records: Vec<Record>,
}

/// One operation of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Running number of the operations, collectives and messages, of its lane.
    pub(crate) number: u64,
    /// Number of the collective in its communicator, or of the message.
    pub(crate) seq: u64,
    /// `all_reduce`, `send`, ..
    pub(crate) operation: Cow<'static, str>,
    /// As messages write it: `all_reduce#11 (f32[1024], SUM)`.
    pub(crate) text: String,
    pub(crate) is_message: bool,
    pub(crate) dtype: Cow<'static, str>,
    pub(crate) reduce_op: Option<Cow<'static, str>>,
    /// Root, or the peer of a message; a rank of the communicator.
    pub(crate) root: Option<u32>,
    pub(crate) tag: i32,
    pub(crate) count: u64,
    pub(crate) shape: Vec<i64>,
    pub(crate) input_bytes: u64,
    pub(crate) strategy: Option<Cow<'static, str>>,
    /// Where the program called, as `train.py:28`.
    pub(crate) site: String,
    pub(crate) posted_ns: u64,
    /// All ranks had posted the same.
    pub(crate) matched_ns: Option<u64>,
    pub(crate) first_byte_ns: Option<u64>,
    pub(crate) done_ns: Option<u64>,
    pub(crate) outcome: Outcome,
}

/// One run of a compiled program of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RunFlight {
    /// Running number of the runs of its rank, whatever the program.
    pub(crate) number: u64,
    /// The fingerprint of the program, in hexadecimal, as `explain` prints it.
    pub(crate) program: String,
    /// The first line of the user's program in it, as `train.py:28`.
    pub(crate) line: String,
    /// Operations of the program.
    pub(crate) operations: u64,
    pub(crate) begun_ns: u64,
    pub(crate) done_ns: Option<u64>,
    pub(crate) outcome: Outcome,
}

/// The outcome of an operation, or of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    #[default]
    Pending,
    Done,
    Failed,
}

impl Flight {
    /// Reads a document and checks what others rely on.
    ///
    /// # Errors
    /// One line: it is no flight recorder document, or one of a newer tpurun.
    pub(crate) fn parse(text: &[u8]) -> Result<Flight, String> {
        let flight: Flight =
            serde_json::from_slice(text).map_err(|error| format!("not a flight recorder dump: {error}"))?;
        if flight.format != FORMAT {
            return Err(format!("expected a dump of format {FORMAT}, given {}", flight.format));
        }
        let lanes = flight.ranks.iter().flat_map(|rank| rank.lanes.iter().map(|lane| lane.communicator));
        let waits =
            flight.ranks.iter().flat_map(|rank| rank.waits.iter().filter_map(|wait| wait.communicator));
        match lanes.chain(waits).all(|index| index < flight.communicators.len()) {
            true => Ok(flight),
            false => Err("not a flight recorder dump: it names a communicator that it does not have".into()),
        }
    }

    pub(crate) fn communicator(&self, lane: &LaneFlight) -> &Communicator {
        &self.communicators[lane.communicator]
    }

    /// Adds what `earlier` did not know: the CPU that each rank has used since.
    pub(crate) fn measure_since(&mut self, earlier: &Flight) {
        let elapsed_ns = self.taken_ns.saturating_sub(earlier.taken_ns);
        let before: BTreeMap<(u32, Option<i32>), Option<u64>> =
            earlier.ranks.iter().map(|rank| ((rank.rank, rank.pid), rank.cpu_ms)).collect();
        for rank in &mut self.ranks {
            let earlier_ms = before.get(&(rank.rank, rank.pid)).copied().flatten();
            rank.cpu_percent = earlier_ms.zip(rank.cpu_ms).filter(|_| elapsed_ns > 0).map(|(then, now)| {
                let used_ns = now.saturating_sub(then) as f64 * 1e6;
                used_ns / elapsed_ns as f64 * 100.0
            });
        }
    }
}

impl RankFlight {
    /// The record that says most: the longest wait, else the oldest operation in flight, else the last one.
    pub(crate) fn doing(&self) -> Option<Doing<'_>> {
        self.waited_for().or_else(|| self.in_flight()).or_else(|| self.last())
    }

    fn waited_for(&self) -> Option<Doing<'_>> {
        let wait = self.waits.iter().min_by_key(|wait| wait.since_ns)?;
        let is_its = |lane: &&LaneFlight| Some(lane.communicator) == wait.communicator && !lane.closed;
        let lane = self.lanes.iter().find(is_its);
        let is_its = |record: &&Record| match wait.seq {
            Some(seq) => !record.is_message && record.seq == seq,
            None => record.is_message && record.outcome == Outcome::Pending,
        };
        let record = lane.and_then(|lane| lane.records.iter().find(is_its));
        Some(Doing { lane, record, wait: Some(wait) })
    }

    fn in_flight(&self) -> Option<Doing<'_>> {
        let open = self.lanes.iter().filter(|lane| !lane.closed);
        let pending = open.filter_map(|lane| Some((lane, lane.oldest_pending()?)));
        let (lane, record) = pending.min_by_key(|(_, record)| record.posted_ns)?;
        Some(Doing { lane: Some(lane), record: Some(record), wait: None })
    }

    fn last(&self) -> Option<Doing<'_>> {
        let last = self.lanes.iter().filter_map(|lane| Some((lane, lane.records.last()?)));
        let (lane, record) = last.max_by_key(|(_, record)| record.done_ns.unwrap_or(record.posted_ns))?;
        Some(Doing { lane: Some(lane), record: Some(record), wait: None })
    }

    /// Operations per second over the last [`RATE_WINDOW_NS`], or over as much of them as is recorded; when none
    /// has ended for a second, at most one in the time since.
    pub(crate) fn ops_per_second(&self, now_ns: u64) -> f64 {
        let rate: f64 = self.lanes.iter().map(|lane| lane.ops_per_second(now_ns)).sum();
        let records = self.lanes.iter().flat_map(|lane| &lane.records);
        let last = records.filter_map(|record| record.done_ns).max().unwrap_or(0);
        // A rank that was fast and hangs is not fast.
        match now_ns.saturating_sub(last) {
            idle_ns if idle_ns > IDLE_NS => rate.min(1e9 / idle_ns as f64),
            _ => rate,
        }
    }
}

impl Doing<'_> {
    /// Index into `communicators`.
    pub(crate) fn communicator(&self) -> Option<usize> {
        self.lane.map(|lane| lane.communicator).or_else(|| self.wait?.communicator)
    }

    /// When the wait began, when the operation ended or, pending, when it was posted.
    pub(crate) fn since_ns(&self) -> Option<u64> {
        let record = self.record.map(|record| record.done_ns.unwrap_or(record.posted_ns));
        self.wait.map(|wait| wait.since_ns).or(record)
    }
}

impl LaneFlight {
    fn oldest_pending(&self) -> Option<&Record> {
        self.records.iter().find(|record| record.outcome == Outcome::Pending)
    }

    fn ops_per_second(&self, now_ns: u64) -> f64 {
        let from = now_ns.saturating_sub(RATE_WINDOW_NS);
        let done = self.records.iter().filter_map(|record| record.done_ns);
        let recent: Vec<u64> = done.filter(|at| (from..=now_ns).contains(at)).collect();
        // A ring that has wrapped tells of a shorter time only.
        let wrapped = self.records.first().filter(|record| record.number > 0).map(|record| record.posted_ns);
        let span_ns = now_ns.saturating_sub(wrapped.unwrap_or(from).max(from));
        if recent.is_empty() || span_ns == 0 { 0.0 } else { recent.len() as f64 * 1e9 / span_ns as f64 }
    }
}

/// Counted up when a key changes its meaning.
pub(crate) const FORMAT: u32 = 1;
const RATE_WINDOW_NS: u64 = 10_000_000_000;
const IDLE_NS: u64 = 1_000_000_000;
