//! How long a group takes to be made, by its size: `cargo test --test creation -- --ignored --nocapture`.

mod ranks;

use std::time::{Duration, Instant};

#[test]
#[ignore = "a measurement"]
fn creation_by_size() {
    for ranks in [32, 64, 128, 256, 512] {
        let begun = Instant::now();
        let took = ranks::with_ranks(ranks, &ranks::config(), Duration::from_secs(60), |_| begun.elapsed());
        println!("{ranks} ranks: {:.3} s", took.iter().max().unwrap().as_secs_f64());
    }
}
