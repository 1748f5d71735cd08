//! The collectives engine of one rank.
#![warn(missing_debug_implementations)]

mod sync;
