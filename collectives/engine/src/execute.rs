//! Moving the bytes of one operation among the ranks of a host.

pub mod execution;
pub(crate) mod in_place;
pub(crate) mod lookout;
pub(crate) mod pipeline;
pub(crate) mod presence;
pub(crate) mod rounds;
pub(crate) mod stepwise;
pub mod transport;
pub(crate) mod windows;
