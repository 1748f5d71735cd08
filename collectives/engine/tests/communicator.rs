//! Whole communicators, with threads as ranks.

mod ranks;

use std::time::Duration;

use ranks::collectives::{LARGE, chunk, every_collective, every_fold, me, summed};
use ranks::{Call, config, who, with_ranks};
use tpurun_engine::dtype::ReduceOp;
use tpurun_engine::{Config, Failure, FailureKind, OpKind};
use tpurun_topology::Topology;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Nothing, less than a line, sizes that do not divide, more than one window.
const COUNTS: [usize; 5] = [0, 1, 7, 1000, 30_011];

#[test]
fn every_collective_is_right_for_every_size() {
    for ranks in [1, 2, 3, 5, 8] {
        with_ranks(ranks, &config(), TIMEOUT, |communicator| {
            for count in COUNTS {
                every_collective(communicator, count, |call| call.run(communicator).unwrap());
            }
        });
    }
}

#[test]
fn every_collective_of_more_than_caches_hold() {
    with_ranks(2, &config(), TIMEOUT, |communicator| {
        every_collective(communicator, LARGE, |call| call.run(communicator).unwrap());
    });
}

/// With more ranks than cores, what is large is folded in a chain: of one piece and of many, with results that stay in
/// the caches and that do not, taken at once or while another piece is folded, by ranks that follow each other closely
/// and by such as sleep. The places of one operation are those of the next, which may have more of them or fewer.
#[test]
fn chains_are_right_too() {
    for (ranks, cpus, counts) in [
        (2, 1, &[131_072, 300_011, 1_200_007][..]),
        (3, 2, &[131_072, 300_011]),
        (5, 1, &[1_700_007, 131_072]),
        (5, 1, &[131_073, 26_215]),
        (40, 2, &[131_072, 3277]),
        (40, 1, &[65_536]),
    ] {
        with_ranks(ranks, &Config { cpus, ..config() }, TIMEOUT, |communicator| {
            for &count in counts {
                every_fold(communicator, count, |call| call.run(communicator).unwrap());
            }
            every_fold(communicator, counts[0], |mut call| {
                let work = call.post(communicator).unwrap();
                communicator.wait(&work, None, 1).unwrap().unwrap();
                call.outputs
            });
        });
    }
}

/// The routes of the torus, over byte rings: forced, because one host has something better.
#[test]
fn forced_algorithms_are_right_too() {
    for (algorithm, topology, ranks) in
        [("ring", None, 1), ("ring", None, 5), ("bucket", Some("2x2x2"), 8), ("bucket", Some("3x2o"), 6)]
    {
        let config = Config {
            algorithm: Some(algorithm.parse().unwrap()),
            topology: topology.map(|shape| Topology::parse(shape).unwrap()),
            ..config()
        };
        with_ranks(ranks, &config, TIMEOUT, |communicator| {
            for count in COUNTS {
                every_collective(communicator, count, |call| call.run(communicator).unwrap());
            }
        });
    }
}

#[test]
fn asynchronous_collectives_are_right_too() {
    with_ranks(4, &config(), TIMEOUT, |communicator| {
        for count in COUNTS {
            every_collective(communicator, count, |mut call| {
                let work = call.post(communicator).unwrap();
                communicator.wait(&work, None, 1).unwrap().unwrap();
                call.outputs
            });
        }
    });
}

#[test]
fn sixty_four_ranks_meet() {
    with_ranks(64, &config(), TIMEOUT, |communicator| {
        for count in [1, 1000] {
            every_collective(communicator, count, |call| call.run(communicator).unwrap());
        }
    });
}

#[test]
fn a_blocking_collective_queues_behind_asynchronous_ones() {
    with_ranks(3, &config(), TIMEOUT, |communicator| {
        let (rank, ranks) = me(communicator);
        let mut calls: Vec<Call> = (0..50)
            .map(|c| Call::new(OpKind::AllReduce, vec![chunk(rank, c, 10)], vec![vec![0; 10]]))
            .collect();
        let works: Vec<_> = calls.iter_mut().map(|call| call.post(communicator).unwrap()).collect();
        let last = Call::new(OpKind::AllReduce, vec![chunk(rank, 50, 10)], vec![vec![0; 10]]);
        assert_eq!(last.run(communicator).unwrap(), [summed(ranks, 50, 10)]);
        for (c, (call, work)) in calls.iter().zip(&works).enumerate() {
            assert!(work.is_done(), "operation {c} was before the blocking one");
            assert_eq!(call.outputs, [summed(ranks, c, 10)]);
        }
    });
}

#[test]
fn uneven_all_to_all_passes_each_pair_its_own_size() {
    with_ranks(5, &config(), TIMEOUT, |communicator| {
        let (rank, ranks) = me(communicator);
        let count = |from: u32, to: u32| ((from * 7 + to * 3) % 11) as usize * 400;
        let inputs = (0..ranks).map(|to| chunk(rank, to as usize, count(rank, to))).collect();
        let outputs = (0..ranks).map(|from| vec![0; count(from, rank)]).collect();
        let got = Call::new(OpKind::AllToAll, inputs, outputs).run(communicator).unwrap();
        let expected: Vec<_> = (0..ranks).map(|from| chunk(from, rank as usize, count(from, rank))).collect();
        assert_eq!(got, expected);
    });
}

#[test]
fn uneven_all_gather_and_reduce_scatter() {
    with_ranks(4, &config(), TIMEOUT, |communicator| {
        let (rank, ranks) = me(communicator);
        let count = |rank: u32| rank as usize * 3000 + 1;
        let outputs = (0..ranks).map(|r| vec![0; count(r)]).collect();
        let got = Call::new(OpKind::AllGather, vec![chunk(rank, 0, count(rank))], outputs).run(communicator);
        assert_eq!(got.unwrap(), (0..ranks).map(|r| chunk(r, 0, count(r))).collect::<Vec<_>>());
        let inputs = (0..ranks).map(|r| chunk(rank, r as usize, count(r))).collect();
        let got = Call::new(OpKind::ReduceScatter, inputs, vec![vec![0; count(rank)]]).run(communicator);
        assert_eq!(got.unwrap(), [summed(ranks, rank as usize, count(rank))]);
    });
}

/// Runs one call per rank and returns the one failure they all must raise.
fn failure(ranks: u32, call: impl Fn(u32) -> Call + Sync) -> Failure {
    let failures = with_ranks(ranks, &config(), TIMEOUT, |communicator| {
        let call = call(communicator.members().rank);
        let before = call.outputs.clone();
        let mut call = call;
        let op = call.op();
        let failure = communicator.post(op, tpurun_engine::Mode::Blocking).unwrap_err();
        assert_eq!(call.outputs, before, "a mismatch changes no user memory");
        let again = Call::new(OpKind::Barrier, vec![], vec![]).run(communicator).unwrap_err();
        assert_eq!(again, failure, "the communicator stays failed");
        failure
    });
    assert!(failures.iter().all(|failure| *failure == failures[0]), "{failures:#?}");
    failures[0].clone()
}

fn reduce(count: usize) -> Call {
    Call::new(OpKind::AllReduce, vec![vec![1; count]], vec![vec![0; count]])
}

#[test]
fn a_mismatch_is_one_text_on_every_rank() {
    let other =
        |rank: u32, other: Call| if rank == 2 { Call { site: "train.py:31", ..other } } else { reduce(8) };
    let found = failure(4, |rank| other(rank, Call { reduce_op: ReduceOp::Max, ..reduce(8) }));
    assert_eq!(found.kind(), FailureKind::Mismatch);
    assert_eq!(
        found.text(),
        "collective mismatch in test, operation 0: the ranks differ in reduce op\n  \
         majority: ranks 0-1,3 (WHO, PID, PID) posted all_reduce(i64[8], sum) at test.py:1\n  \
         minority: rank 2 (WHO) posted all_reduce(i64[8], max) at train.py:31"
            .replace("WHO", &who())
            .replace("PID", &std::process::id().to_string())
    );
    assert_eq!(found.ranks(), [2]);
    let found = failure(4, |rank| other(rank, reduce(9)));
    assert!(found.text().contains("differ in element count\n"), "{found}");
    let found = failure(4, |rank| other(rank, Call::new(OpKind::Barrier, vec![], vec![])));
    let posted = format!("minority: rank 2 ({}) posted barrier() at train.py:31", who());
    assert!(found.text().contains(&posted), "{found}");
    let found = failure(2, |rank| Call {
        root: Some(rank),
        ..Call::new(OpKind::Broadcast, vec![vec![1; 4]], vec![])
    });
    assert!(found.text().contains("differ in root"), "{found}");
    // One against one blames nobody.
    assert_eq!(found.ranks(), [0_u32; 0]);
    assert!(!found.text().contains("majority"), "{found}");
}

#[test]
fn all_to_all_sizes_are_compared_pair_by_pair() {
    let found = failure(2, |rank| {
        let to_other = if rank == 0 { 5 } else { 3 };
        let mut inputs = vec![vec![0; 2]; 2];
        inputs[1 - rank as usize] = vec![0; to_other];
        let mut outputs = vec![vec![0; 2]; 2];
        outputs[1 - rank as usize] = vec![0; 3];
        Call::new(OpKind::AllToAll, inputs, outputs)
    });
    let posted =
        "rank 0 (WHO) posted 5 elements for rank 1 (WHO), expected 3, in all_to_all(i64[2]) at test.py:1";
    assert!(found.text().contains(&posted.replace("WHO", &who())), "{found}");
}

#[test]
fn who_does_not_come_is_named_when_the_time_is_up() {
    let outcomes = with_ranks(3, &config(), TIMEOUT, |communicator| {
        communicator.set_timeout(Duration::from_millis(300));
        if communicator.members().rank == 1 {
            // Alive, but elsewhere: comes only after the others have given up.
            while communicator.failure().is_none() {
                std::thread::yield_now();
            }
        }
        reduce(4).run(communicator).unwrap_err()
    });
    assert!(outcomes.iter().all(|failure| *failure == outcomes[0]));
    assert_eq!(outcomes[0].kind(), FailureKind::Timeout);
    assert_eq!(
        outcomes[0].text(),
        format!(
            "Timed out after 300ms in operation 0 of test, all_reduce(i64[4], sum) at test.py:1: \
             by the timeout 2 of 3 ranks came, missing rank 1 ({})",
            who()
        )
    );
    assert_eq!(outcomes[0].ranks(), [1]);
}

#[test]
fn abort_frees_every_waiter() {
    with_ranks(4, &config(), TIMEOUT, |communicator| {
        let (rank, _) = me(communicator);
        let failure = if rank == 3 {
            communicator.abort("loss is not a number");
            communicator.failure().unwrap()
        } else {
            reduce(4).run(communicator).unwrap_err()
        };
        assert_eq!(failure.kind(), FailureKind::Aborted);
        assert!(failure.text().contains("rank 3 (host "), "{failure}");
        assert!(failure.text().ends_with("loss is not a number"), "{failure}");
        assert_eq!(failure.ranks(), [3]);
    });
}

#[test]
fn bad_usage_is_refused_before_anything_happens() {
    with_ranks(2, &config(), TIMEOUT, |communicator| {
        let refused = |call: Call| {
            let failure = call.run(communicator).unwrap_err();
            assert_eq!(failure.kind(), FailureKind::InvalidUsage);
            failure.to_string()
        };
        let text = refused(Call::new(OpKind::AllReduce, vec![vec![0; 4]], vec![vec![0; 3]]));
        assert_eq!(text, "all_reduce: expected room for this rank's 4 elements in its output, given 3");
        let text = refused(Call { root: Some(2), ..Call::new(OpKind::Reduce, vec![vec![0; 4]], vec![]) });
        assert_eq!(text, "invalid root rank 2 in reduce: expected 0 to 1");
        let text = refused(Call::new(OpKind::AllGather, vec![vec![0; 4]], vec![vec![0; 4]; 3]));
        assert_eq!(text, "all_gather: expected 2 outputs on this rank, given 3");
        // The communicator is as good as before.
        assert_eq!(reduce(1).run(communicator).unwrap(), [[2]]);
    });
}
