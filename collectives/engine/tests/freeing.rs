//! A rank that gives up a communicator, or its own end of it, frees every waiter at once.

mod ranks;

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ranks::{Call, Handover, config, with_ranks};
use tpurun_engine::{Communicator, Config, Failure, FailureKind, Membership, OpKind};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Measured: less than 1 ms on a machine that does nothing else.
const AT_ONCE: Duration = Duration::from_millis(100);
const TRIES: usize = 15;

fn reduce(count: usize) -> Call {
    Call::new(OpKind::AllReduce, vec![vec![1; count]], vec![vec![0; count]])
}

fn receive(from: u32) -> Call {
    Call { root: Some(from), ..Call::new(OpKind::Recv, vec![], vec![vec![0; 4]]) }
}

fn ring() -> Config {
    Config { algorithm: Some("ring".parse().unwrap()), ..config() }
}

/// The median, so that one unlucky moment of a busy machine does not decide.
fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    let median = times[times.len() / 2];
    eprintln!("freed after {median:?} (median of {}, most {:?})", times.len(), times[times.len() - 1]);
    median
}

/// Sleeps in the kernel by now, as far as /proc can tell.
fn asleep(thread: &std::path::Path) -> bool {
    std::fs::read_to_string(thread.join("stat")).is_ok_and(|stat| stat.contains(") S "))
}

/// Ranks 1.. wait for something that never comes; once they sleep, rank 0 gives up. How long until they know?
fn freed(
    config: &Config,
    wait: impl Fn(&Communicator) -> Failure + Sync,
    give_up: impl Fn(&Communicator) + Sync,
    kind: FailureKind,
) -> Duration {
    const RANKS: u32 = 4;
    let once = || {
        let threads = Barrier::new(RANKS as usize);
        let sleepers = std::sync::Mutex::new(vec![]);
        let times = with_ranks(RANKS, config, TIMEOUT, |communicator| {
            if communicator.members().rank > 0 {
                sleepers.lock().unwrap().push(std::fs::read_link("/proc/thread-self").unwrap());
                threads.wait();
                let failure = wait(communicator);
                assert_eq!(failure.kind(), kind, "{failure}");
                assert_eq!(failure.ranks(), [0], "{failure}");
                return Instant::now();
            }
            threads.wait();
            let proc = std::path::Path::new("/proc");
            while !sleepers.lock().unwrap().iter().all(|thread| asleep(&proc.join(thread))) {
                std::thread::yield_now();
            }
            let began = Instant::now();
            give_up(communicator);
            began
        });
        times[1..].iter().max().unwrap().duration_since(times[0])
    };
    median((0..TRIES).map(|_| once()).collect())
}

fn asynchronous(communicator: &Communicator, mut call: Call) -> Failure {
    let work = call.post(communicator).unwrap();
    communicator.wait(&work, None, 1).unwrap().unwrap_err()
}

#[test]
fn abort_frees_those_who_wait_in_a_collective() {
    for config in [config(), ring()] {
        let wait = |communicator: &Communicator| reduce(4).run(communicator).unwrap_err();
        let took = freed(&config, wait, |communicator| communicator.abort("enough"), FailureKind::Aborted);
        assert!(took < AT_ONCE, "{took:?}");
        let wait = |communicator: &Communicator| asynchronous(communicator, reduce(4));
        let took = freed(&config, wait, |communicator| communicator.abort("enough"), FailureKind::Aborted);
        assert!(took < AT_ONCE, "{took:?}");
    }
}

#[test]
fn abort_frees_those_who_wait_for_a_message() {
    let wait = |communicator: &Communicator| receive(0).run(communicator).unwrap_err();
    let took = freed(&config(), wait, |communicator| communicator.abort("enough"), FailureKind::Aborted);
    assert!(took < AT_ONCE, "{took:?}");
    let wait = |communicator: &Communicator| {
        let mut call = receive(0);
        let work = call.post(communicator).unwrap();
        // Not through the communicator, whose waiters move messages themselves.
        work.wait(None).unwrap().unwrap_err()
    };
    let took = freed(&config(), wait, |communicator| communicator.abort("enough"), FailureKind::Aborted);
    assert!(took < AT_ONCE, "{took:?}");
}

/// An operation that needs a rank that has destroyed its end can not complete, and says so without any
/// timeout.
#[test]
fn who_destroys_its_end_frees_those_who_wait_for_it() {
    for call in [|| reduce(4), || receive(0)] {
        let wait = |communicator: &Communicator| call().run(communicator).unwrap_err();
        let took = freed(&config(), wait, Communicator::shutdown, FailureKind::Deadlock);
        assert!(took < AT_ONCE, "{took:?}");
    }
}

#[test]
fn a_rank_that_comes_after_another_has_left_is_told_who() {
    let left = AtomicBool::new(false);
    let failures = with_ranks(2, &config(), TIMEOUT, |communicator| {
        if communicator.members().rank == 0 {
            communicator.shutdown();
            left.store(true, Ordering::Release);
            return None;
        }
        while !left.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        Some(reduce(4).run(communicator).unwrap_err())
    });
    let failure = failures[1].as_ref().unwrap();
    let expected = "rank 0 (WHO) destroyed test before operation 0 of test, all_reduce(i64[4], sum) at \
                    test.py:1: 1 of 2 ranks came, missing rank 0 (WHO)";
    assert_eq!(failure.text(), expected.replace("WHO", &ranks::who()));
    assert_eq!((failure.kind(), failure.ranks()), (FailureKind::Deadlock, &[0_u32][..]));
}

/// A rank that gives up waiting has given its part all the same: those that come later have the result.
#[test]
fn what_a_rank_gave_before_it_left_counts() {
    let left = AtomicBool::new(false);
    with_ranks(3, &config(), TIMEOUT, |communicator| {
        if communicator.members().rank > 0 {
            while !left.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            assert_eq!(reduce(4).run(communicator).unwrap(), [[3; 4]]);
            assert_eq!(reduce(4).run(communicator).unwrap_err().kind(), FailureKind::Deadlock);
            return;
        }
        let waiter = std::sync::Mutex::new(None);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                *waiter.lock().unwrap() = Some(std::fs::read_link("/proc/thread-self").unwrap());
                reduce(4).run(communicator).unwrap_err()
            });
            let thread = loop {
                if let Some(thread) = waiter.lock().unwrap().take() {
                    break std::path::Path::new("/proc").join(thread);
                }
            };
            while !asleep(&thread) {
                std::thread::yield_now();
            }
            communicator.shutdown();
            assert_eq!(waits.join().unwrap().kind(), FailureKind::Aborted);
        });
        left.store(true, Ordering::Release);
    });
}

/// This rank's waiters: blocking in another thread, asynchronous, and for a message.
#[test]
fn shutdown_frees_the_waiters_of_this_rank_and_leaves_the_others_alone() {
    let mut times = vec![];
    for _ in 0..TRIES {
        let done = AtomicBool::new(false);
        let took = with_ranks(2, &config(), TIMEOUT, |communicator| {
            if communicator.members().rank == 1 {
                // Busy elsewhere, and healthy.
                while !done.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                assert_eq!(communicator.failure(), None);
                return None;
            }
            let (mut first, mut second, mut message) = (reduce(4), reduce(4), receive(1));
            let works: Vec<_> = [&mut first, &mut second, &mut message]
                .map(|call| call.post(communicator).unwrap())
                .into_iter()
                .collect();
            let took = std::thread::scope(|scope| {
                let blocking = scope.spawn(|| reduce(4).run(communicator).unwrap_err());
                let began = Instant::now();
                communicator.shutdown();
                assert_eq!(blocking.join().unwrap().kind(), FailureKind::Aborted);
                for work in works {
                    let failure = work.wait(None).unwrap().unwrap_err();
                    assert_eq!(failure.kind(), FailureKind::Aborted, "{failure}");
                }
                began.elapsed()
            });
            done.store(true, Ordering::Release);
            Some(took)
        });
        times.extend(took[0]);
    }
    let took = median(times);
    assert!(took < AT_ONCE, "{took:?}");
}

/// Operations that all ranks have posted are done before a rank is gone, however late each of them gets to
/// it.
#[test]
fn shutdown_completes_what_all_ranks_have_posted() {
    const OPS: usize = 40;
    for config in [config(), ring()] {
        let posted = Barrier::new(3);
        with_ranks(3, &config, TIMEOUT, |communicator| {
            let mut calls: Vec<Call> = (0..OPS).map(|_| reduce(10_000)).collect();
            let works: Vec<_> = calls.iter_mut().map(|call| call.post(communicator).unwrap()).collect();
            posted.wait();
            communicator.shutdown();
            for (call, work) in calls.iter().zip(&works) {
                work.outcome().expect("it ended before the shutdown did").unwrap();
                assert_eq!(call.outputs, [vec![3; 10_000]]);
            }
        });
    }
}

/// A rank that waits for a communicator to come to be learns at once that it will not.
#[test]
fn a_failed_creation_frees_those_who_wait_in_it() {
    let mut times = vec![];
    for _ in 0..TRIES / 3 {
        let handover = Handover::default();
        let create = |rank, timeout| {
            let members =
                Membership { name: "test".to_owned(), rank, world_ranks: (0..4).collect(), epoch: 0 };
            let failure = Communicator::create(members, timeout, config(), &handover, None, 1).map(drop);
            (failure.unwrap_err(), Instant::now())
        };
        std::thread::scope(|scope| {
            // Rank 3 never comes; rank 0 is the first to lose its patience.
            let others: Vec<_> = (1..3).map(|rank| scope.spawn(move || create(rank, TIMEOUT))).collect();
            // Long enough for the others to have come, on a busy machine too.
            let (failure, began) = create(0, Duration::from_secs(1));
            assert_eq!((failure.kind(), failure.ranks()), (FailureKind::Timeout, &[3_u32][..]), "{failure}");
            for other in others {
                let (theirs, at) = other.join().unwrap();
                assert_eq!(theirs, failure);
                times.push(at.saturating_duration_since(began));
            }
        });
    }
    let took = median(times);
    assert!(took < AT_ONCE, "{took:?}");
}
