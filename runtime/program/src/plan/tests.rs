//! Random programs on a machine whose elements are hashes of what they were computed from: run in the order of
//! the program, and by the plan. Both must leave the same elements.

mod machine;

use proptest::prelude::*;

use super::{Plan, Step, ValueMemory};
use crate::program::{
    Argument, CallKind, ElementType, Loops, Operation, OperationId, Pointwise, Program, SourceLine,
    SymbolicSize, TensorValue, ValueId, ValueSource,
};
use machine::{by_plan, in_order};

const F32: ElementType = ElementType { code: 6, bytes: 4 };

fn known(sizes: &[i64]) -> Vec<SymbolicSize> {
    sizes.iter().map(|size| SymbolicSize::Known(*size)).collect()
}

fn plain(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for at in (1..shape.len()).rev() {
        strides[at - 1] = strides[at] * shape[at];
    }
    strides
}

fn tensor(shape: &[i64], source: ValueSource) -> TensorValue {
    strided(shape, &plain(shape), 0, source)
}

fn strided(shape: &[i64], strides: &[i64], offset: i64, source: ValueSource) -> TensorValue {
    TensorValue {
        dtype: F32,
        sizes: known(shape),
        strides: known(strides),
        offset: SymbolicSize::Known(offset),
        source,
    }
}

fn pointwise(
    name: &str,
    operands: &[ValueId],
    result: Option<ValueId>,
    writes: Option<ValueId>,
) -> Operation {
    let read = operands.iter().map(|operand| Argument::Value(*operand));
    let written = writes.map(Argument::Value);
    Operation {
        name: name.to_owned(),
        arguments: written.into_iter().chain(read).collect(),
        results: result.into_iter().collect(),
        writes: writes.into_iter().collect(),
        may_overwrite: Vec::new(),
        line: SourceLine(0),
        pointwise: Some(Pointwise {
            operands: operands.iter().copied().map(Some).collect(),
            loops: Loops::Alike,
        }),
        call_kind: CallKind::Told,
    }
}

/// One move of a random program; its numbers are taken modulo the count of what there is.
#[derive(Clone, Debug)]
enum Move {
    Input(usize),
    Transposed(usize),
    Row(usize),
    Flat(usize),
    Pointwise(Vec<usize>),
    Written(usize, Vec<usize>),
    Copied(usize, usize),
    Whole(usize, Vec<usize>, usize),
    Output(usize),
}

const SHAPES: [&[i64]; 6] = [&[4, 6], &[6, 4], &[6], &[4, 1], &[24], &[]];
const CALLS: [CallKind; 3] = [CallKind::Told, CallKind::Allocating, CallKind::Outside];

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let any = 0_usize..1000;
    let some = proptest::collection::vec(0_usize..1000, 1..4);
    let one = prop_oneof![
        1 => (0..SHAPES.len()).prop_map(Move::Input),
        1 => any.clone().prop_map(Move::Transposed),
        1 => any.clone().prop_map(Move::Row),
        1 => any.clone().prop_map(Move::Flat),
        8 => some.clone().prop_map(Move::Pointwise),
        2 => (any.clone(), some.clone()).prop_map(|(to, from)| Move::Written(to, from)),
        2 => (any.clone(), any.clone()).prop_map(|(to, from)| Move::Copied(to, from)),
        2 => (0..CALLS.len(), some, 0..SHAPES.len()).prop_map(|(call, from, shape)| Move::Whole(call, from, shape)),
        1 => any.prop_map(Move::Output),
    ];
    proptest::collection::vec(one, 1..40)
}

/// torch's rule; nothing where shapes do not go together.
fn broadcast(one: &[i64], other: &[i64]) -> Option<Vec<i64>> {
    let length = one.len().max(other.len());
    let at =
        |shape: &[i64], place: usize| (place + shape.len()).checked_sub(length).map_or(1, |at| shape[at]);
    (0..length)
        .map(|place| match (at(one, place), at(other, place)) {
            (size, other) if size == other || other == 1 => Some(size),
            (1, other) => Some(other),
            _ => None,
        })
        .collect()
}

struct Builder {
    program: Program,
    inputs: u32,
}

impl Builder {
    fn new() -> Self {
        let mut builder = Self { program: Program::new(), inputs: 0 };
        builder.apply(&Move::Input(0));
        builder
    }

    fn pick(&self, number: usize) -> ValueId {
        ValueId((number % self.program.values.len()) as u32)
    }

    /// The values that broadcast together with the first of them, and their shape.
    fn operands(&self, numbers: &[usize]) -> (Vec<ValueId>, Vec<i64>) {
        let mut shape = self.program.at(self.pick(numbers[0])).shape();
        let mut operands = Vec::new();
        for number in numbers {
            let value = self.pick(*number);
            if let Some(both) = broadcast(&shape, &self.program.at(value).shape()) {
                shape = both;
                operands.push(value);
            }
        }
        (operands, shape)
    }

    fn result(&mut self, shape: &[i64]) -> ValueId {
        self.program.value(tensor(shape, ValueSource::Result))
    }

    fn apply(&mut self, next: &Move) {
        match next {
            Move::Input(shape) => {
                self.program.value(tensor(SHAPES[*shape], ValueSource::Input(self.inputs)));
                self.inputs += 1;
            }
            Move::Transposed(of) => self.view(*of, |value| {
                let (mut shape, mut strides) = (value.shape(), value.steps());
                (shape.len() == 2).then(|| {
                    shape.reverse();
                    strides.reverse();
                    (shape, strides, 0)
                })
            }),
            Move::Row(of) => self.view(*of, |value| {
                let (shape, strides) = (value.shape(), value.steps());
                (shape.len() == 2 && shape[0] > 1).then(|| (vec![shape[1]], vec![strides[1]], strides[0]))
            }),
            Move::Flat(of) => self.view(*of, |value| {
                let is_plain = value.steps() == plain(&value.shape());
                (value.shape().len() == 2 && is_plain)
                    .then(|| (vec![value.shape().iter().product()], vec![1], 0))
            }),
            Move::Pointwise(from) => {
                let (operands, shape) = self.operands(from);
                let result = self.result(&shape);
                self.program.operation(pointwise("aten::f", &operands, Some(result), None));
            }
            Move::Written(to, from) => self.write(*to, "aten::f_", from),
            Move::Copied(to, from) => self.write(*to, "aten::copy_", &[*from]),
            Move::Whole(call, from, shape) => {
                let values: Vec<_> = from.iter().map(|from| self.pick(*from)).collect();
                let arguments = values.iter().copied().map(Argument::Value).collect();
                let result = self.result(SHAPES[*shape]);
                self.program.operation(Operation {
                    name: "aten::whole".to_owned(),
                    arguments,
                    results: vec![result],
                    writes: Vec::new(),
                    may_overwrite: if CALLS[*call] == CallKind::Told { values } else { Vec::new() },
                    line: SourceLine(0),
                    pointwise: None,
                    call_kind: CALLS[*call],
                });
            }
            Move::Output(of) => {
                let value = self.pick(*of);
                self.program.output(value);
            }
        }
    }

    fn view(&mut self, of: usize, make: impl Fn(&TensorValue) -> Option<(Vec<i64>, Vec<i64>, i64)>) {
        let of = self.pick(of);
        let value = self.program.at(of);
        if let Some((shape, strides, offset)) = make(value) {
            let offset = value.offset.known() + offset;
            self.program.value(strided(&shape, &strides, offset, ValueSource::View(of)));
        }
    }

    fn write(&mut self, to: usize, name: &str, from: &[usize]) {
        let to = self.pick(to);
        let shape = self.program.at(to).shape();
        let fits =
            |value: &ValueId| broadcast(&shape, &self.program.at(*value).shape()).as_ref() == Some(&shape);
        let operands: Vec<_> = from.iter().map(|from| self.pick(*from)).filter(fits).collect();
        // torch refuses an operand that overlaps with what is written, unless they are the same.
        let root = self.program.root(to);
        let overlaps = operands.iter().any(|value| *value != to && self.program.root(*value) == root);
        if !operands.is_empty() && !overlaps {
            self.program.operation(pointwise(name, &operands, None, Some(to)));
        }
    }
}

fn program(moves: &[Move]) -> Program {
    let mut builder = Builder::new();
    moves.iter().for_each(|next| builder.apply(next));
    builder.apply(&Move::Output(builder.program.values.len() - 1));
    builder.program
}

/// A plan for people.
fn short(plan: &Plan) -> String {
    let group = |number: u32| {
        let group = &plan.groups[number as usize];
        let accesses = group.accesses.iter().map(|access| {
            format!("{}={:?} {}{:?}", access.register, access.direction, access.value, access.strides)
        });
        let instructions = group
            .instructions
            .iter()
            .map(|one| format!("{}: {} <- {:?}", one.operation, one.out, one.operands));
        let lines: Vec<_> = accesses.chain(instructions).collect();
        format!("tiles {:?}\n    {}", group.walk.sizes, lines.join("\n    "))
    };
    let step = |step: &Step| match step {
        Step::Tiles(number) => group(*number),
        other => format!("{other:?}"),
    };
    plan.steps.iter().map(step).collect::<Vec<_>>().join("\n")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_plan_leaves_what_the_program_says(moves in moves(), own_from in proptest::sample::select(OWN_FROM.to_vec())) {
        let program = program(&moves);
        let plan = Plan::new(&program, own_from).map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert_eq!(by_plan(&program, &plan), in_order(&program), "{}\n{}", program, short(&plan));
    }
}

/// No value, all but the smallest, or all of them.
const OWN_FROM: [i64; 3] = [i64::MAX, 32, 0];

fn tiled_groups(plan: &Plan) -> Vec<usize> {
    plan.groups.iter().map(|group| group.instructions.len()).collect()
}

/// Adam's update of one parameter: ten operations, three of which end in memory of the caller.
#[test]
fn a_chain_that_ends_in_inputs_is_one_group_without_memory_of_its_own() {
    let mut program = Program::new();
    let shape = [64, 64];
    let [parameter, gradient, mean] =
        [0, 1, 2].map(|number| program.value(tensor(&shape, ValueSource::Input(number))));
    let result = |program: &mut Program, operands: &[ValueId]| {
        let made = program.value(tensor(&shape, ValueSource::Result));
        program.operation(pointwise("aten::f", operands, Some(made), None));
        made
    };
    let new_mean = result(&mut program, &[mean, gradient]);
    let root = result(&mut program, &[new_mean]);
    let new_parameter = result(&mut program, &[parameter, root]);
    for (to, from) in [(mean, new_mean), (parameter, new_parameter)] {
        program.operation(pointwise("aten::copy_", &[from], None, Some(to)));
    }
    let plan = Plan::new(&program, i64::MAX).unwrap();
    assert_eq!(tiled_groups(&plan), [3], "copies are left out: {program}");
    assert_eq!(plan.workspace, 0);
    assert_eq!(by_plan(&program, &plan), in_order(&program));
}

#[test]
fn a_group_moves_down_to_join_the_next_one_past_an_operation_that_does_not_need_it() {
    let mut program = Program::new();
    let input = program.value(tensor(&[4, 6], ValueSource::Input(0)));
    let [early, product, late] = [0; 3].map(|_| program.value(tensor(&[4, 6], ValueSource::Result)));
    program.operation(pointwise("aten::f", &[input], Some(early), None));
    let mut whole = pointwise("aten::mm", &[input], Some(product), None);
    whole.pointwise = None;
    program.operation(whole);
    program.operation(pointwise("aten::g", &[early, product], Some(late), None));
    program.output(late);
    let plan = Plan::new(&program, i64::MAX).unwrap();
    assert_eq!(tiled_groups(&plan), [2]);
    let runs = plan.steps.iter().filter(|step| matches!(step, Step::Run(_) | Step::Tiles(_)));
    assert_eq!(runs.count(), 2);
}

#[test]
fn a_chain_of_large_operations_reuses_its_memory() {
    let mut program = Program::new();
    let mut last = program.value(tensor(&[24], ValueSource::Input(0)));
    for _ in 0..10 {
        let made = program.value(tensor(&[24], ValueSource::Result));
        let mut whole = pointwise("aten::sort", &[last], Some(made), None);
        whole.pointwise = None;
        program.operation(whole);
        last = made;
    }
    program.output(last);
    assert_eq!(Plan::new(&program, i64::MAX).unwrap().workspace, 2 * 128);
}

#[test]
fn large_values_take_over_memory_of_their_own_and_let_it_go() {
    let mut program = Program::new();
    let input = program.value(tensor(&[24], ValueSource::Input(0)));
    let [product, sum, sorted, result] = [0; 4].map(|_| program.value(tensor(&[24], ValueSource::Result)));
    let whole = |from, to| {
        let mut whole = pointwise("aten::sort", &[from], Some(to), None);
        whole.pointwise = None;
        whole
    };
    program.operation(whole(input, product));
    program.operation(pointwise("aten::f", &[product], Some(sum), None));
    program.operation(whole(sum, sorted));
    program.operation(pointwise("aten::f", &[sorted], Some(result), None));
    program.output(result);
    let plan = Plan::new(&program, 64).unwrap();
    assert_eq!(plan.workspace, 0);
    let memory = [product, sum, sorted, result].map(|value| plan.places[value.0 as usize]);
    assert_eq!(memory, [product, product, sorted, sorted].map(ValueMemory::Own));
    let moves: Vec<_> =
        plan.steps.iter().filter(|step| matches!(step, Step::Make(_) | Step::Free(_))).copied().collect();
    assert_eq!(moves, [Step::Make(product), Step::Free(input), Step::Make(sorted), Step::Free(product)]);
    assert_eq!(by_plan(&program, &plan), in_order(&program));
}

#[test]
fn an_update_runs_once_its_gradient_is_there() {
    let mut program = Program::new();
    let parameters = [0, 1].map(|number| program.value(tensor(&[24], ValueSource::Input(number))));
    let gradients = parameters.map(|parameter| {
        let gradient = program.value(tensor(&[24], ValueSource::Result));
        let mut whole = pointwise("aten::sort", &[parameter], Some(gradient), None);
        whole.pointwise = None;
        program.operation(whole);
        gradient
    });
    for (parameter, gradient) in parameters.into_iter().zip(gradients) {
        program.operation(pointwise("aten::f_", &[parameter, gradient], None, Some(parameter)));
    }
    let plan = Plan::new(&program, i64::MAX).unwrap();
    let runs: Vec<_> = plan.steps.iter().filter(|step| !matches!(step, Step::Free(_))).copied().collect();
    assert_eq!(runs, [Step::Run(OperationId(0)), Step::Tiles(0), Step::Run(OperationId(1)), Step::Tiles(1)]);
    assert_eq!(plan.workspace, 128);
}

#[test]
fn a_kernel_that_may_puts_its_result_where_an_operand_ends() {
    let mut program = Program::new();
    let input = program.value(tensor(&[24], ValueSource::Input(0)));
    let [logits, probabilities, result] = [0; 3].map(|_| program.value(tensor(&[24], ValueSource::Result)));
    for (from, to) in [(input, logits), (logits, probabilities), (probabilities, result)] {
        let mut whole = pointwise("aten::_log_softmax", &[from], Some(to), None);
        whole.pointwise = None;
        whole.may_overwrite = vec![from];
        program.operation(whole);
    }
    program.output(result);
    for (own_from, workspace) in [(i64::MAX, 128), (0, 0)] {
        let plan = Plan::new(&program, own_from).unwrap();
        assert_eq!(
            plan.workspace, workspace,
            "the result is the caller's, the two others share their memory"
        );
        let [one, other] = [logits, probabilities].map(|value| plan.places[value.0 as usize]);
        assert_eq!(one, other);
        assert_eq!(by_plan(&program, &plan), in_order(&program));
    }
}

#[test]
fn equal_streams_have_equal_fingerprints_whatever_their_lines() {
    let make = |line: &str, size: i64| {
        let mut program = Program::new();
        let line = program.line(line);
        let input = program.value(tensor(&[size], ValueSource::Input(0)));
        let made = program.value(tensor(&[size], ValueSource::Result));
        let mut operation = pointwise("aten::f", &[input], Some(made), None);
        operation.line = line;
        program.operation(operation);
        program.output(made);
        program.fingerprint()
    };
    assert_eq!(make("train.py:1", 8), make("train.py:2", 8));
    assert_ne!(make("train.py:1", 8), make("train.py:1", 9));
}
