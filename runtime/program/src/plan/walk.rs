//! The order in which a group goes through the elements of its operations, and how values lie in it.

use crate::program::{Program, TensorValue, ValueId};

/// Sizes of nested loops, the outermost first. An element's place in them, counted by the innermost loop
/// first, is its linear index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ElementWalk {
    /// None of them is 1.
    pub sizes: Vec<i64>,
}

impl ElementWalk {
    /// All elements.
    pub fn elements(&self) -> i64 {
        self.sizes.iter().product()
    }
}

/// Whether an access brings elements into a register or takes them out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Before the first instruction.
    Load,
    /// After the last one.
    Store,
}

/// A value that a group reads or writes in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// The value.
    pub value: ValueId,
    /// Whether it is a load or a store.
    pub direction: Transfer,
    /// In elements, one for each loop of the walk.
    pub strides: Vec<i64>,
    /// Whether the element of linear index i is the i-th in memory: the register is the memory itself then.
    pub is_linear: bool,
    /// Its register.
    pub register: u16,
}

/// How a value lies along the dimensions of `shape`, to which torch broadcasts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BroadcastLayout {
    pub(super) offset: i64,
    pub(super) strides: Vec<i64>,
}

impl BroadcastLayout {
    /// Returns nothing for a value that does not broadcast to `shape`.
    pub(super) fn over(value: &TensorValue, shape: &[i64]) -> Option<Self> {
        let mut strides = vec![0; shape.len()];
        let first = shape.len().checked_sub(value.sizes.len())?;
        for (at, (size, stride)) in value.sizes.iter().zip(&value.strides).enumerate() {
            let (size, wanted) = (size.known(), shape[first + at]);
            if size != wanted && size != 1 {
                return None;
            }
            strides[first + at] = if size == 1 { 0 } else { stride.known() };
        }
        Some(Self { offset: value.offset.known(), strides })
    }
}

/// The strides of elements that lie one after the other.
pub(super) fn in_order(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![0; shape.len()];
    let mut product = 1;
    for (stride, size) in strides.iter_mut().zip(shape).rev() {
        *stride = if *size == 1 { 0 } else { product };
        product *= size;
    }
    strides
}

/// Whether the elements of a value lie one after the other, in the order of its dimensions.
pub(super) fn is_dense(value: &TensorValue) -> bool {
    let shape = value.shape();
    let steps = value.steps().into_iter().zip(&shape).map(|(step, size)| if *size == 1 { 0 } else { step });
    value.elements() == Some(0) || steps.eq(in_order(&shape))
}

/// Whether a value is one number, wherever it is used.
pub(super) fn is_number(value: &TensorValue) -> bool {
    value.sizes.is_empty()
}

/// The walk over `shape` in the memory order of `first`, with as few loops as all `layouts` allow; and the
/// strides of each layout in it.
pub(super) fn walk(
    shape: &[i64],
    first: &[i64],
    layouts: &[BroadcastLayout],
) -> (ElementWalk, Vec<Vec<i64>>) {
    let mut order: Vec<usize> = (0..shape.len()).filter(|dimension| shape[*dimension] != 1).collect();
    order.sort_by_key(|dimension| std::cmp::Reverse(first[*dimension]));
    let mut sizes: Vec<i64> = Vec::new();
    let mut strides: Vec<Vec<i64>> = vec![Vec::new(); layouts.len()];
    for dimension in order {
        let size = shape[dimension];
        let joins = !sizes.is_empty()
            && layouts
                .iter()
                .zip(&strides)
                .all(|(layout, outer)| outer.last() == Some(&(layout.strides[dimension] * size)));
        match sizes.last_mut().filter(|_| joins) {
            Some(outer) => *outer *= size,
            None => sizes.push(size),
        }
        for (layout, known) in layouts.iter().zip(&mut strides) {
            if joins {
                known.pop();
            }
            known.push(layout.strides[dimension]);
        }
    }
    (ElementWalk { sizes }, strides)
}

impl Program {
    /// The value that an operation in tiles computes: its result, or what it writes to.
    pub(super) fn target(&self, operation: crate::program::OperationId) -> ValueId {
        let operation = &self.operations[operation.0 as usize];
        operation.writes.first().or(operation.results.first()).copied().unwrap_or(ValueId(0))
    }
}
