//! Scratch memory for blocks that have no place in the output, used again once a block is gone.

use std::collections::HashMap;

use tpurun_topology::Block;

use super::program::{Act, BlockStart, Task};

/// Gives every scratch place of the tasks of one channel its offset, from `base` on; returns the end.
///
/// A slot is free again when its block is not needed any more. A block that was sent may wait for its receiver, so it
/// is needed until the next send to the same rank, which begins when nothing to that rank is left: reusing a slot
/// never waits for anything that the schedule does not wait for anyway.
pub(super) fn assign(tasks: &mut [Task], base: usize) -> usize {
    let last_use = last_uses(tasks);
    let scratch = tasks.iter().filter(|task| scratch_place(&task.act));
    let slot_bytes = scratch.map(|task| task.bytes.next_multiple_of(ALIGNMENT)).max().unwrap_or(0);
    let mut taken: HashMap<Block, usize> = HashMap::new();
    let mut expiring: Vec<Vec<Block>> = vec![Vec::new(); tasks.len() + 1];
    let mut free: Vec<usize> = Vec::new();
    let mut slots = 0;
    for (index, task) in tasks.iter_mut().enumerate() {
        let freed = std::mem::take(&mut expiring[index]).into_iter();
        free.extend(freed.filter_map(|block| taken.remove(&block)));
        if !scratch_place(&task.act) {
            continue;
        }
        let slot = *taken.entry(task.block).or_insert_with(|| {
            expiring[last_use[&task.block]].push(task.block);
            free.pop().unwrap_or_else(|| {
                slots += 1;
                slots - 1
            })
        });
        let offset = base + slot * slot_bytes;
        match &mut task.act {
            Act::Send(BlockStart::Scratch(at)) | Act::Store(BlockStart::Scratch(at)) => *at = offset,
            Act::Fold(fold) => {
                if let BlockStart::Scratch(at) = &mut fold.partial {
                    *at = offset;
                }
            }
            _ => {}
        }
    }
    base + slots * slot_bytes
}

/// For each scratch block, the task before which its slot is free.
fn last_uses(tasks: &[Task]) -> HashMap<Block, usize> {
    let mut next_send: HashMap<u32, usize> = HashMap::new();
    let mut last_use = HashMap::new();
    for (index, task) in tasks.iter().enumerate().rev() {
        let sends = matches!(task.act, Act::Send(_) | Act::SendWidened(_));
        if scratch_place(&task.act) {
            let end =
                if sends { next_send.get(&task.rank).copied().unwrap_or(tasks.len()) } else { index + 1 };
            // The last of several sends to different ranks is not always the last to leave.
            let known = last_use.entry(task.block).or_insert(end);
            *known = end.max(*known);
        }
        if sends {
            next_send.insert(task.rank, index);
        }
    }
    last_use
}

fn scratch_place(act: &Act) -> bool {
    match act {
        Act::Send(place) | Act::Store(place) => matches!(place, BlockStart::Scratch(_)),
        Act::Fold(fold) => matches!(fold.partial, BlockStart::Scratch(_)),
        Act::SendWidened(_) => false,
    }
}

/// A cache line.
const ALIGNMENT: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;
    use tpurun_protocol::wire::Form;

    fn task(rank: u32, chunk: u32, act: Act) -> Task {
        Task { rank, block: Block { chunk, part: 0 }, form: Form::Whole, bytes: 100, act }
    }

    #[test]
    fn slots_are_used_again_one_send_later() {
        let here = BlockStart::Scratch(0);
        let mut tasks: Vec<Task> = (0..4)
            .flat_map(|chunk| [task(0, chunk, Act::Store(here)), task(1, chunk, Act::Send(here))])
            .collect();
        assert_eq!(assign(&mut tasks, 1000), 1000 + 2 * 128);
        let places: Vec<_> = tasks.iter().map(|task| task.act.clone()).collect();
        let (a, b) = (BlockStart::Scratch(1000), BlockStart::Scratch(1128));
        let expected = [a, b, a, b].map(|place| [Act::Store(place), Act::Send(place)]);
        assert_eq!(places, expected.as_flattened());
    }

    #[test]
    fn no_scratch_needs_no_memory() {
        let mut tasks =
            [task(0, 0, Act::Store(BlockStart::Output(0))), task(1, 0, Act::Send(BlockStart::Output(0)))];
        assert_eq!(assign(&mut tasks, 64), 64);
    }
}
