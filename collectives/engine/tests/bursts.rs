//! Small asynchronous all-reduces: a rank that posts begins them, the one that comes last ends them, many
//! share a meeting.

mod ranks;

use std::sync::Barrier;
use std::sync::mpsc::channel;
use std::time::Duration;

use proptest::prelude::*;
use ranks::collectives::{chunk, me, summed};
use ranks::{Call, config, finish, with_ranks, with_ranks_on};
use tpurun_engine::board::Board;
use tpurun_engine::dtype::ReduceOp;
use tpurun_engine::{Config, FailureKind, Matching, Mode, OpKind, Outcome};

const TIMEOUT: Duration = Duration::from_secs(60);

fn all_reduce(rank: u32, c: usize, count: usize) -> Call {
    Call::new(OpKind::AllReduce, vec![chunk(rank, c, count)], vec![vec![0; count]])
}

/// The way a rank does its next operation.
#[derive(Clone, Copy, Debug)]
enum Step {
    Block,
    Post,
    PostLazily,
    PostAndWait,
    /// And does nothing else for a moment.
    PostAndYield,
}

fn step() -> impl Strategy<Value = Step> {
    use Step::{Block, Post, PostAndWait, PostAndYield, PostLazily};
    prop_oneof![
        1 => Just(Block),
        2 => Just(Post),
        6 => Just(PostLazily),
        1 => Just(PostAndWait),
        1 => Just(PostAndYield),
    ]
}

fn program() -> impl Strategy<Value = (Vec<usize>, Vec<Vec<Step>>)> {
    // Up to the largest that share a meeting, and beyond.
    let counts = prop::collection::vec(prop_oneof![8 => 0..40_usize, 2 => 900..1100_usize], 1..80);
    (counts, 1..5_usize).prop_flat_map(|(counts, ranks)| {
        let steps = prop::collection::vec(step(), counts.len());
        (Just(counts), prop::collection::vec(steps, ranks))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every rank posts the same operations, each in its own way.
    #[test]
    fn every_way_to_post_gives_the_same((counts, steps) in program()) {
        let ranks = steps.len() as u32;
        with_ranks(ranks, &config(), TIMEOUT, |communicator| {
            let (rank, ranks) = me(communicator);
            let mut calls: Vec<Call> =
                counts.iter().enumerate().map(|(c, count)| all_reduce(rank, c, *count)).collect();
            let mut works = vec![];
            for (call, step) in calls.iter_mut().zip(&steps[rank as usize]) {
                let mode = match step {
                    Step::Block => Mode::Blocking,
                    Step::Post => Mode::Async(None),
                    _ => Mode::Lazy(None),
                };
                let posted = call.post_as(communicator, mode).unwrap();
                match step {
                    Step::PostAndWait => finish(communicator, posted.clone()).unwrap(),
                    Step::PostAndYield => std::thread::yield_now(),
                    _ => {}
                }
                works.push(posted);
            }
            for posted in works {
                finish(communicator, posted).unwrap();
            }
            for (c, (call, count)) in calls.iter().zip(&counts).enumerate() {
                assert_eq!(call.outputs, [summed(ranks, c, *count)], "operation {c} of {counts:?}");
            }
        });
    }
}

#[test]
fn who_does_not_attend_holds_up_nobody() {
    for ranks in [2, 3] {
        let (done, attended) = (Barrier::new(ranks as usize), Barrier::new(ranks as usize));
        with_ranks(ranks, &config(), TIMEOUT, |communicator| {
            let (rank, ranks) = me(communicator);
            let mut calls: Vec<Call> = (0..70).map(|c| all_reduce(rank, c, 10)).collect();
            let works: Vec<_> =
                calls.iter_mut().map(|call| call.post_lazily(communicator).unwrap()).collect();
            if rank > 0 {
                for work in &works {
                    communicator.wait(work, None, 1).unwrap().unwrap();
                }
            }
            done.wait();
            communicator.wait(&works[69], None, 1).unwrap().unwrap();
            // Operations end in order, though nobody has waited for the others.
            assert!(works.iter().all(|work| work.is_done()));
            attended.wait();
            for (c, call) in calls.iter().enumerate() {
                assert_eq!(call.outputs, [summed(ranks, c, 10)]);
            }
        });
    }
}

#[test]
fn a_lazy_operation_ends_when_somebody_attends() {
    let (posted, done) = (Barrier::new(2), Barrier::new(2));
    with_ranks(2, &config(), TIMEOUT, |communicator| {
        let (rank, ranks) = me(communicator);
        // A progress thread that starts looks at what is queued.
        let mut call = all_reduce(rank, 0, 10);
        let work = call.post(communicator).unwrap();
        communicator.wait(&work, None, 1).unwrap().unwrap();
        let mut call = all_reduce(rank, 0, 10);
        if rank == 1 {
            posted.wait();
        }
        let work = call.post_lazily(communicator).unwrap();
        if rank == 0 {
            posted.wait();
            done.wait();
            communicator.attend(&work);
            while !work.is_done() {
                std::thread::yield_now();
            }
        } else {
            assert!(work.is_done(), "who comes last does it at once");
            done.wait();
        }
        assert_eq!(call.outputs, [summed(ranks, 0, 10)]);
    });
}

#[test]
fn the_board_tells_what_is_left_alone() {
    let (board, _) = Board::create(2).unwrap();
    let looked = Barrier::new(2);
    let left = with_ranks_on(Some(&board), 2, &config(), TIMEOUT, |communicator| {
        let (rank, ranks) = me(communicator);
        let round = |seq| {
            let mut call = all_reduce(rank, 0, 10);
            let mut left = false;
            if rank == 1 {
                looked.wait();
            }
            let work = call.post_lazily(communicator).unwrap();
            if rank == 0 {
                let lane = || board.read(0).lanes.remove(0);
                assert_eq!(lane().in_flight(), Some(seq));
                left = lane().awaited().is_none();
                communicator.attend(&work);
                assert_eq!(lane().awaited(), Some(seq));
                looked.wait();
            }
            communicator.wait(&work, None, 1).unwrap().unwrap();
            assert_eq!(call.outputs, [summed(ranks, 0, 10)]);
            left
        };
        // A progress thread that is not asleep yet is seen to take it.
        (0..20).map(round).filter(|left| *left).count()
    });
    assert!(left[0] > 0, "{left:?}");
}

/// The callback runs without any lock of the communicator: it posts, and waits for what it posts.
#[test]
fn callbacks_may_go_on() {
    with_ranks(2, &config(), TIMEOUT, |communicator| {
        let (rank, ranks) = me(communicator);
        let (sender, receiver) = channel();
        let mut first = all_reduce(rank, 0, 10);
        let on_done = Box::new(move |outcome: &Outcome| sender.send(outcome.is_ok()).unwrap());
        let posted = first.post_as(communicator, Mode::Lazy(Some(on_done))).unwrap();
        let work = posted.expect("it is not blocking");
        assert_eq!(all_reduce(rank, 1, 10).run(communicator).unwrap(), [summed(ranks, 1, 10)]);
        assert!(work.is_done() && receiver.recv().unwrap());
    });
}

#[test]
fn a_mismatch_amid_a_burst_is_told_as_ever() {
    let failures = with_ranks(3, &config(), TIMEOUT, |communicator| {
        let (rank, ranks) = me(communicator);
        let mut calls: Vec<Call> = (0..8).map(|c| all_reduce(rank, c, 10)).collect();
        if rank == 2 {
            calls[5].reduce_op = ReduceOp::Max;
            calls[5].site = "other.py:7";
        }
        let works: Vec<_> = calls.iter_mut().map(|call| call.post_lazily(communicator)).collect();
        let mut failure = None;
        for (c, work) in works.iter().enumerate() {
            // Once the communicator has failed, it refuses what comes later.
            let outcome = match work {
                Ok(work) => communicator.wait(work, None, 1).unwrap().map(drop),
                Err(failure) => Err(failure.clone()),
            };
            assert_eq!(outcome.is_ok(), c < 5, "operation {c}: {outcome:?}");
            failure = failure.or(outcome.err());
        }
        for (c, call) in calls.iter().enumerate().take(5) {
            assert_eq!(call.outputs, [summed(ranks, c, 10)]);
        }
        failure.unwrap()
    });
    assert!(failures.iter().all(|failure| *failure == failures[0]), "{failures:?}");
    assert_eq!(failures[0].kind(), FailureKind::Mismatch);
    let text = failures[0].text();
    for part in ["operation 5", "reduce op", "all_reduce(i64[10], max) at other.py:7", "rank 2"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

#[test]
fn call_sites_of_a_burst_count_in_strict_matching() {
    let config = Config { matching: Matching::Strict, ..config() };
    let failures = with_ranks(2, &config, TIMEOUT, |communicator| {
        let (rank, _) = me(communicator);
        let mut calls: Vec<Call> = (0..4).map(|c| all_reduce(rank, c, 10)).collect();
        if rank == 1 {
            calls[3].site = "other.py:7";
        }
        let works: Vec<_> = calls.iter_mut().map(|call| call.post_lazily(communicator).unwrap()).collect();
        for work in &works[..3] {
            communicator.wait(work, None, 1).unwrap().unwrap();
        }
        communicator.wait(&works[3], None, 1).unwrap().unwrap_err()
    });
    assert_eq!(failures[0], failures[1]);
    assert!(failures[0].text().contains("call site"), "{}", failures[0]);
}

#[test]
fn who_shuts_down_ends_what_it_has_begun() {
    let posted = Barrier::new(2);
    with_ranks(2, &config(), TIMEOUT, |communicator| {
        let (rank, ranks) = me(communicator);
        let mut calls: Vec<Call> = (0..6).map(|c| all_reduce(rank, c, 10)).collect();
        let works: Vec<_> = calls.iter_mut().map(|call| call.post_lazily(communicator).unwrap()).collect();
        posted.wait();
        communicator.shutdown();
        for work in &works {
            work.outcome().expect("shutting down ends all of them").unwrap();
        }
        for (c, call) in calls.iter().enumerate() {
            assert_eq!(call.outputs, [summed(ranks, c, 10)]);
        }
    });
}

/// A second thread of a rank posts while the first one has begun something.
#[test]
fn threads_of_a_rank_do_not_mix_their_meetings() {
    with_ranks(2, &config(), TIMEOUT, |communicator| {
        let (rank, ranks) = me(communicator);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(move || {
                    for turn in 0..100 {
                        // All are alike, for the threads' order differs from rank to rank.
                        let mut call = all_reduce(rank, 0, 10);
                        if turn % 3 == 0 {
                            assert_eq!(call.run(communicator).unwrap(), [summed(ranks, 0, 10)]);
                            continue;
                        }
                        let work = call.post_lazily(communicator).unwrap();
                        communicator.wait(&work, None, 1).unwrap().unwrap();
                        assert_eq!(call.outputs, [summed(ranks, 0, 10)]);
                    }
                });
            }
        });
    });
}
