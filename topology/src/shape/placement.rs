//! Where the ranks of a communicator sit on the torus, and what it costs to go from one to the next.

use std::collections::{BTreeMap, BTreeSet};

use super::grid::Grid;
use super::route::Router;
use super::torus::{Dimension, Torus};

/// How the neighbours of a pattern lie on the real links.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stretch {
    /// Links between the two neighbours that are farthest apart.
    pub hops: u32,
    /// Neighbour pairs whose routes share the busiest directed link.
    pub sharing: u32,
}

impl Stretch {
    /// Every neighbour one link away, on a link of its own.
    pub const UNIT: Self = Self { hops: 1, sharing: 1 };
}

/// The form that the ranks of a communicator have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrangement {
    /// They are a box of the torus: every combination of some coordinates of each dimension.
    Grid,
    /// They are anything else, taken as a ring in rank order.
    Ring,
}

/// The ranks of one communicator on the torus; built once for a communicator, used for each of its plans.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placement {
    grid: Grid,
    arrangement: Arrangement,
    grid_stretch: Stretch,
    ring_stretch: Stretch,
}

impl Placement {
    /// Places the communicator whose rank r is world rank `world_ranks[r]`.
    ///
    /// When the ranks are a box of the torus, a dimension of the box wraps where it covers a whole wrapping
    /// dimension of the torus. Takes O(ranks × hops between neighbours) time.
    ///
    /// # Errors
    /// When the group is empty, names a rank twice or one without a chip, or dead links cut it in two.
    pub fn new(torus: &Torus, world_ranks: &[u32]) -> Result<Self, PlacementError> {
        let chips = chips_of(torus, world_ranks)?;
        let router = Router::new(torus);
        let ring = neighbours_on_ring(&chips);
        let ring_stretch = stretch(&router, ring.iter().copied())?;
        Ok(match find_box(torus, &chips) {
            Some(grid) => {
                let hops = neighbours_on_grid(&grid).map(|(a, b)| (chips[a as usize], chips[b as usize]));
                let grid_stretch = stretch(&router, hops)?;
                Self { grid, arrangement: Arrangement::Grid, grid_stretch, ring_stretch }
            }
            None => {
                let grid = Grid::ring(chips.len() as u32);
                Self { grid, arrangement: Arrangement::Ring, grid_stretch: ring_stretch, ring_stretch }
            }
        })
    }

    /// Ranks of which nothing is known but their number: a ring in rank order.
    ///
    /// # Panics
    /// When there are no ranks.
    pub fn ring(ranks: u32) -> Self {
        assert!(ranks > 0, "a communicator has at least one rank");
        let grid = Grid::ring(ranks);
        Self {
            grid,
            arrangement: Arrangement::Ring,
            grid_stretch: Stretch::UNIT,
            ring_stretch: Stretch::UNIT,
        }
    }

    /// How many ranks the communicator has.
    pub fn ranks(&self) -> u32 {
        self.grid.ranks()
    }

    /// The ranks as a grid; an [`Arrangement::Ring`] has one dimension.
    pub fn grid(&self) -> &Grid {
        &self.grid
    }

    /// Returns the form that the ranks have.
    pub fn arrangement(&self) -> Arrangement {
        self.arrangement
    }

    /// How the neighbours of the grid lie on the links.
    pub fn grid_stretch(&self) -> Stretch {
        self.grid_stretch
    }

    /// How the neighbours in rank order lie on the links.
    pub fn ring_stretch(&self) -> Stretch {
        self.ring_stretch
    }
}

/// Why a communicator cannot be placed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// A group of nobody.
    #[error("group has 0 ranks, expected at least 1")]
    Empty,
    /// A rank that is in the group twice.
    #[error("group names rank {rank} twice, expected each rank once")]
    RankTwice {
        /// The world rank.
        rank: u32,
    },
    /// A rank that no chip is left for.
    #[error("group names rank {rank}, expected a rank below the {chips} chips of topology {topology}")]
    NoSuchRank {
        /// The world rank.
        rank: u32,
        /// The working chips.
        chips: u32,
        /// The shape.
        topology: String,
    },
    /// Dead links and chips leave no way between two members.
    #[error("no working link leads from chip {from} to chip {to} on topology {topology}")]
    Unreachable {
        /// The chip of one member.
        from: u32,
        /// The chip of the other.
        to: u32,
        /// The shape.
        topology: String,
    },
}

fn chips_of(torus: &Torus, world_ranks: &[u32]) -> Result<Vec<u32>, PlacementError> {
    if world_ranks.is_empty() {
        return Err(PlacementError::Empty);
    }
    let mut seen = BTreeSet::new();
    let place = |&rank: &u32| {
        if !seen.insert(rank) {
            return Err(PlacementError::RankTwice { rank });
        }
        torus.chip_of_rank(rank).ok_or_else(|| PlacementError::NoSuchRank {
            rank,
            chips: torus.live_chips(),
            topology: torus.to_string(),
        })
    };
    world_ranks.iter().map(place).collect()
}

fn find_box(torus: &Torus, chips: &[u32]) -> Option<Grid> {
    let mut taken = vec![BTreeSet::new(); torus.dimensions().len()];
    for &chip in chips {
        let at = torus.coordinates(chip);
        taken.iter_mut().zip(at).for_each(|(set, coordinate)| {
            set.insert(coordinate);
        });
    }
    // The chips differ from each other, so as many as the box has places fill the box.
    if taken.iter().map(|set| set.len() as u64).product::<u64>() != chips.len() as u64 {
        return None;
    }
    let dimensions = torus.dimensions().iter().zip(&taken).map(|(whole, set)| {
        let size = set.len() as u32;
        if whole.wraps() && size == whole.size() { Dimension::ring(size) } else { Dimension::line(size) }
    });
    // Sorted by chip, the members fill the box row major: so does the numbering of the chips.
    let mut rank_at: Vec<u32> = (0..chips.len() as u32).collect();
    rank_at.sort_unstable_by_key(|&rank| chips[rank as usize]);
    Some(Grid::with_order(&dimensions.collect::<Vec<_>>(), rank_at))
}

fn neighbours_on_ring(chips: &[u32]) -> Vec<(u32, u32)> {
    match chips {
        [_] => vec![],
        // The way back is the same link.
        &[a, b] => vec![(a, b)],
        _ => chips.iter().copied().zip(chips.iter().copied().cycle().skip(1)).collect(),
    }
}

fn neighbours_on_grid(grid: &Grid) -> impl Iterator<Item = (u32, u32)> + '_ {
    (0..grid.ranks()).flat_map(move |rank| {
        let at = grid.coordinates(rank);
        grid.dimensions().iter().enumerate().filter_map(move |(d, dimension)| {
            dimension.up(at[d]).map(|next| (rank, grid.rank_along(&at, d, next)))
        })
    })
}

fn stretch(router: &Router<'_>, pairs: impl Iterator<Item = (u32, u32)>) -> Result<Stretch, PlacementError> {
    let mut stretch = Stretch::UNIT;
    let mut load: BTreeMap<(u32, u32), u32> = BTreeMap::new();
    for (a, b) in pairs {
        // Neighbours send both ways at once.
        for (from, to) in [(a, b), (b, a)] {
            let way = router.route(from, to).ok_or_else(|| PlacementError::Unreachable {
                from,
                to,
                topology: router.torus().to_string(),
            })?;
            stretch.hops = stretch.hops.max(way.len() as u32 - 1);
            for hop in way.windows(2) {
                *load.entry((hop[0], hop[1])).or_default() += 1;
            }
        }
    }
    stretch.sharing = load.into_values().max().unwrap_or(1);
    Ok(stretch)
}
