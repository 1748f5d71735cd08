//! Where values lie. Small ones that no caller sees share one workspace, where each has its bytes from the batch
//! that makes it to the last that uses it. Large ones have memory of their own for as long. A group may put a
//! result where an operand ends.

use std::collections::HashMap;

use super::groups::Batch;
use super::{Access, Plan, Step, TileGroup, TileInstruction, ValueMemory};
use crate::program::{CallKind, OperationId, Program, TensorValue, ValueId, ValueSource};

/// Vector loads of a line of the cache.
const ALIGNMENT: i64 = 64;

/// For each root, when it is needed and by whom.
pub(super) struct Needs {
    /// By the number of the value.
    of: Vec<Need>,
    /// Bytes from which a value is large.
    own_from: i64,
}

#[derive(Clone, Copy, Default)]
struct Need {
    first: Option<usize>,
    last: Option<usize>,
    is_output: bool,
    is_handed_over: bool,
    is_allocated_by_kernel: bool,
    is_tiled: bool,
    is_written: bool,
    bytes: i64,
}

impl Needs {
    pub(super) fn of(program: &Program, batches: &[Batch], own_from: i64) -> Self {
        let mut needs = Self { of: vec![Need::default(); program.values.len()], own_from };
        for (at, value) in program.values.iter().enumerate() {
            needs.of[at].bytes = value.bytes();
        }
        for (at, batch) in batches.iter().enumerate() {
            for id in &batch.operations {
                needs.note(program, at, *id, batch.is_tiled());
            }
        }
        for output in &program.outputs {
            needs.of[program.root(*output).0 as usize].is_output = true;
        }
        needs
    }

    fn note(&mut self, program: &Program, at: usize, id: OperationId, is_tiled: bool) {
        let operation = &program.operations[id.0 as usize];
        for value in operation.values().chain(operation.results.iter().copied()) {
            let need = &mut self.of[program.root(value).0 as usize];
            need.first = need.first.or(Some(at));
            need.last = Some(need.last.unwrap_or(at).max(at));
            need.is_handed_over |= !is_tiled && operation.call_kind == CallKind::Outside;
        }
        for written in &operation.writes {
            self.of[program.root(*written).0 as usize].is_written = true;
        }
        for result in &operation.results {
            let need = &mut self.of[result.0 as usize];
            need.is_tiled = is_tiled;
            need.is_allocated_by_kernel = !is_tiled && operation.call_kind != CallKind::Told;
        }
    }

    /// Whether a value has memory: it is needed beyond the batch that makes it, or changed in place.
    pub(super) fn is_kept(&self, root: ValueId) -> bool {
        let need = &self.of[root.0 as usize];
        need.is_output || need.is_written || need.first != need.last
    }

    fn place(&self, program: &Program, value: ValueId) -> ValueMemory {
        let root = program.root(value);
        let need = &self.of[root.0 as usize];
        match program.at(root).source {
            ValueSource::Input(number) => ValueMemory::Input(number),
            _ if need.is_allocated_by_kernel => ValueMemory::Kernel,
            _ if need.is_output || need.is_handed_over => ValueMemory::Own(root),
            _ if need.is_tiled && !self.is_kept(root) => ValueMemory::Nowhere,
            _ if need.bytes >= self.own_from => ValueMemory::Own(root),
            _ => ValueMemory::Workspace(0),
        }
    }
}

/// Puts everything together.
pub(super) fn plan(program: &Program, batches: &[Batch], groups: Vec<TileGroup>, needs: Needs) -> Plan {
    let all = (0..program.values.len()).map(|at| ValueId(at as u32));
    let places = all.map(|value| needs.place(program, value)).collect();
    let mut planner = Planner {
        program,
        needs,
        places,
        space: Space::default(),
        steps: Vec::new(),
        begins: HashMap::new(),
        ends: HashMap::new(),
    };
    planner.index();
    let mut next_group = 0;
    for (at, batch) in batches.iter().enumerate() {
        let group = batch.is_tiled().then(|| {
            next_group += 1;
            (next_group - 1, &groups[next_group - 1])
        });
        planner.run(at, batch, group);
    }
    planner.finish(groups)
}

struct Planner<'a> {
    program: &'a Program,
    needs: Needs,
    places: Vec<ValueMemory>,
    space: Space,
    steps: Vec<Step>,
    /// Roots by the batch that makes them.
    begins: HashMap<usize, Vec<ValueId>>,
    /// Roots by the last batch that uses them.
    ends: HashMap<usize, Vec<ValueId>>,
}

impl Planner<'_> {
    fn index(&mut self) {
        for (at, value) in self.program.values.iter().enumerate() {
            let root = ValueId(at as u32);
            let need = self.needs.of[at];
            if matches!(value.source, ValueSource::View(_)) {
                continue;
            }
            if let Some(first) = need.first.filter(|_| value.source == ValueSource::Result) {
                self.begins.entry(first).or_default().push(root);
            }
            if let Some(last) = need.last.filter(|_| !need.is_output) {
                self.ends.entry(last).or_default().push(root);
            }
        }
    }

    fn run(&mut self, at: usize, batch: &Batch, group: Option<(usize, &TileGroup)>) {
        let begins = self.begins.remove(&at).unwrap_or_default();
        let mut ends = self.ends.remove(&at).unwrap_or_default();
        for root in begins {
            let taken = match group {
                Some((_, group)) => self.take_over_in_tiles(root, &mut ends, group),
                None => self.take_over_whole(root, &mut ends, batch),
            };
            if let Some(taken) = taken {
                self.places[root.0 as usize] = taken;
                continue;
            }
            match self.places[root.0 as usize] {
                ValueMemory::Own(_) => self.steps.push(Step::Make(root)),
                ValueMemory::Workspace(_) => {
                    let offset = self.space.take(self.needs.of[root.0 as usize].bytes);
                    self.places[root.0 as usize] = ValueMemory::Workspace(offset);
                }
                _ => {}
            }
        }
        match group {
            Some((number, _)) => self.steps.push(Step::Tiles(number as u32)),
            None => self.steps.extend(batch.operations.iter().map(|id| Step::Run(*id))),
        }
        for root in ends {
            match self.places[root.0 as usize] {
                ValueMemory::Workspace(offset) => {
                    self.space.give_back(offset, self.needs.of[root.0 as usize].bytes)
                }
                ValueMemory::Nowhere => {}
                ValueMemory::Own(owner) => self.steps.push(Step::Free(owner)),
                _ => self.steps.push(Step::Free(root)),
            }
        }
    }

    /// The memory of an operand that ends here, if a group reads each of its elements just before it writes the
    /// same element of the result.
    fn take_over_in_tiles(
        &self,
        root: ValueId,
        ends: &mut Vec<ValueId>,
        group: &TileGroup,
    ) -> Option<ValueMemory> {
        let found = ends.iter().position(|ending| {
            let (need, ended) = (&self.needs.of[root.0 as usize], &self.needs.of[ending.0 as usize]);
            self.is_alike(*ending, root)
                && *ending != root
                && ended.bytes == need.bytes
                && ended.first != need.first
                && self.is_linear(group, *ending, root)
                && self.is_over(group, *ending, root)
        });
        let found = found.filter(|_| self.is_linear(group, root, root))?;
        Some(self.places[ends.remove(found).0 as usize])
    }

    /// The memory of an operand that ends here, if the kernel may put its result there.
    fn take_over_whole(&self, root: ValueId, ends: &mut Vec<ValueId>, batch: &Batch) -> Option<ValueMemory> {
        let [id] = batch.operations[..] else { return None };
        let operation = &self.program.operations[id.0 as usize];
        let made = self.program.at(root);
        let lies_alike = |value: &TensorValue| {
            value.offset.known() == 0
                && (value.dtype, value.shape(), value.steps()) == (made.dtype, made.shape(), made.steps())
        };
        let found = ends.iter().position(|ending| {
            let is_of = |value: &ValueId| self.program.root(*value) == *ending;
            let bytes = |value: ValueId| self.needs.of[value.0 as usize].bytes;
            let mut over = operation.may_overwrite.iter().copied().filter(is_of);
            operation.values().filter(is_of).count() == 1
                && over.any(|value| lies_alike(self.program.at(value)))
                && bytes(*ending) == bytes(root)
                && self.is_alike(*ending, root)
        })?;
        Some(self.places[ends.remove(found).0 as usize])
    }

    /// Whether both are in the workspace, or both have memory of their own. An operation outside may keep what it was handed.
    fn is_alike(&self, ending: ValueId, root: ValueId) -> bool {
        match (self.places[ending.0 as usize], self.places[root.0 as usize]) {
            (ValueMemory::Workspace(_), ValueMemory::Workspace(_)) => true,
            (ValueMemory::Own(_), ValueMemory::Own(_)) => !self.needs.of[ending.0 as usize].is_handed_over,
            _ => false,
        }
    }

    /// The accesses of a group to the memory of a root.
    fn accesses<'g>(&self, group: &'g TileGroup, root: ValueId) -> impl Iterator<Item = &'g Access> {
        group.accesses.iter().filter(move |access| self.program.root(access.value) == root)
    }

    /// Whether a group goes through the memory of a root in order, as elements of the type of `like`.
    fn is_linear(&self, group: &TileGroup, root: ValueId, like: ValueId) -> bool {
        let mut accesses = self.accesses(group, root).peekable();
        accesses.peek().is_some()
            && accesses.all(|access| {
                let value = self.program.at(access.value);
                let is_alike = value.dtype == self.program.at(like).dtype;
                access.is_linear && value.offset.known() == 0 && is_alike
            })
    }

    /// Whether a group has used an operand for the last time when it first writes the result: within a tile, an
    /// instruction reads what the ones before it have written.
    fn is_over(&self, group: &TileGroup, operand: ValueId, result: ValueId) -> bool {
        let registers =
            |root| -> Vec<u16> { self.accesses(group, root).map(|access| access.register).collect() };
        let (read, made) = (registers(operand), registers(result));
        let first_write = group.instructions.iter().position(|one| made.contains(&one.out));
        let uses = |one: &TileInstruction| {
            let mut operands = one.operands.iter().flatten();
            read.contains(&one.out) || operands.any(|register| read.contains(register))
        };
        group.instructions.iter().rposition(uses) <= first_write
    }

    fn finish(mut self, groups: Vec<TileGroup>) -> Plan {
        for at in 0..self.places.len() {
            let root = self.program.root(ValueId(at as u32));
            self.places[at] = self.places[root.0 as usize];
        }
        Plan { steps: self.steps, groups, places: self.places, workspace: self.space.end }
    }
}

/// Bytes of the workspace that are free at the batch that is being planned.
#[derive(Default)]
struct Space {
    /// Where ranges begin and how long they are, in order, no two of them neighbours.
    free: Vec<(i64, i64)>,
    end: i64,
}

impl Space {
    fn rounded(bytes: i64) -> i64 {
        (bytes.max(1) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT
    }

    /// The smallest range that is large enough, else new bytes at the end.
    fn take(&mut self, bytes: i64) -> i64 {
        let bytes = Self::rounded(bytes);
        let fitting = self.free.iter().enumerate().filter(|(_, (_, length))| *length >= bytes);
        if let Some((at, (offset, length))) =
            fitting.min_by_key(|(_, (_, length))| *length).map(|(at, range)| (at, *range))
        {
            if length == bytes {
                self.free.remove(at);
            } else {
                self.free[at] = (offset + bytes, length - bytes);
            }
            return offset;
        }
        // A free range that ends where the workspace does grows.
        let last = self.free.last().copied().filter(|(offset, length)| offset + length == self.end);
        let offset = last.map_or(self.end, |(offset, _)| offset);
        if last.is_some() {
            self.free.pop();
        }
        self.end = offset + bytes;
        offset
    }

    fn give_back(&mut self, offset: i64, bytes: i64) {
        let at = self.free.partition_point(|(other, _)| *other < offset);
        self.free.insert(at, (offset, Self::rounded(bytes)));
        if let Some((next, length)) = self.free.get(at + 1).copied()
            && offset + self.free[at].1 == next
        {
            self.free[at].1 += length;
            self.free.remove(at + 1);
        }
        if at > 0 && self.free[at - 1].0 + self.free[at - 1].1 == offset {
            self.free[at - 1].1 += self.free[at].1;
            self.free.remove(at);
        }
    }
}
