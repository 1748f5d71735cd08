//! Failures that only the board tells of. The ranks are this test program itself, started again.

use rustix::process::{Signal, getpid, kill_process};
use tpurun_protocol::board::{Board, OpRecord};

use crate::sandbox::{Outcome, Sandbox};

const ROLE: &str = "TEST_RANK_ROLE";

fn run(sandbox: &mut Sandbox, ranks: &str, role: &str) -> Outcome {
    sandbox.variable(ROLE, role);
    let program = std::env::current_exe().unwrap();
    sandbox.run(&["-n", ranks, program.to_str().unwrap(), "--exact", "board::rank", "--nocapture"])
}

/// Not a test of its own, but the work of a rank in the tests below.
#[test]
fn rank() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let number = |name: &str| std::env::var(name).unwrap().parse::<u32>().unwrap();
    let (rank, world) = (number("RANK"), number("WORLD_SIZE"));
    let lane = Board::from_env().unwrap().rank(rank).claim_lane(7, "dp0", world, rank).unwrap();
    let op = |seq| OpRecord {
        seq,
        collective: 0,
        dtype: 11,
        reduce_op: 0,
        root: -1,
        tag: 0,
        count: 8,
        input_bytes: 32,
        shape: &[8],
        site: "train.py:5",
    };
    lane.posted(&op(1));
    lane.completed(1);
    match (rank, role.as_str()) {
        (2, "leaves") => return,
        (2, "stops") => kill_process(getpid(), Signal::STOP).unwrap(),
        _ => drop(lane.posted(&op(2))),
    }
    lane.blocked();
    loop {
        std::thread::park();
    }
}

#[test]
fn a_rank_that_leaves_while_others_wait_is_the_culprit() {
    for ranks in ["4", "64"] {
        let mut sandbox = Sandbox::new();
        let outcome = run(&mut sandbox, ranks, "leaves");
        assert_eq!(outcome.code, 1);
        let report = outcome.report();
        let last = ranks.parse::<u32>().unwrap() - 1;
        for part in [
            "culprit   rank 2 (".to_owned(),
            "exited with code 0 while others were waiting for it".into(),
            "waiting for it in all_reduce#2 (f32[8], SUM), group dp0 at train.py:5".into(),
            format!("victims   0-1,3-{last} ").replace("3-3", "3"),
        ] {
            assert!(report.contains(&part), "{part}: {report}");
        }
    }
}

#[test]
fn a_stopped_rank_is_the_culprit() {
    let mut sandbox = Sandbox::new();
    let outcome = run(&mut sandbox, "4", "stops");
    assert_eq!(outcome.code, 1);
    let report = outcome.report();
    assert!(
        report.contains("culprit   rank 2 (") && report.contains("has been stopped (SIGSTOP)"),
        "{report}"
    );
    assert!(report.contains("3 ranks were waiting for it in all_reduce#2"), "{report}");
}
