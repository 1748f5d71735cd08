//! The grid of one communicator: its ranks as a box of rows, columns and planes.

use super::torus::{Coordinates, Dimension, coordinates_of, index_of};

/// The ranks of a communicator arranged as a grid, in whatever order they fill it.
///
/// Dimensions of one rank carry nothing and are left out, so a grid of a single rank has no dimension.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Grid {
    dimensions: Vec<Dimension>,
    /// Absent when rank r sits at place r.
    order: Option<Order>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Order {
    rank_at: Vec<u32>,
    place_of: Vec<u32>,
}

impl Grid {
    /// A grid whose ranks fill it row major.
    pub fn new(dimensions: &[Dimension]) -> Self {
        Self { dimensions: dimensions.iter().copied().filter(|d| d.size() > 1).collect(), order: None }
    }

    /// A grid where `rank_at[place]` is the rank at each row-major place.
    ///
    /// # Panics
    /// When `rank_at` is not a permutation of the grid's places.
    pub fn with_order(dimensions: &[Dimension], rank_at: Vec<u32>) -> Self {
        let mut grid = Self::new(dimensions);
        assert_eq!(rank_at.len(), grid.ranks() as usize, "one rank for each place of the grid");
        if rank_at.iter().enumerate().any(|(place, &rank)| place != rank as usize) {
            let mut place_of = vec![u32::MAX; rank_at.len()];
            for (place, &rank) in (0..).zip(&rank_at) {
                assert_eq!(place_of[rank as usize], u32::MAX, "rank {rank} sits at two places");
                place_of[rank as usize] = place;
            }
            grid.order = Some(Order { rank_at, place_of });
        }
        grid
    }

    /// A ring in rank order.
    pub fn ring(ranks: u32) -> Self {
        Self::new(&[Dimension::ring(ranks)])
    }

    /// Its dimensions, all longer than one rank, slowest first.
    pub fn dimensions(&self) -> &[Dimension] {
        &self.dimensions
    }

    /// How many ranks it holds.
    pub fn ranks(&self) -> u32 {
        self.dimensions.iter().map(|d| d.size()).product()
    }

    /// Where a rank sits.
    pub fn coordinates(&self, rank: u32) -> Coordinates {
        let place = self.order.as_ref().map_or(rank, |order| order.place_of[rank as usize]);
        coordinates_of(&self.dimensions, place)
    }

    /// The rank at a place.
    pub fn rank_at(&self, at: &Coordinates) -> u32 {
        let place = index_of(&self.dimensions, at);
        self.order.as_ref().map_or(place, |order| order.rank_at[place as usize])
    }

    /// The rank at `at` with one coordinate replaced.
    pub fn rank_along(&self, at: &Coordinates, dimension: usize, coordinate: u32) -> u32 {
        let mut other = *at;
        other[dimension] = coordinate;
        self.rank_at(&other)
    }

    /// Undirected links between neighbours of the grid.
    pub fn links(&self) -> u64 {
        let ranks = u64::from(self.ranks());
        self.dimensions.iter().map(|d| ranks / u64::from(d.size()) * u64::from(d.links())).sum()
    }

    /// Hops between the two ranks that are farthest apart.
    pub fn diameter(&self) -> u32 {
        self.dimensions.iter().map(|d| d.diameter()).sum()
    }

    /// Whether at least one dimension wraps, so that the two ways around it carry different blocks.
    pub(crate) fn any_wraps(&self) -> bool {
        self.dimensions.iter().any(|d| d.wraps())
    }
}
