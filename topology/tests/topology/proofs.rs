//! Every algorithm, proven: exhaustively for small shapes, for 64 ranks, and at random.

use proptest::prelude::*;
use tpurun_topology::{Algorithm, Collective, Dimension, Placement, Proof, Tensor, Torus, algorithm, verify};

use crate::{all_ranks, collectives, placed, shapes, whole};

fn prove(algorithm: Algorithm, collective: Collective, placement: &Placement, tensor: Tensor) -> Proof {
    let context = || format!("{algorithm} {collective} on {:?}", placement.grid());
    let schedules = all_ranks(algorithm, collective, placement);
    let proof = verify(&schedules, tensor).unwrap_or_else(|error| panic!("{}: {error}", context()));
    let formula = algorithm::traffic(algorithm, collective, placement, tensor);
    proof.expect_traffic(&formula).unwrap_or_else(|error| panic!("{}: {error}", context()));
    proof
}

/// Elements that all chunks share evenly, whatever the collective: parts divide 12, chunks ranks².
fn even(ranks: u32) -> Tensor {
    let ranks = u64::from(ranks);
    Tensor { elements: 12 * ranks * ranks, element_bytes: 2 }
}

/// Elements that no number of ranks divides.
const ODD: Tensor = Tensor { elements: 10_007, element_bytes: 4 };

fn prove_sizes(algorithm: Algorithm, collective: Collective, placement: &Placement) -> Proof {
    let ranks = u64::from(placement.ranks());
    for elements in [0, 1, ranks.saturating_sub(1), ranks + 1] {
        prove(algorithm, collective, placement, Tensor { elements, element_bytes: 1 });
    }
    prove(algorithm, collective, placement, ODD);
    prove(algorithm, collective, placement, even(placement.ranks()))
}

#[test]
fn flat_and_ring_are_right_for_every_number_of_ranks() {
    for ranks in (1..=17).chain([64]) {
        let roots = if ranks <= 17 { (0..ranks).collect() } else { vec![0, 31, 63] };
        for collective in collectives(roots) {
            let placement = Placement::ring(ranks);
            prove_sizes(Algorithm::Flat, collective, &placement);
            let proof = prove_sizes(Algorithm::Ring, collective, &placement);
            assert_eq!(proof.rounds, algorithm::ring::load(collective, ranks).rounds, "{collective} {ranks}");
        }
    }
}

#[test]
fn bucket_is_right_for_every_small_shape_and_root() {
    for shape in shapes(5, 18) {
        let placement = whole(&Torus::new(&shape).unwrap());
        for collective in collectives(0..placement.ranks()) {
            prove(Algorithm::Bucket, collective, &placement, ODD);
        }
    }
}

#[test]
fn bucket_is_right_for_64_ranks() {
    for shape in
        ["64", "64o", "8x8", "8ox8", "8ox8o", "4x16", "2x32", "4x4x4", "4ox4x4", "4ox4ox4o", "2x2x16"]
    {
        let placement = placed(shape);
        for collective in collectives([0, 21, 63]) {
            prove(Algorithm::Bucket, collective, &placement, ODD);
        }
    }
}

#[test]
fn bucket_takes_the_rounds_and_loads_the_links_as_its_formulas_say() {
    for shape in shapes(5, 25) {
        let placement = whole(&Torus::new(&shape).unwrap());
        let root = placement.ranks() / 3;
        for collective in collectives([root]) {
            let tensor = even(placement.ranks());
            let proof = prove(Algorithm::Bucket, collective, &placement, tensor);
            let load = algorithm::bucket::load(collective, placement.grid());
            let context = format!("{collective} on {}", Torus::new(&shape).unwrap());
            let all_wrap = placement.grid().dimensions().iter().all(|d| d.wraps());
            // Along a line an all-to-all has gaps, which the ranks in the middle close.
            if collective == Collective::AllToAll && !all_wrap {
                assert!(proof.rounds <= load.rounds, "{context}: {} of {}", proof.rounds, load.rounds);
            } else {
                assert_eq!(proof.rounds, load.rounds, "{context}");
            }
            let unit = match collective {
                Collective::AllToAll => tensor.elements * 2 / u64::from(placement.ranks()),
                _ => tensor.elements * 2,
            };
            let busiest = load.busiest * unit as f64;
            let given = proof.traffic.busiest() as f64;
            // The two sweeps of an all-reduce load different links of a line most.
            if collective == Collective::AllReduce && !all_wrap {
                assert!(given <= busiest + 0.5, "{context}: {given} of {busiest}");
            } else {
                assert!((given - busiest).abs() < 0.5, "{context}: {given} of {busiest}");
            }
            let total = load.total * unit as f64;
            assert!((proof.traffic.total() as f64 - total).abs() < 0.5, "{context}: total of {total}");
        }
    }
}

#[test]
fn schedules_take_time_only_for_their_own_steps() {
    // 4096 ranks: making the schedule of one must not need those of the others.
    let placement = placed("16x16x16");
    let steps = |collective| {
        let schedule = algorithm::schedule(Algorithm::Bucket, collective, &placement, 1234);
        schedule.channels.iter().map(Vec::len).sum::<usize>()
    };
    assert_eq!(steps(Collective::AllReduce), 6 * 2 * 2 * 4095);
    assert_eq!(steps(Collective::AllGather), 6 * 2 * 4095);
}

fn dimension() -> impl Strategy<Value = Dimension> {
    (1u32..=7, any::<bool>()).prop_map(|(n, wrap)| if wrap { Dimension::ring(n) } else { Dimension::line(n) })
}

fn collective(ranks: u32) -> impl Strategy<Value = Collective> {
    (0..5usize, 0..ranks).prop_map(|(index, root)| collectives([root])[index])
}

/// Some ranks of a torus, in any order: as often as not a box of it.
fn members(shape: &[Dimension]) -> impl Strategy<Value = Vec<u32>> + use<> {
    let torus = Torus::new(shape).unwrap();
    let chips = torus.chips();
    let any = prop::sample::subsequence((0..chips).collect::<Vec<_>>(), 1..=chips as usize);
    let sides = shape.iter().map(|d| {
        let side = (0..d.size()).collect::<Vec<_>>();
        prop::sample::subsequence(side, 1..=d.size() as usize)
    });
    let within = move |sides: Vec<Vec<u32>>| {
        let inside =
            |chip: &u32| sides.iter().zip(torus.coordinates(*chip)).all(|(side, x)| side.contains(&x));
        (0..chips).filter(inside).collect()
    };
    let boxed = sides.collect::<Vec<_>>().prop_map(within);
    prop_oneof![any.prop_shuffle(), boxed.prop_shuffle()]
}

/// A group of ranks of a torus and what it does.
fn group() -> impl Strategy<Value = (Placement, Collective, Algorithm, u64)> {
    let shape = prop::collection::vec(dimension(), 1..=3)
        .prop_filter("too many chips", |shape| shape.iter().map(|d| d.size()).product::<u32>() <= 70);
    let members = shape.prop_flat_map(|shape| (members(&shape), Just(shape)));
    let placement =
        members.prop_map(|(ranks, shape)| Placement::new(&Torus::new(&shape).unwrap(), &ranks).unwrap());
    placement.prop_flat_map(|placement| {
        let collective = collective(placement.ranks());
        (Just(placement), collective, prop::sample::select(&Algorithm::ALL[..]), 0u64..5000)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_group_of_every_torus_is_right((placement, collective, algorithm, elements) in group()) {
        prove(algorithm, collective, &placement, Tensor { elements, element_bytes: 8 });
    }
}
