//! The instructions that a case executes, for `make test-instructions`: callgrind counts between the two ends
//! of `measured`.
//!
//! Counts of instructions are the same on a busy machine, so a few per cent more are seen where times would
//! not show them.
#![allow(unsafe_code)]

#[path = "../tests/ranks/mod.rs"]
mod ranks;

use std::hint::black_box;
use std::time::Duration;

use ranks::{Call, with_ranks};
use tpurun_engine::benching::Keys;
use tpurun_engine::dtype::{Dtype, ReduceOp};
use tpurun_engine::reduce::{Copying, Reduction, fold_from};
use tpurun_engine::{Config, Mode, OpKind};

fn main() {
    let given = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let Some(name) = given else {
        CASES.iter().for_each(|(name, _)| println!("{name}"));
        return;
    };
    let case = CASES.iter().find(|(known, _)| *known == name);
    case.unwrap_or_else(|| {
        panic!("expected one of those that are printed without an argument, given {name}")
    })
    .1();
}

const CASES: [(&str, fn()); 8] = [
    ("fold 2 x 4 KiB f32", || folds::<2, 4096>(Dtype::F32)),
    ("fold 2 x 64 KiB f32 from memory", || folds_from::<2, 65536>(Copying::Loading, Dtype::F32)),
    ("fold 8 x 4 KiB f32", || folds::<8, 4096>(Dtype::F32)),
    ("fold 8 x 4 KiB bf16", || folds::<8, 4096>(Dtype::Bf16)),
    ("fold 8 x 4 KiB f16", || folds::<8, 4096>(Dtype::F16)),
    ("write a key", || {
        let keys = Keys::new(64);
        measured(&mut || keys.write(1));
    }),
    ("compare 64 keys", || {
        let keys = Keys::new(64);
        measured(&mut || assert!(keys.agree()));
    }),
    ("all_reduce of 8 B on one rank", all_reduce),
];

fn folds<const RANKS: usize, const BYTES: usize>(dtype: Dtype) {
    folds_from::<RANKS, BYTES>(Copying::Cached, dtype);
}

fn folds_from<const RANKS: usize, const BYTES: usize>(how: Copying, dtype: Dtype) {
    let sources = [[40u8; BYTES]; RANKS];
    let pointers = sources.each_ref().map(|source| source.as_ptr());
    let mut out = [0u8; BYTES];
    let reduction = Reduction::new(dtype, ReduceOp::Sum, 1.0, RANKS as u32).expect("sums are defined");
    let count = out.len() / dtype.size();
    // SAFETY: the arrays hold `count` elements and are apart.
    measured(&mut || unsafe { fold_from(how, reduction, &pointers, out.as_mut_ptr(), count) });
    black_box(out);
}

fn all_reduce() {
    let config = Config::from_env().expect("TPURUN_* variables are valid");
    with_ranks(1, &config, Duration::from_secs(60), |communicator| {
        let mut call = Call::new(OpKind::AllReduce, vec![vec![1]], vec![vec![0]]);
        measured(&mut || drop(communicator.post(call.op(), Mode::Blocking).expect("it works")));
    });
}

/// Twice before it counts: what is set up once is no part of it.
fn measured(case: &mut dyn FnMut()) {
    case();
    case();
    (0..100).for_each(|_| tpurun_measured(case));
}

/// Callgrind is told this name.
#[unsafe(no_mangle)]
#[inline(never)]
fn tpurun_measured(case: &mut dyn FnMut()) {
    case();
}
