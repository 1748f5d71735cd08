//! The collectives engine of one rank: communicators, matching, executions, transports.

pub mod board;
pub mod control;
