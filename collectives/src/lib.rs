//! placeholder
pub mod buffer;
pub mod dtype;
pub mod execution;
pub mod reduce;
pub mod transport;
pub mod wire;
