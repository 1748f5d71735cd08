//! Whole worlds of executions over the in-memory network, against what the collective means.
//!
//! Every run is a function of its seed. `TPURUN_TEST_SEED` tries another one, or replays the one that a
//! failure printed.

mod hostile;
mod memory;
mod world;

use std::sync::Arc;

use tpurun_topology::{Action, Algorithm, Block, Collective, Schedule, Step};

use super::{Buffers, Delivery, Execution};
use memory::{Tensor, number};
use tpurun_kernels::dtype::{Dtype, ReduceOp};
use tpurun_kernels::reduce::Reduction;
use tpurun_protocol::wire::{Form, Header};
use world::{Case, OPERATION, World};

fn seed() -> u64 {
    let given = std::env::var("TPURUN_TEST_SEED").ok();
    given.map_or(1, |text| text.parse().expect("TPURUN_TEST_SEED is a number"))
}

fn collectives(ranks: u32) -> [Collective; 5] {
    let root = ranks / 2;
    [
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Broadcast { root },
        Collective::AllToAll,
    ]
}

/// Shapes of tori that ranks may form.
fn shapes(ranks: u32) -> &'static [&'static str] {
    match ranks {
        4 => &["4", "2x2"],
        6 => &["2x3"],
        8 => &["8", "2x4", "2x2x2"],
        9 => &["3x3"],
        12 => &["2x3x2"],
        16 => &["4x4", "2x2x4"],
        1 => &["1"],
        2 => &["2"],
        3 => &["3"],
        5 => &["5"],
        _ => &["7"],
    }
}

const MOVED: (Dtype, ReduceOp) = (Dtype::F32, ReduceOp::Sum);
const REDUCED: [(Dtype, ReduceOp); 9] = [
    MOVED,
    (Dtype::Bf16, ReduceOp::Avg),
    (Dtype::F8E4M3Fn, ReduceOp::PremulSum),
    (Dtype::F16, ReduceOp::Max),
    (Dtype::I64, ReduceOp::Avg),
    (Dtype::U8, ReduceOp::Bxor),
    (Dtype::C64, ReduceOp::PremulSum),
    (Dtype::F64, ReduceOp::Avg),
    (Dtype::Bool, ReduceOp::Product),
];

fn every_case(mut check: impl FnMut(Case)) {
    let mut seed = seed();
    for ranks in [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16] {
        let shapes =
            shapes(ranks).iter().flat_map(|shape| Algorithm::ALL.map(|algorithm| (*shape, algorithm)));
        let stepwise = shapes.filter(|(_, algorithm)| *algorithm != Algorithm::Flat);
        for (shape, algorithm) in stepwise {
            for collective in collectives(ranks) {
                let kinds = if collective.reduces() { &REDUCED[..] } else { &[MOVED][..] };
                for &(dtype, op) in kinds {
                    check(Case { collective, algorithm, ranks, shape, dtype, op, seed });
                    seed += 1;
                }
            }
        }
    }
}

#[test]
fn every_algorithm_does_what_the_collective_says() {
    every_case(|case| {
        for elements in [0, 1, case.ranks as usize - 1, 41] {
            let mut world = World::new(&case, elements);
            world.run();
            world.check();
        }
    });
}

/// Rings do not change what others see when the input is also the output.
#[test]
fn in_place_is_the_same() {
    every_case(|case| {
        if case.collective == Collective::AllReduce {
            let mut world = World::in_place(&case, 29);
            world.run();
            world.check();
        }
    });
}

/// A block that is being sent stays as it is until it is sent, however early its replacement comes.
#[test]
fn a_block_under_way_is_not_replaced() {
    let block = |chunk| Block { chunk, part: 0 };
    let steps = vec![
        Step::Send { to: 1, block: block(0) },
        Step::Receive { from: 1, block: block(0), action: Action::Copy },
        Step::Receive { from: 1, block: block(1), action: Action::Copy },
    ];
    let (collective, algorithm) = (Collective::AllReduce, Algorithm::Ring);
    let schedule = Schedule { collective, algorithm, ranks: 2, rank: 0, parts: 1, channels: vec![steps] };
    let mut tensor = Tensor::new(&[number(Dtype::U8, 1).repeat(2)], 1);
    let spans = tensor.spans();
    let buffers = Buffers { input: spans.clone(), output: spans };
    let reduction = Reduction::none(Dtype::U8);
    let mut execution = Execution::new(&Arc::new(schedule), reduction, buffers, OPERATION, 64)
        .expect("it makes sense for rank 0");
    let first = execution.poll_transmit().expect("it begins with a send");
    assert_eq!(first.payload, [1]);
    let replacement = Header { form: Form::Whole, ..first.header };
    assert_eq!(execution.handle_segment(1, &replacement, &[7]), Ok(Delivery::Later));
    execution.sent();
    assert_eq!(execution.handle_segment(1, &replacement, &[7]), Ok(Delivery::Taken));
    assert!(!execution.is_done());
    drop(execution);
    assert_eq!(tensor.chunks(), [[7, 1]]);
}

/// Nothing hangs once a partition heals, and nobody is done before.
#[test]
fn a_cut_link_only_delays() {
    let (ranks, shape) = (4, "4");
    let (dtype, op) = MOVED;
    for collective in [Collective::AllReduce, Collective::AllGather] {
        let case = Case { collective, algorithm: Algorithm::Ring, ranks, shape, dtype, op, seed: seed() };
        let mut world = World::new(&case, 41);
        world.network.cut(1, 2);
        world.settle();
        assert!(!world.is_done(), "{case:?}");
        world.network.heal(1, 2);
        world.run();
        world.check();
    }
}

#[test]
fn a_lost_rank_is_named() {
    let (ranks, shape) = (3, "3");
    let (dtype, op) = MOVED;
    let collective = Collective::AllReduce;
    let case = Case { collective, algorithm: Algorithm::Ring, ranks, shape, dtype, op, seed: seed() };
    let mut world = World::new(&case, 41);
    world.network.drop_rank(2);
    let error = world.drive(1).expect_err("rank 1 sends to rank 2");
    assert_eq!(error.to_string(), "rank 2 is gone");
}
