//! The bytes that two processes of a job agree on.
//!
//! Where everything lies in a segment ([`layout`]) and what the words mean ([`segment`]), the board that shows what
//! ranks do ([`board`]), frames to the agent ([`control`]) and between hosts ([`frame`], [`wire`]), match keys, and
//! every setting of the engine ([`config`]). Nothing here runs an operation: `tpurun-engine` does. The launcher needs
//! this crate and not the engine.

pub mod authority;
pub mod board;
pub mod config;
pub mod control;
pub mod frame;
pub mod hosts;
pub mod layout;
pub mod looks;
pub mod match_key;
pub mod membership;
pub mod message;
pub mod network;
pub mod op;
pub mod rank_list;
pub mod refusals;
pub mod segment;
pub mod site;
pub mod strategy;
pub mod supervise;
#[cfg(any(test, fuzzing, feature = "testing"))]
#[doc(hidden)]
pub mod testing;
pub mod tuning;
pub mod wire;

pub use config::Config;
pub use membership::Membership;
pub use op::{Op, OpKind, Shape};
pub use supervise::Supervised;
