//! All-to-all: each rank has a block for each other one.
//!
//! Direct: rank r sends to r+k and receives from r-k, k = 1..P-1: nothing is relayed, which is right where the
//! way between any two ranks is as good as between neighbours, as on hosts.
//!
//! Along dimensions: blocks go along one dimension after the other, stored and forwarded at each rank, the
//! shorter way around a ring. Lanes begin with different dimensions, and of two equally short ways around the
//! upward lane takes one and the downward lane the other, so that on a torus of equal even sizes n every
//! directed link carries M·n/8 bytes of the M that each rank sends: the bisection bound.

use super::{Cuts, Lane, Way};
use crate::grid::Grid;
use crate::schedule::{Action, Block, Step};
use crate::torus::{Coordinates, Dimension};
use crate::traffic::Traffic;

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
pub(super) fn along_dimensions(lane: &Lane, grid: &Grid, rank: u32) -> Vec<Step> {
    let mut walk = Walk { lane, grid, at: grid.coordinates(rank), steps: Vec::new() };
    (0..lane.order.len()).for_each(|position| walk.phase(position));
    walk.steps
}

/// Every block over every link of its way.
pub(super) fn add_traffic(traffic: &mut Traffic, cuts: &Cuts, lane: &Lane, grid: &Grid) {
    let ranks = grid.ranks();
    for chunk in 0..ranks * ranks {
        let bytes = cuts.bytes(Block { chunk, part: lane.part });
        let goal = grid.coordinates(chunk % ranks);
        let mut at = grid.coordinates(chunk / ranks);
        for &d in &lane.order {
            let dimension = grid.dimensions()[d];
            let up = hops_up(dimension, at[d], goal[d]);
            let upwards = up.is_some_and(|hops| hops <= reach(dimension, lane.way, Way::Up));
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
            let far = f64::from(reach(*dimension, way, Way::Up));
            far * (far + 1.0) / 2.0
        };
        (flows(Way::Up) + flows(Way::Down)) / 2.0 / n
    };
    grid.dimensions().iter().map(share).fold(0.0, f64::max)
}

/// What all ranks send together, as a multiple of M: P times the mean distance.
pub(super) fn total(grid: &Grid) -> f64 {
    let mean = |dimension: &Dimension| {
        let n = f64::from(dimension.size());
        if dimension.wraps() { f64::from(dimension.size().pow(2) / 4) / n } else { (n * n - 1.0) / (3.0 * n) }
    };
    f64::from(grid.ranks()) * grid.dimensions().iter().map(mean).sum::<f64>()
}

/// Hops that a block at most goes up (or down) a dimension; on a tie the lane's own way is taken.
fn reach(dimension: Dimension, lane_way: Way, way: Way) -> u32 {
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

struct Walk<'a> {
    lane: &'a Lane,
    grid: &'a Grid,
    at: Coordinates,
    steps: Vec<Step>,
}

impl Walk<'_> {
    /// In round (passed, hops) every rank sends on, each way, the flow of `hops` hops that began `passed`
    /// hops before it, then receives the one that its neighbour sends.
    fn phase(&mut self, position: usize) {
        let d = self.lane.order[position];
        let dimension = self.grid.dimensions()[d];
        let far = reach(dimension, self.lane.way, Way::Up).max(reach(dimension, self.lane.way, Way::Down));
        for passed in 0..far {
            for hops in (passed + 1..=far).rev() {
                let flow_through = |at: Option<u32>, way| {
                    let allowed = hops <= reach(dimension, self.lane.way, way);
                    at.filter(|_| allowed).and_then(|at| flow(dimension, way, at, passed, hops))
                };
                let (up, down) = (dimension.up(self.at[d]), dimension.down(self.at[d]));
                let here = Some(self.at[d]);
                let sends = [(up, flow_through(here, Way::Up)), (down, flow_through(here, Way::Down))];
                let receives = [(down, flow_through(down, Way::Up)), (up, flow_through(up, Way::Down))];
                self.round(position, &sends, &receives);
            }
        }
    }

    fn round(
        &mut self,
        position: usize,
        sends: &[(Option<u32>, Option<Flow>)],
        receives: &[(Option<u32>, Option<Flow>)],
    ) {
        let d = self.lane.order[position];
        let present = |(with, flow): &(Option<u32>, Option<Flow>)| Some(((*with)?, (*flow)?));
        let sends: Vec<_> = sends.iter().filter_map(present).collect();
        let receives: Vec<_> = receives.iter().filter_map(present).collect();
        if sends.is_empty() && receives.is_empty() {
            return;
        }
        for index in 0..self.grid.ranks() / self.grid.dimensions()[d].size() {
            for &(with, flow) in &sends {
                let to = self.grid.rank_along(&self.at, d, with);
                let block = self.block(position, flow, index);
                self.steps.push(Step::Send { to, block });
            }
            for &(with, flow) in &receives {
                let from = self.grid.rank_along(&self.at, d, with);
                let block = self.block(position, flow, index);
                self.steps.push(Step::Receive { from, block, action: Action::Copy });
            }
        }
    }

    /// Block `index` of a flow: what has come here began anywhere in the dimensions already done, and goes
    /// anywhere in those still to do.
    fn block(&self, position: usize, flow: Flow, index: u32) -> Block {
        let (mut source, mut goal) = (self.at, self.at);
        let mut rest = index;
        for (k, &d) in self.lane.order.iter().enumerate() {
            if k == position {
                (source[d], goal[d]) = (flow.from, flow.to);
                continue;
            }
            let size = self.grid.dimensions()[d].size();
            let free = if k < position { &mut source[d] } else { &mut goal[d] };
            *free = rest % size;
            rest /= size;
        }
        let chunk = self.grid.rank_at(&source) * self.grid.ranks() + self.grid.rank_at(&goal);
        Block { chunk, part: self.lane.part }
    }
}

/// The flow of `hops` hops that began `passed` hops before `at`, if the dimension has it.
fn flow(dimension: Dimension, way: Way, at: u32, passed: u32, hops: u32) -> Option<Flow> {
    let n = dimension.size();
    let step = |from: u32, by: u32, way: Way| match (dimension.wraps(), way) {
        (true, Way::Up) => Some((from + by) % n),
        (true, Way::Down) => Some((from + n - by) % n),
        (false, Way::Up) => Some(from + by).filter(|&to| to < n),
        (false, Way::Down) => from.checked_sub(by),
    };
    let against = if way == Way::Up { Way::Down } else { Way::Up };
    let from = step(at, passed, against)?;
    Some(Flow { from, to: step(from, hops, way)? })
}
