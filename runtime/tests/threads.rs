//! Device memory that several threads use at once: blocks are freed by others than who allocated them.
#![allow(unsafe_code)]

use std::sync::mpsc;

use tpurun_runtime::ArenaMemory;

const THREADS: u64 = 4;
const ROUNDS: u64 = 5000;
const LIMIT: u64 = 256 << 20;

/// A block full of its owner's mark.
struct Marked {
    data: *mut u8,
    bytes: usize,
    mark: u8,
}

// SAFETY: memory of the arena is any thread's.
unsafe impl Send for Marked {}

impl Marked {
    fn new(memory: &ArenaMemory, bytes: usize, mark: u8) -> Self {
        let data = memory.allocate(bytes as u64, None).expect("there is room").as_ptr();
        // SAFETY: a block of this many bytes, which is ours alone.
        unsafe { data.write_bytes(mark, bytes) };
        Self { data, bytes, mark }
    }

    /// Nobody else may have written into it.
    fn free(self, memory: &ArenaMemory) {
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(self.data, self.bytes) };
        assert!(bytes.iter().all(|byte| *byte == self.mark), "two blocks overlap");
        assert!(memory.free(self.data));
    }
}

#[test]
fn blocks_are_freed_by_other_threads_and_none_is_lost() {
    let memory = &ArenaMemory::open(0, LIMIT).unwrap();
    let (tx, rx): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| mpsc::sync_channel::<Marked>(64)).unzip();
    std::thread::scope(|scope| {
        for (thread, rx) in rx.into_iter().enumerate() {
            scope.spawn(move || rx.into_iter().for_each(|block| block.free(memory)));
            let next = tx[(thread + 1) % THREADS as usize].clone();
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    // From 1 byte to 100 KiB, small ones more often; every hundredth is large.
                    let bytes = round * 7919 % 1000 * (round % 103) + 1;
                    let bytes = if round % 100 == 99 { bytes << 4 } else { bytes };
                    let block = Marked::new(memory, bytes as usize, (round + thread as u64) as u8);
                    next.send(block).expect("the other thread frees until we end");
                }
            });
        }
        drop(tx);
    });
    let stats = memory.stats().unwrap();
    assert_eq!((stats.live, stats.allocated, stats.refused), (0, 0, 0));
    assert_eq!((stats.allocations, stats.frees), (THREADS * ROUNDS, THREADS * ROUNDS));
    assert_eq!(stats.allocated_total, stats.freed_total);
    assert_eq!(memory.trim(), stats.reserved);
    assert_eq!(memory.report().unwrap().largest_free, LIMIT);
}

/// Trimming takes nothing from those who allocate meanwhile.
#[test]
fn trimming_zeroes_no_live_block() {
    let memory = &ArenaMemory::open(0, LIMIT).unwrap();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (1..3)
            .map(|thread: u8| {
                scope.spawn(move || {
                    for round in 0..2000_usize {
                        Marked::new(memory, round * 211 % 300_000 + 1, thread).free(memory);
                    }
                })
            })
            .collect();
        while !workers.iter().all(|worker| worker.is_finished()) {
            memory.trim();
        }
    });
    assert_eq!(memory.stats().unwrap().live, 0);
}
