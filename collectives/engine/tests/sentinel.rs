//! Ranks as processes without a launcher: when one dies, the others learn of it at once.
//!
//! Each test runs itself again as every rank. A rank says lines on its standard output, and the test decides
//! when somebody dies.

mod ranks;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use ranks::{Call, config};
use tpurun_engine::board::now_ns;
use tpurun_engine::bootstrap::{Store, StoreBootstrap};
use tpurun_engine::network::Network;
use tpurun_engine::{Communicator, Config, Failure, Membership, OpKind, Sentinel};

const TIMEOUT: Duration = Duration::from_secs(60);
const RANK: &str = "SENTINEL_TEST_RANK";
/// Not used: all ranks are on one host.
static NETWORK: Network = Network::new();
const RANKS: &str = "SENTINEL_TEST_RANKS";
const DIRECTORY: &str = "SENTINEL_TEST_DIRECTORY";
/// Between a death and the median survivor's error, on a machine that does other things, too: alone it takes
/// a millisecond. Without a sentinel it takes a quarter of a second on average.
const SOON: Duration = Duration::from_millis(50);

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

/// This process as a rank, if it is one.
fn rank() -> Option<u32> {
    Some(std::env::var(RANK).ok()?.parse().unwrap())
}

fn join(sentinel: &Sentinel) -> Communicator {
    let rank = rank().unwrap();
    let ranks = std::env::var(RANKS).unwrap().parse().unwrap();
    let members = Membership { name: "dp0".to_owned(), rank, world_ranks: (0..ranks).collect(), epoch: 0 };
    let store = Directory(std::env::var(DIRECTORY).unwrap().into());
    let bootstrap = StoreBootstrap::new(store, rank, &NETWORK).unwrap();
    // With more ranks than CPUs, wherever this runs.
    let config = Config { cpus: 2, ..config() };
    Communicator::create(members, TIMEOUT, config, &bootstrap, None, 0).unwrap().watched_by(sentinel)
}

fn say(line: &str) {
    // Past the test harness, which captures what tests print.
    let mut out = std::io::stdout().lock();
    writeln!(out, "says {line}").unwrap();
    out.flush().unwrap();
}

/// Waits for a line on standard input.
fn heed() {
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
}

/// Says what a rank has learned, and when.
fn report(failure: &Failure) {
    say(&format!("{} {:?} {}", now_ns(), failure.kind(), failure.text()));
}

fn reduce(communicator: &Communicator, count: usize) -> Result<(), Failure> {
    Call::new(OpKind::AllReduce, vec![vec![1; count]], vec![vec![0; count]]).run(communicator).map(drop)
}

fn send(to: u32, communicator: &Communicator) -> Result<(), Failure> {
    let call = Call::new(OpKind::Send, vec![vec![7; 4]], vec![]);
    Call { root: Some(to), ..call }.run(communicator).map(drop)
}

fn receive(from: u32, communicator: &Communicator) -> Result<(), Failure> {
    let call = Call::new(OpKind::Recv, vec![], vec![vec![0; 4]]);
    Call { root: Some(from), ..call }.run(communicator).map(drop)
}

/// A rank as its test sees it.
struct Rank {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Rank {
    /// The next line that the rank says.
    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "a rank ended without a word");
            if let Some((_, said)) = line.trim_end().split_once("says ") {
                return said.to_owned();
            }
        }
    }

    fn tell(&mut self) {
        writeln!(self.input, "go on").unwrap();
    }

    /// Returns what it has learned after `since_ns`: how long that took, and the text.
    fn learned(&mut self, since_ns: u64) -> (Duration, String) {
        let line = self.hear();
        let (at, what) = line.split_once(' ').unwrap();
        (Duration::from_nanos(at.parse::<u64>().unwrap().saturating_sub(since_ns)), what.to_owned())
    }

    /// Until every thread of it sleeps.
    fn wait_until_asleep(&self) {
        let tasks = PathBuf::from(format!("/proc/{}/task", self.child.id()));
        let asleep =
            |task: &Path| std::fs::read_to_string(task.join("stat")).is_ok_and(|stat| stat.contains(") S "));
        while !std::fs::read_dir(&tasks).unwrap().all(|task| asleep(&task.unwrap().path())) {
            std::thread::yield_now();
        }
    }
}

/// A job of as many ranks; all of them are gone when it is dropped.
struct World {
    ranks: Vec<Rank>,
    directory: PathBuf,
}

impl World {
    fn new(test: &str, ranks: u32) -> World {
        let directory =
            std::env::temp_dir().join(format!("tpurun-{test}-{}-{}", std::process::id(), now_ns()));
        std::fs::create_dir_all(&directory).unwrap();
        let start = |rank: u32| {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", test, "--nocapture"])
                .env(RANK, rank.to_string())
                .env(RANKS, ranks.to_string())
                .env(DIRECTORY, &directory)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
            Rank { child, input, output: BufReader::new(output) }
        };
        World { ranks: (0..ranks).map(start).collect(), directory }
    }

    fn hear_all(&mut self, expected: &str) {
        for rank in &mut self.ranks {
            assert_eq!(rank.hear(), expected);
        }
    }

    /// Kills a rank and returns when, by the clock of the ranks.
    fn kill(&mut self, rank: usize) -> u64 {
        let at = now_ns();
        self.ranks[rank].child.kill().unwrap();
        at
    }

    /// Returns what all but `dead` learned: the times in order, and the one text.
    fn learned(&mut self, dead: &[usize], since_ns: u64) -> (Vec<Duration>, String) {
        let living = self.ranks.iter_mut().enumerate().filter(|(rank, _)| !dead.contains(rank));
        let all: Vec<_> = living.map(|(_, rank)| rank.learned(since_ns)).collect();
        let text = all[0].1.clone();
        assert!(all.iter().all(|(_, other)| *other == text), "several stories: {all:?}");
        let mut times: Vec<Duration> = all.into_iter().map(|(time, _)| time).collect();
        times.sort_unstable();
        (times, text)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.child.kill();
            let _ = rank.child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// The median of all survivors' times, and the longest.
fn judge(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let (median, most) = (times[times.len() / 2], times[times.len() - 1]);
    println!("{what}: median {median:?}, most {most:?} of {} survivors", times.len());
    assert!(median < SOON, "{what}: the median survivor took {median:?}, the last one {most:?}");
}

#[test]
fn a_killed_rank_is_missed_at_once() {
    const TEST: &str = "a_killed_rank_is_missed_at_once";
    if let Some(rank) = rank() {
        let sentinel = Sentinel::new();
        let communicator = join(&sentinel);
        reduce(&communicator, 4).unwrap();
        say("ready");
        if rank == 3 {
            heed();
        }
        report(&reduce(&communicator, 4).unwrap_err());
        return heed();
    }
    let mut times = Vec::new();
    for _ in 0..5 {
        let mut world = World::new(TEST, 8);
        world.hear_all("ready");
        world.ranks.iter().for_each(Rank::wait_until_asleep);
        let pid = world.ranks[3].child.id();
        let died = world.kill(3);
        let (took, text) = world.learned(&[3], died);
        let expected = format!(", pid {pid}) is gone: operation 1 of dp0, all_reduce(");
        assert!(text.starts_with("RankLost rank 3 (host ") && text.contains(&expected), "{text}");
        times.extend(took);
    }
    judge(TEST, times);
}

/// A rank is missed wherever it dies: before it arrives, as the last one, with a piece of the fold in its
/// hands.
#[test]
fn a_rank_that_dies_at_work_is_missed_at_once() {
    dies_at_work("a_rank_that_dies_at_work_is_missed_at_once", 1 << 16);
}

/// Larger tensors are folded in a chain, where only the next one waits for it.
#[test]
fn a_rank_that_dies_in_a_chain_is_missed_at_once() {
    dies_at_work("a_rank_that_dies_in_a_chain_is_missed_at_once", 1 << 18);
}

fn dies_at_work(test: &'static str, count: usize) {
    if rank().is_some() {
        let sentinel = Sentinel::new();
        let communicator = join(&sentinel);
        reduce(&communicator, count).unwrap();
        say("ready");
        let failure = loop {
            if let Err(failure) = reduce(&communicator, count) {
                break failure;
            }
        };
        report(&failure);
        return heed();
    }
    let mut times = Vec::new();
    for _ in 0..5 {
        let mut world = World::new(test, 4);
        world.hear_all("ready");
        let died = world.kill(1);
        let (took, text) = world.learned(&[1], died);
        assert!(text.starts_with("RankLost rank 1 (host "), "{text}");
        times.extend(took);
    }
    judge(test, times);
}

/// One watches the other, so nobody watches the second one when it dies.
#[test]
fn neighbours_that_die_together_are_missed_at_once() {
    const TEST: &str = "neighbours_that_die_together_are_missed_at_once";
    if let Some(rank) = rank() {
        let sentinel = Sentinel::new();
        let communicator = join(&sentinel);
        reduce(&communicator, 4).unwrap();
        say("ready");
        if rank == 2 {
            heed();
        }
        // Waits only for the second one.
        let outcome = if rank == 0 { receive(2, &communicator) } else { reduce(&communicator, 4) };
        report(&outcome.unwrap_err());
        return heed();
    }
    let mut times = Vec::new();
    for _ in 0..5 {
        let mut world = World::new(TEST, 5);
        world.hear_all("ready");
        world.ranks.iter().for_each(Rank::wait_until_asleep);
        world.kill(1);
        let died = world.kill(2);
        let (took, text) = world.learned(&[1, 2], died);
        assert!(text.starts_with("RankLost rank"), "{text}");
        times.extend(took);
    }
    judge(TEST, times);
}

#[test]
fn what_the_dead_had_sent_is_received() {
    const TEST: &str = "what_the_dead_had_sent_is_received";
    if let Some(rank) = rank() {
        let sentinel = Sentinel::new();
        let communicator = join(&sentinel);
        if rank == 1 {
            (0..3).for_each(|_| send(0, &communicator).unwrap());
            say("ready");
            return heed();
        }
        say("ready");
        heed();
        (0..3).for_each(|_| receive(1, &communicator).unwrap());
        let began = now_ns();
        report(&receive(1, &communicator).unwrap_err());
        say(&began.to_string());
        return heed();
    }
    let mut world = World::new(TEST, 2);
    world.hear_all("ready");
    world.kill(1);
    world.ranks[1].child.wait().unwrap();
    world.ranks[0].tell();
    let (learned, text) = world.ranks[0].learned(0);
    let began = Duration::from_nanos(world.ranks[0].hear().parse().unwrap());
    assert!(text.starts_with("RankLost rank 1"), "{text}");
    judge(TEST, vec![learned - began]);
}

/// A rank that left in order is missed by nobody that does not wait for it.
#[test]
fn a_rank_that_left_in_order_is_no_loss() {
    const TEST: &str = "a_rank_that_left_in_order_is_no_loss";
    if let Some(rank) = rank() {
        let sentinel = Sentinel::new();
        let communicator = join(&sentinel);
        reduce(&communicator, 4).unwrap();
        if rank == 1 {
            drop(communicator);
            return say("done");
        }
        say("ready");
        heed();
        for _ in 0..10 {
            if rank == 0 {
                send(2, &communicator).unwrap();
                receive(2, &communicator).unwrap();
            } else {
                receive(0, &communicator).unwrap();
                send(0, &communicator).unwrap();
            }
        }
        assert_eq!(communicator.failure(), None);
        return say("done");
    }
    let mut world = World::new(TEST, 3);
    assert_eq!(world.ranks[1].hear(), "done");
    world.ranks[1].child.wait().unwrap();
    for rank in [0, 2] {
        assert_eq!(world.ranks[rank].hear(), "ready");
        world.ranks[rank].tell();
    }
    for rank in [0, 2] {
        assert_eq!(world.ranks[rank].hear(), "done");
        assert!(world.ranks[rank].child.wait().unwrap().success());
    }
}

/// A rank that comes after another's process has ended is told that the other left.
#[test]
fn a_rank_that_left_in_order_is_not_lost() {
    const TEST: &str = "a_rank_that_left_in_order_is_not_lost";
    if let Some(rank) = rank() {
        let sentinel = Sentinel::new();
        let communicator = join(&sentinel);
        say("ready");
        heed();
        if rank == 1 {
            return communicator.shutdown();
        }
        return report(&reduce(&communicator, 4).unwrap_err());
    }
    let mut world = World::new(TEST, 2);
    world.hear_all("ready");
    world.ranks[1].tell();
    world.ranks[1].child.wait().unwrap();
    world.ranks[0].tell();
    let (_, text) = world.learned(&[1], 0);
    assert!(text.starts_with("Deadlock rank 1 (host ") && text.contains(") destroyed dp0 before "), "{text}");
}

/// The thread and the descriptors are there only while they are needed.
#[test]
fn a_sentinel_leaves_nothing() {
    const TEST: &str = "a_sentinel_leaves_nothing";
    fn threads_and_descriptors() -> [usize; 2] {
        ["/proc/self/task", "/proc/self/fd"].map(|list| std::fs::read_dir(list).unwrap().count())
    }
    if rank().is_some() {
        let sentinel = Sentinel::new();
        let before = threads_and_descriptors();
        for _ in 0..3 {
            let communicator = join(&sentinel);
            reduce(&communicator, 4).unwrap();
            // A thread; what wakes it, and the other rank.
            assert_eq!(threads_and_descriptors(), [before[0] + 1, before[1] + 2]);
            // All have it before the next one takes its place in the store.
            say("made");
            heed();
            drop(communicator);
            assert_eq!(threads_and_descriptors(), before);
            say("gone");
            heed();
        }
        return;
    }
    let mut world = World::new(TEST, 2);
    for _ in 0..3 {
        world.hear_all("made");
        world.ranks.iter_mut().for_each(Rank::tell);
        world.hear_all("gone");
        for entry in std::fs::read_dir(&world.directory).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
        world.ranks.iter_mut().for_each(Rank::tell);
    }
    for rank in &mut world.ranks {
        assert!(rank.child.wait().unwrap().success());
    }
}
