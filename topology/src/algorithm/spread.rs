//! Spanning trees that a broadcast is pipelined through, one tree for each lane.
//!
//! The tree of a lane with dimensions o, p, q in its order: the root passes on along o only. From every rank
//! of that row it goes along p, from there along q. That reaches all ranks but those beside the root, which
//! agree with it in o; they get it from their neighbour in o. A row along j is used by the one lane whose o
//! is the first dimension after j (going around) in which the row and the root differ: where every
//! dimension wraps no two lanes share a directed link, and each link carries V/2d bytes, the lower bound.

use super::lane::{Direction, GridLane};
use super::load::Cuts;
use crate::schedule::{Action, Block, ScheduleTraffic, Step};
use crate::shape::{Coordinates, Dimension, Grid};

/// Rank r receives chunk c from its parent, then sends it to its children, for c = 0..P.
pub(super) fn steps(lane: &GridLane, grid: &Grid, root: u32, rank: u32) -> Vec<Step> {
    let tree = Tree { lane, grid, root: grid.coordinates(root) };
    let at = grid.coordinates(rank);
    let parent = tree.parent(&at).map(|parent| grid.rank_at(&parent));
    let children = tree.children(&at);
    let blocks = (0..grid.ranks()).map(|chunk| Block { chunk, part: lane.part });
    let chunk_steps = |block| {
        let receive = parent.map(|from| Step::Receive { from, block, action: Action::Copy });
        let sends = children.iter().map(move |&to| Step::Send { to, block });
        receive.into_iter().chain(sends)
    };
    blocks.flat_map(chunk_steps).collect()
}

/// Every rank but the root receives the lane's part of the tensor once.
pub(super) fn add_traffic(
    traffic: &mut ScheduleTraffic,
    cuts: &Cuts,
    lane: &GridLane,
    grid: &Grid,
    root: u32,
) {
    let tree = Tree { lane, grid, root: grid.coordinates(root) };
    let bytes = (0..grid.ranks()).map(|chunk| cuts.bytes(Block { chunk, part: lane.part })).sum();
    for rank in 0..grid.ranks() {
        if let Some(parent) = tree.parent(&grid.coordinates(rank)) {
            traffic.add(grid.rank_at(&parent), rank, bytes);
        }
    }
}

/// Hops from the root to the rank that hears last.
pub(super) fn depth(grid: &Grid, root: u32) -> u64 {
    let at = grid.coordinates(root);
    let reach = |d: usize| {
        let dimension = grid.dimensions()[d];
        let last = dimension.size() - 1;
        u64::from(if dimension.wraps() { last } else { at[d].max(last - at[d]) })
    };
    let dimensions = 0..grid.dimensions().len();
    let across: u64 = dimensions.clone().map(reach).sum();
    // Those beside the root come last, one hop after a whole way around where the first dimension wraps.
    let beside = dimensions.clone().map(|first| {
        let entry = if grid.dimensions()[first].wraps() { reach(first) } else { 1 };
        entry + across - reach(first) + 1
    });
    if dimensions.len() > 1 { across.max(beside.max().unwrap_or(0)) } else { across }
}

/// The share of V over the busiest directed link.
pub(super) fn busiest(grid: &Grid) -> f64 {
    let dimensions = grid.dimensions();
    let lanes = if dimensions.iter().all(|d| d.wraps()) { 2 * dimensions.len() } else { dimensions.len() };
    1.0 / lanes as f64
}

struct Tree<'a> {
    lane: &'a GridLane,
    grid: &'a Grid,
    root: Coordinates,
}

impl Tree<'_> {
    fn parent(&self, at: &Coordinates) -> Option<Coordinates> {
        let order = &self.lane.order;
        let last = order.iter().rev().find(|&&d| at[d] != self.root[d])?;
        let first = order[0];
        let mut parent = *at;
        if at[first] == self.root[first] {
            parent[first] = self.beside(first);
        } else {
            parent[*last] = self.before(*last, at[*last]);
        }
        Some(parent)
    }

    fn children(&self, at: &Coordinates) -> Vec<u32> {
        let mut children = Vec::new();
        for (d, dimension) in self.grid.dimensions().iter().enumerate() {
            for coordinate in [dimension.up(at[d]), dimension.down(at[d])].into_iter().flatten() {
                let mut child = *at;
                child[d] = coordinate;
                if self.parent(&child) == Some(*at) {
                    children.push(self.grid.rank_at(&child));
                }
            }
        }
        children
    }

    /// The coordinate that passes on to `at` along a row that starts at the root's coordinate.
    fn before(&self, d: usize, at: u32) -> u32 {
        match (self.dimension(d).wraps(), self.lane.way) {
            (true, way) => self.back(d, at, way),
            (false, _) if at > self.root[d] => at - 1,
            (false, _) => at + 1,
        }
    }

    /// The coordinate in the lane's first dimension that passes on to those beside the root.
    fn beside(&self, d: usize) -> u32 {
        let (dimension, root) = (self.dimension(d), self.root[d]);
        let (up, down) = (dimension.up(root), dimension.down(root));
        match (dimension.wraps(), self.lane.way) {
            (true, way) => self.back(d, root, way),
            (false, Direction::Up) => up.or(down).expect("a dimension of a grid has two ranks at least"),
            (false, Direction::Down) => down.or(up).expect("a dimension of a grid has two ranks at least"),
        }
    }

    fn back(&self, d: usize, at: u32, way: Direction) -> u32 {
        let previous = match way {
            Direction::Up => self.dimension(d).down(at),
            Direction::Down => self.dimension(d).up(at),
        };
        previous.expect("a ring has a coordinate before every other")
    }

    fn dimension(&self, d: usize) -> Dimension {
        self.grid.dimensions()[d]
    }
}
