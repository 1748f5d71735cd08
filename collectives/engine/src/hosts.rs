//! Moving the bytes of a communicator between hosts.

pub(crate) mod bridge;
pub mod network;
