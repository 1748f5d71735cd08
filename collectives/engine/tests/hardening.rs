//! Communicators in trouble: lanes that mix, ranks that leave early or late, operations that can not work.
#![allow(unsafe_code)]

mod ranks;

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ranks::{Call, Handover, config, with_ranks};
use tpurun_engine::benching::looks;
use tpurun_engine::bootstrap::{Store, StoreBootstrap};
use tpurun_engine::dtype::{Dtype, ReduceOp};
use tpurun_engine::network::Network;
use tpurun_engine::{Communicator, Config, Failure, FailureKind, Membership, Mode, Op, OpKind, Shape, Spans};

const TIMEOUT: Duration = Duration::from_secs(60);

fn barrier() -> Call {
    Call::new(OpKind::Barrier, vec![], vec![])
}

fn reduce(count: usize) -> Call {
    Call::new(OpKind::AllReduce, vec![vec![1; count]], vec![vec![0; count]])
}

fn send(to: u32, tag: i32, count: usize) -> Call {
    Call { root: Some(to), tag, ..Call::new(OpKind::Send, vec![vec![1; count]], vec![]) }
}

fn recv(from: Option<u32>, tag: i32, count: usize) -> Call {
    Call { root: from, tag, ..Call::new(OpKind::Recv, vec![], vec![vec![0; count]]) }
}

/// An operation that succeeded on one rank must not fail on another because of what came later.
#[test]
fn a_barrier_that_one_rank_passed_is_passed_by_all() {
    for _ in 0..50 {
        let outcomes = with_ranks(8, &config(), TIMEOUT, |communicator| {
            let outcome = barrier().run(communicator);
            if communicator.members().rank == 0 && outcome.is_ok() {
                communicator.abort("done");
            }
            outcome
        });
        if outcomes[0].is_ok() {
            let failed: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
            assert!(failed.is_empty(), "{} ranks failed a barrier that rank 0 passed", failed.len());
        }
    }
}

/// The time that `rounds` rounds take where each sleeps until it is time to look at the other ranks; awake,
/// they take milliseconds.
fn asleep(rounds: u32) -> Duration {
    rounds * Duration::from_millis(500)
}

/// A pending receive must not slow down who waits for a collective.
#[test]
fn a_pending_receive_does_not_delay_collectives() {
    const ROUNDS: u32 = 100;
    with_ranks(2, &config(), TIMEOUT, |communicator| {
        let rank = communicator.members().rank;
        let mut later = recv(Some(1), 0, 1);
        let receive = (rank == 0).then(|| later.post(communicator).unwrap());
        let began = Instant::now();
        for _ in 0..ROUNDS {
            let mut call = reduce(4);
            let work = call.post(communicator).unwrap();
            communicator.wait(&work, None, 1).unwrap().unwrap();
        }
        let took = began.elapsed();
        assert!(took < asleep(ROUNDS) / 2, "{ROUNDS} all_reduces took {took:?}");
        if let Some(receive) = receive {
            communicator.wait(&receive, None, 1).unwrap().unwrap();
        } else {
            send(0, 0, 1).run(communicator).unwrap();
        }
    });
}

/// A rank that waits for a message goes on when it is there, whatever else is pending.
#[test]
fn a_pending_receive_does_not_delay_other_messages() {
    const ROUNDS: u32 = 100;
    with_ranks(2, &config(), TIMEOUT, |communicator| {
        let rank = communicator.members().rank;
        let mut later = recv(Some(1 - rank), 7, 1);
        let receive = later.post(communicator).unwrap();
        let began = Instant::now();
        for _ in 0..ROUNDS {
            if rank == 0 {
                send(1, 1, 1).run(communicator).unwrap();
                recv(Some(1), 1, 1).run(communicator).unwrap();
            } else {
                recv(Some(0), 1, 1).run(communicator).unwrap();
                send(0, 1, 1).run(communicator).unwrap();
            }
        }
        let took = began.elapsed();
        assert!(took < asleep(ROUNDS) / 2, "{ROUNDS} round trips took {took:?}");
        send(1 - rank, 7, 1).run(communicator).unwrap();
        communicator.wait(&receive, None, 1).unwrap().unwrap();
    });
}

/// Messages of one thread move although another thread waits for a collective.
#[test]
fn a_thread_that_waits_for_a_collective_does_not_stop_messages() {
    let outcomes = with_ranks(2, &config(), Duration::from_secs(5), |communicator| {
        if communicator.members().rank == 1 {
            recv(Some(0), 2, 200_000).run(communicator)?;
            return reduce(4).run(communicator).map(drop);
        }
        // Makes the waiter below a driver of messages, until it arrives.
        let mut own = recv(Some(0), 1, 1);
        own.post(communicator).unwrap();
        let mut call = reduce(4);
        let work = call.post(communicator).unwrap();
        let waiter = Mutex::new(None);
        let waiting = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                *waiter.lock().unwrap() = Some(std::fs::read_link("/proc/thread-self").unwrap());
                waiting.store(true, Ordering::Release);
                let _ = communicator.wait(&work, None, 1);
            });
            while !waiting.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            let stat = PathBuf::from("/proc").join(waiter.lock().unwrap().take().unwrap()).join("stat");
            let asleep = || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") S "));
            while !asleep() {
                std::thread::yield_now();
            }
            send(0, 1, 1).run(communicator).unwrap();
            // More than a ring holds: somebody has to drive.
            let mut large = send(1, 2, 200_000);
            let sent = large.post(communicator).unwrap();
            // Not `communicator.wait`, which would drive: the progress thread exists for this.
            sent.wait(None).unwrap().map(drop)
        })
    });
    for outcome in outcomes {
        outcome.unwrap();
    }
}

/// Rank 0 sends and expects two elements everywhere; only ranks 1 and 2 see that the sizes differ.
#[test]
fn a_forced_algorithm_takes_sizes_that_only_some_ranks_see_to_be_uneven() {
    let config = Config { algorithm: Some("ring".parse().unwrap()), ..config() };
    let outcomes = with_ranks(3, &config, TIMEOUT, |communicator| {
        let rank = communicator.members().rank;
        let count = |from: u32, to: u32| if (from, to) == (1, 2) { 5 } else { 2 };
        let inputs = (0..3).map(|to| vec![i64::from(rank); count(rank, to)]).collect();
        let outputs = (0..3).map(|from| vec![0; count(from, rank)]).collect();
        Call::new(OpKind::AllToAll, inputs, outputs).run(communicator).map(drop)
    });
    for outcome in outcomes {
        outcome.unwrap();
    }
}

#[test]
fn a_rank_that_comes_too_late_does_not_get_a_failed_communicator() {
    let handover = Handover::default();
    let create = |rank, timeout| {
        let members = Membership { name: "test".to_owned(), rank, world_ranks: vec![0, 1], epoch: 0 };
        Communicator::create(members, timeout, config(), &handover, None, 1)
    };
    let first = create(0, Duration::from_millis(50)).map(drop).unwrap_err();
    let late = create(1, TIMEOUT).map(drop).expect_err("its communicator has failed");
    assert_eq!(first, late);
}

#[test]
fn a_rank_of_another_epoch_does_not_get_in() {
    let handover = Handover::default();
    let create = |rank, epoch, timeout| {
        let members = Membership { name: "test".to_owned(), rank, world_ranks: vec![0, 1], epoch };
        Communicator::create(members, timeout, config(), &handover, None, 1).map(drop).unwrap_err()
    };
    std::thread::scope(|scope| {
        let late = scope.spawn(|| create(1, 0, TIMEOUT));
        let alone = create(0, 1, Duration::from_millis(50));
        assert_eq!((alone.kind(), alone.ranks()), (FailureKind::Timeout, &[1_u32][..]));
        let text = "the shared segment of test has epoch 1, expected 0";
        assert_eq!(late.join().unwrap().text(), text);
    });
}

/// A message that can not be completed any more is an error at once, not after the timeout.
#[test]
fn shutting_down_in_the_middle_of_a_message_frees_its_receiver() {
    let kinds = with_ranks(2, &config(), Duration::from_secs(5), |communicator| {
        if communicator.members().rank == 0 {
            let mut call = send(1, 0, 1 << 20);
            call.post(communicator).unwrap();
            communicator.shutdown();
            None
        } else {
            Some(recv(Some(0), 0, 1 << 20).run(communicator).unwrap_err().kind())
        }
    });
    assert_eq!(kinds[1], Some(FailureKind::Aborted));
}

/// Runs one call per rank and returns the failure of rank 0.
fn failure(
    ranks: u32,
    op: impl Fn(u32) -> Call + Sync,
    hash: impl Fn(u32) -> Option<u64> + Sync,
) -> Option<Failure> {
    let failures = with_ranks(ranks, &config(), TIMEOUT, |communicator| {
        let mut call = op(communicator.members().rank);
        let mut op = call.op();
        op.shape_hash = hash(communicator.members().rank);
        communicator.post(op, Mode::Blocking).err()
    });
    failures[0].clone()
}

/// The ranks agree on the sum and on their own share, not on the rest.
#[test]
fn a_mismatch_of_split_sizes_says_who_posted_what() {
    let call = |rank: u32| {
        let sizes = if rank == 2 { [1, 3, 2] } else { [2, 2, 2] };
        let outputs = sizes.iter().map(|size| vec![0; *size]).collect();
        Call::new(OpKind::AllGather, vec![vec![0; 2]], outputs)
    };
    let found = failure(3, call, |_| None).unwrap();
    assert!(!found.text().contains("ranks 0-2 posted"), "says the same of all ranks: {found}");
}

/// `TPURUN_SHAPE_MATCH`: the shape must be the same on all ranks.
#[test]
fn shapes_that_must_match_are_compared_in_every_collective() {
    let gather = |_| Call::new(OpKind::AllGather, vec![vec![0; 6]], vec![vec![0; 6]; 2]);
    let found = failure(2, gather, |rank| Some(u64::from(rank)));
    assert_eq!(found.map(|found| found.kind()), Some(FailureKind::Mismatch));
}

/// The file and the line are at the end of a call site.
#[test]
fn a_long_call_site_keeps_its_line() {
    const SITE: &str = "/home/somebody/experiments/2031/a-directory-with-a-long-name/another-one-below-it/\
                        and-the-package/train.py:28";
    let texts = with_ranks(2, &config(), TIMEOUT, |communicator| {
        let rank = communicator.members().rank;
        let call = if rank == 0 { send(1, 0, 4) } else { recv(Some(0), 0, 6) };
        let sent = Call { site: SITE, ..call }.run(communicator);
        sent.and_then(|_| barrier().run(communicator)).unwrap_err().to_string()
    });
    let posted = texts[1].lines().nth(1).unwrap();
    assert!(posted.ends_with("train.py:28"), "{posted}");
}

/// All elements, but not in whole pieces.
fn torn(kind: OpKind, input: &mut [i64], output: &mut [i64]) -> Op {
    let pieces = |memory: &mut [i64], chunks: usize| {
        let (start, bytes) = (memory.as_mut_ptr().cast::<u8>(), size_of_val(memory) / chunks);
        let ends = (0..chunks).flat_map(move |chunk| [(chunk * bytes, 4), (chunk * bytes + 4, bytes - 4)]);
        // SAFETY: the tests keep the memory until the operation is over; offsets are within it.
        unsafe { Spans::new(ends.map(|(at, bytes)| (start.wrapping_add(at), bytes)), 2) }
    };
    Op {
        kind,
        dtype: Dtype::I64,
        reduce_op: ReduceOp::Sum,
        scale: 1.0,
        root: None,
        tag: 0,
        inputs: pieces(input, input.len() / output.len()),
        outputs: pieces(output, 1),
        shape: Shape::new(&[output.len() as i64]),
        shape_hash: None,
        timeout: None,
        site: "".into(),
        python_threads: 1,
    }
}

#[test]
fn pieces_that_tear_elements_are_refused_or_right() {
    with_ranks(2, &config(), TIMEOUT, |communicator| {
        let (mut input, mut output) = (vec![1; 8], vec![0; 4]);
        let outcome = communicator.post(torn(OpKind::ReduceScatter, &mut input, &mut output), Mode::Blocking);
        match outcome {
            Ok(_) => assert_eq!(output, [2; 4], "a success with a wrong result"),
            Err(failure) => assert_eq!(failure.kind(), FailureKind::InvalidUsage, "{failure}"),
        }
    });
}

/// A bug on the progress thread is an error for the thread that waits, not silence.
#[test]
fn a_panic_on_the_progress_thread_ends_the_operation() {
    // The ends of communicators panic, too, when their thread did: keep that apart from the finding.
    let outcome = std::thread::spawn(|| {
        let handover = Handover::default();
        let members = Membership { name: "test".to_owned(), rank: 0, world_ranks: vec![0], epoch: 0 };
        let communicator = Communicator::create(members, TIMEOUT, config(), &handover, None, 1).unwrap();
        let (mut input, mut output) = (vec![1; 4], vec![0; 4]);
        let posted = communicator.post(torn(OpKind::AllReduce, &mut input, &mut output), Mode::Async(None));
        let ended = match posted {
            Ok(Some(work)) => work.wait(Some(Instant::now() + Duration::from_secs(5))).is_some(),
            Ok(None) | Err(_) => true,
        };
        std::mem::forget(communicator);
        ended
    });
    assert!(outcome.join().unwrap(), "the work never ends");
}

/// A store in a directory, for ranks in different processes.
struct Directory(PathBuf);

impl Store for Directory {
    fn set(&self, key: &str, value: &str) -> Result<(), Failure> {
        let path = self.0.join(key.replace('/', "-"));
        let hidden = path.with_extension("new");
        std::fs::write(&hidden, value).unwrap();
        std::fs::rename(hidden, path).unwrap();
        Ok(())
    }

    fn get(&self, key: &str) -> Result<String, Failure> {
        loop {
            if let Ok(value) = std::fs::read_to_string(self.0.join(key.replace('/', "-"))) {
                return Ok(value);
            }
            std::thread::yield_now();
        }
    }

    fn add(&self, _key: &str, _delta: i64) -> Result<i64, Failure> {
        Ok(1)
    }
}

const DIRECTORY: &str = "REVIEW_DIRECTORY";

fn join(directory: &str, rank: u32, ranks: u32, config: Config, timeout: Duration) -> Communicator {
    let members = Membership { name: "test".to_owned(), rank, world_ranks: (0..ranks).collect(), epoch: 0 };
    static NETWORK: Network = Network::new();
    let bootstrap = StoreBootstrap::new(Directory(directory.into()), rank, &NETWORK).unwrap();
    Communicator::create(members, timeout, config, &bootstrap, None, 1).unwrap()
}

/// Runs this test a second time, as another process.
fn other_process(test: &str) -> (String, Child) {
    let directory = std::env::temp_dir().join(format!("tpurun-{test}-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let directory = directory.to_str().unwrap().to_owned();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test])
        .env(DIRECTORY, &directory)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    (directory, child)
}

#[test]
fn sending_to_a_dead_rank_fails_even_if_it_left_a_message() {
    if let Ok(directory) = std::env::var(DIRECTORY) {
        let communicator = join(&directory, 1, 2, config(), TIMEOUT);
        send(0, 9, 4).run(&communicator).unwrap();
        std::mem::forget(communicator);
        return;
    }
    let (directory, mut child) = other_process("sending_to_a_dead_rank_fails_even_if_it_left_a_message");
    let communicator = join(&directory, 0, 2, config(), Duration::from_secs(5));
    child.wait().unwrap();
    let failure = send(1, 0, 1 << 20).run(&communicator).unwrap_err();
    std::fs::remove_dir_all(directory).unwrap();
    assert_eq!(failure.kind(), FailureKind::RankLost, "{failure}");
}

#[test]
fn receiving_from_anybody_fails_when_nobody_is_left() {
    if let Ok(directory) = std::env::var(DIRECTORY) {
        std::mem::forget(join(&directory, 1, 2, config(), TIMEOUT));
        return;
    }
    let (directory, mut child) = other_process("receiving_from_anybody_fails_when_nobody_is_left");
    let communicator = join(&directory, 0, 2, config(), Duration::from_secs(5));
    child.wait().unwrap();
    let failure = recv(None, 0, 4).run(&communicator).unwrap_err();
    std::fs::remove_dir_all(directory).unwrap();
    assert_eq!(failure.kind(), FailureKind::RankLost, "{failure}");
}

/// The root has done its part and leaves while its bytes are still on their way around the ring.
#[test]
fn a_rank_that_is_done_may_leave() {
    const RANKS: u32 = 64;
    const COUNT: usize = 1 << 17;
    let config = Config { algorithm: Some("ring".parse().unwrap()), ..config() };
    let broadcast = |inputs, outputs| Call { root: Some(0), ..Call::new(OpKind::Broadcast, inputs, outputs) };
    if let Ok(directory) = std::env::var(DIRECTORY) {
        let communicator = join(&directory, 0, RANKS, config, TIMEOUT);
        broadcast(vec![vec![7; COUNT]], vec![]).run(&communicator).unwrap();
        std::process::exit(0);
    }
    let (directory, mut child) = other_process("a_rank_that_is_done_may_leave");
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        // A parent collects its children at once, as a launcher does: the root is no zombie.
        scope.spawn(|| child.wait().unwrap());
        let rank = |rank| {
            let (directory, config) = (&directory, &config);
            scope.spawn(move || {
                let communicator = join(directory, rank, RANKS, config.clone(), TIMEOUT);
                broadcast(vec![], vec![vec![0; COUNT]]).run(&communicator).map(drop)
            })
        };
        let threads: Vec<_> = (1..RANKS).map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    std::fs::remove_dir_all(directory).unwrap();
    for outcome in outcomes {
        outcome.unwrap();
    }
}

/// Looking after the other ranks must not cost more than the operation.
#[test]
fn waiting_in_a_forced_ring_does_not_look_at_every_rank_at_every_wake_up() {
    const RANKS: u32 = 32;
    let config = Config { algorithm: Some("ring".parse().unwrap()), ..config() };
    let (before, began) = (looks(), Instant::now());
    with_ranks(RANKS, &config, TIMEOUT, |communicator| {
        for _ in 0..20 {
            reduce(64).run(communicator).unwrap();
        }
    });
    let (looked, periods) = (looks() - before, began.elapsed().as_millis() as u64 / 100);
    println!("{looked} looks in {periods} periods");
    // Each rank looks at all others at most once in a tenth of a second, however slow the machine is. The
    // ring has 62 rounds, and a rank that waits in one is woken in each.
    assert!(looked <= u64::from(RANKS * RANKS) * (periods + 1), "{looked} looks in {periods} periods");
}
