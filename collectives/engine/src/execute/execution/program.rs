//! A schedule with everything resolved that can be before the first segment: sizes, places, and what each
//! arrival does. Only counting remains while segments move.

use std::collections::HashMap;

use tpurun_topology::{Action, Block, Schedule, Step};

use super::ExecutionError;
use super::layout::{BlockOffsets, Buffers, Extent};
use super::slots;
use tpurun_kernels::reduce::Reduction;
use tpurun_memory::traffic::Traffic;
use tpurun_protocol::wire::Form;

/// The steps of each channel, and what they need.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) channels: Vec<Vec<Task>>,
    /// Inputs that become outputs without a step.
    pub(super) kept: Vec<Kept>,
    /// Bytes of memory beyond inputs and outputs.
    pub(super) scratch_bytes: usize,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Task {
    /// The receiver of what is sent, the sender of what is received.
    pub(super) rank: u32,
    pub(super) block: Block,
    pub(super) form: Form,
    /// On the wire.
    pub(super) bytes: usize,
    pub(super) act: Act,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// Send what lies there.
    Send(BlockStart),
    /// Send this input as partial results.
    SendWidened(BlockStart),
    /// Put what arrives in place of what lies there.
    Store(BlockStart),
    /// Fold in what arrives.
    Fold(Fold),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fold {
    /// This rank's own operand, when it is not part of `partial` yet.
    pub(super) own: Option<BlockStart>,
    pub(super) partial: BlockStart,
    /// Where the result goes, when this was the last operand.
    pub(super) result: Option<BlockStart>,
}

/// The first byte of a block in one of the memories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockStart {
    Input(usize),
    Output(usize),
    Scratch(usize),
}

/// An input of `count` elements that is, or makes, the output.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    pub(super) input: usize,
    pub(super) output: usize,
    pub(super) count: usize,
}

/// The data that this rank holds of a block.
#[derive(Clone, Copy)]
enum Holding {
    /// The data that the rank began with: its input, or nothing.
    Untouched,
    Partial(BlockStart),
    Whole(BlockStart),
}

/// A block while the steps of its channel are gone through.
struct Tracked {
    channel: usize,
    extent: Extent,
    holding: Holding,
    receives_left: usize,
}

impl Program {
    pub(super) fn new(
        schedule: &Schedule,
        reduction: Reduction,
        buffers: &Buffers,
    ) -> Result<Self, ExecutionError> {
        let offsets = BlockOffsets::new(schedule, buffers, reduction.dtype().size())?;
        let mut compiler = Compiler { schedule, reduction, blocks: track(schedule, &offsets)? };
        let mut program = Self { channels: Vec::new(), kept: Vec::new(), scratch_bytes: 0 };
        for steps in &schedule.channels {
            let tasks = steps.iter().map(|step| compiler.compile(step)).collect::<Result<Vec<_>, _>>()?;
            let mut tasks: Vec<Task> = tasks.into_iter().flatten().filter(|task| task.bytes > 0).collect();
            program.scratch_bytes = slots::assign(&mut tasks, program.scratch_bytes);
            program.channels.push(tasks);
        }
        program.kept = compiler.kept(&offsets)?;
        Ok(program)
    }

    /// Returns what the whole program moves; the bytes through rings are those that count as staged.
    pub(super) fn traffic(&self, reduction: Reduction, reduces: bool) -> Traffic {
        let (size, wide) = (reduction.dtype().size() as u64, reduction.wide().size() as u64);
        let mut total = Traffic::default();
        let mut move_bytes = |read, written, staged| {
            total.read += read;
            total.written += written;
            total.staged += staged;
        };
        for task in self.channels.iter().flatten() {
            let bytes = task.bytes as u64;
            let elements = bytes / wide * size;
            match &task.act {
                Act::Send(_) | Act::Store(_) => move_bytes(bytes, bytes, bytes),
                Act::SendWidened(_) => move_bytes(elements, bytes, bytes),
                Act::Fold(fold) => {
                    move_bytes(2 * bytes, bytes, bytes);
                    if fold.own.is_some() {
                        move_bytes(elements, bytes, 0);
                    }
                    if fold.result.is_some() {
                        move_bytes(bytes, elements, 0);
                    }
                }
            }
        }
        for kept in &self.kept {
            let partial = if reduces { kept.count as u64 * wide } else { 0 };
            let elements = kept.count as u64 * size;
            move_bytes(elements + partial, elements + partial, 0);
        }
        total
    }
}

/// Collects the blocks that the steps touch.
fn track(schedule: &Schedule, offsets: &BlockOffsets<'_>) -> Result<HashMap<Block, Tracked>, ExecutionError> {
    let mut blocks = HashMap::new();
    for (channel, steps) in schedule.channels.iter().enumerate() {
        for step in steps {
            let (rank, block, receives) = match *step {
                Step::Send { to, block } => (to, block, 0),
                Step::Receive { from, block, .. } => (from, block, 1),
                _ => return Err(ExecutionError::NotStepwise { algorithm: schedule.algorithm }),
            };
            if rank >= schedule.ranks || rank == schedule.rank {
                return Err(ExecutionError::Schedule { block, problem: "moves to or from no other rank" });
            }
            let extent = offsets.block(block)?;
            let untouched = Tracked { channel, extent, holding: Holding::Untouched, receives_left: 0 };
            let tracked = blocks.entry(block).or_insert(untouched);
            if tracked.channel != channel {
                return Err(ExecutionError::Schedule { block, problem: "is touched by two channels" });
            }
            tracked.receives_left += receives;
        }
    }
    Ok(blocks)
}

struct Compiler<'a> {
    schedule: &'a Schedule,
    reduction: Reduction,
    blocks: HashMap<Block, Tracked>,
}

impl Compiler<'_> {
    /// The task of a step; none for a step that an execution ignores.
    fn compile(&mut self, step: &Step) -> Result<Option<Task>, ExecutionError> {
        Ok(Some(match *step {
            Step::Send { to, block } => self.send(to, block)?,
            Step::Receive { from, block, action } => self.receive(from, block, action)?,
            _ => return Ok(None),
        }))
    }

    fn send(&mut self, to: u32, block: Block) -> Result<Task, ExecutionError> {
        let tracked = self.blocks.get(&block).expect("all blocks of the steps are tracked");
        let (form, act) = match tracked.holding {
            Holding::Partial(place) => (Form::Partial, Act::Send(place)),
            Holding::Whole(place) => (Form::Whole, Act::Send(place)),
            Holding::Untouched => {
                let place = self.input(block, tracked)?;
                match self.schedule.collective.reduces() {
                    true => (Form::Partial, Act::SendWidened(place)),
                    false => (Form::Whole, Act::Send(place)),
                }
            }
        };
        let bytes = tracked.extent.count * self.width(form);
        Ok(Task { rank: to, block, form, bytes, act })
    }

    fn receive(&mut self, from: u32, block: Block, action: Action) -> Result<Task, ExecutionError> {
        let tracked = self.blocks.get(&block).expect("all blocks of the steps are tracked");
        let last = tracked.receives_left == 1;
        let output =
            tracked.extent.output.map(|element| BlockStart::Output(element * self.reduction.dtype().size()));
        let (form, act, holding) = match action {
            Action::Copy => {
                let place = output.unwrap_or(BlockStart::Scratch(0));
                (Form::Whole, Act::Store(place), Holding::Whole(place))
            }
            Action::Reduce if !self.schedule.collective.reduces() => {
                return Err(ExecutionError::Schedule { block, problem: "is folded where nothing reduces" });
            }
            Action::Reduce => {
                let in_place = self.reduction.wide() == self.reduction.dtype();
                let (own, partial) = match tracked.holding {
                    Holding::Partial(place) => (None, place),
                    Holding::Untouched => {
                        let place = output.filter(|_| in_place).unwrap_or(BlockStart::Scratch(0));
                        (Some(self.input(block, tracked)?), place)
                    }
                    Holding::Whole(_) => {
                        return Err(ExecutionError::Schedule {
                            block,
                            problem: "is folded again when whole",
                        });
                    }
                };
                // Data that arrives later replaces it: then this is not the result yet.
                let result = output.filter(|_| last);
                let holding = result.map_or(Holding::Partial(partial), Holding::Whole);
                (Form::Partial, Act::Fold(Fold { own, partial, result }), holding)
            }
        };
        let bytes = tracked.extent.count * self.width(form);
        let tracked = self.blocks.get_mut(&block).expect("found above");
        tracked.holding = holding;
        tracked.receives_left -= 1;
        Ok(Task { rank: from, block, form, bytes, act })
    }

    fn input(&self, block: Block, tracked: &Tracked) -> Result<BlockStart, ExecutionError> {
        let missing = ExecutionError::Schedule { block, problem: "is used before this rank has it" };
        tracked
            .extent
            .input
            .map(|element| BlockStart::Input(element * self.reduction.dtype().size()))
            .ok_or(missing)
    }

    fn width(&self, form: Form) -> usize {
        match form {
            Form::Whole => self.reduction.dtype().size(),
            Form::Partial => self.reduction.wide().size(),
        }
    }

    /// The outputs that no step makes must be inputs.
    fn kept(&self, offsets: &BlockOffsets<'_>) -> Result<Vec<Kept>, ExecutionError> {
        let mut kept = Vec::new();
        let schedule = self.schedule;
        let chunks = (0..schedule.chunks()).filter(|&chunk| schedule.is_output(chunk));
        for block in chunks.flat_map(|chunk| (0..schedule.parts).map(move |part| Block { chunk, part })) {
            let Extent { count, input, output: Some(output) } = offsets.block(block)? else { continue };
            match (self.blocks.get(&block).map(|tracked| tracked.holding), input) {
                (Some(Holding::Whole(_)), _) => {}
                (Some(Holding::Partial(_)), _) => {
                    return Err(ExecutionError::Schedule { block, problem: "is left partial" });
                }
                // The whole of a reduction among one.
                (_, Some(input)) if schedule.ranks == 1 || !schedule.collective.reduces() => {
                    let size = self.reduction.dtype().size();
                    kept.push(Kept { input: input * size, output: output * size, count });
                }
                _ => return Err(ExecutionError::Schedule { block, problem: "never arrives" }),
            }
        }
        Ok(kept)
    }
}
