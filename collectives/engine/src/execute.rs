//! Moving the bytes of one operation among the ranks of a host.

pub(crate) mod chain;
pub mod execution;
pub(crate) mod flat;
pub(crate) mod lookout;
pub(crate) mod mapped;
pub(crate) mod presence;
pub(crate) mod rounds;
pub(crate) mod stepwise;
pub mod transport;
