//! Batches that let go of more memory than they take run as early as they can: an optimizer's update of a
//! parameter right after its gradient is there, instead of after all gradients are, and the gradient of a weight
//! before that of what it is multiplied with. Batches of numbers do so, too: such an update needs some.

use std::collections::{HashMap, HashSet};

use super::groups::Batch;
use crate::program::{CallKind, OperationId, Program, ValueId, ValueSource};

/// Where a batch runs: behind the batch of the first number, and among those there in the order of the second.
type RunOrder = (usize, usize);

#[derive(Clone, Copy, Default)]
struct Touched {
    /// The last place where it is read, or written.
    read: Option<RunOrder>,
    written: Option<RunOrder>,
}

/// Puts batches in the order in which they are to run.
pub(super) fn early(program: &Program, batches: Vec<Batch>) -> Vec<Batch> {
    let roots: Vec<_> = batches.iter().map(|batch| roots_of(program, batch)).collect();
    let ending = endings(program, &roots);
    let mut touched: HashMap<ValueId, Touched> = HashMap::new();
    let mut placed: Vec<(RunOrder, Batch)> = Vec::with_capacity(batches.len());
    for (at, (batch, roots)) in batches.into_iter().zip(roots).enumerate() {
        let lets_go = lets_go(program, &roots, &ending[at]);
        let rises = is_known(program, &batch) && (lets_go > 0 || are_numbers(program, &roots));
        let place = if rises { after(&touched, &roots, &ending[at], at) } else { (at, 0) };
        for (root, is_written) in roots {
            let known = touched.entry(root).or_default();
            let last = if is_written { &mut known.written } else { &mut known.read };
            *last = (*last).max(Some(place));
        }
        placed.push((place, batch));
    }
    placed.sort_by_key(|(place, _)| *place);
    placed.into_iter().map(|(_, batch)| batch).collect()
}

/// The roots that a batch touches, and whether it makes them or writes to them.
type Roots = HashMap<ValueId, bool>;

fn roots_of(program: &Program, batch: &Batch) -> Roots {
    let mut roots = HashMap::new();
    for id in &batch.operations {
        let operation = &program.operations[id.0 as usize];
        for value in operation.values() {
            roots.entry(program.root(value)).or_insert(false);
        }
        for value in operation.results.iter().chain(&operation.writes) {
            roots.insert(program.root(*value), true);
        }
    }
    roots
}

/// For each batch, the roots that nothing after it needs; those that the caller has are none.
fn endings(program: &Program, roots: &[Roots]) -> Vec<HashSet<ValueId>> {
    let mut last = HashMap::new();
    for (at, roots) in roots.iter().enumerate() {
        for root in roots.keys() {
            if program.at(*root).source == ValueSource::Result {
                last.insert(*root, at);
            }
        }
    }
    for output in &program.outputs {
        last.remove(&program.root(*output));
    }
    let mut endings = vec![HashSet::new(); roots.len()];
    for (root, at) in last {
        endings[at].insert(root);
    }
    endings
}

/// Whether the program says all that a batch does: it draws no random numbers, and is no collective.
fn is_known(program: &Program, batch: &Batch) -> bool {
    let is_outside = |id: &OperationId| program.operations[id.0 as usize].call_kind == CallKind::Outside;
    !batch.operations.iter().any(is_outside)
}

fn are_numbers(program: &Program, roots: &Roots) -> bool {
    const FEW: i64 = 64;
    roots.keys().all(|root| program.at(*root).bytes() <= FEW)
}

/// Bytes of what ends in a batch and was there before, without those of what begins there and stays.
fn lets_go(program: &Program, roots: &Roots, ending: &HashSet<ValueId>) -> i64 {
    let is_made = |root: &ValueId| roots[root] && program.at(*root).source == ValueSource::Result;
    let gone = ending.iter().filter(|root| !is_made(root)).map(|root| program.at(*root).bytes());
    let made = roots
        .keys()
        .filter(|root| is_made(root) && !ending.contains(root))
        .map(|root| program.at(*root).bytes());
    gone.sum::<i64>() - made.sum::<i64>()
}

/// The first place after all that a batch needs, and after everybody else who reads what ends in it.
fn after(
    touched: &HashMap<ValueId, Touched>,
    roots: &Roots,
    ending: &HashSet<ValueId>,
    at: usize,
) -> RunOrder {
    let last = roots.iter().filter_map(|(root, is_written)| {
        let known = touched.get(root)?;
        let read = known.read.filter(|_| *is_written || ending.contains(root));
        known.written.max(read)
    });
    last.max().map_or((0, at + 1), |(behind, _)| (behind, at + 1))
}
