//! The cost model against the proofs, and the lower bounds against known numbers.

use tpurun_topology::cost::{estimate, lower_bound, of_schedule};
use tpurun_topology::{Algorithm, Collective, Machine, Placement, SharedMemory, Tensor};

use crate::{all_ranks, collectives, placed};

const LINKS: Machine = Machine { alpha_s: 1e-6, link_bytes_per_s: 1e9, shared: None };
const HOST: Machine = Machine {
    alpha_s: 1e-6,
    link_bytes_per_s: 1e9,
    shared: Some(SharedMemory { cores: 4, wake_s: 3e-6, memory_bytes_per_s: 20e9 }),
};

/// Bytes over links of 1 GB/s take this many times their own size.
fn bandwidth_of(collective: Collective, shape: &str) -> f64 {
    lower_bound(collective, 1_000_000_000, &placed(shape), &LINKS).bandwidth_s
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

#[test]
fn lower_bounds_are_those_known() {
    // All-reduce: P-1 trees' worth of bytes over all links.
    assert!(close(bandwidth_of(Collective::AllReduce, "4x4"), 15.0 / 32.0));
    assert!(close(bandwidth_of(Collective::AllReduce, "4ox4o"), 15.0 / 24.0));
    assert!(close(bandwidth_of(Collective::AllReduce, "8x8x8"), 511.0 / 1536.0));
    // All-gather: 2d links on a torus, d in the corner of a mesh.
    assert!(close(bandwidth_of(Collective::AllGather, "4x4"), 15.0 / 16.0 / 4.0));
    assert!(close(bandwidth_of(Collective::ReduceScatter, "4ox4o"), 15.0 / 16.0 / 2.0));
    assert!(close(bandwidth_of(Collective::Broadcast { root: 0 }, "4x4x4"), 1.0 / 6.0));
    // All-to-all: the bisection of the longest dimension.
    assert!(close(bandwidth_of(Collective::AllToAll, "4x8"), 8.0 / 8.0));
    assert!(close(bandwidth_of(Collective::AllToAll, "4ox8o"), 8.0 / 4.0));
    assert!(close(lower_bound(Collective::AllGather, 0, &placed("4x4ox2"), &LINKS).latency_s, 6e-6));
}

#[test]
fn bucket_meets_the_lower_bounds_where_it_is_said_to() {
    for shape in ["8x8", "4x4x4", "16"] {
        for collective in collectives([0]) {
            let placement = placed(shape);
            let bytes = 1 << 40;
            let bound = lower_bound(collective, bytes, &placement, &LINKS).bandwidth_s;
            let seconds = estimate(Algorithm::Bucket, collective, bytes, &placement, &LINKS).unwrap();
            assert!(seconds < bound * 1.001, "{collective} on {shape}: {seconds} against {bound}");
        }
    }
}

#[test]
fn no_estimate_beats_the_lower_bound() {
    for shape in ["3", "4o", "2x2", "3x5", "4ox3", "2x3x4o", "4x4x4"] {
        let placement = placed(shape);
        for collective in collectives([0, 1]) {
            for bytes in [0, 1000, 1 << 20, 1 << 30] {
                let bound = lower_bound(collective, bytes, &placement, &LINKS);
                let least = bound.bandwidth_s.max(bound.latency_s) * (1.0 - 1e-9);
                for algorithm in [Algorithm::Ring, Algorithm::Bucket] {
                    let seconds = estimate(algorithm, collective, bytes, &placement, &LINKS).unwrap();
                    assert!(seconds >= least, "{algorithm} {collective} of {bytes} on {shape}");
                }
            }
        }
    }
}

#[test]
fn the_cost_of_a_schedule_is_its_estimate_where_all_ranks_do_the_same() {
    for ranks in [2, 3, 4, 8] {
        let placement = Placement::ring(ranks);
        let elements = 4 * 1024 * u64::from(ranks * ranks);
        for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
            for (algorithm, machine) in
                [(Algorithm::Ring, LINKS), (Algorithm::Ring, HOST), (Algorithm::Flat, HOST)]
            {
                let estimated = estimate(algorithm, collective, elements, &placement, &machine).unwrap();
                let costs = all_ranks(algorithm, collective, &placement)
                    .iter()
                    .map(|schedule| of_schedule(schedule, Tensor::of_bytes(elements), &machine))
                    .collect::<Vec<_>>();
                assert!(
                    costs.iter().all(|&cost| close(cost, estimated)),
                    "{algorithm} {collective}: {costs:?}"
                );
            }
        }
    }
}

#[test]
fn flat_has_no_cost_without_shared_memory() {
    assert_eq!(estimate(Algorithm::Flat, Collective::AllReduce, 8, &Placement::ring(4), &LINKS), None);
}
