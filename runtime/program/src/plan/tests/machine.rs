//! A machine whose elements are hashes.

use std::collections::HashMap;

use twox_hash::XxHash3_64;

use crate::plan::{Access, FIRST_TILE, Plan, Step, TileGroup, Transfer, ValueMemory};
use crate::program::{Operation, Program, TensorValue, ValueId, ValueSource};

const BYTES: i64 = 4;

fn hash(words: &[u64]) -> u64 {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    XxHash3_64::oneshot(&bytes)
}

/// The element that an operation makes of its operands; a copy leaves its operand as it is.
fn computed(operation: &Operation, operands: &[u64]) -> u64 {
    if operation.name == "aten::copy_" {
        return operands[0];
    }
    let name = XxHash3_64::oneshot(operation.name.as_bytes());
    hash(&[&[name], operands].concat())
}

/// The places of the elements of a value in its root, in the order of its dimensions.
fn places(value: &TensorValue, shape: &[i64]) -> Vec<usize> {
    let first = shape.len() - value.sizes.len();
    let count: i64 = shape.iter().product();
    (0..count)
        .map(|mut index| {
            let mut place = value.offset.known();
            for (dimension, size) in shape.iter().enumerate().rev() {
                let at = index % size;
                index /= size;
                let own = dimension.checked_sub(first);
                if let Some(own) = own.filter(|own| value.sizes[*own].known() != 1) {
                    place += at * value.strides[own].known();
                }
            }
            place as usize
        })
        .collect()
}

fn begin(program: &Program) -> HashMap<ValueId, Vec<u64>> {
    let inputs = program.values.iter().enumerate().filter_map(|(at, value)| match value.source {
        ValueSource::Input(number) => {
            let elements = (0..value.extent().unwrap()).map(|place| hash(&[u64::from(number), place as u64]));
            Some((ValueId(at as u32), elements.collect()))
        }
        _ => None,
    });
    inputs.collect()
}

/// Results, and what has become of the arguments.
type Left = Vec<Vec<u64>>;

fn left(program: &Program, read: impl Fn(ValueId) -> Vec<u64>) -> Left {
    let inputs = (0..program.values.len() as u32)
        .map(ValueId)
        .filter(|value| matches!(program.at(*value).source, ValueSource::Input(_)));
    program.outputs.iter().copied().chain(inputs).map(read).collect()
}

pub(super) fn in_order(program: &Program) -> Left {
    let mut memory = begin(program);
    let read = |memory: &HashMap<ValueId, Vec<u64>>, value: ValueId, shape: &[i64]| -> Vec<u64> {
        let root = &memory[&program.root(value)];
        places(program.at(value), shape).into_iter().map(|place| root[place]).collect()
    };
    for operation in &program.operations {
        for result in &operation.results {
            memory.insert(*result, vec![0; program.at(*result).extent().unwrap() as usize]);
        }
        if let Some(pointwise) = &operation.pointwise {
            let target = *operation.writes.first().or(operation.results.first()).unwrap();
            let shape = program.at(target).shape();
            let operands: Vec<_> =
                pointwise.operands.iter().flatten().map(|value| read(&memory, *value, &shape)).collect();
            let root = memory.get_mut(&program.root(target)).unwrap();
            for (index, place) in places(program.at(target), &shape).into_iter().enumerate() {
                let elements: Vec<_> = operands.iter().map(|operand| operand[index]).collect();
                root[place] = computed(operation, &elements);
            }
        } else {
            let all: Vec<_> = operation
                .values()
                .flat_map(|value| read(&memory, value, &program.at(value).shape()))
                .collect();
            whole(operation, &all, memory.get_mut(&operation.results[0]).unwrap());
        }
    }
    left(program, |value| read(&memory, value, &program.at(value).shape()))
}

fn whole(operation: &Operation, read: &[u64], result: &mut [u64]) {
    for (place, element) in result.iter_mut().enumerate() {
        *element = computed(operation, &[read, &[place as u64]].concat());
    }
}

struct Machine<'a> {
    program: &'a Program,
    plan: &'a Plan,
    workspace: Vec<u64>,
    /// Elements of inputs, and of values with memory of their own, until they are freed.
    own: HashMap<ValueId, Vec<u64>>,
    /// The elements of values that were freed, as they were then.
    returned: HashMap<ValueId, Vec<u64>>,
}

impl Machine<'_> {
    fn element(&mut self, root: ValueId, place: usize) -> &mut u64 {
        match self.plan.places[root.0 as usize] {
            ValueMemory::Workspace(offset) => &mut self.workspace[(offset / BYTES) as usize + place],
            ValueMemory::Nowhere => panic!("{root} is nowhere"),
            ValueMemory::Own(owner) => {
                &mut self.own.get_mut(&owner).unwrap_or_else(|| panic!("{root} is not there"))[place]
            }
            _ => &mut self.own.get_mut(&root).unwrap_or_else(|| panic!("{root} is not there"))[place],
        }
    }

    fn read(&mut self, value: ValueId) -> Vec<u64> {
        let (root, of) = (self.program.root(value), self.program.at(value));
        places(of, &of.shape()).into_iter().map(|place| *self.element(root, place)).collect()
    }

    fn tiles(&mut self, group: &TileGroup) {
        const TILE: i64 = 5;
        let mut begin = 0;
        while begin < group.walk.elements() {
            let count = TILE.min(group.walk.elements() - begin);
            self.tile(group, begin, count);
            begin += count;
        }
    }

    /// Places in memory of the elements of a tile.
    fn accessed(&self, group: &TileGroup, access: &Access, begin: i64, count: i64) -> Vec<usize> {
        let place = |mut index: i64| {
            let mut place = self.program.at(access.value).offset.known();
            for (size, stride) in group.walk.sizes.iter().zip(&access.strides).rev() {
                place += index % size * stride;
                index /= size;
            }
            place as usize
        };
        let places: Vec<_> = (begin..begin + count).map(place).collect();
        let first = self.program.at(access.value).offset.known() + begin;
        let expected: Vec<_> = (first..first + count).map(|place| place as usize).collect();
        assert!(!access.is_linear || places == expected, "{access:?}");
        places
    }

    /// As the executor does: what is linear is read and written in memory at once, the rest goes through tiles.
    fn tile(&mut self, group: &TileGroup, begin: i64, count: i64) {
        let mut tiles: HashMap<u16, Vec<u64>> = HashMap::new();
        for access in group.accesses.iter().filter(|access| !access.is_linear) {
            let root = self.program.root(access.value);
            let places = self.accessed(group, access, begin, count);
            let read = places.into_iter().map(|place| *self.element(root, place)).collect();
            tiles.insert(access.register, read);
        }
        for instruction in &group.instructions {
            let operation = &self.program.operations[instruction.operation.0 as usize];
            let operands: Vec<Vec<u64>> = instruction
                .operands
                .iter()
                .flatten()
                .map(|register| self.register(group, &tiles, *register, begin, count))
                .collect();
            let results: Vec<u64> = (0..count as usize)
                .map(|at| {
                    computed(operation, &operands.iter().map(|operand| operand[at]).collect::<Vec<_>>())
                })
                .collect();
            let out = instruction.out;
            match group.accesses.get(usize::from(out)).filter(|access| out < FIRST_TILE && access.is_linear) {
                Some(access) => self.store(group, access, begin, &results),
                None => drop(tiles.insert(out, results)),
            }
        }
        for access in &group.accesses {
            if access.direction == Transfer::Store && !access.is_linear {
                let elements = tiles[&access.register].clone();
                self.store(group, access, begin, &elements);
            }
        }
    }

    fn register(
        &mut self,
        group: &TileGroup,
        tiles: &HashMap<u16, Vec<u64>>,
        register: u16,
        begin: i64,
        count: i64,
    ) -> Vec<u64> {
        match group
            .accesses
            .get(usize::from(register))
            .filter(|access| register < FIRST_TILE && access.is_linear)
        {
            Some(access) => {
                let root = self.program.root(access.value);
                let places = self.accessed(group, access, begin, count);
                places.into_iter().map(|place| *self.element(root, place)).collect()
            }
            None => tiles[&register].clone(),
        }
    }

    fn store(&mut self, group: &TileGroup, access: &Access, begin: i64, elements: &[u64]) {
        let root = self.program.root(access.value);
        let places = self.accessed(group, access, begin, elements.len() as i64);
        for (place, element) in places.into_iter().zip(elements) {
            *self.element(root, place) = *element;
        }
    }
}

pub(super) fn by_plan(program: &Program, plan: &Plan) -> Left {
    let workspace = vec![0; (plan.workspace / BYTES) as usize];
    let own = begin(program);
    let mut machine = Machine { program, plan, workspace, own, returned: HashMap::new() };
    let fresh = |value: ValueId| vec![0; program.at(value).extent().unwrap() as usize];
    for step in &plan.steps {
        match step {
            Step::Make(value) => drop(machine.own.insert(*value, fresh(*value))),
            Step::Free(value) => {
                let gone = machine.own.remove(value).expect("what is freed was there");
                machine.returned.insert(*value, gone);
            }
            Step::Tiles(group) => machine.tiles(&plan.groups[*group as usize]),
            Step::Run(id) => {
                let operation = &program.operations[id.0 as usize];
                if let Some(result) = operation.results.first().copied() {
                    if plan.places[result.0 as usize] == ValueMemory::Kernel {
                        machine.own.insert(result, fresh(result));
                    }
                    let all: Vec<_> = operation.values().flat_map(|value| machine.read(value)).collect();
                    let mut made = fresh(result);
                    assert!(
                        operation.pointwise.is_none(),
                        "{program}: nothing of these sizes runs outside of tiles"
                    );
                    whole(operation, &all, &mut made);
                    for (place, element) in made.into_iter().enumerate() {
                        *machine.element(result, place) = element;
                    }
                }
            }
        }
    }
    machine.own.extend(std::mem::take(&mut machine.returned));
    let machine = std::cell::RefCell::new(machine);
    left(program, |value| machine.borrow_mut().read(value))
}
