//! Time of a collective without Python: `cargo bench -p tpurun-engine --bench collective [-- RANKS BYTES]
//! [all_gather|reduce_scatter|all_to_all|broadcast] [mapped] [f32|bf16|f16|..]`; an all-reduce unless told.
//!
//! Ranks are threads that map the segment separately; each row is the median over blocks of iterations of
//! the slowest rank's mean, with the fastest and slowest block. `mapped` has the tensors in an arena. Bytes are
//! those of the largest buffer of a rank.
#![allow(unsafe_code)]

#[path = "../tests/ranks/mod.rs"]
mod ranks;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ranks::{Call, with_ranks};
use tpurun_engine::arena::{Arena, ArenaKind, Arenas};
use tpurun_engine::dtype::Dtype;
use tpurun_engine::{Config, Mode, OpKind, Spans};

const BLOCKS: usize = 7;
const KINDS: [OpKind; 5] =
    [OpKind::AllReduce, OpKind::AllGather, OpKind::ReduceScatter, OpKind::AllToAll, OpKind::Broadcast];

fn main() {
    let given: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let numbers: Vec<usize> = given.iter().filter_map(|arg| arg.parse().ok()).collect();
    let dtype = Dtype::ALL.into_iter().find(|dtype| given.contains(&dtype.to_string())).unwrap_or(Dtype::F32);
    let kind = KINDS.into_iter().find(|kind| given.contains(&kind.to_string())).unwrap_or(OpKind::AllReduce);
    let is_mapped = given.iter().any(|arg| arg == "mapped");
    let (all_ranks, all_bytes) = match numbers[..] {
        [ranks, bytes] => (vec![ranks], vec![bytes]),
        _ => (vec![2, 8, 64], vec![8, 64 << 10, 1 << 20, 16 << 20]),
    };
    println!(
        "{:>14} {:>6} {:>10} {:>12} {:>12} {:>12} {:>10}",
        "collective", "ranks", "bytes", "median us", "min us", "max us", "GB/s"
    );
    for ranks in all_ranks {
        for &bytes in &all_bytes {
            if ranks * bytes <= 1 << 30 {
                row(kind, ranks as u32, bytes, dtype, is_mapped);
            }
        }
    }
}

/// A piece of memory in chunks of equal bytes.
type Chunks = (*mut u8, usize, usize);

/// Returns what rank `me` gives and gets, out of memory for two buffers of `bytes` bytes each.
fn buffers(kind: OpKind, me: u32, ranks: usize, bytes: usize, memory: *mut u8) -> [Chunks; 2] {
    let behind = memory.wrapping_add(bytes);
    let part = bytes / ranks;
    match kind {
        OpKind::AllGather => [(memory, 1, part), (behind, ranks, part)],
        OpKind::ReduceScatter => [(memory, ranks, part), (behind, 1, part)],
        OpKind::AllToAll => [(memory, ranks, part), (behind, ranks, part)],
        OpKind::Broadcast if me == 0 => [(memory, 1, bytes), (memory, 0, 0)],
        OpKind::Broadcast => [(memory, 0, 0), (memory, 1, bytes)],
        _ => [(memory, 1, bytes); 2],
    }
}

fn row(kind: OpKind, ranks: u32, bytes: usize, dtype: Dtype, is_mapped: bool) {
    let bytes = bytes.next_multiple_of(dtype.size() * ranks as usize);
    let stride = (2 * bytes).next_multiple_of(4096);
    let arena = is_mapped.then(|| {
        Arc::new(Arena::create(stride as u64 * u64::from(ranks)).expect("the host has a memfd to give"))
    });
    let config = Config::from_env().expect("TPURUN_* variables are valid");
    let config = match &arena {
        Some(arena) => Config { arenas: Arenas::default().with(ArenaKind::Host, arena.clone()), ..config },
        None => config,
    };
    // About a quarter of a second per block.
    let iterations = (100_000_000 / (ranks as usize * (bytes + 20_000))).clamp(3, 5000);
    let times = with_ranks(ranks, &config, Duration::from_secs(60), |communicator| {
        // Zeroes would all be read from one page.
        let mut own = vec![1u64; stride / 8];
        let me = communicator.members().rank;
        let memory = match &arena {
            Some(arena) => {
                let memory = arena.pointer(u64::from(me) * stride as u64, stride as u64);
                // SAFETY: this part of the arena is this rank's.
                unsafe { memory.write_bytes(1, stride) };
                memory
            }
            None => own.as_mut_ptr().cast(),
        };
        let spans = buffers(kind, me, ranks as usize, bytes, memory).map(|(memory, chunks, part)| {
            let pieces = (0..chunks).map(|chunk| (memory.wrapping_add(chunk * part), part));
            // SAFETY: the memory outlives the blocking calls below.
            unsafe { Spans::new(pieces, 1) }
        });
        let mut call = Call::new(kind, vec![], vec![]);
        let mut run = || {
            let mut op = call.op();
            op.dtype = dtype;
            op.root = (kind == OpKind::Broadcast).then_some(0);
            [op.inputs, op.outputs] = spans.clone();
            communicator.post(op, Mode::Blocking).expect("the collective works");
        };
        (0..3).for_each(|_| run());
        let block = |_| {
            let began = Instant::now();
            (0..iterations).for_each(|_| run());
            began.elapsed().as_secs_f64() / iterations as f64 * 1e6
        };
        (0..BLOCKS).map(block).collect::<Vec<f64>>()
    });
    let mut blocks: Vec<f64> =
        (0..BLOCKS).map(|block| times.iter().map(|rank| rank[block]).fold(0.0, f64::max)).collect();
    blocks.sort_by(f64::total_cmp);
    let median = blocks[BLOCKS / 2];
    let rate = bytes as f64 / median / 1e3;
    println!(
        "{:>14} {ranks:>6} {bytes:>10} {median:>12.1} {:>12.1} {:>12.1} {rate:>10.2}",
        kind.to_string(),
        blocks[0],
        blocks[BLOCKS - 1]
    );
}
