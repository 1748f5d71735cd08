//! All-to-all: each rank has a block for each other one.
//!
//! Direct: rank r sends to r+k and receives from r-k, k = 1..P-1: nothing is relayed, which is right where
//! the way between any two ranks is as good as between neighbours, as on hosts.
//!
//! Along dimensions: blocks go along one dimension after the other, stored and forwarded at each rank, the
//! shorter way around a ring. Lanes begin with different dimensions, and of two equally short ways around the
//! upward lane takes one and the downward lane the other, so that on a torus of equal even sizes n every
//! directed link carries M·n/8 bytes of the M that each rank sends: the bisection bound.

use super::lane::{Direction, GridLane};
use super::load::Cuts;
use super::walk::{Pass, Round, Walk};
use crate::schedule::{Action, Block, ScheduleTraffic, Step};
use crate::shape::{Dimension, Grid};

/// Rank r sends block r→r+k and receives block r-k→r, for k = 1..P-1.
pub(super) fn direct(ranks: u32, rank: u32) -> Vec<Step> {
    let exchange = |k: u32| {
        let (to, from) = ((rank + k) % ranks, (rank + ranks - k) % ranks);
        let sent = Block { chunk: rank * ranks + to, part: 0 };
        let received = Block { chunk: from * ranks + rank, part: 0 };
        [Step::Send { to, block: sent }, Step::Receive { from, block: received, action: Action::Copy }]
    };
    (1..ranks).flat_map(exchange).collect()
}

/// Rank r passes on, dimension after dimension, all blocks that have come as far as r.
pub(super) fn along_dimensions(lane: &GridLane, grid: &Grid, rank: u32) -> Vec<Step> {
    let mut walk = Walk::new(lane, grid, rank);
    for position in 0..lane.order.len() {
        let dimension = walk.dimension(position);
        let blocks = grid.ranks() / dimension.size();
        for round in rounds_of_flows(dimension, lane.way, walk.coordinate(position)) {
            let name = |walk: &Walk<'_>, flow, index| block_of_flow(walk, position, flow, index);
            walk.round(position, &round, blocks, Action::Copy, name);
        }
    }
    walk.into_steps()
}

/// Every block over every link of its way.
pub(super) fn add_traffic(traffic: &mut ScheduleTraffic, cuts: &Cuts, lane: &GridLane, grid: &Grid) {
    let ranks = grid.ranks();
    for chunk in 0..ranks * ranks {
        let bytes = cuts.bytes(Block { chunk, part: lane.part });
        let goal = grid.coordinates(chunk % ranks);
        let mut at = grid.coordinates(chunk / ranks);
        for &d in &lane.order {
            let dimension = grid.dimensions()[d];
            let up = hops_up(dimension, at[d], goal[d]);
            let upwards = up.is_some_and(|hops| hops <= reach(dimension, lane.way, Direction::Up));
            while at[d] != goal[d] {
                let next = if upwards { dimension.up(at[d]) } else { dimension.down(at[d]) };
                let next = next.expect("the goal lies on the way");
                traffic.add(grid.rank_at(&at), grid.rank_along(&at, d, next), bytes);
                at[d] = next;
            }
        }
    }
}

/// Rounds of one lane, at most: hops of all flows of a line or ring, for each of its P/n blocks.
pub(super) fn rounds(grid: &Grid) -> u64 {
    let phase = |dimension: &Dimension| {
        let far = u64::from(dimension.diameter());
        u64::from(grid.ranks() / dimension.size()) * far * (far + 1) / 2
    };
    grid.dimensions().iter().map(phase).sum()
}

/// The share of M, the bytes each rank sends, over the busiest directed link.
pub(super) fn busiest(grid: &Grid) -> f64 {
    let share = |dimension: &Dimension| {
        let n = f64::from(dimension.size());
        if !dimension.wraps() {
            let half = f64::from(dimension.size() / 2);
            return half * (n - half) / n;
        }
        let flows = |way| {
            let far = f64::from(reach(*dimension, way, Direction::Up));
            far * (far + 1.0) / 2.0
        };
        (flows(Direction::Up) + flows(Direction::Down)) / 2.0 / n
    };
    grid.dimensions().iter().map(share).fold(0.0, f64::max)
}

/// Returns the data that all ranks send together, as a multiple of M: P times the mean distance.
pub(super) fn total(grid: &Grid) -> f64 {
    let mean = |dimension: &Dimension| {
        let n = f64::from(dimension.size());
        if dimension.wraps() { f64::from(dimension.size().pow(2) / 4) / n } else { (n * n - 1.0) / (3.0 * n) }
    };
    f64::from(grid.ranks()) * grid.dimensions().iter().map(mean).sum::<f64>()
}

/// Hops that a block at most goes up (or down) a dimension; on a tie the lane's own way is taken.
fn reach(dimension: Dimension, lane_way: Direction, way: Direction) -> u32 {
    let n = dimension.size();
    match dimension.wraps() {
        false => n - 1,
        true if way == lane_way => n / 2,
        true => (n - 1) / 2,
    }
}

/// Hops from one coordinate to another going up, if that leads there.
fn hops_up(dimension: Dimension, from: u32, to: u32) -> Option<u32> {
    if to >= from { Some(to - from) } else { dimension.wraps().then(|| to + dimension.size() - from) }
}

/// Blocks that go from coordinate `from` to coordinate `to` of the dimension of a phase.
#[derive(Clone, Copy)]
struct Flow {
    from: u32,
    to: u32,
}

/// In round (passed, hops) every rank sends on, each way, the flow of `hops` hops that began `passed` hops
/// before it, then receives the one that its neighbour sends.
fn rounds_of_flows(dimension: Dimension, lane_way: Direction, at: u32) -> impl Iterator<Item = Round<Flow>> {
    // Where the ways differ, the lane's own reaches farther.
    let far = reach(dimension, lane_way, lane_way);
    let (up, down) = (dimension.up(at), dimension.down(at));
    (0..far).flat_map(move |passed| {
        (passed + 1..=far).rev().map(move |hops| {
            let pass = |with: Option<u32>, through: Option<u32>, way| {
                let what = flow(dimension, way, through?, passed, hops)?;
                (hops <= reach(dimension, lane_way, way)).then_some(Pass { with: with?, what })
            };
            Round {
                sends: [pass(up, Some(at), Direction::Up), pass(down, Some(at), Direction::Down)],
                receives: [pass(down, down, Direction::Up), pass(up, up, Direction::Down)],
            }
        })
    })
}

/// Block `index` of a flow: what has come here began anywhere in the dimensions already done, and goes
/// anywhere in those still to do.
fn block_of_flow(walk: &Walk<'_>, position: usize, flow: Flow, index: u32) -> Block {
    let (mut source, mut goal) = (walk.at, walk.at);
    let mut rest = index;
    for (k, &d) in walk.lane.order.iter().enumerate() {
        if k == position {
            (source[d], goal[d]) = (flow.from, flow.to);
            continue;
        }
        let size = walk.dimension(k).size();
        let free = if k < position { &mut source[d] } else { &mut goal[d] };
        *free = rest % size;
        rest /= size;
    }
    let chunk = walk.grid.rank_at(&source) * walk.grid.ranks() + walk.grid.rank_at(&goal);
    Block { chunk, part: walk.lane.part }
}

/// The flow of `hops` hops that began `passed` hops before `at`, if the dimension has it.
fn flow(dimension: Dimension, way: Direction, at: u32, passed: u32, hops: u32) -> Option<Flow> {
    let n = dimension.size();
    let step = |from: u32, by: u32, way: Direction| match (dimension.wraps(), way) {
        (true, Direction::Up) => Some((from + by) % n),
        (true, Direction::Down) => Some((from + n - by) % n),
        (false, Direction::Up) => Some(from + by).filter(|&to| to < n),
        (false, Direction::Down) => from.checked_sub(by),
    };
    let against = if way == Direction::Up { Direction::Down } else { Direction::Up };
    let from = step(at, passed, against)?;
    Some(Flow { from, to: step(from, hops, way)? })
}
