//! How a program is run: which operations share a pass over memory, in which order, and where values lie.

mod early;
mod groups;
mod memory;
mod registers;
mod walk;

#[cfg(test)]
mod tests;

pub use registers::{FIRST_TILE, TileInstruction};
pub use walk::{Access, ElementWalk, Transfer};

use crate::error::ProgramError;
use crate::program::{OperationId, Program, ValueId};

/// One step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Memory for a value of [`ValueMemory::Own`], and for those that take it over.
    Make(ValueId),
    /// An operation, by ATen's kernel or outside.
    Run(OperationId),
    /// The group of this number, in tiles.
    Tiles(u32),
    /// Nothing in the memory of a value is needed any more: of an input, or of one with memory of its own.
    Free(ValueId),
}

/// Where the memory of a value is. A view is where its root is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueMemory {
    /// The caller's argument of this number.
    Input(u32),
    /// In the workspace of the run, from this byte on.
    Workspace(i64),
    /// Memory of its own, or that of the value which is named and has ended: results of the program, what
    /// operations outside are given, and large values, which then hold memory only as long as they are needed.
    Own(ValueId),
    /// Where ATen's kernel has put it.
    Kernel,
    /// In registers of a group alone.
    Nowhere,
}

/// Operations that run together, tile by tile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileGroup {
    /// The elements that each operation computes, and in which order.
    pub walk: ElementWalk,
    /// Values that the group reads from memory or writes to it.
    pub accesses: Vec<Access>,
    /// In order.
    pub instructions: Vec<TileInstruction>,
    /// Tiles of scratch memory that registers need.
    pub tiles: u16,
}

/// How a program is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// In order.
    pub steps: Vec<Step>,
    /// The groups that [`Step::Tiles`] names.
    pub groups: Vec<TileGroup>,
    /// The memory of each value, by its number.
    pub places: Vec<ValueMemory>,
    /// Bytes of workspace that a run needs.
    pub workspace: i64,
}

impl Plan {
    /// Plans a program of which all sizes are known. Values of `own_from` bytes or more are in no workspace.
    ///
    /// # Errors
    /// Whatever [`Program::verify`] finds.
    pub fn new(program: &Program, own_from: i64) -> Result<Self, ProgramError> {
        program.verify()?;
        let batches = early::early(program, groups::batches(program));
        let placed = memory::Needs::of(program, &batches, own_from);
        let groups: Vec<_> = batches
            .iter()
            .filter(|batch| batch.is_tiled())
            .map(|batch| registers::group(program, batch, &placed))
            .collect();
        Ok(memory::plan(program, &batches, groups, placed))
    }
}
