//! Which operations run together, and in which order.
//!
//! Operations are taken in the order of the program. One in tiles joins the group that makes what it reads;
//! groups that it joins together move down to the last of them. Nothing moves past what it must not: a write
//! past a read or a write of the same memory, a read past a write, an operation past what makes its operands.

use std::collections::{BTreeSet, HashMap};
use std::ops::Bound;

use super::walk::{BroadcastLayout, is_dense, is_number};
use crate::program::{Loops, OperationId, Program, TensorValue, ValueId};

/// An instruction takes some registers, and a tile of each has to stay in the level 1 cache.
const MOST_OPERATIONS: usize = 64;
/// Groups before the last one that an operation may join for what they read alone.
const LOOKS_BACK: usize = 4;

/// Operations that run one after the other, or together in tiles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) operations: Vec<OperationId>,
    pub(super) tiled: Option<Tiled>,
}

/// The properties that the operations of a group have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tiled {
    /// The shape of every result.
    pub(super) shape: Vec<i64>,
    /// Whether every access so far lies in order, so that its elements can be counted through in any shape.
    is_linear: bool,
    /// Whether the first result lies in order: the walk then is in that order, too.
    pub(super) is_in_order: bool,
}

impl Batch {
    pub(super) fn is_tiled(&self) -> bool {
        self.tiled.is_some()
    }
}

/// The batches of a program, in the order in which they run.
pub(super) fn batches(program: &Program) -> Vec<Batch> {
    let mut builder = Builder { program, batches: Vec::new(), users: HashMap::new() };
    for number in 0..program.operations.len() {
        builder.add(OperationId(number as u32));
    }
    builder.batches.into_iter().filter(|batch| !batch.operations.is_empty()).collect()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Touch {
    Reads,
    Writes,
}

struct Builder<'a> {
    program: &'a Program,
    /// Emptied ones have moved down.
    batches: Vec<Batch>,
    /// The batches that touch the memory of each root.
    users: HashMap<ValueId, Users>,
}

/// The batches that touch the memory of a root. There may be as many of them as there are operations, so nothing
/// goes through all of them.
#[derive(Default)]
struct Users {
    readers: BTreeSet<usize>,
    writers: BTreeSet<usize>,
}

impl Users {
    fn of(&mut self, what: Touch) -> &mut BTreeSet<usize> {
        match what {
            Touch::Reads => &mut self.readers,
            Touch::Writes => &mut self.writers,
        }
    }

    /// Whether a batch in this range must stay on its side of something that touches the memory so.
    fn hold(&self, what: Touch, range: (Bound<usize>, Bound<usize>)) -> bool {
        let is_written = self.writers.range(range).next().is_some();
        is_written || (what == Touch::Writes && self.readers.range(range).next().is_some())
    }
}

impl Builder<'_> {
    fn add(&mut self, id: OperationId) {
        let touched = self.touched(id);
        let place = match self.tiled(id) {
            Some(tiled) => self.join(id, &touched, tiled),
            None => self.push(Batch { operations: Vec::new(), tiled: None }),
        };
        self.batches[place].operations.push(id);
        for (root, what) in touched {
            self.users.entry(root).or_default().of(what).insert(place);
        }
    }

    fn push(&mut self, batch: Batch) -> usize {
        self.batches.push(batch);
        self.batches.len() - 1
    }

    /// The roots that an operation touches; a result counts as written.
    fn touched(&self, id: OperationId) -> Vec<(ValueId, Touch)> {
        let operation = &self.program.operations[id.0 as usize];
        let reads = operation.values().map(|value| (self.program.root(value), Touch::Reads));
        let made = operation.results.iter().chain(&operation.writes);
        reads.chain(made.map(|value| (self.program.root(*value), Touch::Writes))).collect()
    }

    /// How an operation runs in tiles: nothing when it cannot.
    fn tiled(&self, id: OperationId) -> Option<Tiled> {
        let operation = &self.program.operations[id.0 as usize];
        let pointwise = operation.pointwise.as_ref()?;
        let target = self.program.at(self.program.target(id));
        let shape = target.shape();
        let operands: Vec<_> =
            pointwise.operands.iter().flatten().map(|operand| self.program.at(*operand)).collect();
        if target.elements()? == 0
            || !operands.iter().all(|value| BroadcastLayout::over(value, &shape).is_some())
        {
            return None;
        }
        let is_in_order = is_dense(target);
        // A number is everywhere the same, so it lies in every order.
        let is_linear = is_in_order
            && operands
                .iter()
                .all(|value| is_number(value) || (value.elements() == target.elements() && is_dense(value)));
        let is_same = |value: &&TensorValue| is_dense(value) && value.shape() == shape;
        let ends_alike = is_in_order && operands.iter().all(is_same);
        (pointwise.loops == Loops::Alike || ends_alike).then_some(Tiled { shape, is_linear, is_in_order })
    }

    /// The batch that an operation in tiles goes to.
    fn join(&mut self, id: OperationId, touched: &[(ValueId, Touch)], tiled: Tiled) -> usize {
        let makers = touched.iter().filter_map(|(root, _)| self.users.get(root)?.writers.last());
        let last = makers.copied().max();
        let up = last
            .filter(|last| self.may_rise(touched, *last))
            .and_then(|last| Some((last, self.common(last, &tiled, &[id])?)));
        let (place, common) = up
            .or_else(|| self.beside(id, touched, &tiled, last))
            .unwrap_or_else(|| (self.push(Batch { operations: Vec::new(), tiled: None }), tiled.clone()));
        self.batches[place].tiled = Some(common);
        self.gather(id, touched, &tiled, place);
        place
    }

    /// Moves the groups that made, or last wrote, what an operation touches into the one that it has joined, the
    /// newest first. One that stays holds those before it that have written the same memory.
    fn gather(&mut self, id: OperationId, touched: &[(ValueId, Touch)], tiled: &Tiled, place: usize) {
        let mut open: Vec<ValueId> = touched.iter().map(|(root, _)| *root).collect();
        let maker = |builder: &Self, root: &ValueId| {
            builder.users.get(root)?.writers.range(..place).next_back().copied()
        };
        while let Some(from) = open.iter().filter_map(|root| maker(self, root)).max() {
            if self.common(from, tiled, &[id]).is_none() || !self.sink(from, place, id) {
                open.retain(|root| maker(self, root) != Some(from));
            }
        }
    }

    /// A group not before `last` that reads what this operation reads: memory is gone through once then.
    fn beside(
        &self,
        id: OperationId,
        touched: &[(ValueId, Touch)],
        tiled: &Tiled,
        last: Option<usize>,
    ) -> Option<(usize, Tiled)> {
        let first = last.map_or(0, |last| last + 1).max(self.batches.len().saturating_sub(LOOKS_BACK));
        (first..self.batches.len()).rev().find_map(|batch| {
            let shares = touched.iter().filter(|(_, what)| *what == Touch::Reads).any(|(root, _)| {
                let users = self.users.get(root);
                users.is_some_and(|users| users.readers.contains(&batch) || users.writers.contains(&batch))
            });
            let may_join = shares && self.may_rise(touched, batch);
            may_join.then(|| Some((batch, self.common(batch, tiled, &[id])?))).flatten()
        })
    }

    /// The properties that a group and further operations have in common, if they can run in the same tiles.
    fn common(&self, batch: usize, tiled: &Tiled, operations: &[OperationId]) -> Option<Tiled> {
        let of = self.batches[batch].tiled.as_ref()?;
        let count = |shape: &[i64]| shape.iter().product::<i64>();
        let is_same = of.shape == tiled.shape;
        let is_counted =
            (of.is_linear || tiled.is_linear) && count(&of.shape) == count(&tiled.shape) && of.is_in_order;
        let fits = self.batches[batch].operations.len() + operations.len() <= MOST_OPERATIONS;
        if !(fits && (is_same || is_counted) && of.is_in_order == tiled.is_in_order) {
            return None;
        }
        let shape = if is_same || tiled.is_linear { of.shape.clone() } else { tiled.shape.clone() };
        let common = Tiled { shape, is_linear: of.is_linear && tiled.is_linear, is_in_order: of.is_in_order };
        let known = &self.batches[batch].operations;
        self.are_in_step(known, operations, &common.shape).then_some(common)
    }

    /// Whether two sets of operations that touch the same memory, one of them writing, do so element by
    /// element: each then has read its own element before that is written.
    fn are_in_step(&self, known: &[OperationId], others: &[OperationId], shape: &[i64]) -> bool {
        let accesses = |ids: &[OperationId]| -> Vec<(ValueId, ValueId, Touch)> {
            ids.iter()
                .flat_map(|id| {
                    let operation = &self.program.operations[id.0 as usize];
                    let operands = operation.pointwise.iter().flat_map(|pointwise| pointwise.operands.iter());
                    let reads = operands.flatten().map(|value| (*value, Touch::Reads));
                    let target = (self.program.target(*id), Touch::Writes);
                    reads.chain([target]).map(|(value, what)| (self.program.root(value), value, what))
                })
                .collect()
        };
        let theirs = accesses(others);
        accesses(known).iter().all(|(root, value, what)| {
            theirs.iter().all(|(other_root, other, other_what)| {
                root != other_root
                    || (*what == Touch::Reads && *other_what == Touch::Reads)
                    || value == other
                    || self.lie_alike(*value, *other, shape)
            })
        })
    }

    fn lie_alike(&self, one: ValueId, other: ValueId, shape: &[i64]) -> bool {
        let (one, other) = (self.program.at(one), self.program.at(other));
        let are_dense = || {
            is_dense(one)
                && is_dense(other)
                && one.elements() == other.elements()
                && one.offset == other.offset
        };
        let over = |value| BroadcastLayout::over(value, shape);
        one.dtype == other.dtype && (are_dense() || (over(one).is_some() && over(one) == over(other)))
    }

    /// Whether an operation, the newest, may run in a batch before others.
    fn may_rise(&self, touched: &[(ValueId, Touch)], to: usize) -> bool {
        let after = (Bound::Excluded(to), Bound::Unbounded);
        !touched.iter().any(|(root, what)| self.users.get(root).is_some_and(|users| users.hold(*what, after)))
    }

    /// Whether all operations of a batch may run as late as in another.
    fn may_sink(&self, moved: &[(ValueId, Touch)], from: usize, to: usize) -> bool {
        let between = (Bound::Excluded(from), Bound::Excluded(to));
        !moved.iter().any(|(root, what)| self.users.get(root).is_some_and(|users| users.hold(*what, between)))
    }

    /// Moves a batch into a later one, before its operations, if that is allowed; says whether it is.
    fn sink(&mut self, from: usize, to: usize, id: OperationId) -> bool {
        let Some(tiled) = self.batches[from].tiled.clone() else {
            return false;
        };
        let moved = self.batches[from].operations.clone();
        let touched: Vec<_> = moved.iter().flat_map(|id| self.touched(*id)).collect();
        let Some(common) = self.common(to, &tiled, &moved).filter(|_| self.may_sink(&touched, from, to))
        else {
            return false;
        };
        // The operation that joins them is not in a batch yet, and is to fit the shape of both.
        if !self.are_in_step(&moved, &[id], &common.shape) {
            return false;
        }
        for (root, what) in touched {
            let batches = self.users.entry(root).or_default().of(what);
            batches.remove(&from);
            batches.insert(to);
        }
        self.batches[from] = Batch { operations: Vec::new(), tiled: None };
        let batch = &mut self.batches[to];
        batch.operations.splice(0..0, moved);
        batch.operations.sort_unstable();
        batch.tiled = Some(common);
        true
    }
}
