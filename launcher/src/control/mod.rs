//! The agent's end of the sockets and segments of the ranks: how they find each other, and hear of failures.
//!
//! This room knows no loop and no world: the agent tells it which rank is lost, and why.

pub(crate) mod control_server;
pub(crate) mod exchange;
pub(crate) mod identities;
pub(crate) mod supervisor;
