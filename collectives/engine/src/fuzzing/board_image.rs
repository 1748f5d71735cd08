//! A board whose bytes are anything, for those who read it and for ranks that go on writing to it.

use std::fs::File;

use super::{Input, Target};
use tpurun_memory::region::Region;
use tpurun_protocol::board::{Board, Mark, OpRecord, Outcome, ProgramRun, RUNS, Wait, WaitKind};
use tpurun_protocol::strategy::Strategy;

pub(super) const TARGET: Target = Target { name: "board_image", run, seeds };

/// The rank's header, its waits, and the counts and first records of its first communicator.
const NEAR: usize = 400;

fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    image(&mut input);
    let (board, fd) = Board::create(2).expect("the host has memory");
    let size = Region::size_of(&fd).expect("a memfd has a size");
    let memory = Region::open(&fd, size).expect("our own board");
    write_some(&board);
    while !input.is_empty() {
        let word =
            if input.below(4) == 0 { input.u32() as usize } else { input.number(NEAR as u64) as usize };
        memory.write(word % (size / 8) * 8, &input.number(200).to_le_bytes());
    }
    if let Ok(again) = Board::open(&fd) {
        read_all(&again);
        if again.world() > 0 {
            write_some(&again);
            read_all(&again);
        }
    }
    // A process that has the board open already does not look at the header again.
    read_all(&board);
    write_some(&board);
}

/// Any bytes, of any size.
fn image(input: &mut Input<'_>) {
    let size = input.number(4096) as usize % (1 << 22);
    let Ok((memory, fd)) = Region::create("fuzz", size) else { return };
    memory.write(0, input.take(size.min(64)));
    if let Ok(board) = Board::open(&fd) {
        read_all(&board);
    }
    assert!(Board::open(File::open("/dev/null").expect("every host has it")).is_err());
}

/// As a rank does, through two communicators and more operations than are kept.
fn write_some(board: &Board) {
    let writer = board.rank(0);
    for _ in 0..70 {
        let run = writer.run_begun(&ProgramRun { program: 7, operations: 3, line: "train.py:5" });
        writer.run_ended(run, Outcome::Done);
    }
    for comm in 0..2 {
        let Some(lane) = writer.claim_lane(comm, "dp0", 2, 0) else { continue };
        for seq in 0..70 {
            let op = OpRecord {
                seq,
                collective: 0,
                dtype: 1,
                reduce_op: 0,
                root: -1,
                tag: 0,
                count: 4,
                input_bytes: 16,
                shape: &[4],
                site: "train.py:28",
            };
            let recording = lane.posted(&op);
            let wait = Wait { comm_id: comm, kind: WaitKind::Collective { seq }, python_threads: 1 };
            let waiting = writer.waiting(wait);
            lane.blocked();
            lane.agreed(recording, Some(Strategy::Windows));
            lane.unblocked();
            drop(waiting);
            lane.ended(recording, Outcome::Done);
            lane.completed(seq);
        }
        lane.close();
    }
}

fn read_all(board: &Board) {
    for rank in 0..board.world().min(4) {
        let view = board.read(rank);
        for lane in &view.lanes {
            assert!(lane.comm_rank < lane.size);
            assert!(!lane.name.chars().any(char::is_control));
        }
        assert_ne!(board.mark(rank, Mark::ScriptEntered), Some(0));
        let runs = board.runs(rank);
        assert!(runs.len() <= RUNS && runs.iter().all(|run| !run.line.chars().any(char::is_control)));
        for (_, ops) in board.records(rank) {
            assert!(ops.len() <= tpurun_protocol::board::RECORDS);
            assert!(ops.iter().all(|op| !op.site.chars().any(char::is_control)));
        }
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let word = |index: u8, value: u8| vec![1, index, value];
    vec![
        vec![64],
        [&[255, 0, 0, 16, 0, 0, 0, 0, 0][..], b"TPUBRD\0\x03", &2_u64.to_le_bytes(), &word(1, 9)].concat(),
        [&[0][..], &word(9, 255), &[255; 8], &word(10, 3)].concat(),
        [&[0][..], &word(16, 2), &word(80, 7), &word(90, 100)].concat(),
        // A count of waits that is at its end.
        [&[0][..], &word(10, 255), &[255; 8]].concat(),
    ]
}
