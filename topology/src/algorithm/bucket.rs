//! Bucket: dimension by dimension over a grid, every link in both directions at once.
//!
//! Every chunk is cut into 2d parts, one for each of the d dimensions to begin with and each way around; each
//! part has a channel of its own, so that all 2d links of a rank are busy in every phase (Jain and
//! Sabharwal, "Optimal bucket algorithms for large MPI collectives on torus interconnects", ICS 2010). In a
//! grid where no dimension wraps d parts do: along a line each part already goes both ways.
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

use super::lane::{Direction, GridLane, lane_count, lanes};
use super::load::{Cuts, Load, check};
use super::walk::{Round, Walk};
use super::{all_to_all, spread, sweep};
use crate::schedule::{Action, Algorithm, Block, Collective, Schedule, ScheduleTraffic, Step, Tensor};
use crate::shape::Grid;

/// The schedule of one rank of a grid.
///
/// # Panics
/// As [`super::schedule`].
pub fn schedule(collective: Collective, grid: &Grid, rank: u32) -> Schedule {
    let ranks = grid.ranks();
    check(collective, ranks, rank);
    let channel = |lane: GridLane| match collective {
        Collective::Broadcast { root } => spread::steps(&lane, grid, root, rank),
        Collective::AllToAll => all_to_all::along_dimensions(&lane, grid, rank),
        _ => sweep_steps(Walk::new(&lane, grid, rank), collective),
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

/// Returns the traffic of all ranks of a grid: for each part and each directed link, the chunks that cross
/// it.
pub fn traffic(collective: Collective, grid: &Grid, tensor: Tensor) -> ScheduleTraffic {
    let ranks = grid.ranks();
    let chunks = if collective == Collective::AllToAll { ranks * ranks } else { ranks };
    let cuts = Cuts { tensor, chunks, parts: lane_count(grid) };
    let mut traffic = ScheduleTraffic::default();
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

/// Returns the load that a schedule puts on the links of the grid.
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

fn sweep_steps(mut walk: Walk<'_>, collective: Collective) -> Vec<Step> {
    let positions = 0..walk.lane.order.len();
    if collective.reduces() {
        for position in positions.clone() {
            let way = walk.lane.way;
            let rounds = sweep::reduce_scatter(walk.dimension(position), way, walk.coordinate(position));
            rounds.for_each(|round| pass_slots(&mut walk, position, &round, Action::Reduce));
        }
    }
    if collective != Collective::ReduceScatter {
        for position in positions.rev() {
            let way = walk.lane.way;
            let rounds = sweep::all_gather(walk.dimension(position), way, walk.coordinate(position));
            rounds.for_each(|round| pass_slots(&mut walk, position, &round, Action::Copy));
        }
    }
    walk.into_steps()
}

fn pass_slots(walk: &mut Walk<'_>, position: usize, round: &Round<u32>, action: Action) {
    let later = position + 1..walk.lane.order.len();
    let blocks = later.map(|later| walk.dimension(later).size()).product();
    walk.round(position, round, blocks, action, |walk, slot, index| {
        block_of_slot(walk, position, slot, index)
    });
}

/// Block `index` of a slot: its chunk agrees with this rank in the dimensions before, and takes every
/// coordinate in those after.
fn block_of_slot(walk: &Walk<'_>, position: usize, slot: u32, index: u32) -> Block {
    let order = &walk.lane.order;
    let mut at = walk.at;
    at[order[position]] = slot;
    let mut rest = index;
    for later in position + 1..order.len() {
        let size = walk.dimension(later).size();
        at[order[later]] = rest % size;
        rest /= size;
    }
    Block { chunk: walk.grid.rank_at(&at), part: walk.lane.part }
}

#[derive(Clone, Copy)]
enum Sweep {
    Reduce,
    Gather,
}

fn add_sweeps(traffic: &mut ScheduleTraffic, cuts: &Cuts, lane: &GridLane, grid: &Grid, sweep: Sweep) {
    for rank in 0..grid.ranks() {
        let at = grid.coordinates(rank);
        for (position, &d) in lane.order.iter().enumerate() {
            let dimension = grid.dimensions()[d];
            for way in [Direction::Up, Direction::Down] {
                let next = match way {
                    Direction::Up => dimension.up(at[d]),
                    Direction::Down => dimension.down(at[d]),
                };
                let Some(next) = next else { continue };
                if dimension.wraps() && way != lane.way {
                    continue;
                }
                let crosses = |slot: u32| match (dimension.wraps(), sweep, way) {
                    (true, Sweep::Reduce, _) => slot != at[d],
                    (true, Sweep::Gather, _) => slot != next,
                    (false, Sweep::Reduce, Direction::Up) | (false, Sweep::Gather, Direction::Down) => {
                        slot > at[d].min(next)
                    }
                    (false, Sweep::Reduce, Direction::Down) | (false, Sweep::Gather, Direction::Up) => {
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
        // With 2d parts, half of them go up a ring; with d parts, or with 2d on a line, all of them do.
        let lanes = if dimension.wraps() { 2 * count } else { count };
        (0..count).map(starting_at).sum::<f64>() / lanes as f64
    };
    (0..count).map(share).fold(0.0, f64::max)
}
