//! The registers that each operation of a group reads and writes: memory, or a tile of scratch memory.

use super::TileGroup;
use super::groups::{Batch, Tiled};
use super::memory::Needs;
use super::walk::{Access, BroadcastLayout, Transfer, in_order, is_dense, walk};
use crate::program::{ElementType, Operation, OperationId, Program, ValueId};

/// One operation of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileInstruction {
    /// The operation.
    pub operation: OperationId,
    /// The register of its result.
    pub out: u16,
    /// The registers of its operands; nothing for a number.
    pub operands: Vec<Option<u16>>,
}

/// Registers of accesses are numbered from 0 on, tiles of scratch memory from here on.
pub const FIRST_TILE: u16 = 1 << 15;

/// Operations that leave elements as they are.
const COPIES: [&str; 2] = ["aten::copy_", "aten::clone"];

/// The same elements in the same order: a register.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Lies {
    root: ValueId,
    dtype: ElementType,
    layout: BroadcastLayout,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Home {
    Load,
    Store,
    Scratch,
}

struct Register {
    lies: Lies,
    value: ValueId,
    home: Home,
}

/// Reads and writes are those of `Register`s, by their place in the list.
struct Draft {
    operation: OperationId,
    out: usize,
    operands: Vec<Option<usize>>,
}

struct Drafts<'a> {
    program: &'a Program,
    shape: &'a [i64],
    registers: Vec<Register>,
    /// The newest register of each place.
    known: Vec<(Lies, usize)>,
    drafts: Vec<Draft>,
}

/// Makes the group of a batch in tiles.
pub(super) fn group(program: &Program, batch: &Batch, needs: &Needs) -> TileGroup {
    let no_shape = Tiled::default();
    let tiled = batch.tiled.as_ref().unwrap_or(&no_shape);
    let mut drafts =
        Drafts { program, shape: &tiled.shape, registers: Vec::new(), known: Vec::new(), drafts: Vec::new() };
    for id in &batch.operations {
        drafts.add(*id, needs);
    }
    drafts.leave_out_copies();
    drafts.finish()
}

impl Drafts<'_> {
    fn operation(&self, id: OperationId) -> &Operation {
        &self.program.operations[id.0 as usize]
    }

    fn lies(&self, value: ValueId) -> Lies {
        let of = self.program.at(value);
        let is_all = is_dense(of) && of.elements() == Some(self.shape.iter().product());
        let in_step =
            is_all.then(|| BroadcastLayout { offset: of.offset.known(), strides: in_order(self.shape) });
        let layout = in_step.or_else(|| BroadcastLayout::over(of, self.shape));
        let nowhere = || BroadcastLayout { offset: 0, strides: vec![0; self.shape.len()] };
        Lies { root: self.program.root(value), dtype: of.dtype, layout: layout.unwrap_or_else(nowhere) }
    }

    fn add(&mut self, id: OperationId, needs: &Needs) {
        let operation = self.operation(id);
        let pointwise = operation.pointwise.clone();
        let writes_memory = !operation.writes.is_empty();
        let target = self.program.target(id);
        let operands = pointwise.iter().flat_map(|pointwise| &pointwise.operands);
        let operands = operands.map(|operand| operand.map(|value| self.register_of(value))).collect();
        let is_kept = writes_memory || needs.is_kept(self.program.root(target));
        let home = if is_kept { Home::Store } else { Home::Scratch };
        let out = self.new_register(target, home);
        self.drafts.push(Draft { operation: id, out, operands });
    }

    fn register_of(&mut self, value: ValueId) -> usize {
        let lies = self.lies(value);
        match self.known.iter().rev().find(|(known, _)| *known == lies) {
            Some((_, register)) => *register,
            None => self.new_register(value, Home::Load),
        }
    }

    fn new_register(&mut self, value: ValueId, home: Home) -> usize {
        let lies = self.lies(value);
        // Memory that is written twice is one register, which then has the newer elements.
        let same = self.known.iter().rev().find(|(known, _)| *known == lies).map(|(_, register)| *register);
        if let Some(register) = same.filter(|register| self.registers[*register].home == Home::Store) {
            return register;
        }
        self.registers.push(Register { lies: lies.clone(), value, home });
        self.known.push((lies, self.registers.len() - 1));
        self.registers.len() - 1
    }

    /// A tile that is computed to be copied to memory is computed there.
    fn leave_out_copies(&mut self) {
        let mut at = 0;
        while at < self.drafts.len() {
            if let Some((maker, source)) = self.maker_of_copy(at) {
                let target = self.drafts[at].out;
                for draft in &mut self.drafts[maker..] {
                    let all = draft.operands.iter_mut().flatten().chain([&mut draft.out]);
                    all.filter(|register| **register == source).for_each(|register| *register = target);
                }
                self.drafts.remove(at);
            } else {
                at += 1;
            }
        }
    }

    /// The draft that makes what the one at `at` copies, and the register, where it may write to the target.
    fn maker_of_copy(&self, at: usize) -> Option<(usize, usize)> {
        let copy = &self.drafts[at];
        let is_copy = COPIES.contains(&self.operation(copy.operation).name.as_str());
        let source = copy.operands.first().copied().flatten().filter(|_| is_copy)?;
        let (from, to) = (&self.registers[source], &self.registers[copy.out]);
        let same_type = from.lies.dtype == to.lies.dtype;
        if from.home != Home::Scratch || to.home != Home::Store || !same_type {
            return None;
        }
        let maker = self.drafts.iter().position(|draft| draft.out == source)?;
        let mut between = self.drafts[maker + 1..].iter().enumerate();
        // Whoever reads the target's memory between the two wants its old elements.
        let is_free = between.all(|(place, draft)| {
            let after = maker + 1 + place;
            let others = draft.operands.iter().flatten().chain([&draft.out]);
            let mut others = others.map(|register| (*register, &self.registers[*register].lies));
            after >= at || others.all(|(_, lies)| lies.root != to.lies.root)
        });
        let made_once = self.drafts.iter().filter(|draft| draft.out == source).count() == 1;
        // A later write to the target does not change what was copied there.
        let after = &self.drafts[at + 1..];
        let is_read_again = after.iter().any(|draft| draft.operands.contains(&Some(source)));
        let is_written_again = after.iter().any(|draft| self.registers[draft.out].lies.root == to.lies.root);
        let is_same = !(is_read_again && is_written_again);
        // The maker itself may read it: each element before it is written.
        (is_free && made_once && is_same).then_some((maker, source))
    }

    fn finish(self) -> TileGroup {
        let accessed: Vec<usize> = (0..self.registers.len())
            .filter(|register| self.registers[*register].home != Home::Scratch && self.is_used(*register))
            .collect();
        let layouts: Vec<_> =
            accessed.iter().map(|register| self.registers[*register].lies.layout.clone()).collect();
        let first = self.drafts.first().map(|draft| self.registers[draft.out].lies.layout.strides.clone());
        let (walk, strides) = walk(self.shape, &first.unwrap_or_default(), &layouts);
        let plain = in_order(&walk.sizes);
        let mut tiles = Tiles::default();
        let mut numbers = vec![0_u16; self.registers.len()];
        let mut accesses = Vec::new();
        for (at, (register, strides)) in accessed.iter().zip(strides).enumerate() {
            let direction = match self.registers[*register].home {
                Home::Store => Transfer::Store,
                _ => Transfer::Load,
            };
            let value = self.registers[*register].value;
            numbers[*register] = at as u16;
            let is_linear = strides == plain;
            accesses.push(Access { value, direction, strides, is_linear, register: at as u16 });
        }
        let instructions = self.instructions(&mut numbers, &mut tiles);
        TileGroup { walk, accesses, instructions, tiles: tiles.count }
    }

    fn is_used(&self, register: usize) -> bool {
        self.drafts.iter().any(|draft| draft.out == register || draft.operands.contains(&Some(register)))
    }

    fn instructions(&self, numbers: &mut [u16], tiles: &mut Tiles) -> Vec<TileInstruction> {
        let is_scratch = |register: usize| self.registers[register].home == Home::Scratch;
        let last_use = |register: usize| {
            self.drafts
                .iter()
                .rposition(|draft| draft.operands.contains(&Some(register)) || draft.out == register)
        };
        let mut instructions = Vec::new();
        for (at, draft) in self.drafts.iter().enumerate() {
            let operands: Vec<_> =
                draft.operands.iter().map(|operand| operand.map(|register| numbers[register])).collect();
            let bytes = self.registers[draft.out].lies.dtype.bytes;
            let mut over: Vec<usize> =
                draft.operands.iter().flatten().copied().filter(|register| is_scratch(*register)).collect();
            over.sort_unstable();
            over.dedup();
            over.retain(|register| last_use(*register) == Some(at) && *register != draft.out);
            // A result may go where an operand was, if its elements are as large.
            let (early, late): (Vec<_>, Vec<_>) =
                over.into_iter().partition(|register| self.registers[*register].lies.dtype.bytes == bytes);
            early.into_iter().for_each(|register| tiles.give_back(numbers[register]));
            let is_first = self.drafts[..at].iter().all(|earlier| earlier.out != draft.out);
            if is_scratch(draft.out) && is_first {
                numbers[draft.out] = tiles.take();
            }
            late.into_iter().for_each(|register| tiles.give_back(numbers[register]));
            let out = numbers[draft.out];
            instructions.push(TileInstruction { operation: draft.operation, out, operands });
            if is_scratch(draft.out) && last_use(draft.out) == Some(at) {
                tiles.give_back(out);
            }
        }
        instructions
    }
}

/// Tiles of scratch memory.
#[derive(Default)]
struct Tiles {
    free: Vec<u16>,
    count: u16,
}

impl Tiles {
    fn take(&mut self) -> u16 {
        self.free.pop().unwrap_or_else(|| {
            self.count += 1;
            FIRST_TILE + self.count - 1
        })
    }

    fn give_back(&mut self, tile: u16) {
        self.free.push(tile);
    }
}
