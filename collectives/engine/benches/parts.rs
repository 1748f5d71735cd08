//! The time that the parts of a small operation take: `cargo bench -p tpurun-engine --bench parts [--
//! FILTER]`.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use tpurun_engine::benching::Keys;
use tpurun_memory::sync::Doorbell;

fn matching(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("match");
    for ranks in [2, 8, 64] {
        let keys = Keys::new(ranks);
        group.bench_function(BenchmarkId::new("write", ranks), |bencher| bencher.iter(|| keys.write(0)));
        group.bench_function(BenchmarkId::new("compare", ranks), |bencher| {
            bencher.iter(|| assert!(keys.agree()));
        });
    }
}

fn doorbells(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("doorbell");
    let bell = Doorbell::default();
    group.bench_function("ring nobody", |bencher| bencher.iter(|| black_box(&bell).ring()));
    // There and back, through the scheduler.
    let (there, back, ended) = (Doorbell::default(), Doorbell::default(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut seen = 0;
            while !ended.load(Ordering::Acquire) {
                there.wait(seen, None);
                if there.rings() != seen {
                    seen = there.rings();
                    back.ring();
                }
            }
        });
        group.bench_function("wake and be woken", |bencher| {
            bencher.iter(|| {
                let seen = back.rings();
                there.ring();
                while back.rings() == seen {
                    back.wait(seen, None);
                }
            });
        });
        ended.store(true, Ordering::Release);
        there.ring();
    });
}

criterion_group!(parts, matching, doorbells);
criterion_main!(parts);
