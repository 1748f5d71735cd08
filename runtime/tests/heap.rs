//! The allocator against a model: a list of live blocks.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tpurun_runtime::{Block, Heap};

/// The blocks that the caller has: they say which bytes are its own.
#[derive(Default)]
struct Model {
    /// Bytes and size asked, by offset.
    live: BTreeMap<u64, Block>,
    peak: u64,
    total: u64,
}

impl Model {
    fn allocated(&self) -> u64 {
        self.live.values().map(|block| block.bytes).sum()
    }

    fn take(&mut self, block: Block, asked: u64, limit: u64) {
        assert!(block.offset.is_multiple_of(512) && block.bytes.is_multiple_of(512));
        assert!(block.bytes >= asked && block.bytes > 0);
        assert!(block.bytes <= (asked + 511).max(512).max(asked + asked / 8 + 512), "{asked} took {block:?}");
        assert!(block.offset + block.bytes <= limit);
        if let Some((_, before)) = self.live.range(..=block.offset).next_back() {
            assert!(before.offset + before.bytes <= block.offset, "{block:?} overlaps {before:?}");
        }
        if let Some((_, after)) = self.live.range(block.offset..).next() {
            assert!(block.offset + block.bytes <= after.offset, "{block:?} overlaps {after:?}");
        }
        self.live.insert(block.offset, block);
        self.total += block.bytes;
        self.peak = self.peak.max(self.allocated());
    }
}

#[derive(Clone, Debug)]
enum Step {
    Take(u64),
    Give(prop::sample::Index),
    GiveWrong(u64),
    Trim,
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop_oneof![
        3 => 0..2048_u64,
        3 => 0..70_000_u64,
        2 => 60_000..3_000_000_u64,
        1 => 1_000_000..20_000_000_u64,
        1 => prop::sample::select(vec![512, 65_536, 65_537, 2 << 20, u64::MAX, u64::MAX - 600]),
    ];
    prop_oneof![
        8 => bytes.prop_map(Step::Take),
        6 => any::<prop::sample::Index>().prop_map(Step::Give),
        1 => (0..64_u64 << 20).prop_map(Step::GiveWrong),
        1 => Just(Step::Trim),
    ]
}

fn check(limit: u64, steps: &[Step]) {
    let mut heap = Heap::new(limit);
    let mut model = Model::default();
    let (mut refused, mut frees) = (0, 0);
    for step in steps {
        match step {
            Step::Take(bytes) => match heap.allocate(*bytes, Some("model.py:1")) {
                Ok(block) => model.take(block, *bytes, limit),
                Err(shortage) => {
                    refused += 1;
                    let text = shortage.text(0);
                    assert!(text.starts_with("expected at most ") && !text.contains('\n'), "{text}");
                    assert!(!model.live.is_empty() || *bytes > limit / 512 * 512, "{bytes} of an empty heap");
                    let fits = |bytes| bytes <= heap.largest_free() && model.allocated() + bytes <= limit;
                    assert!(
                        !(*bytes).max(1).checked_next_multiple_of(512).is_some_and(fits),
                        "{bytes} refused"
                    );
                }
            },
            Step::Give(which) if !model.live.is_empty() => {
                let offset = *model.live.keys().nth(which.index(model.live.len())).unwrap();
                let block = model.live.remove(&offset).unwrap();
                assert_eq!(heap.bytes(offset), Some(block.bytes));
                assert_eq!(heap.free(offset), Some(block.bytes));
                assert_eq!(heap.free(offset), None, "freed twice");
                frees += 1;
            }
            Step::Give(_) => {}
            Step::GiveWrong(offset) => {
                if !model.live.contains_key(offset) {
                    assert_eq!((heap.free(*offset), heap.bytes(*offset)), (None, None));
                }
            }
            Step::Trim => trim(&mut heap, &model),
        }
        let stats = heap.stats();
        assert_eq!((stats.allocated, stats.allocated_peak), (model.allocated(), model.peak));
        assert_eq!(
            (stats.allocated_total, stats.allocated_total - stats.freed_total),
            (model.total, stats.allocated)
        );
        assert_eq!((stats.live, stats.frees, stats.refused), (model.live.len() as u64, frees, refused));
        assert_eq!(stats.allocations - stats.frees, stats.live);
        assert!(stats.allocated <= limit);
        let pages = stats.reserved;
        assert!(
            pages >= stats.allocated && pages <= limit.next_multiple_of(4096) && pages <= stats.reserved_peak
        );
    }
    for offset in std::mem::take(&mut model.live).into_keys() {
        heap.free(offset).expect("live");
    }
    trim(&mut heap, &model);
    assert_eq!(heap.stats().allocated, 0);
    assert_eq!(heap.largest_free(), limit / 512 * 512, "all is one range again");
    assert_eq!(heap.stats().reserved, 0);
}

/// Gives free ranges back to the host, and checks that they are nobody's.
fn trim(heap: &mut Heap, model: &Model) {
    let before = heap.stats().reserved;
    let trimmed = heap.trim(|start, bytes| {
        assert!(start.is_multiple_of(4096) && bytes.is_multiple_of(4096) && bytes > 0);
        for block in model.live.values() {
            assert!(block.offset + block.bytes <= start || start + bytes <= block.offset, "{block:?}");
        }
    });
    assert_eq!(heap.stats().reserved, before - trimmed);
    assert_eq!(heap.trim(|_, _| panic!("there is nothing left to trim")), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn it_does_what_the_model_does(
        limit in prop_oneof![Just(1_u64 << 30), Just(256 << 20), Just(64 << 20), 512..5_000_000_u64],
        steps in prop::collection::vec(step(), 1..200),
    ) {
        check(limit, &steps);
    }
}

#[test]
fn the_same_calls_give_the_same_offsets() {
    let run = || {
        let mut heap = Heap::new(1 << 30);
        let offsets: Vec<u64> = (1..300_u64)
            .map(|n| {
                let offset = heap.allocate(n * n * 7, None).unwrap().offset;
                if n % 3 == 0 {
                    heap.free(offset);
                }
                offset
            })
            .collect();
        offsets
    };
    assert_eq!(run(), run());
}

#[test]
fn the_limit_is_met_exactly() {
    let mut heap = Heap::new(1 << 20);
    let blocks: Vec<Block> = std::iter::from_fn(|| heap.allocate(512, None).ok()).collect();
    assert_eq!(blocks.len(), 2048);
    let shortage = heap.allocate(1, Some("last.py:1")).unwrap_err();
    assert_eq!(
        shortage.text(0),
        "expected at most 1.00 MiB on tpu:0 (--hbm), asked 1 B at last.py:1 with 1.00 MiB held by 2,048 \
         tensors: 1.00 MiB smaller than 1 MiB each (2,048); 0 B free, largest free block 0 B"
    );
    assert_eq!((heap.stats().refused, heap.stats().allocated), (2, 1 << 20));
}

/// A slab kept for reuse is no reason to refuse.
#[test]
fn what_is_kept_for_reuse_is_given_up_before_anything_is_refused() {
    const LIMIT: u64 = 512 << 20;
    let mut heap = Heap::new(LIMIT);
    let small: Vec<Block> = (0..40).map(|class| heap.allocate(512 + class * 1500, None).unwrap()).collect();
    for block in small {
        heap.free(block.offset).expect("live");
    }
    assert!(heap.largest_free() < LIMIT);
    heap.allocate(LIMIT, None).expect("nothing else is live");
}

#[test]
fn small_blocks_of_a_slab_reuse_what_was_freed_last() {
    let mut heap = Heap::new(64 << 20);
    let blocks: Vec<Block> = (0..5000).map(|_| heap.allocate(1000, None).unwrap()).collect();
    let reserved = heap.stats().reserved;
    for block in &blocks[1000..4000] {
        heap.free(block.offset).expect("live");
    }
    let again: Vec<Block> = (0..3000).map(|_| heap.allocate(1000, None).unwrap()).collect();
    assert!(again.iter().all(|block| blocks.contains(block)));
    assert_eq!(heap.stats().reserved, reserved);
}

#[test]
fn peaks_and_totals_start_again_when_asked() {
    let memory = tpurun_runtime::ArenaMemory::open(0, 8 << 20).unwrap();
    let one = memory.allocate(3 << 20, None).unwrap();
    let two = memory.allocate(1 << 20, None).unwrap();
    assert!(memory.free(one.as_ptr()));
    memory.reset_peak();
    memory.reset_totals();
    let stats = memory.stats().unwrap();
    assert_eq!((stats.allocated_peak, stats.reserved_peak), (1 << 20, 4 << 20));
    assert_eq!((stats.allocations, stats.frees, stats.allocated_total, stats.freed_total), (0, 0, 0, 0));
    assert_eq!(memory.trim(), 3 << 20);
    assert!(memory.free(two.as_ptr()));
    let stats = memory.stats().unwrap();
    assert_eq!((stats.live, stats.frees, stats.freed_total, stats.reserved), (0, 1, 1 << 20, 1 << 20));
}

/// However many sizes are in use: most of a small arena stays for whoever asks.
#[test]
fn slabs_take_a_small_part_of_a_small_arena() {
    let mut heap = Heap::new(64 << 20);
    let blocks: Vec<Block> = (1..128).map(|units| heap.allocate(units * 512, None).unwrap()).collect();
    let taken: u64 = blocks.iter().map(|block| block.bytes).sum();
    heap.allocate((64 << 20) - taken - (2 << 20), None).expect("at most a 32nd is unused");
}
