//! One operation after the other: collectives in the order in which all ranks post them, messages as they match.

pub(crate) mod engine;
pub(crate) mod lane;
pub(crate) mod p2p;
pub(crate) mod work;
