//! Programs as data: a stream of operations on tensors, and the plan by which it is run.
//!
//! [`Program`] says what is computed: values, operations, views, writes, results, and the line of the user's
//! program that each comes from. [`Program::fingerprint`] is equal on every rank for equal streams,
//! [`Program::verify`] refuses what makes no sense, and `Display` prints it. [`Plan`] says how: which
//! operations run together in tiles, in which order, and where in memory each value lies.
//!
//! Everything here is pure: no clock, no allocator, no tensor. The program alone decides which values share
//! memory, and in which order operations run.

#![forbid(unsafe_code)]

mod error;
mod fingerprint;
mod plan;
mod print;
mod program;
mod verify;
mod words;

pub use error::ProgramError;
pub use plan::{
    Access, ElementWalk, FIRST_TILE, Plan, Step, TileGroup, TileInstruction, Transfer, ValueMemory,
};
pub use program::{
    Argument, CallKind, ElementType, Loops, Operation, OperationId, Pointwise, Program, SourceLine,
    SymbolicSize, TensorValue, ValueId, ValueSource,
};
