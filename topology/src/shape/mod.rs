//! Shapes: tori and grids, the ways through them, and where the ranks of a communicator sit.
//!
//! This room knows no collective and no machine: it counts links and never says what one takes.

mod grid;
mod placement;
mod route;
mod torus;

pub use grid::Grid;
pub use placement::{Arrangement, Placement, PlacementError, Stretch};
pub use route::Router;
pub use torus::{Coordinates, Dimension, Link, MAX_CHIPS, MAX_DIMENSIONS, TopologyError, Torus};
