//! Bytes per second of the reduction kernels: `cargo bench -p tpurun-kernels --bench kernels [-- FILTER]`.
//!
//! The sources of `cached` stay in a core's own caches; those of `memory` do not. Throughput counts what is
//! read and written.
#![allow(unsafe_code)]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use tpurun_kernels::dtype::{Dtype, ReduceOp};
use tpurun_kernels::reduce::{Reduction, fold};

const CASES: [(&str, usize, usize); 4] =
    [("cached", 2, 64 << 10), ("cached", 8, 16 << 10), ("memory", 8, 8 << 20), ("memory", 64, 1 << 20)];
const DTYPES: [Dtype; 6] = [Dtype::F32, Dtype::Bf16, Dtype::F16, Dtype::F64, Dtype::I32, Dtype::F8E4M3Fn];

fn folds(criterion: &mut Criterion) {
    for (name, ranks, bytes) in CASES {
        let mut group = criterion.benchmark_group(format!("fold {name} {ranks}x{}K", bytes >> 10));
        group.throughput(Throughput::Bytes(((ranks + 1) * bytes) as u64));
        group.sample_size(20);
        let sources: Vec<Vec<u8>> = (0..ranks).map(|rank| vec![rank as u8 + 40; bytes]).collect();
        let pointers: Vec<*const u8> = sources.iter().map(|source| source.as_ptr()).collect();
        let mut out = vec![0u8; bytes];
        for dtype in DTYPES {
            let reduction =
                Reduction::new(dtype, ReduceOp::Sum, 1.0, ranks as u32).expect("sums are defined");
            let count = bytes / dtype.size();
            group.bench_function(BenchmarkId::from_parameter(dtype), |bencher| {
                // SAFETY: the vectors hold `count` elements and are apart.
                bencher.iter(|| unsafe { fold(reduction, &pointers, out.as_mut_ptr(), count) });
            });
        }
    }
}

criterion_group!(kernels, folds);
criterion_main!(kernels);
