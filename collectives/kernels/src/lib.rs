//! Element types, and what is calculated with them.
//!
//! They are a crate of their own, because the compiler makes them for every vector unit, element type and
//! operation, which takes longer than all the rest of the engine.

pub mod dtype;
pub mod reduce;

/// Bytes of a line of the cache: what processors hand to each other.
pub const LINE: usize = 64;
