//! Hosts that come to one round after the other, over networks of all kinds. `TPURUN_TEST_SEED` tries another seed
//! than the first, or replays the one that a failure printed; `TPURUN_TEST_SEEDS` says how many follow it.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::address::Address;
use super::super::simulation::{LONG, Sky};
use super::super::timeouts::SILENCE;
use super::super::tls::{Expected, Identity};
use super::ID;
use crate::hosts::bridge::{Bridge, Shares};
use tpurun_memory::failure::FailureKind;
use tpurun_memory::sync::Arrival;
use tpurun_protocol::authority::{Authority, RankKey};
use tpurun_protocol::frame::RankStatus;
use tpurun_protocol::hosts::Hosts;
use tpurun_protocol::network::Link;
use tpurun_protocol::segment::remote::Written;
use tpurun_protocol::segment::{Segment, Verdict};

const PLACES: [&str; 3] = ["0 1\nn0\nn1", "0 0 1 2\nn0\nn1\nn2", "0 1 2 0 3 1\nn0\nn1\nn2\nn3"];
const ROUNDS: u32 = 6;
/// Bytes of a window, with one connection between hosts and with several. Rounds of most lengths then go over all
/// connections.
const WINDOWS: [usize; 2] = [64 << 10, 600 << 10];
/// Time for everything that follows from a silence: proposals, the word of the host that decides, and looks.
const AFTER: Duration = Duration::from_secs(2);

/// The fault of the network, or of a host, while the rounds go on.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Nothing,
    /// Two hosts do not reach each other for a while, much shorter than a silence: QUIC tries again after twice as
    /// long each time, and so may find out late that it is over.
    Interruption {
        from_ms: u64,
        for_ms: u64,
    },
    /// Two hosts never reach each other again.
    Cut {
        from_ms: u64,
    },
    /// Two hosts never reach each other again over their last connection alone.
    CutOne {
        from_ms: u64,
    },
    /// A host is gone.
    Gone {
        from_ms: u64,
    },
}

#[derive(Clone, Copy, Debug)]
struct Case {
    places: &'static str,
    /// Connections between each two hosts.
    connections: usize,
    link: Link,
    fault: Fault,
    /// Whether a rank that has seen the last round leaves at once.
    leaves: bool,
}

impl Case {
    fn of(sky: &mut Sky) -> Self {
        let chance = sky.chance();
        let places = PLACES[chance.below(3) as usize];
        let mut link = Link {
            delay: Duration::from_micros(50 + chance.below(20_000)),
            jitter: Duration::from_micros([0, chance.below(20_000)][chance.below(2) as usize]),
            loss: [0, 10_000, 50_000][chance.below(3) as usize],
            duplicate: [0, 100_000][chance.below(2) as usize],
            rate: [0, 12_500_000][chance.below(2) as usize],
        };
        let connections = [1, 1, 2, 3][chance.below(4) as usize];
        let from_ms = chance.below(400);
        let fault = match chance.below(5) {
            0 => Fault::Nothing,
            1 => {
                link.loss = link.loss.min(10_000);
                Fault::Interruption { from_ms, for_ms: 1 + chance.below(SILENCE.as_millis() as u64 / 4) }
            }
            2 => Fault::Cut { from_ms },
            3 => Fault::CutOne { from_ms },
            _ => Fault::Gone { from_ms },
        };
        Self { places, connections, link, fault, leaves: chance.below(2) == 0 }
    }
}

/// The ranks of one host.
struct Ranks {
    segment: Arc<Segment>,
    window: usize,
    own: Vec<u32>,
    /// Rounds that each rank has come to.
    come: Vec<u32>,
    leaves: bool,
}

/// The bytes that a rank writes for a round.
fn bytes(rank: u32, round: u32, window: usize) -> Vec<u8> {
    let length = [0, 7, 900, window / 2][((rank + round) % 4) as usize];
    (0..length).map(|at| (at as u32 * 31 + rank * 7 + round) as u8).collect()
}

impl Ranks {
    fn new(case: Case, host: u32) -> Self {
        let (places, window) = (case.places, WINDOWS[usize::from(case.connections > 1)]);
        let ranks = places.lines().next().unwrap().split(' ').count() as u32;
        let hosts = Hosts::parse(places, ranks).unwrap();
        let (own, first) = (hosts.ranks(host).to_vec(), hosts.first(host));
        let segment = Segment::alone("dp0", ranks, window).with_hosts(hosts).of_rank(first);
        Self { segment: Arc::new(segment), window, come: vec![0; own.len()], own, leaves: case.leaves }
    }

    /// Each rank does the next thing it can. Returns whether any rank did one.
    fn go_on(&mut self) -> bool {
        let mut moved = false;
        for (index, rank) in self.own.clone().into_iter().enumerate() {
            let come = self.come[index];
            let is_open = come == 0 || self.segment.meeting().is_open(come - 1);
            if self.is_failed() || !is_open || come == ROUNDS {
                continue;
            }
            if come > 0 {
                self.check(come - 1);
            }
            self.come(rank, come);
            self.come[index] += 1;
            moved = true;
        }
        if self.leaves && self.is_done() {
            let status = RankStatus { left: u64::from(ROUNDS) + 1, ..RankStatus::default() };
            self.own.iter().for_each(|rank| self.segment.roster().put_status(*rank, &status));
            self.leaves = false;
            moved = true;
        }
        if self.segment.meeting().has_duty() && !self.is_failed() {
            self.segment.meeting().open();
            moved = true;
        }
        self.give_up_lost();
        moved
    }

    fn come(&self, rank: u32, round: u32) {
        let (segment, parity) = (&self.segment, (round % 2) as usize);
        let written = bytes(rank, round, self.window);
        segment.region().write(segment.layout().window(rank, parity), &written);
        segment.remote().set_written_by(
            rank,
            parity,
            Written { for_all: written.len(), ..Written::default() },
            &[],
        );
        segment.remote().count_written(|| {});
        if segment.meeting().arrive(segment.size()) == Arrival::Last {
            segment.meeting().open();
        }
    }

    fn check(&self, round: u32) {
        for rank in self.segment.ranks() {
            let expected = bytes(rank, round, self.window);
            let mut found = vec![0; expected.len()];
            let at = self.segment.layout().window(rank, (round % 2) as usize);
            self.segment.region().read(at, &mut found);
            assert!(found == expected, "what rank {rank} wrote for round {round}");
        }
    }

    /// Gives up as a rank does that waits for a lost one.
    fn give_up_lost(&self) {
        let come = self.come.iter().min().copied().unwrap_or(0);
        let lost: Vec<u32> =
            self.segment.ranks().filter(|rank| self.segment.roster().is_lost(*rank)).collect();
        if !lost.is_empty() && come > 0 && !self.is_failed() {
            let text = format!("{lost:?} lost, says host {}", self.segment.host());
            self.segment
                .failure_word()
                .fail_round_here(come - 1, &Verdict::new(FailureKind::RankLost, text).blaming(lost));
        }
    }

    fn is_failed(&self) -> bool {
        self.segment.meeting().is_poisoned()
    }

    fn is_done(&self) -> bool {
        self.come.iter().all(|come| *come == ROUNDS) && self.segment.meeting().is_open(ROUNDS - 1)
    }
}

fn identities(places: &str) -> Vec<(Identity, u32)> {
    let ranks = places.lines().next().unwrap().split(' ').count() as u32;
    let hosts = Hosts::parse(places, ranks).unwrap();
    let authority = Authority::new().unwrap();
    let certified = (0..hosts.count()).map(|host| {
        let (key, rank) = (RankKey::new().unwrap(), hosts.first(host));
        let certificate = authority.certify(rank, key.public()).unwrap();
        (Identity::new(Some(key.certified(authority.certificate(), &certificate))).unwrap(), rank)
    });
    certified.collect()
}

/// The end of a run: its time, the datagrams before it, and the decision of every host that is left.
#[derive(PartialEq, Eq, Debug)]
struct Outcome {
    after: Duration,
    sent: u64,
    done: Vec<bool>,
    said: BTreeSet<String>,
}

fn run(seed: u64) -> Outcome {
    let mut sky = Sky::new(seed);
    let case = Case::of(&mut sky);
    let came = std::panic::AssertUnwindSafe(|| run_case(sky, case));
    std::panic::catch_unwind(came).unwrap_or_else(|panic| {
        eprintln!("TPURUN_TEST_SEED={seed} replays it: {case:?}");
        std::panic::resume_unwind(panic)
    })
}

/// The processes of the hosts, each with a mesh for each connection.
struct Processes {
    sky: Sky,
    connections: usize,
}

impl Processes {
    fn meshes(&self, host: usize) -> Range<usize> {
        host * self.connections..(host + 1) * self.connections
    }

    fn add(&mut self, host: usize, segment: &Arc<Segment>, addresses: &[Address]) {
        let (now, connections) = (self.sky.now, self.connections);
        for (index, bridge) in Bridge::all(segment, Shares::All(connections)).into_iter().enumerate() {
            let of_connection = addresses.iter().skip(index).step_by(connections).cloned().collect();
            self.sky.mesh(host * connections + index).sessions.add(now, ID, bridge, of_connection);
        }
    }

    /// Has bridges look that others of their hosts call. Returns whether there were any.
    fn call(&mut self) -> bool {
        let (now, connections) = (self.sky.now, self.connections);
        let mut called = vec![];
        for (index, mesh) in self.sky.meshes.iter_mut().enumerate() {
            let calls = mesh.as_mut().is_some_and(|mesh| !mesh.sessions.communicators.calls().is_empty());
            let first = index - index % connections;
            match index == first {
                _ if !calls => {}
                true => called.extend(first + 1..first + connections),
                false => called.push(first),
            }
        }
        called.iter().for_each(|mesh| self.sky.mesh(*mesh).sessions.rung(now, ID));
        !called.is_empty()
    }

    fn part(&mut self, one: usize, other: usize) {
        for (one, other) in self.meshes(one).zip(self.meshes(other)) {
            self.sky.part(one, other);
        }
    }

    fn kill(&mut self, host: usize) {
        self.meshes(host).for_each(|mesh| self.sky.kill(mesh));
    }
}

fn run_case(mut sky: Sky, case: Case) -> Outcome {
    sky.links(case.link);
    let began = sky.now;
    let mut hosts: Vec<Option<Ranks>> = vec![];
    let mut addresses: Vec<Address> = vec![];
    for (identity, rank) in identities(case.places) {
        let identity = Arc::new(identity);
        for _ in 0..case.connections {
            addresses.push(sky.add(identity.clone(), Expected::default(), rank));
        }
        hosts.push(Some(Ranks::new(case, hosts.len() as u32)));
    }
    let mut processes = Processes { sky, connections: case.connections };
    for (index, ranks) in hosts.iter().enumerate() {
        processes.add(index, &ranks.as_ref().unwrap().segment, &addresses);
    }
    let (one, other) = (0, hosts.len() - 1);
    let at = |ms: u64| began + Duration::from_millis(ms);
    let mut faults: Vec<(Instant, Option<bool>)> = match case.fault {
        Fault::Nothing => vec![],
        Fault::Interruption { from_ms, for_ms } => {
            vec![(at(from_ms), Some(true)), (at(from_ms + for_ms), Some(false))]
        }
        Fault::Cut { from_ms } | Fault::CutOne { from_ms } => vec![(at(from_ms), Some(true))],
        Fault::Gone { from_ms } => vec![(at(from_ms), None)],
    };
    let until = began + LONG + AFTER;
    loop {
        while let Some((when, fault)) = faults.first().copied()
            && when <= processes.sky.now
        {
            faults.remove(0);
            match fault {
                Some(true) if matches!(case.fault, Fault::CutOne { .. }) => {
                    let last = |host: usize| (host + 1) * case.connections - 1;
                    processes.sky.part(last(one), last(other));
                }
                Some(true) => processes.part(one, other),
                Some(false) => processes.sky.heal(),
                None => {
                    processes.kill(other);
                    hosts[other] = None;
                }
            }
        }
        let mut moved = processes.call();
        for (index, ranks) in hosts.iter_mut().enumerate() {
            if let Some(ranks) = ranks
                && ranks.go_on()
            {
                moved = true;
                let (now, first) = (processes.sky.now, processes.meshes(index).start);
                processes.sky.mesh(first).sessions.rung(now, ID);
            }
        }
        if hosts.iter().flatten().all(|ranks| ranks.is_done() || is_told(ranks)) {
            break;
        }
        let next = faults.first().map_or(until, |(when, _)| *when);
        if !moved && !processes.sky.step(next) && faults.is_empty() {
            break;
        }
    }
    let done: Vec<bool> = hosts.iter().flatten().map(Ranks::is_done).collect();
    let said: BTreeSet<String> =
        hosts.iter().flatten().filter_map(|ranks| ranks.segment.failure_word().decided_now()).collect();
    let over = hosts.iter().flatten().all(|ranks| ranks.is_done() || is_told(ranks));
    assert!(over, "somebody still waits after {:?}: {done:?}, {said:?}", processes.sky.now - began);
    match case.fault {
        Fault::Nothing | Fault::Interruption { .. } => {
            assert!(done.iter().all(|done| *done), "{done:?}, {said:?}");
        }
        // A host that is done needs nobody any more.
        Fault::Gone { .. } => assert!(said.len() <= 1, "{said:?}"),
        Fault::CutOne { .. } if case.connections > 1 => assert!(said.len() <= 1, "{said:?}"),
        // Each of two hosts decides for itself. A host that reaches both, and has not left, tells both the same.
        Fault::Cut { .. } | Fault::CutOne { .. } => {
            let is_between = hosts.len() > 2 && !(case.leaves && done.contains(&true));
            assert!(said.len() <= if is_between { 1 } else { 2 }, "{said:?}");
        }
    }
    let Sky { now, .. } = processes.sky;
    Outcome { after: now - began, sent: processes.sky.sent(), done, said }
}

/// Whether the ranks of a host know why they can not go on, in the words of all others.
fn is_told(ranks: &Ranks) -> bool {
    ranks.is_failed() && ranks.segment.failure_word().has_decided()
}

fn number(name: &str, otherwise: u64) -> u64 {
    let given = std::env::var(name).ok();
    given.map_or(otherwise, |text| text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

#[test]
fn hosts_go_on_or_say_why_not() {
    let first = number("TPURUN_TEST_SEED", 1);
    for seed in first..first + number("TPURUN_TEST_SEEDS", 500) {
        run(seed);
    }
}

/// A run with the same seed has the same end.
#[test]
fn a_seed_replays() {
    for seed in 1..10 {
        assert_eq!(run(seed), run(seed), "seed {seed}");
    }
}
