//! Memory that processes of one host share, and how they wait for each other in it.
//!
//! Nothing here knows a rank or a group: words and bytes have no owner but the caller. `tpurun-protocol` says what
//! lies where in it, and `tpurun-engine` moves tensors through it.
//!
//! Under `--cfg tpurun_loom` only [`sync`] exists: the primitives and their models.
#![cfg_attr(tpurun_loom, allow(dead_code, unused_imports))]

pub mod sync;

#[cfg(not(tpurun_loom))]
pub mod arena;
#[cfg(not(tpurun_loom))]
pub mod buffer;
#[cfg(not(tpurun_loom))]
pub mod descriptor;
#[cfg(not(tpurun_loom))]
pub mod failure;
#[cfg(not(tpurun_loom))]
pub mod ffi;
#[cfg(not(tpurun_loom))]
pub mod joined;
#[cfg(not(tpurun_loom))]
pub mod process;
#[cfg(not(tpurun_loom))]
pub mod rank_set;
#[cfg(not(tpurun_loom))]
pub mod region;
#[cfg(not(tpurun_loom))]
pub mod text;
#[cfg(not(tpurun_loom))]
pub mod traffic;

#[cfg(not(tpurun_loom))]
pub use buffer::Spans;
#[cfg(not(tpurun_loom))]
pub use failure::{Failure, FailureKind};
