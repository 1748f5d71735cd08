//! Time of an all-reduce without Python: `cargo bench -p tpurun-collectives [-- RANKS BYTES]`.
//!
//! Ranks are threads that map the segment separately; each row is the median over blocks of iterations of
//! the slowest rank's mean, with the fastest and slowest block.
#![allow(unsafe_code)]

#[path = "../tests/ranks/mod.rs"]
mod ranks;

use std::time::{Duration, Instant};

use ranks::{Call, with_ranks};
use tpurun_collectives::dtype::Dtype;
use tpurun_collectives::{Config, Mode, OpKind};

const BLOCKS: usize = 7;

fn main() {
    let given: Vec<usize> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let (all_ranks, all_bytes) = match given[..] {
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
                row(ranks as u32, bytes);
            }
        }
    }
}

fn row(ranks: u32, bytes: usize) {
    let config = Config::from_env().expect("TPURUN_* variables are valid");
    // About a quarter of a second per block.
    let iterations = (100_000_000 / (ranks as usize * (bytes + 20_000))).clamp(3, 5000);
    let times = with_ranks(ranks, &config, Duration::from_secs(60), |communicator| {
        let mut call =
            Call::new(OpKind::AllReduce, vec![vec![1; bytes.div_ceil(8)]], vec![vec![0; bytes.div_ceil(8)]]);
        let mut run = || {
            let mut op = call.op();
            op.dtype = if bytes.is_multiple_of(4) { Dtype::F32 } else { Dtype::I64 };
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
