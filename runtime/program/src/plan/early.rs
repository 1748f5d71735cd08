//! Groups that let go of more memory than they take run as early as they can: an optimizer's update of a
//! parameter right after its gradient is there, instead of after all gradients are. So do those that work on
//! numbers, as such an update needs some.

use std::collections::{HashMap, HashSet};

use super::groups::Batch;
use crate::program::{CallKind, OperationId, Program, ValueId, ValueSource};

/// The place of a batch in the new order: behind the batch of the first number, in the order of the second.
type Place = (usize, usize);

#[derive(Clone, Copy, Default)]
struct Touched {
    /// The last place where it is read, or written.
    read: Option<Place>,
    written: Option<Place>,
}

/// Puts batches in the order in which they are to run.
pub(super) fn early(program: &Program, batches: Vec<Batch>) -> Vec<Batch> {
    let ending = endings(program, &batches);
    let mut touched: HashMap<ValueId, Touched> = HashMap::new();
    let mut placed: Vec<(Place, Batch)> = Vec::with_capacity(batches.len());
    for (at, batch) in batches.into_iter().enumerate() {
        let roots = roots_of(program, &batch);
        let saves = batch.is_tiled() && lets_go(program, &roots, &ending[at]) > 0;
        let rises = saves || is_of_numbers(program, &batch, &roots);
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
fn roots_of(program: &Program, batch: &Batch) -> HashMap<ValueId, bool> {
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
fn endings(program: &Program, batches: &[Batch]) -> Vec<HashSet<ValueId>> {
    let mut last = HashMap::new();
    for (at, batch) in batches.iter().enumerate() {
        for root in roots_of(program, batch).into_keys() {
            if program.at(root).source == ValueSource::Result {
                last.insert(root, at);
            }
        }
    }
    for output in &program.outputs {
        last.remove(&program.root(*output));
    }
    let mut endings = vec![HashSet::new(); batches.len()];
    for (root, at) in last {
        endings[at].insert(root);
    }
    endings
}

fn bytes(program: &Program, root: ValueId) -> i64 {
    let value = program.at(root);
    value.extent().unwrap_or_default() * i64::from(value.dtype.bytes)
}

/// Whether a batch touches next to no memory, and all that it does is known here.
fn is_of_numbers(program: &Program, batch: &Batch, roots: &HashMap<ValueId, bool>) -> bool {
    const FEW: i64 = 64;
    let is_outside = |id: &OperationId| program.operations[id.0 as usize].call_kind == CallKind::Outside;
    !batch.operations.iter().any(is_outside) && roots.keys().all(|root| bytes(program, *root) <= FEW)
}

/// Bytes of what ends in a batch and was there before, without those of what begins there and stays.
fn lets_go(program: &Program, roots: &HashMap<ValueId, bool>, ending: &HashSet<ValueId>) -> i64 {
    let is_made = |root: &ValueId| roots[root] && program.at(*root).source == ValueSource::Result;
    let gone = ending.iter().filter(|root| !is_made(root)).map(|root| bytes(program, *root));
    let made =
        roots.keys().filter(|root| is_made(root) && !ending.contains(root)).map(|root| bytes(program, *root));
    gone.sum::<i64>() - made.sum::<i64>()
}

/// The first place after all that a batch needs, and after everybody else who reads what ends in it.
fn after(
    touched: &HashMap<ValueId, Touched>,
    roots: &HashMap<ValueId, bool>,
    ending: &HashSet<ValueId>,
    at: usize,
) -> Place {
    let last = roots.iter().filter_map(|(root, is_written)| {
        let known = touched.get(root)?;
        let read = known.read.filter(|_| *is_written || ending.contains(root));
        known.written.max(read)
    });
    last.max().map_or((0, at + 1), |(behind, _)| (behind, at + 1))
}
