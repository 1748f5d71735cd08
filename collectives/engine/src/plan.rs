//! How an operation is run: which way, with which schedule, in which pieces, and past which caches.
//!
//! All of it is computed from an operation, its communicator and the numbers of
//! [`Tuning`](tpurun_protocol::tuning::Tuning), but for what is measured as it goes (`measured_choice.rs`). Nothing here runs
//! anything.

pub(crate) mod copying;
pub(crate) mod measured_choice;
pub(crate) mod planning;
pub(crate) mod sizes;
pub(crate) mod strategy;
