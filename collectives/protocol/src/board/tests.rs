use std::os::unix::fs::FileExt;

use super::*;
use crate::strategy::Strategy;
use rustix::fs::{MemfdFlags, SealFlags};

fn op<'a>(seq: u64, site: &'a str, shape: &'a [i64]) -> OpRecord<'a> {
    OpRecord {
        seq,
        collective: 0,
        dtype: 11,
        reduce_op: 0,
        root: -1,
        tag: 7,
        count: 1024,
        input_bytes: 4096,
        shape,
        site,
    }
}

#[test]
fn a_second_mapping_reads_what_the_rank_wrote() {
    let (board, fd) = Board::create(4).unwrap();
    let reader = Board::open(&fd).unwrap();
    let lane = board.rank(2).claim_lane(99, "dp0", 3, 1).unwrap();
    lane.posted(&op(11, "train.py:28", &[2, -1]));
    lane.completed(10);
    lane.blocked();
    let view = reader.read(2);
    assert_eq!(view.pid, std::process::id());
    let [seen] = &view.lanes[..] else { panic!("{view:?}") };
    assert_eq!((seen.comm_id, seen.name.as_str(), seen.size, seen.comm_rank), (99, "dp0", 3, 1));
    assert_eq!((seen.posted, seen.completed, seen.in_flight()), (12, 11, Some(11)));
    assert!(seen.blocked_since_ns.is_some_and(|ns| ns <= now_ns()));
    let read = seen.op.as_ref().unwrap();
    assert_eq!((read.seq, read.root, read.tag, read.count, read.input_bytes), (11, -1, 7, 1024, 4096));
    assert_eq!((read.shape.as_slice(), read.site.as_str()), (&[2, -1][..], "train.py:28"));
    lane.unblocked();
    lane.completed(11);
    lane.close();
    let seen = reader.read(2).lanes.remove(0);
    assert_eq!((seen.completed, seen.blocked_since_ns, seen.closed), (12, None, true));
    assert_eq!(reader.read(3), RankView::default());
    assert_eq!(reader.read(4), RankView::default());
}

#[test]
fn the_operation_shown_is_the_one_in_flight() {
    let (board, _fd) = Board::create(1).unwrap();
    let lane = board.rank(0).claim_lane(1, "g", 1, 0).unwrap();
    for seq in 0..10 {
        lane.posted(&op(seq, "", &[]));
        lane.posted(&OpRecord { collective: 9, ..op(seq, "", &[]) });
    }
    lane.completed(3);
    let seen = board.read(0).lanes.remove(0);
    assert_eq!((seen.posted, seen.in_flight()), (10, Some(4)), "sends are not counted");
    let shown = seen.op.unwrap();
    assert_eq!((shown.seq, shown.is_message()), (4, false));
    lane.completed(9);
    assert!(board.read(0).lanes[0].op.as_ref().unwrap().is_message(), "else the last one posted");
}

#[test]
fn a_record_grows_until_it_is_overwritten() {
    let (board, _fd) = Board::create(1).unwrap();
    let lane = board.rank(0).claim_lane(1, "g", 1, 0).unwrap();
    let recordings: Vec<Recording> = (0..=RECORDS as u64).map(|seq| lane.posted(&op(seq, "", &[]))).collect();
    for recording in &recordings {
        lane.agreed(*recording, Some(Strategy::Pipeline));
    }
    lane.ended(recordings[0], Outcome::Failed);
    lane.ended(recordings[5], Outcome::Done);
    let (_, records) = board.records(0).remove(0);
    let numbers: Vec<u64> = records.iter().map(|record| record.number).collect();
    assert_eq!(numbers, (1..=RECORDS as u64).collect::<Vec<_>>());
    let last = records.last().unwrap();
    assert_eq!(
        (last.seq, last.outcome, last.strategy),
        (RECORDS as u64, Outcome::Pending, Strategy::Pipeline as u8)
    );
    let done = &records[4];
    assert_eq!((done.number, done.outcome), (5, Outcome::Done));
    let times = [done.posted_ns, done.matched_ns, done.first_byte_ns, done.done_ns];
    assert!(times.is_sorted() && times[0] > 0, "{times:?}");
}

#[test]
fn a_run_of_a_program_is_kept_until_it_is_overwritten() {
    let (board, fd) = Board::create(2).unwrap();
    let reader = Board::open(&fd).unwrap();
    let writer = board.rank(1);
    let begin = |program| writer.run_begun(&ProgramRun { program, operations: 6, line: "train.py:5" });
    assert_eq!((reader.runs(1), reader.runs(2)), (vec![], vec![]));
    let runs: Vec<u64> = (0..=RUNS as u64).map(begin).collect();
    writer.run_ended(runs[0], Outcome::Failed);
    writer.run_ended(runs[5], Outcome::Done);
    writer.run_ended(runs[6], Outcome::Failed);
    let seen = reader.runs(1);
    assert_eq!(seen.iter().map(|run| run.number).collect::<Vec<_>>(), runs[1..]);
    let outcomes: Vec<Outcome> = seen.iter().map(|run| run.outcome).collect();
    assert_eq!(outcomes[3..7], [Outcome::Pending, Outcome::Done, Outcome::Failed, Outcome::Pending]);
    assert!(outcomes.iter().filter(|outcome| **outcome != Outcome::Pending).count() == 2);
    let done = &seen[4];
    assert_eq!((done.program, done.operations, done.line.as_str()), (5, 6, "train.py:5"));
    assert!(0 < done.begun_ns && done.begun_ns <= done.done_ns && seen[0].done_ns == 0);
    writer.run_begun(&ProgramRun { program: 9, operations: 1, line: &format!("{}.py:5", "ü".repeat(60)) });
    let last = reader.runs(1).pop().unwrap();
    assert!(last.line.ends_with("ü.py:5") && last.line.len() <= LINE_BYTES, "{}", last.line);
    assert_eq!(reader.runs(0), []);
}

#[test]
fn a_reader_never_sees_half_of_a_run() {
    let (board, _fd) = Board::create(1).unwrap();
    let writer = board.rank(0);
    let write = |start: u64| {
        for program in (start..20_000).step_by(2) {
            let line = format!("{program:040}");
            let run = writer.run_begun(&ProgramRun { program, operations: program, line: &line });
            writer.run_ended(run, Outcome::Done);
        }
    };
    std::thread::scope(|scope| {
        let writers = [0, 1].map(|start| scope.spawn(move || write(start)));
        while writers.iter().any(|writer| !writer.is_finished()) {
            for run in board.runs(0) {
                assert_eq!((run.operations, run.line), (run.program, format!("{:040}", run.program)));
            }
        }
    });
    assert_eq!(board.runs(0).len(), RUNS);
}

#[test]
fn only_the_first_of_each_step_is_marked() {
    let (board, fd) = Board::create(2).unwrap();
    let marks = [Mark::ScriptEntered, Mark::GroupCreated, Mark::FirstPosted, Mark::FirstDone];
    let seen = || marks.map(|mark| board.mark(1, mark));
    let lane = board.rank(1).claim_lane(1, "g", 1, 0).unwrap();
    lane.ended(lane.posted(&OpRecord { collective: 9, ..op(0, "", &[]) }), Outcome::Done);
    assert_eq!(seen(), [None; 4], "a message is no collective");
    lane.posted(&op(0, "", &[]));
    let [None, None, Some(posted), None] = seen() else { panic!("{:?}", seen()) };
    lane.completed(0);
    let [None, None, Some(_), Some(done)] = seen() else { panic!("{:?}", seen()) };
    assert!(board.records(1)[0].1[1].posted_ns == posted && posted <= done);
    // Another communicator is not the first any more.
    let other = board.rank(1).claim_lane(2, "h", 1, 0).unwrap();
    other.posted(&op(0, "", &[]));
    other.completed(0);
    let file = std::fs::File::from(fd);
    for (index, mark) in marks[..2].iter().enumerate() {
        let word = (index as u64 + 7).to_ne_bytes();
        file.write_all_at(&word, board.offset_of_mark(1, *mark) as u64).unwrap();
    }
    assert_eq!(seen(), [Some(7), Some(8), Some(posted), Some(done)]);
    assert!(marks.iter().all(|mark| board.mark(0, *mark).is_none() && board.mark(2, *mark).is_none()));
}

#[test]
fn a_wait_has_a_token_of_its_own() {
    let (board, _fd) = Board::create(2).unwrap();
    let rank = board.rank(1);
    let wait = |kind| Wait { comm_id: 9, kind, python_threads: 3 };
    let kinds = [
        WaitKind::Collective { seq: 7 },
        WaitKind::Send { to: 2 },
        WaitKind::Recv { from: Some(0) },
        WaitKind::Recv { from: None },
        WaitKind::Creation,
    ];
    let entries: Vec<WaitEntry> = kinds.iter().map(|kind| rank.waiting(wait(*kind))).collect();
    let seen = board.read(1).waits;
    assert_eq!(seen.iter().map(|view| view.wait).collect::<Vec<_>>(), kinds.map(wait));
    drop(entries);
    assert!(board.read(1).waits.is_empty());
    let _again = rank.waiting(wait(WaitKind::Creation));
    let again = board.read(1).waits[0];
    assert!(seen.iter().all(|view| view.token != again.token));
    let _more: Vec<WaitEntry> = (0..20).map(|_| rank.waiting(wait(WaitKind::Creation))).collect();
    assert_eq!(board.read(1).waits.len(), wait::WAITS, "more are not shown");
}

#[test]
fn long_texts_keep_the_telling_end_and_whole_characters() {
    let (board, _fd) = Board::create(1).unwrap();
    let lane = board.rank(0).claim_lane(1, &"é".repeat(40), 1, 0).unwrap();
    lane.posted(&op(1, &format!("{}/train.py:28", "ü".repeat(100)), &[1; 9]));
    lane.completed(0);
    let seen = board.read(0).lanes.remove(0);
    assert_eq!(seen.name, "é".repeat(16));
    let read = seen.op.unwrap();
    assert!(read.site.ends_with("ü/train.py:28") && read.site.len() <= SITE_BYTES, "{}", read.site);
    assert_eq!(read.shape, [1; MAX_DIMS]);
    lane.posted(&op(2, "a.py:1", &[]));
    lane.completed(1);
    assert_eq!(board.read(0).lanes[0].op.as_ref().unwrap().site, "a.py:1");
}

#[test]
fn lanes_run_out_and_closed_ones_come_back() {
    let (board, _fd) = Board::create(1).unwrap();
    let rank = board.rank(0);
    let mut lanes: Vec<BoardLane> =
        (0..LANES as u64).map(|id| rank.claim_lane(id, "g", 1, 0).unwrap()).collect();
    assert!(rank.claim_lane(100, "g", 1, 0).is_none());
    lanes[5].posted(&op(0, "old.py:1", &[]));
    let closed = lanes.remove(5);
    closed.close();
    let again = rank.claim_lane(101, "g", 1, 0).unwrap();
    assert!(rank.claim_lane(102, "g", 1, 0).is_none());
    // The first owner is dropped late, and does not close what is the second one's by now.
    drop(closed);
    let seen = &board.read(0).lanes[5];
    assert_eq!((seen.comm_id, seen.closed, &seen.op), (101, false, &None));
    assert!(board.records(0)[5].1.is_empty());
    drop(again);
    assert!(board.read(0).lanes[5].closed);
}

#[test]
fn a_reader_never_sees_half_of_a_record() {
    let (board, _fd) = Board::create(1).unwrap();
    let lane = board.rank(0).claim_lane(1, "g", 1, 0).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for seq in 0..20_000 {
                let dim = seq as i64;
                lane.posted(&op(seq, &format!("{seq:040}"), &[dim, dim, dim]));
            }
        });
        while !writer.is_finished() {
            for read in board.records(0).remove(0).1 {
                assert_eq!(read.site, format!("{:040}", read.seq));
                assert_eq!(read.shape, [read.seq as i64; 3]);
            }
        }
    });
}

#[test]
fn threads_of_a_rank_record_side_by_side() {
    let (board, _fd) = Board::create(1).unwrap();
    let lane = &board.rank(0).claim_lane(1, "g", 1, 0).unwrap();
    let write = |start: u64| {
        for seq in (start..20_000).step_by(2) {
            let recording = lane.posted(&op(seq, &format!("{seq:040}"), &[seq as i64]));
            lane.ended(recording, Outcome::Done);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(move || write(0));
        scope.spawn(move || write(1));
    });
    let (seen, records) = board.records(0).remove(0);
    assert_eq!((seen.posted, records.len()), (20_000, RECORDS));
    for read in records {
        assert_eq!((read.site, read.shape), (format!("{:040}", read.seq), vec![read.seq as i64]));
        assert_eq!(read.outcome, Outcome::Done);
    }
}

#[test]
fn hostile_bytes_are_clamped() {
    let (board, _fd) = Board::create(2).unwrap();
    for seed in 1..40_u64 {
        let mut random = seed;
        for index in HEADER_WORDS..words(2) {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            board.store(index, random >> (random % 64));
        }
        board.store(slot_at(1) + SLOT_CLAIMED, u64::MAX - seed);
        for lane in board.read(1).lanes {
            assert!(lane.comm_rank < lane.size);
            assert!(!lane.name.chars().any(char::is_control));
        }
        for (_, records) in board.records(1) {
            assert!(records.len() <= RECORDS && records.iter().all(|op| op.shape.len() <= MAX_DIMS));
        }
        let runs = board.runs(1);
        assert!(runs.len() <= RUNS && runs.iter().all(|run| !run.line.chars().any(char::is_control)));
        assert!(board.read(1).waits.len() <= wait::WAITS);
    }
}

#[test]
fn what_is_no_board_is_refused() {
    let plain = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&plain, 4096).unwrap();
    assert!(Board::open(&plain).unwrap_err().to_string().contains("not sealed"));
    rustix::fs::fcntl_add_seals(&plain, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
    assert!(Board::open(&plain).unwrap_err().to_string().contains("another layout"));
    let (board, fd) = Board::create(2).unwrap();
    board.store(HEADER_WORLD, 3);
    assert!(Board::open(&fd).unwrap_err().to_string().contains("does not fit"));
    assert!(Board::create(0).unwrap_err().to_string().contains("given 0"));
    assert!(Board::open(std::fs::File::open("/dev/null").unwrap()).is_err());
}
