//! A job for tests: four ranks, of which rank 3 computes while the others wait for it; rank 1 has another
//! operation in flight on a second communicator, and ranks 0 and 2 have exchanged a message. Rank 3 runs compiled
//! programs.

use super::{
    Communicator, FORMAT, Flight, JobFacts, LaneFlight, Outcome, RankFlight, RankState, Record, RunFlight,
    WaitFlight,
};

/// The moment at which it was taken: 20 s after boot.
pub(crate) const NOW_NS: u64 = 20_000_000_000;

pub(crate) fn flight() -> Flight {
    Flight {
        format: FORMAT,
        job: JobFacts {
            run: "20261121-030415-7f3a".into(),
            host: "n0".into(),
            agent_pid: 90,
            ranks: 5,
            command: vec!["train.py".into()],
            started_unix_ms: 1_795_230_255_000,
        },
        reason: "failed".into(),
        taken_ns: NOW_NS,
        taken_unix_ns: 1_795_230_261_000_000_000,
        communicators: vec![
            communicator("dp0", vec![Some(0), Some(1), Some(2), Some(3), None]),
            communicator("tp", vec![Some(1), Some(3)]),
        ],
        ranks: vec![
            waiting(0, vec![dp(0, vec![first(0), message(0, "send", 2), second(0)])]),
            waiting(1, vec![dp(1, vec![first(1), second(1)]), tp()]),
            waiting(2, vec![dp(2, vec![first(2), message(2, "recv", 0), second(2)])]),
            RankFlight {
                state: RankState::Running,
                waits: vec![],
                runs: vec![run(0, 0xab, Some(10)), run(1, 0xcd, Some(20)), run(2, 0xab, None)],
                ..waiting(3, vec![dp(3, vec![first(3)])])
            },
            RankFlight { rank: 4, ..RankFlight::default() },
        ],
    }
}

fn communicator(name: &str, members: Vec<Option<u32>>) -> Communicator {
    let id = format!("{:016x}", members.len());
    Communicator { id, name: name.into(), size: members.len() as u32, members }
}

fn waiting(rank: u32, lanes: Vec<LaneFlight>) -> RankFlight {
    let wait = WaitFlight {
        communicator: Some(0),
        text: "collective #1".into(),
        seq: Some(1),
        since_ns: NOW_NS - 5_000_000_000,
    };
    RankFlight {
        rank,
        pid: Some(100 + rank as i32),
        state: RankState::Waiting,
        process: Some('S'),
        has_joined: true,
        cpu_ms: Some(1000),
        cpu_percent: Some(25.0 * f64::from(rank)),
        rss_bytes: Some((300 + u64::from(rank)) << 20),
        waits: vec![wait],
        lanes,
        ..RankFlight::default()
    }
}

fn dp(rank: u32, records: Vec<Record>) -> LaneFlight {
    let posted = records.iter().filter(|record| !record.is_message).count() as u64;
    let blocked_since_ns = (posted == 2).then_some(NOW_NS - 5_000_000_000);
    LaneFlight {
        communicator: 0,
        comm_rank: rank,
        closed: false,
        posted,
        completed: 1,
        blocked_since_ns,
        records,
    }
}

fn tp() -> LaneFlight {
    let record =
        Record { text: "broadcast#0 (f32[8], root 0)".into(), operation: "broadcast".into(), ..first(1) };
    let record = Record { outcome: Outcome::Failed, root: Some(0), reduce_op: None, ..record };
    LaneFlight {
        communicator: 1,
        comm_rank: 0,
        closed: false,
        posted: 1,
        completed: 0,
        blocked_since_ns: None,
        records: vec![record],
    }
}

fn run(number: u64, program: u64, took_ns: Option<u64>) -> RunFlight {
    let begun_ns = 14_000_000_000 + number * 1_000_000;
    RunFlight {
        number,
        program: format!("{program:016x}"),
        line: format!("train.py:{program}"),
        operations: 6,
        begun_ns,
        done_ns: took_ns.map(|took_ns| begun_ns + took_ns),
        outcome: if took_ns.is_some() { Outcome::Done } else { Outcome::Pending },
    }
}

/// Done by all.
fn first(rank: u32) -> Record {
    let posted_ns = 11_000_000_000 + u64::from(rank) * 1_000_000;
    Record {
        number: 0,
        seq: 0,
        operation: "all_reduce".into(),
        text: "all_reduce#0 (f32[8], SUM)".into(),
        dtype: "f32".into(),
        reduce_op: Some("SUM".into()),
        count: 8,
        shape: vec![8],
        input_bytes: 32,
        strategy: Some("windows".into()),
        site: "train.py:5".into(),
        posted_ns,
        matched_ns: Some(11_004_000_000),
        first_byte_ns: Some(11_004_000_001),
        done_ns: Some(11_005_000_000),
        outcome: Outcome::Done,
        ..Record::default()
    }
}

/// Missed by rank 3.
fn second(rank: u32) -> Record {
    Record {
        number: if rank == 1 { 1 } else { 2 },
        seq: 1,
        text: "all_reduce#1 (f32[8], SUM)".into(),
        site: "train.py:9".into(),
        strategy: None,
        posted_ns: NOW_NS - 5_000_000_000 + u64::from(rank),
        matched_ns: None,
        first_byte_ns: None,
        done_ns: None,
        outcome: Outcome::Pending,
        ..first(rank)
    }
}

fn message(rank: u32, operation: &'static str, peer: u32) -> Record {
    Record {
        number: 1,
        seq: 0,
        operation: operation.into(),
        text: format!("{operation} (f32[8], rank {peer}, tag 7)"),
        is_message: true,
        reduce_op: None,
        root: Some(peer),
        tag: 7,
        strategy: None,
        posted_ns: 12_000_000_000 + u64::from(rank),
        matched_ns: (operation == "recv").then_some(12_500_000_000),
        done_ns: Some(13_000_000_000),
        ..first(rank)
    }
}
