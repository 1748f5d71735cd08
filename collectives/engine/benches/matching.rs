//! The cost of matching: `make bench-matching` builds this twice, the second time with `--cfg
//! tpurun_unmatched`, which leaves out the match keys, their comparison and the flight recorder, and runs the
//! two in turn.
//!
//! That cfg exists for this comparison alone: without keys, ranks that post different operations corrupt each
//! other. Prints one line per operation, rank count and size: the median over blocks of the slowest rank's
//! mean, in microseconds.
#![allow(unsafe_code)]

#[path = "../tests/ranks/mod.rs"]
mod ranks;

use std::time::{Duration, Instant};

use ranks::{Call, with_ranks_on};
use tpurun_engine::board::Board;
use tpurun_engine::{Communicator, Config, Mode, OpKind};

const BLOCKS: usize = 9;
const RANKS: [u32; 2] = [2, 8];
const BYTES: [usize; 4] = [8, 512, 8 << 10, 64 << 10];

fn main() {
    // Cargo passes `--bench`, which is no number.
    let block = std::env::args().skip(1).find_map(|arg| arg.parse().ok()).unwrap_or(20);
    for ranks in RANKS {
        row("barrier", ranks, 0, Duration::from_millis(block));
        for bytes in BYTES {
            row("all_reduce", ranks, bytes, Duration::from_millis(block));
        }
    }
}

fn call(name: &str, bytes: usize) -> Call {
    let elements = || vec![vec![1; bytes / 8]];
    match name {
        "barrier" => Call::new(OpKind::Barrier, vec![], vec![]),
        _ => Call::new(OpKind::AllReduce, elements(), elements()),
    }
}

fn row(name: &str, ranks: u32, bytes: usize, block: Duration) {
    let config = Config::from_env().expect("TPURUN_* variables are valid");
    let board = (!cfg!(tpurun_unmatched)).then(|| Board::create(ranks).expect("the host has memory").0);
    let measure = |communicator: &Communicator| {
        let mut call = call(name, bytes);
        let mut run = || drop(communicator.post(call.op(), Mode::Blocking).expect("it works"));
        (0..20).for_each(|_| run());
        let began = Instant::now();
        (0..50).for_each(|_| run());
        let one = began.elapsed() / 50;
        // All ranks must do as many.
        let mut count = Call::new(
            OpKind::AllReduce,
            vec![vec![(block.as_nanos() / one.as_nanos()) as i64]],
            vec![vec![0]],
        );
        count.reduce_op = tpurun_engine::dtype::ReduceOp::Min;
        let count = count.run(communicator).expect("it works")[0][0].clamp(10, 1_000_000);
        let block = |_| {
            let began = Instant::now();
            (0..count).for_each(|_| run());
            began.elapsed().as_secs_f64() / count as f64 * 1e6
        };
        (0..BLOCKS).map(block).collect::<Vec<f64>>()
    };
    let times = with_ranks_on(board.as_ref(), ranks, &config, Duration::from_secs(60), measure);
    let slowest = |block: usize| times.iter().map(|rank| rank[block]).fold(0.0, f64::max);
    let mut blocks: Vec<f64> = (0..BLOCKS).map(slowest).collect();
    blocks.sort_by(f64::total_cmp);
    println!("{name} {ranks} {bytes} {:.3}", blocks[BLOCKS / 2]);
}
