//! All-reduce between pretended hosts, over QUIC on the loopback: `cargo bench --bench hosts -- HOSTS RANKS BYTES`,
//! with so many ranks on each.

#[path = "../tests/ranks/mod.rs"]
mod ranks;

use std::time::{Duration, Instant};

use ranks::Call;
use ranks::hosts::on_hosts;
use tpurun_engine::{Config, OpKind};

const BLOCKS: usize = 7;

fn main() {
    let numbers: Vec<usize> = std::env::args().filter_map(|word| word.parse().ok()).collect();
    let [hosts, ranks, bytes] = numbers[..] else {
        eprintln!("expected HOSTS RANKS BYTES, as in `cargo bench --bench hosts -- 2 2 1048576`");
        return;
    };
    let count = (bytes / 8).max(1);
    let iterations = (20_000_000 / bytes.max(20_000)).clamp(3, 300);
    let places: Vec<usize> = (0..hosts * ranks).map(|rank| rank / ranks).collect();
    let times = on_hosts(&places, &Config::default(), Duration::from_secs(60), |communicator| {
        let mut call = Call::new(OpKind::AllReduce, vec![vec![1; count]], vec![vec![0; count]]);
        let mut block = || {
            let start = Instant::now();
            for _ in 0..iterations {
                call.post_as(communicator, tpurun_engine::Mode::Blocking).expect("all take part");
            }
            start.elapsed().as_secs_f64() / iterations as f64
        };
        block();
        let mut times: Vec<f64> = (0..BLOCKS).map(|_| block()).collect();
        times.sort_by(f64::total_cmp);
        times
    });
    let [least, median, most] = [0, BLOCKS / 2, BLOCKS - 1].map(|at| times[0][at] * 1e6);
    println!(
        "{hosts} hosts of {ranks}, {bytes} bytes: {median:.0} us ({least:.0} to {most:.0}), {:.3} GB/s",
        bytes as f64 / median / 1e3
    );
}
