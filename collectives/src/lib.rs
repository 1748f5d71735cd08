//! The collectives engine of one rank: communicators, matching, executions, transports.
//!
//! An operation travels top down: [`Communicator::post`] checks it, its lane plans it (a schedule is data,
//! made by `tpurun-topology`), all ranks meet over their match keys, and an execution moves the bytes. On
//! one host they meet in a shared segment: a sealed memfd with a slot, two windows and byte rings per rank.
//!
//! Under `--cfg tpurun_loom` only `sync` exists: the primitives and their models.
#![cfg_attr(tpurun_loom, allow(dead_code, unused_imports))]

mod sync;

#[cfg(not(tpurun_loom))]
pub mod arena;
#[cfg(not(tpurun_loom))]
pub mod authority;
#[cfg(not(tpurun_loom))]
#[doc(hidden)]
pub mod benching;
#[cfg(not(tpurun_loom))]
pub mod board;
#[cfg(not(tpurun_loom))]
pub mod bootstrap;
#[cfg(not(tpurun_loom))]
mod bridge;
#[cfg(not(tpurun_loom))]
pub mod buffer;
#[cfg(not(tpurun_loom))]
mod chain;
#[cfg(not(tpurun_loom))]
mod communicator;
#[cfg(not(tpurun_loom))]
mod config;
#[cfg(not(tpurun_loom))]
pub mod control;
#[cfg(not(tpurun_loom))]
mod descriptor;
#[cfg(not(tpurun_loom))]
mod engine;
#[cfg(not(tpurun_loom))]
pub mod execution;
#[cfg(not(tpurun_loom))]
mod failure;
#[cfg(not(tpurun_loom))]
pub mod ffi;
#[cfg(not(tpurun_loom))]
mod flat;
#[cfg(not(tpurun_loom))]
mod frame;
#[cfg(all(any(test, fuzzing), not(tpurun_loom)))]
pub mod fuzzing;
#[cfg(not(tpurun_loom))]
mod hosts;
#[cfg(not(tpurun_loom))]
mod join;
#[cfg(not(tpurun_loom))]
mod lane;
#[cfg(not(tpurun_loom))]
mod layout;
#[cfg(not(tpurun_loom))]
mod lookout;
#[cfg(not(tpurun_loom))]
mod looks;
#[cfg(not(tpurun_loom))]
mod mapped;
#[cfg(not(tpurun_loom))]
mod match_key;
#[cfg(not(tpurun_loom))]
mod membership;
#[cfg(not(tpurun_loom))]
mod message;
#[cfg(not(tpurun_loom))]
pub mod network;
#[cfg(not(tpurun_loom))]
mod op;
#[cfg(not(tpurun_loom))]
mod p2p;
#[cfg(not(tpurun_loom))]
mod planning;
#[cfg(not(tpurun_loom))]
mod presence;
#[cfg(not(tpurun_loom))]
mod process;
#[cfg(not(tpurun_loom))]
mod rank_list;
#[cfg(not(tpurun_loom))]
mod rank_set;
#[cfg(not(tpurun_loom))]
pub mod refusals;
#[cfg(not(tpurun_loom))]
mod region;
#[cfg(not(tpurun_loom))]
mod segment;
#[cfg(not(tpurun_loom))]
mod sentinel;
#[cfg(not(tpurun_loom))]
mod site;
#[cfg(not(tpurun_loom))]
mod splits;
#[cfg(not(tpurun_loom))]
mod stepwise;
#[cfg(not(tpurun_loom))]
pub mod supervise;
#[cfg(not(tpurun_loom))]
mod survivors;
#[cfg(not(tpurun_loom))]
mod text;
#[cfg(not(tpurun_loom))]
mod traffic;
#[cfg(not(tpurun_loom))]
pub mod transport;
#[cfg(not(tpurun_loom))]
mod trial;
#[cfg(not(tpurun_loom))]
mod validate;
#[cfg(not(tpurun_loom))]
mod verdict;
#[cfg(not(tpurun_loom))]
mod verify;
#[cfg(not(tpurun_loom))]
pub mod wire;
#[cfg(not(tpurun_loom))]
mod work;

#[cfg(not(tpurun_loom))]
pub use buffer::Spans;
#[cfg(not(tpurun_loom))]
pub use communicator::{Communicator, Mode};
#[cfg(not(tpurun_loom))]
pub use config::{Config, Matching, Results, parse_timeout_ms, switch};
#[cfg(not(tpurun_loom))]
pub use failure::{Failure, FailureKind};
#[cfg(not(tpurun_loom))]
pub use join::Bootstrap;
#[cfg(not(tpurun_loom))]
pub use membership::Membership;
#[cfg(not(tpurun_loom))]
pub use op::{Op, OpKind, Shape};
#[cfg(not(tpurun_loom))]
pub use sentinel::Sentinel;
#[cfg(not(tpurun_loom))]
pub use tpurun_kernels::{dtype, reduce};
#[cfg(not(tpurun_loom))]
pub use traffic::Traffic;
#[cfg(not(tpurun_loom))]
pub use work::{OnDone, Outcome, Work};
