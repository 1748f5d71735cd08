//! The threads of communicators: who starts them joins them. Threads have names, by which these tests count them.
#![allow(unsafe_code)]

mod ranks;

use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};

use ranks::collectives::{chunk, me, summed};
use ranks::hosts::{Memory, some_on_hosts};
use ranks::{Call, config, with_ranks};
use tpurun_engine::bootstrap::{Store, StoreBootstrap};
use tpurun_engine::network::Network;
use tpurun_engine::{Communicator, FailureKind, Membership, OpKind};
use tpurun_protocol::network::Bulk;

const TIMEOUT: Duration = Duration::from_secs(60);

const NETWORK: &str = "tpurun-net";
/// As long as the system may list a thread that has been joined.
const SOON: Duration = Duration::from_secs(1);

/// Held by each test: all of them may run in one process.
static ALONE: Mutex<()> = Mutex::new(());

/// Threads of this process with this name.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|comm| comm.trim_end() == name).count()
}

/// Waits until there are so many. The system lists a thread until a moment after whoever joined it has gone on.
fn become_threads(name: &str, count: usize, within: Duration) {
    let until = Instant::now() + within;
    while threads(name) != count {
        assert!(Instant::now() < until, "{} threads {name}, expected {count}", threads(name));
        std::thread::yield_now();
    }
}

fn sum_of(communicator: &Communicator, count: usize) {
    let (rank, ranks) = me(communicator);
    let sum = Call::new(OpKind::AllReduce, vec![chunk(rank, 0, count)], vec![vec![0; count]]);
    assert!(sum.run(communicator).unwrap() == [summed(ranks, 0, count)]);
}

/// The end of a rank of two, each of which is on a host of its own.
fn join(network: &Network, store: &Memory, rank: u32, name: &str) -> Communicator {
    let bootstrap = StoreBootstrap::new(store.clone(), rank, network).unwrap();
    let bootstrap = bootstrap.on_host(&format!("n{rank}"));
    let members = Membership { name: name.to_owned(), rank, world_ranks: vec![0, 1], epoch: 0 };
    Communicator::create(members, TIMEOUT, config(), &bootstrap, None, 1).unwrap()
}

#[test]
fn network_threads_end_with_the_last_communicator() {
    const CONNECTIONS: usize = 3;
    let _alone = ALONE.lock();
    let networks = [Bulk::Tcp, Bulk::Tcp].map(|bulk| Network::of_connections(CONNECTIONS, bulk));
    let (first, second, third) = (Memory::default(), Memory::default(), Memory::default());
    let both = Barrier::new(2);
    let one_checks = |rank: u32, count: usize| {
        both.wait();
        if rank == 0 {
            become_threads(NETWORK, count, SOON);
        }
        both.wait();
    };
    assert_eq!(threads(NETWORK), 0);
    std::thread::scope(|scope| {
        for (rank, network) in (0_u32..).zip(&networks) {
            let (first, second, third, one_checks) = (&first, &second, &third, &one_checks);
            scope.spawn(move || {
                // Two communicators share the threads: those end with the second one.
                let one = join(network, first, rank, "one");
                let other = join(network, second, rank, "other");
                sum_of(&one, 600_000);
                one_checks(rank, 2 * CONNECTIONS);
                drop(one);
                sum_of(&other, 600_000);
                one_checks(rank, 2 * CONNECTIONS);
                drop(other);
                one_checks(rank, 0);
                // The next communicator begins anew.
                let next = join(network, third, rank, "next");
                sum_of(&next, 600_000);
                one_checks(rank, 2 * CONNECTIONS);
                next.shutdown();
                one_checks(rank, 0);
            });
        }
    });
}

/// A forked process has a copy of all there is but the threads: it waits for none, and ends none of its parent's.
#[test]
fn a_fork_ends_no_thread_of_its_parent() {
    let _alone = ALONE.lock();
    let networks = [Bulk::Tcp, Bulk::Tcp].map(|bulk| Network::of_connections(1, bulk));
    let (store, both) = (Memory::default(), Barrier::new(2));
    std::thread::scope(|scope| {
        for (rank, network) in (0_u32..).zip(&networks) {
            let (store, both) = (&store, &both);
            scope.spawn(move || {
                let communicator = join(network, store, rank, "forked");
                sum_of(&communicator, 600_000);
                both.wait();
                if rank == 0 {
                    // SAFETY: the child frees memory, which glibc allows in a fork, and exits.
                    let pid = unsafe { libc::fork() };
                    assert!(pid >= 0, "fork fails");
                    let Some(child) = Pid::from_raw(pid) else {
                        drop(communicator);
                        // SAFETY: any time.
                        unsafe { libc::_exit(0) }
                    };
                    assert!(ends_well(child), "it waits for nobody");
                    assert_eq!(threads(NETWORK), 2);
                }
                both.wait();
                sum_of(&communicator, 600_000);
            });
        }
    });
    become_threads(NETWORK, 0, SOON);
}

/// Whether a child ends within a minute, with status 0.
fn ends_well(child: Pid) -> bool {
    let watched = pidfd_open(child, PidfdFlags::empty()).expect("our own child");
    let minute = Timespec::try_from(TIMEOUT).expect("fits");
    let ended = poll(&mut [PollFd::new(&watched, PollFlags::IN)], Some(&minute)).expect("poll works");
    if ended == 0 {
        kill_process(child, Signal::KILL).expect("our own child");
    }
    let status = waitpid(Some(child), WaitOptions::empty()).expect("our own child").expect("it ended").1;
    ended == 1 && status.exit_status() == Some(0)
}

/// A communicator that is given up before it is there has used the network, too.
#[test]
fn network_threads_end_where_a_rank_does_not_come() {
    let _alone = ALONE.lock();
    let (store, connections) = (Memory::default(), [(2, Bulk::Tcp); 3]);
    // The third rank says that it is on the host of the second one, and is not heard of again.
    let place_of_third = store.clone();
    let says = std::thread::spawn(move || {
        let place = place_of_third.get("tpurun/place/1/1").unwrap();
        place_of_third.set("tpurun/place/1/2", &place).unwrap();
    });
    let limit = Duration::from_millis(300);
    let failed = some_on_hosts(&connections, &store, &[0, 1, 1], &[0, 1], &config(), limit, |created| {
        created.unwrap_err().kind()
    });
    says.join().unwrap();
    assert!(failed == [FailureKind::Timeout; 2], "{failed:?}");
    become_threads(NETWORK, 0, SOON);
}

/// A thread without work ends by itself, and is joined before another one takes its place.
#[test]
fn progress_threads_come_and_go() {
    const LIMIT: Duration = Duration::from_secs(60);
    const NAMES: [&str; 2] = ["tpurun-coll", "tpurun-p2p"];
    let _alone = ALONE.lock();
    let both = Barrier::new(2);
    with_ranks(2, &config(), TIMEOUT, |communicator| {
        let (rank, _) = me(communicator);
        for _ in 0..2 {
            let mut sum = Call::new(OpKind::AllReduce, vec![chunk(rank, 0, 9)], vec![vec![0; 9]]);
            let mut message = match rank {
                0 => Call { root: Some(1), ..Call::new(OpKind::Send, vec![chunk(0, 0, 100_000)], vec![]) },
                _ => Call { root: Some(0), ..Call::new(OpKind::Recv, vec![], vec![vec![0; 100_000]]) },
            };
            let works = [sum.post(communicator).unwrap(), message.post(communicator).unwrap()];
            both.wait();
            // They run without anybody who waits.
            while !works.iter().all(|work| work.is_done()) {
                std::thread::yield_now();
            }
            assert!(sum.outputs == [summed(2, 0, 9)]);
            assert!(
                NAMES.iter().all(|name| (1..=2).contains(&threads(name))),
                "each at most once for each rank"
            );
            both.wait();
            NAMES.iter().for_each(|name| become_threads(name, 0, LIMIT));
            both.wait();
        }
    });
    NAMES.iter().for_each(|name| become_threads(name, 0, LIMIT));
}
