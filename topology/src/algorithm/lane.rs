//! How the grid algorithms divide their work: a lane for each part of a chunk.

use crate::shape::Grid;

/// How the grid algorithms divide their work: a lane for each dimension to begin with and each way around.
pub(super) fn lanes(grid: &Grid) -> impl Iterator<Item = GridLane> + '_ {
    let count = grid.dimensions().len();
    let ways = if grid.any_wraps() { &[Direction::Up, Direction::Down][..] } else { &[Direction::Up][..] };
    let starts = (0..count).flat_map(move |first| ways.iter().map(move |&way| (first, way)));
    starts.zip(0..).map(move |((first, way), part)| GridLane {
        order: (0..count).map(|k| (first + k) % count).collect(),
        way,
        part,
    })
}

pub(super) fn lane_count(grid: &Grid) -> u32 {
    let ways = if grid.any_wraps() { 2 } else { 1 };
    (grid.dimensions().len() as u32 * ways).max(1)
}

/// One part of every chunk and how it goes through the grid, on a channel of its own.
#[derive(Clone, Debug)]
pub(super) struct GridLane {
    /// Dimensions in the order they are gone through.
    pub(super) order: Vec<usize>,
    /// Which way around the dimensions that wrap.
    pub(super) way: Direction,
    pub(super) part: u32,
}

/// Which way along a dimension.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Direction {
    Up,
    Down,
}
