//! Time of an all-reduce without Python: `cargo bench -p tpurun-collectives --bench all_reduce [-- RANKS BYTES]
//! [mapped] [f32|bf16|f16|..]`.
//!
//! Ranks are threads that map the segment separately; each row is the median over blocks of iterations of
//! the slowest rank's mean, with the fastest and slowest block. `mapped` has the tensors in an arena.
#![allow(unsafe_code)]

#[path = "../tests/ranks/mod.rs"]
mod ranks;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ranks::{Call, with_ranks};
use tpurun_collectives::arena::{Arena, ArenaKind, Arenas};
use tpurun_collectives::dtype::Dtype;
use tpurun_collectives::{Config, Mode, OpKind, Spans};

const BLOCKS: usize = 7;

fn main() {
    let given: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let numbers: Vec<usize> = given.iter().filter_map(|arg| arg.parse().ok()).collect();
    let dtype = Dtype::ALL.into_iter().find(|dtype| given.contains(&dtype.to_string())).unwrap_or(Dtype::F32);
    let is_mapped = given.iter().any(|arg| arg == "mapped");
    let (all_ranks, all_bytes) = match numbers[..] {
        [ranks, bytes] => (vec![ranks], vec![bytes]),
        _ => (vec![2, 8, 64], vec![8, 64 << 10, 1 << 20, 16 << 20]),
    };
    println!(
        "{:>6} {:>10} {:>12} {:>12} {:>12} {:>10}",
        "ranks", "bytes", "median us", "min us", "max us", "GB/s"
    );
    for ranks in all_ranks {
        for &bytes in &all_bytes {
            if ranks * bytes <= 1 << 30 {
                row(ranks as u32, bytes, dtype, is_mapped);
            }
        }
    }
}

fn row(ranks: u32, bytes: usize, dtype: Dtype, is_mapped: bool) {
    let bytes = bytes.next_multiple_of(dtype.size());
    let stride = bytes.next_multiple_of(4096) as u64;
    let arena = is_mapped
        .then(|| Arc::new(Arena::create(stride * u64::from(ranks)).expect("the host has a memfd to give")));
    let config = Config::from_env().expect("TPURUN_* variables are valid");
    let config = match &arena {
        Some(arena) => Config { arenas: Arenas::default().with(ArenaKind::Host, arena.clone()), ..config },
        None => config,
    };
    // About a quarter of a second per block.
    let iterations = (100_000_000 / (ranks as usize * (bytes + 20_000))).clamp(3, 5000);
    let times = with_ranks(ranks, &config, Duration::from_secs(60), |communicator| {
        let mut own = vec![0u64; bytes.div_ceil(8)];
        let data = match &arena {
            Some(arena) => {
                let data = arena.pointer(u64::from(communicator.members().rank) * stride, bytes as u64);
                // SAFETY: this part of the arena is this rank's.
                unsafe { data.write_bytes(0, bytes) };
                data
            }
            None => own.as_mut_ptr().cast(),
        };
        let mut call = Call::new(OpKind::AllReduce, vec![], vec![]);
        let mut run = || {
            let mut op = call.op();
            op.dtype = dtype;
            // SAFETY: the memory outlives the blocking call below.
            op.inputs = unsafe { Spans::new([(data, bytes)], 1) };
            op.outputs = op.inputs.clone();
            communicator.post(op, Mode::Blocking).expect("the all-reduce works");
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
        "{ranks:>6} {bytes:>10} {median:>12.1} {:>12.1} {:>12.1} {rate:>10.2}",
        blocks[0],
        blocks[BLOCKS - 1]
    );
}
