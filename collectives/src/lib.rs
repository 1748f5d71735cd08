//! placeholder
pub mod dtype;
pub mod reduce;
