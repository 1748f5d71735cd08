//! The engine of one rank: communicators, matching, schedules in execution, transports.
//!
//! An operation travels top down: [`Communicator::post`] checks it, its queue plans it (a schedule is data, made by
//! `tpurun-topology`), all ranks meet over their match keys, and an execution moves the bytes. On one host they meet
//! in a shared segment: a sealed memfd with a slot, two windows and byte rings per rank. Its words are
//! `tpurun-protocol`'s, the memory is `tpurun-memory`'s.
//!
//! Rooms, from what others stand on to what stands on them: `matching`, `plan`, `execute`, `hosts`, `queue`, `join`,
//! `communicator`, `ffi`.

#[doc(hidden)]
pub mod benching;
mod communicator;
pub mod execute;
pub mod ffi;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod hosts;
mod join;
mod matching;
mod plan;
mod queue;

pub use communicator::sentinel::Sentinel;
pub use communicator::{Communicator, Mode};
pub use hosts::network;
pub use join::Bootstrap;
pub use join::bootstrap;
pub use queue::work::{OnDone, Outcome, Work};
pub use tpurun_kernels::{dtype, reduce};
pub use tpurun_memory::traffic::Traffic;
pub use tpurun_memory::{Failure, FailureKind, Spans, arena, buffer};
pub use tpurun_protocol::config::{Matching, Results};
pub use tpurun_protocol::{Config, Membership, Op, OpKind, Shape, board, control, supervise, wire};
