//! Alpha-beta cost: how long a collective takes on a machine, and how long it must take at least.
//!
//! A message costs `alpha_s` for each link it crosses and its bytes over the bandwidth of the busiest link.
//! On a host with shared memory there are no links: what counts there is how often a rank must be woken, and
//! how many bytes go through memory.

use std::collections::BTreeMap;

use crate::algorithm::{self, Load};
use crate::machine::{Machine, SharedMemory};
use crate::schedule::{Action, Algorithm, Collective, Schedule, Source, Step, Tensor};
use crate::shape::{Dimension, Placement, Stretch};

/// Seconds that a collective takes, in closed form; nothing for flat without shared memory.
///
/// `bytes` is the size of the tensor for all-reduce and broadcast, of the gathered output for all-gather, of
/// one rank's input for reduce-scatter and all-to-all.
pub fn estimate(
    algorithm: Algorithm,
    collective: Collective,
    bytes: u64,
    placement: &Placement,
    machine: &Machine,
) -> Option<f64> {
    let ranks = placement.ranks();
    let load = algorithm::load(algorithm, collective, placement);
    match (machine.shared, algorithm) {
        (Some(memory), Algorithm::Flat) => Some(flat_seconds(&load, bytes, ranks, machine, &memory)),
        (Some(memory), _) => Some(relayed_seconds(collective, &load, bytes, ranks, machine, &memory)),
        (None, Algorithm::Flat) => None,
        (None, Algorithm::Ring) if collective == Collective::AllToAll => {
            Some(direct_seconds(&load, bytes, placement, machine))
        }
        (None, Algorithm::Ring) => Some(link_seconds(&load, bytes, placement.ring_stretch(), machine)),
        (None, Algorithm::Bucket) => Some(link_seconds(&load, bytes, placement.grid_stretch(), machine)),
    }
}

/// Seconds that one rank's schedule keeps it busy on links of its own to each other rank.
///
/// The slowest channel's messages follow from each other; the bytes to and from each other rank share one
/// link in each direction. With shared memory every rank is taken to be as busy as this one.
pub fn of_schedule(schedule: &Schedule, tensor: Tensor, machine: &Machine) -> f64 {
    let bytes = |block| {
        let range = schedule.block_range(tensor.elements, block);
        (range.end - range.start) * tensor.element_bytes
    };
    let ranks = u64::from(schedule.ranks);
    let mut links: BTreeMap<(LinkSide, u32), u64> = BTreeMap::new();
    let (mut memory, mut meetings, mut rounds) = (0, 0, 0);
    for steps in &schedule.channels {
        let mut arrivals = 0;
        for step in steps {
            match step {
                Step::Send { to, block } => *links.entry((LinkSide::Out, *to)).or_default() += bytes(*block),
                Step::Receive { from, block, action } => {
                    arrivals += 1;
                    *links.entry((LinkSide::In, *from)).or_default() += bytes(*block);
                    memory += ranks * bytes(*block) * relay_passes(*action);
                }
                Step::Publish { block } => memory += ranks * 2 * bytes(*block),
                Step::Meet { fold } => {
                    meetings += 1;
                    memory += fold.iter().map(|&block| (ranks + 1) * bytes(block)).sum::<u64>();
                }
                Step::Fetch { from: Source::Folded, block, .. } => memory += ranks * 2 * bytes(*block),
                Step::Fetch { block, action, .. } => {
                    memory += ranks * bytes(*block) * if *action == Action::Copy { 2 } else { 1 };
                }
            }
        }
        rounds = rounds.max(arrivals);
    }
    match machine.shared {
        None => {
            let busiest = links.into_values().max().unwrap_or(0);
            f64::from(rounds) * machine.alpha_s + busiest as f64 / machine.link_bytes_per_s
        }
        Some(shared) => {
            let channels = schedule.channels.len() as f64;
            let wakes = f64::from(rounds) * channels * wakes_in_a_row(schedule.ranks, &shared)
                + f64::from(meetings) * (ranks - 1) as f64;
            f64::from(rounds + meetings) * machine.alpha_s
                + wakes * shared.wake_s
                + memory as f64 / shared.memory_bytes_per_s
        }
    }
}

/// A time that no algorithm can beat: neither part can be undercut.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LowerBound {
    /// Seconds for the distance between the two ranks farthest apart.
    pub latency_s: f64,
    /// Seconds for the bytes over the links.
    pub bandwidth_s: f64,
}

/// The lower bound of a collective among ranks that fill a grid of links.
///
/// - All-reduce: (P-1)·V over the E links of the grid: a reduction that repeats nothing sends each byte of
///   V P-1 times inwards and P-1 times outwards, over 2E directed links.
/// - All-gather and reduce-scatter: V·(P-1)/P into, or out of, the rank with the fewest links: 2d on a
///   torus, d in the corner of a mesh.
/// - Broadcast: V into the rank with the fewest links.
/// - All-to-all: the bytes that must cross the middle of the longest dimension: M·n/8 per link on a ring of
///   n, M·n/4 on a line.
pub fn lower_bound(
    collective: Collective,
    bytes: u64,
    placement: &Placement,
    machine: &Machine,
) -> LowerBound {
    let grid = placement.grid();
    if grid.ranks() == 1 {
        return LowerBound { latency_s: 0.0, bandwidth_s: 0.0 };
    }
    let ranks = f64::from(grid.ranks());
    let fewest_links: u32 = grid.dimensions().iter().map(|d| if d.wraps() { 2 } else { 1 }).sum();
    let per_link = match collective {
        Collective::AllReduce => (ranks - 1.0) / grid.links() as f64,
        Collective::AllGather | Collective::ReduceScatter => (ranks - 1.0) / ranks / f64::from(fewest_links),
        Collective::Broadcast { .. } => 1.0 / f64::from(fewest_links),
        Collective::AllToAll => grid.dimensions().iter().map(across_the_middle).fold(0.0, f64::max),
    };
    LowerBound {
        latency_s: f64::from(grid.diameter()) * machine.alpha_s,
        bandwidth_s: per_link * bytes as f64 / machine.link_bytes_per_s,
    }
}

/// The direction of a link, as one rank sees it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum LinkSide {
    In,
    Out,
}

fn across_the_middle(dimension: &Dimension) -> f64 {
    let half = dimension.size() / 2;
    let cuts = if dimension.wraps() { 2 } else { 1 };
    f64::from(half * (dimension.size() - half)) / f64::from(dimension.size() * cuts)
}

fn link_seconds(load: &Load, bytes: u64, stretch: Stretch, machine: &Machine) -> f64 {
    let latency = load.rounds as f64 * f64::from(stretch.hops) * machine.alpha_s;
    latency + load.busiest * f64::from(stretch.sharing) * bytes as f64 / machine.link_bytes_per_s
}

/// Pairwise exchange on real links: each round goes as far as its farthest pair, and routed dimension by
/// dimension the blocks load the links as if they were passed on that way.
fn direct_seconds(load: &Load, bytes: u64, placement: &Placement, machine: &Machine) -> f64 {
    let stretch = placement.grid_stretch();
    let routed = algorithm::load(Algorithm::Bucket, Collective::AllToAll, placement);
    let farthest = Stretch { hops: stretch.hops * placement.grid().diameter(), ..stretch };
    link_seconds(&Load { busiest: routed.busiest, ..*load }, bytes, farthest, machine)
}

fn flat_seconds(load: &Load, bytes: u64, ranks: u32, machine: &Machine, memory: &SharedMemory) -> f64 {
    let others = f64::from(ranks) - 1.0;
    load.rounds as f64 * (machine.alpha_s + others * memory.wake_s)
        + load.total * bytes as f64 / memory.memory_bytes_per_s
}

/// Messages from rank to rank through shared memory: each is copied in and out again, and what is reduced
/// goes through memory once more; in each round the ranks that share a core are woken one after the other.
fn relayed_seconds(
    collective: Collective,
    load: &Load,
    bytes: u64,
    ranks: u32,
    machine: &Machine,
    memory: &SharedMemory,
) -> f64 {
    let (reduced, copied) = (relay_passes(Action::Reduce) as f64, relay_passes(Action::Copy) as f64);
    let passes = match collective {
        Collective::AllReduce => load.total / 2.0 * (reduced + copied),
        Collective::ReduceScatter => load.total * reduced,
        _ => load.total * copied,
    };
    let wakes = f64::from(load.channels) * wakes_in_a_row(ranks, memory);
    load.rounds as f64 * (machine.alpha_s + wakes * memory.wake_s)
        + passes * bytes as f64 / memory.memory_bytes_per_s
}

fn wakes_in_a_row(ranks: u32, memory: &SharedMemory) -> f64 {
    f64::from(ranks) / f64::from(memory.cores.clamp(1, ranks))
}

/// Reads and writes of one byte that is sent through shared memory.
fn relay_passes(action: Action) -> u64 {
    match action {
        Action::Copy => 4,
        Action::Reduce => 7,
    }
}
