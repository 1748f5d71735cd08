//! A blocking collective of few bytes takes nothing of the allocator.
#![allow(unsafe_code)]

mod ranks;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use ranks::{Call, config, with_ranks};
use tpurun_engine::{Config, Mode, OpKind, Spans};

/// Counts what each thread asks the system's allocator for.
struct Counting;

thread_local! {
    static TAKEN: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: all of it is the system's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        TAKEN.set(TAKEN.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, data: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise; it came from there.
        unsafe { System.dealloc(data, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The pieces of each: a tensor, or one for every rank.
fn spans(memory: &mut [i64], chunks: usize) -> Spans {
    let bytes = size_of_val(memory) / chunks.max(1);
    let data: *mut u8 = memory.as_mut_ptr().cast();
    // SAFETY: the memory outlives the blocking calls.
    unsafe { Spans::new((0..chunks).map(|chunk| (data.wrapping_add(chunk * bytes), bytes)), 1) }
}

#[test]
fn small_blocking_collectives_allocate_nothing() {
    // The ranks that sleep and the rank that comes last differ from operation to operation.
    for (cpus, size) in [(2, 2), (1, 2), (2, 5)] {
        let config = Config { cpus, ..config() };
        for kind in [OpKind::AllReduce, OpKind::Broadcast, OpKind::Reduce, OpKind::Barrier] {
            let taken = with_ranks(size, &config, Duration::from_secs(60), |communicator| {
                let me = communicator.members().rank;
                let mut memory = [1; 8];
                let mut call = Call::new(kind, vec![], vec![]);
                let ops = (0..200).map(|_| {
                    let mut op = call.op();
                    let is_root = me == 0;
                    op.root = matches!(kind, OpKind::Broadcast | OpKind::Reduce).then_some(0);
                    let has = |takes: bool| usize::from(takes && kind != OpKind::Barrier);
                    op.inputs = spans(&mut memory, has(is_root || kind != OpKind::Broadcast));
                    op.outputs = spans(
                        &mut memory,
                        has(kind == OpKind::AllReduce || is_root == (kind == OpKind::Reduce)),
                    );
                    op
                });
                let ops: Vec<_> = ops.collect();
                let mut most = 0;
                for (index, op) in ops.into_iter().enumerate() {
                    let before = TAKEN.get();
                    communicator.post(op, Mode::Blocking).unwrap();
                    // The first one makes the plan.
                    if index > 0 {
                        most = most.max(TAKEN.get() - before);
                    }
                }
                most
            });
            assert_eq!(taken, vec![0; size as usize], "{kind} of {size} ranks on {cpus} CPUs");
        }
    }
}
