//! The eager runtime of one rank: device memory, and CPU memory that ranks share.
//!
//! A tensor on device `tpu` lives in the arena of its process, which the other ranks of the host can map.
//! [`Heap`] decides which bytes of it are whose, in pure code over offsets; [`ArenaMemory`] puts the two
//! together; `process.rs` holds the one of this process, and `ffi.rs` is what the Python extension calls.

mod accounts;
mod error;
pub mod ffi;
mod heap;
mod memory;
mod process;
mod report;
mod shortage;
mod sites;
mod units;

pub use accounts::Stats;
pub use error::MemoryError;
pub use heap::{Block, Heap};
pub use memory::ArenaMemory;
pub use report::Report;
pub use shortage::Shortage;
