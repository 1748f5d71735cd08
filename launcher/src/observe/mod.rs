//! The documents about a job: the run directory, the flight recorder and what is made of it, stacks and timings.
//!
//! This room writes down what is, and judges nothing: it knows no verdict.

pub(crate) mod error_record;
pub(crate) mod flight;
pub(crate) mod op_text;
pub(crate) mod run_dir;
pub(crate) mod stacks;
pub(crate) mod timings;
