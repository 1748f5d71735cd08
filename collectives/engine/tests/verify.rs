//! Results that something else writes to.
#![allow(unsafe_code)]

mod ranks;

use std::time::Duration;

use ranks::{Call, config, finish, who, with_ranks};
use tpurun_engine::{Communicator, Config, Failure, FailureKind, Mode, OpKind, Results, Spans};

const TIMEOUT: Duration = Duration::from_secs(60);

fn verified() -> Config {
    Config { results: Results::Verified, ..config() }
}

/// All ranks gather; rank 2 names the same memory for the parts of ranks 0 and 1.
fn gather(communicator: &Communicator, count: usize, mode: Mode) -> Result<(), Failure> {
    let rank = communicator.members().rank;
    let ranks = communicator.members().size() as usize;
    let mut call =
        Call::new(OpKind::AllGather, vec![vec![i64::from(rank); count]], vec![vec![0; count]; ranks]);
    let mut op = call.op();
    if rank == 2 {
        let part = |chunk: usize| if chunk == 1 { 0 } else { chunk };
        let outputs: Vec<_> = (0..ranks).map(|chunk| call.outputs[part(chunk)].as_mut_ptr()).collect();
        // SAFETY: the call lives until the operation has ended.
        op.outputs = unsafe { Spans::new(outputs.into_iter().map(|at| (at.cast(), count * 8)), 1) };
    }
    let posted = communicator.post(op, mode)?;
    finish(communicator, posted)
}

/// The one failure that all ranks raise.
fn difference(config: &Config, count: usize, mode: impl Fn() -> Mode + Sync) -> Failure {
    let run = |communicator: &Communicator| gather(communicator, count, mode()).unwrap_err();
    let failures = with_ranks(4, config, TIMEOUT, run);
    assert!(failures.iter().all(|failure| *failure == failures[0]), "{failures:#?}");
    assert_eq!(failures[0].kind(), FailureKind::Mismatch);
    let head = format!("results differ after operation 0 of test, all_gather(i64[{count}]) at test.py:1\n");
    assert!(failures[0].text().starts_with(&head), "{}", failures[0]);
    failures[0].clone()
}

#[test]
fn the_rank_whose_result_differs_is_named() {
    for count in [10, 100_000] {
        for mode in [|| Mode::Blocking, || Mode::Async(None)] {
            let failure = difference(&verified(), count, mode);
            assert_eq!(failure.ranks(), [2]);
            let lines: Vec<&str> = failure.text().lines().collect();
            assert!(lines[1].starts_with("  majority: ranks 0-1,3 (host "), "{}", lines[1]);
            assert!(lines[2].starts_with(&format!("  minority: rank 2 ({}) have ", who())), "{}", lines[2]);
            assert_ne!(lines[1].split(" have ").last(), lines[2].split(" have ").last());
        }
    }
}

/// In a ring, a rank passes on what it has: others may have it, too.
#[test]
fn steps_over_rings_are_verified_too() {
    let ring = Config { algorithm: Some("ring".parse().unwrap()), ..verified() };
    assert!(difference(&ring, 1000, || Mode::Blocking).text().contains("rank"));
}

#[test]
fn trusted_results_are_not_compared() {
    with_ranks(4, &config(), TIMEOUT, |communicator| gather(communicator, 10, Mode::Blocking).unwrap());
}

#[test]
fn right_results_pass() {
    for config in [verified(), Config { algorithm: Some("ring".parse().unwrap()), ..verified() }] {
        with_ranks(3, &config, TIMEOUT, |communicator| {
            let rank = communicator.members().rank;
            for count in [0, 1, 20_000] {
                let sum = Call::new(OpKind::AllReduce, vec![vec![1; count]], vec![vec![0; count]]);
                assert_eq!(sum.run(communicator).unwrap(), [vec![3; count]]);
                let data = vec![vec![7; count]];
                let (inputs, outputs) = if rank == 1 { (data, vec![]) } else { (vec![], data) };
                Call { root: Some(1), ..Call::new(OpKind::Broadcast, inputs, outputs) }
                    .run(communicator)
                    .unwrap();
                let scatter = Call::new(OpKind::ReduceScatter, vec![vec![1; count]; 3], vec![vec![0; count]]);
                assert_eq!(scatter.run(communicator).unwrap(), [vec![3; count]]);
            }
        });
    }
}
