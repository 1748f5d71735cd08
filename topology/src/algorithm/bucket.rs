//! Bucket: dimension by dimension over a grid, every link in both directions at once.
//!
//! Every chunk is cut into 2d parts, one for each of the d dimensions to begin with and each way around; each
//! part has a channel of its own, so that all 2d links of a rank are busy in every phase (Jain and Sabharwal,
//! "Optimal bucket algorithms for large MPI collectives on torus interconnects", ICS 2010). In a grid where no
//! dimension wraps d parts do: along a line each part already goes both ways.
//!
//! P ranks in dimensions n_1..n_d, V bytes:
//! - reduce-scatter: P-1 rounds, V(P-1)/P/2d bytes per directed link when all dimensions are equal and wrap,
//!   twice that when none does. In the phase of dimension j, rank r sends its neighbour in j the slots of
//!   the other coordinates of j, one after the other; a slot is all chunks that agree with r in the
//!   dimensions already done.
//! - all-gather: the same phases backwards, rank r passing on what it has.
//! - all-reduce: the one after the other, 2(P-1) rounds.
//! - broadcast: 2d spanning trees that share no directed link where every dimension wraps, V/2d bytes each.
//! - all-to-all: rank r passes blocks on along one dimension after the other, the shorter way around.

use super::sweep::{self, Round};
use super::{Cuts, Lane, Load, Way, all_to_all, lane_count, lanes, spread};
use crate::grid::Grid;
use crate::schedule::{Action, Algorithm, Block, Collective, Schedule, Step};
use crate::torus::Coordinates;
use crate::traffic::{Tensor, Traffic};

/// The schedule of one rank of a grid.
///
/// # Panics
/// When `rank` or the root of a broadcast is not in the grid.
pub fn schedule(collective: Collective, grid: &Grid, rank: u32) -> Schedule {
    let ranks = grid.ranks();
    assert!(rank < ranks, "rank {rank} is not one of {ranks}");
    if let Collective::Broadcast { root } = collective {
        assert!(root < ranks, "root {root} is not one of {ranks}");
    }
    let channel = |lane: Lane| match collective {
        Collective::Broadcast { root } => spread::steps(&lane, grid, root, rank),
        Collective::AllToAll => all_to_all::along_dimensions(&lane, grid, rank),
        _ => Walk::new(&lane, grid, rank).steps(collective),
    };
    Schedule {
        collective,
        algorithm: Algorithm::Bucket,
        ranks,
        rank,
        parts: lane_count(grid),
        channels: lanes(grid).map(channel).collect(),
    }
}

/// What all ranks of a grid move: for each part and each directed link, the chunks that cross it.
pub fn traffic(collective: Collective, grid: &Grid, tensor: Tensor) -> Traffic {
    let ranks = grid.ranks();
    let chunks = if collective == Collective::AllToAll { ranks * ranks } else { ranks };
    let cuts = Cuts { tensor, chunks, parts: lane_count(grid) };
    let mut traffic = Traffic::default();
    for lane in lanes(grid) {
        match collective {
            Collective::Broadcast { root } => spread::add_traffic(&mut traffic, &cuts, &lane, grid, root),
            Collective::AllToAll => all_to_all::add_traffic(&mut traffic, &cuts, &lane, grid),
            Collective::ReduceScatter => add_sweeps(&mut traffic, &cuts, &lane, grid, Sweep::Reduce),
            Collective::AllGather => add_sweeps(&mut traffic, &cuts, &lane, grid, Sweep::Gather),
            Collective::AllReduce => {
                add_sweeps(&mut traffic, &cuts, &lane, grid, Sweep::Reduce);
                add_sweeps(&mut traffic, &cuts, &lane, grid, Sweep::Gather);
            }
        }
    }
    traffic
}

/// What a schedule asks of the links of the grid.
pub fn load(collective: Collective, grid: &Grid) -> Load {
    if grid.ranks() == 1 {
        return Load::NONE;
    }
    let ranks = u64::from(grid.ranks());
    let others = (ranks - 1) as f64;
    let channels = lane_count(grid);
    let once = Load { rounds: ranks - 1, busiest: sweep_share(grid), total: others, channels };
    match collective {
        Collective::ReduceScatter | Collective::AllGather => once,
        Collective::AllReduce => {
            Load { rounds: 2 * once.rounds, busiest: 2.0 * once.busiest, total: 2.0 * others, channels }
        }
        Collective::Broadcast { root } => Load {
            rounds: spread::depth(grid, root) + ranks - 1,
            busiest: spread::busiest(grid),
            total: others,
            channels,
        },
        Collective::AllToAll => Load {
            rounds: all_to_all::rounds(grid),
            busiest: all_to_all::busiest(grid),
            total: all_to_all::total(grid),
            channels,
        },
    }
}

/// One rank's way through the phases of a lane.
struct Walk<'a> {
    lane: &'a Lane,
    grid: &'a Grid,
    at: Coordinates,
    steps: Vec<Step>,
}

impl<'a> Walk<'a> {
    fn new(lane: &'a Lane, grid: &'a Grid, rank: u32) -> Self {
        Self { lane, grid, at: grid.coordinates(rank), steps: Vec::new() }
    }

    fn steps(mut self, collective: Collective) -> Vec<Step> {
        let positions = 0..self.lane.order.len();
        if collective.reduces() {
            positions.clone().for_each(|position| self.reduce_phase(position));
        }
        if collective != Collective::ReduceScatter {
            positions.rev().for_each(|position| self.gather_phase(position));
        }
        self.steps
    }

    fn reduce_phase(&mut self, position: usize) {
        let d = self.lane.order[position];
        let rounds = sweep::reduce_scatter(self.grid.dimensions()[d], self.lane.way, self.at[d]);
        self.phase(position, rounds, Action::Reduce);
    }

    fn gather_phase(&mut self, position: usize) {
        let d = self.lane.order[position];
        let rounds = sweep::all_gather(self.grid.dimensions()[d], self.lane.way, self.at[d]);
        self.phase(position, rounds, Action::Copy);
    }

    fn phase(&mut self, position: usize, rounds: impl Iterator<Item = Round>, action: Action) {
        let d = self.lane.order[position];
        let chunks_of_slot: u32 =
            self.lane.order[position + 1..].iter().map(|&later| self.size(later)).product();
        for round in rounds {
            for index in 0..chunks_of_slot {
                for pass in round.sends.iter().flatten() {
                    let to = self.grid.rank_along(&self.at, d, pass.with);
                    let block = self.block(position, pass.slot, index);
                    self.steps.push(Step::Send { to, block });
                }
                for pass in round.receives.iter().flatten() {
                    let from = self.grid.rank_along(&self.at, d, pass.with);
                    let block = self.block(position, pass.slot, index);
                    self.steps.push(Step::Receive { from, block, action });
                }
            }
        }
    }

    /// Block `index` of a slot: its chunk agrees with this rank in the dimensions before, and takes every
    /// coordinate in those after.
    fn block(&self, position: usize, slot: u32, index: u32) -> Block {
        let mut at = self.at;
        at[self.lane.order[position]] = slot;
        let mut rest = index;
        for &later in &self.lane.order[position + 1..] {
            at[later] = rest % self.size(later);
            rest /= self.size(later);
        }
        Block { chunk: self.grid.rank_at(&at), part: self.lane.part }
    }

    fn size(&self, dimension: usize) -> u32 {
        self.grid.dimensions()[dimension].size()
    }
}

#[derive(Clone, Copy)]
enum Sweep {
    Reduce,
    Gather,
}

fn add_sweeps(traffic: &mut Traffic, cuts: &Cuts, lane: &Lane, grid: &Grid, sweep: Sweep) {
    for rank in 0..grid.ranks() {
        let at = grid.coordinates(rank);
        for (position, &d) in lane.order.iter().enumerate() {
            let dimension = grid.dimensions()[d];
            for way in [Way::Up, Way::Down] {
                let next = match way {
                    Way::Up => dimension.up(at[d]),
                    Way::Down => dimension.down(at[d]),
                };
                let Some(next) = next else { continue };
                if dimension.wraps() && way != lane.way {
                    continue;
                }
                let crosses = |slot: u32| match (dimension.wraps(), sweep, way) {
                    (true, Sweep::Reduce, _) => slot != at[d],
                    (true, Sweep::Gather, _) => slot != next,
                    (false, Sweep::Reduce, Way::Up) | (false, Sweep::Gather, Way::Down) => {
                        slot > at[d].min(next)
                    }
                    (false, Sweep::Reduce, Way::Down) | (false, Sweep::Gather, Way::Up) => {
                        slot < at[d].max(next)
                    }
                };
                let earlier = &lane.order[..position];
                let bytes = (0..grid.ranks())
                    .filter(|&chunk| {
                        let goal = grid.coordinates(chunk);
                        crosses(goal[d]) && earlier.iter().all(|&e| goal[e] == at[e])
                    })
                    .map(|chunk| cuts.bytes(Block { chunk, part: lane.part }));
                traffic.add(rank, grid.rank_along(&at, d, next), bytes.sum());
            }
        }
    }
}

/// The share of V that crosses the busiest directed link in one sweep over all dimensions.
fn sweep_share(grid: &Grid) -> f64 {
    let count = grid.dimensions().len();
    let share = |d: usize| {
        let dimension = grid.dimensions()[d];
        let starting_at = |first: usize| {
            let done = (0..).map(|k| (first + k) % count).take_while(|&earlier| earlier != d);
            let done: u32 = done.map(|earlier| grid.dimensions()[earlier].size()).product();
            f64::from(dimension.size() - 1) / f64::from(done * dimension.size())
        };
        // Of 2d parts half go up a ring; of d parts, or of 2d on a line, all do.
        let lanes = if dimension.wraps() { 2 * count } else { count };
        (0..count).map(starting_at).sum::<f64>() / lanes as f64
    };
    (0..count).map(share).fold(0.0, f64::max)
}
