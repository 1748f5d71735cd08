//! The table of choices: each line is a boundary of one number of the tuning.

use proptest::prelude::{ProptestConfig, Strategy as _, prop, prop_assert_eq, proptest};

use super::*;
use tpurun_protocol::strategy::Strategy;

const K: usize = 1 << 10;
const M: usize = 1 << 20;
const FOLDS: [OpKind; 3] = [OpKind::AllReduce, OpKind::ReduceScatter, OpKind::Reduce];
const COPIES: [OpKind; 4] = [OpKind::AllGather, OpKind::AllToAll, OpKind::Gather, OpKind::Scatter];

fn on(ranks: u32, hosts: u32, cpus: u32) -> Ground {
    Ground { ranks, hosts, cpus }
}

/// An operation whose ranks give and get so many bytes, in one chunk.
fn op(kind: OpKind, bytes: usize) -> Traits {
    Traits { kind, bytes, most: bytes, longest_chunk: bytes, widening: 1 }
}

fn staged_of(ground: Ground, op: Traits) -> Strategy {
    choose(ground, &op, Algorithm::Flat, &Tuning::default()).staged
}

fn in_place_of(ground: Ground, op: Traits) -> Option<Strategy> {
    choose(ground, &op, Algorithm::Flat, &Tuning::default()).in_place
}

#[test]
fn algorithms_with_messages_are_run_as_such() {
    for (algorithm, staged) in [(Algorithm::Ring, Strategy::Ring), (Algorithm::Bucket, Strategy::Bucket)] {
        for bytes in [8, M, 64 * M] {
            let choice = choose(on(8, 1, 2), &op(OpKind::AllReduce, bytes), algorithm, &Tuning::default());
            assert_eq!(choice, Choice { staged, in_place: None });
        }
    }
}

#[test]
fn folds_on_one_host() {
    for kind in FOLDS {
        for (ranks, cpus, bytes, expected) in [
            (8, 2, M - 4, Strategy::Windows),
            (8, 2, M, Strategy::Pipeline),
            // With a core for each rank, all fold at once.
            (8, 8, 64 * M, Strategy::Windows),
            (9, 8, M, Strategy::Pipeline),
            // The more ranks share a core, the earlier a pipeline pays.
            (63, 2, M / 2, Strategy::Windows),
            (64, 2, M / 2, Strategy::Pipeline),
            (64, 2, M / 2 - 4, Strategy::Windows),
            (1, 1, 64 * M, Strategy::Windows),
        ] {
            assert_eq!(staged_of(on(ranks, 1, cpus), op(kind, bytes)), expected, "{kind} {ranks} {bytes}");
        }
    }
}

#[test]
fn folds_between_hosts() {
    let wide = |bytes| Traits { widening: 2, ..op(OpKind::AllReduce, bytes) };
    let narrow = |bytes| op(OpKind::AllReduce, bytes);
    let scatter = |bytes| op(OpKind::ReduceScatter, bytes);
    for (ranks, hosts, op, expected) in [
        (4, 2, narrow(16 * K - 4), Strategy::Windows),
        (4, 2, narrow(16 * K), Strategy::Hierarchical),
        // A host with one rank sends as much either way.
        (2, 2, narrow(64 * M), Strategy::Windows),
        (3, 2, narrow(16 * K), Strategy::Hierarchical),
        // As do two ranks of a host with partial results that are twice as wide.
        (4, 2, wide(64 * M), Strategy::Windows),
        (5, 2, wide(64 * M), Strategy::Hierarchical),
        // Three hosts send less if each folds a part.
        (6, 3, narrow(128 * K - 4), Strategy::Hierarchical),
        (6, 3, narrow(128 * K), Strategy::Scattered),
        (3, 3, narrow(128 * K), Strategy::Scattered),
        (3, 3, wide(128 * K), Strategy::Windows),
        (4, 3, wide(128 * K), Strategy::Scattered),
        // Each rank folds its own chunk of a reduce-scatter.
        (6, 3, scatter(M), Strategy::Hierarchical),
        (3, 3, scatter(M), Strategy::Windows),
    ] {
        assert_eq!(staged_of(on(ranks, hosts, 2), op), expected, "{op:?} of {ranks} on {hosts}");
        assert_eq!(in_place_of(on(ranks, hosts, 2), op), None);
    }
}

#[test]
fn what_is_not_folded_goes_through_windows() {
    for kind in COPIES.into_iter().chain([OpKind::Broadcast, OpKind::Barrier]) {
        for ground in [on(8, 1, 2), on(64, 1, 2), on(8, 2, 2), on(9, 3, 2)] {
            assert_eq!(staged_of(ground, op(kind, 64 * M)), Strategy::Windows);
        }
    }
}

#[test]
fn tensors_in_arenas() {
    let (all, shares) = (Some(Strategy::InPlace), Some(Strategy::InPlaceShares));
    for (ranks, cpus, kinds, bytes, expected) in [
        (2, 2, &FOLDS[..], 16 * K - 4, None),
        (2, 2, &FOLDS, 16 * K, all),
        (8, 2, &FOLDS, 32 * K - 4, None),
        (8, 8, &FOLDS, 64 * M, all),
        (2, 1, &[OpKind::AllReduce, OpKind::Reduce], 128 * K - 4, all),
        (2, 1, &[OpKind::AllReduce, OpKind::Reduce], 128 * K, shares),
        (64, 2, &[OpKind::AllReduce, OpKind::Reduce], M - 4, all),
        (64, 2, &[OpKind::AllReduce, OpKind::Reduce], M, shares),
        (8, 2, &[OpKind::ReduceScatter], 64 * K - 4, all),
        (8, 2, &[OpKind::ReduceScatter], 64 * K, shares),
        (8, 2, &[OpKind::Broadcast], 64 * K - 4, None),
        (8, 2, &[OpKind::Broadcast], 64 * K, all),
        (8, 2, &[OpKind::Broadcast], 512 * K - 4, all),
        (8, 2, &[OpKind::Broadcast], 512 * K, shares),
        (8, 2, &COPIES, 16 * K - 4, None),
        (8, 2, &COPIES, 16 * K, all),
        (64, 2, &COPIES, 32 * K - 4, None),
        (64, 2, &COPIES, 64 * K, shares),
        (1, 1, &FOLDS, 64 * M, None),
        (8, 2, &[OpKind::Barrier], 0, None),
    ] {
        for kind in kinds {
            let found = in_place_of(on(ranks, 1, cpus), op(*kind, bytes));
            assert_eq!(found, expected, "{kind} of {bytes} on {ranks}");
        }
    }
    // Chunks count, and not their sum.
    let chunks = Traits { longest_chunk: 16 * K - 4, ..op(OpKind::AllToAll, 64 * M) };
    assert_eq!(in_place_of(on(8, 1, 2), chunks), None);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Ranks that have not queued the same number of small operations behind each other come to one meeting: what
    /// one of them has share it, another one runs alone, so that must be done alike.
    #[test]
    fn what_may_share_a_meeting_goes_through_windows(
        bytes in 1usize..64 << 10,
        ground in (1u32..64, 1u32..4, 1u32..8).prop_map(|(ranks, hosts, cpus)| on(ranks, hosts.min(ranks), cpus)),
        small_bytes in 0usize..64 << 10,
        thresholds in prop::array::uniform3(0usize..64 << 10),
    ) {
        let [pipeline_bytes, hierarchical_bytes, in_place_bytes] = thresholds;
        let tuning =
            Tuning { small_bytes, pipeline_bytes, hierarchical_bytes, in_place_bytes, ..Tuning::default() };
        let choice = choose(ground, &op(OpKind::AllReduce, bytes), Algorithm::Flat, &tuning);
        if bytes <= small_bytes {
            prop_assert_eq!(choice, Choice { staged: Strategy::Windows, in_place: None });
        }
    }
}
