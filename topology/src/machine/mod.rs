//! Machines: what their links and their memory take, and the slices that are for sale.
//!
//! This room knows shapes; it knows no schedule, and nothing of what a collective costs.

mod fabric;
mod presets;

pub use fabric::{Machine, SharedMemory};
pub use presets::{CHIPS, Chip, Topology};
