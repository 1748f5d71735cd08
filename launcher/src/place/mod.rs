//! The places where the ranks of a job are: hosts, and the nodes that a scheduler or ssh has placed.
//!
//! This room reads names, numbers and variables. It knows no job, and starts nothing.

pub(crate) mod assignment;
pub(crate) mod cluster;
pub(crate) mod hosts;
pub(crate) mod schedulers;
pub(crate) mod ssh_hosts;
