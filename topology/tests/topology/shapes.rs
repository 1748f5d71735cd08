//! Shapes, faults, routes and presets.

use std::collections::{BTreeSet, VecDeque};

use expect_test::{Expect, expect};
use proptest::prelude::*;
use tpurun_topology::machine::CHIPS;
use tpurun_topology::shape::Router;
use tpurun_topology::{Dimension, Link, Topology, TopologyError, Torus};

use crate::shapes;

fn torus(text: &str) -> Torus {
    text.parse().unwrap()
}

fn check_error(text: &str, expect: Expect) {
    expect.assert_eq(&Topology::parse(text).unwrap_err().to_string());
}

#[test]
fn a_shape_prints_as_it_was_written() {
    for text in ["1", "2", "64", "4x4x4", "4x4ox2", "3ox5o"] {
        assert_eq!(torus(text).to_string(), text);
    }
    // One link is all that two chips have: open or not, it is the same.
    assert_eq!(torus("2ox4"), torus("2x4"));
}

#[test]
fn what_is_no_shape_is_said_in_one_line() {
    check_error("4xx4", expect![[r#"topology dimension "" is not a number, expected one such as 4 or 4o"#]]);
    check_error("axb", expect![[r#"topology dimension "a" is not a number, expected one such as 4 or 4o"#]]);
    check_error("", expect![[r#"topology dimension "" is not a number, expected one such as 4 or 4o"#]]);
    check_error("+4", expect![[r#"topology dimension "+4" is not a number, expected one such as 4 or 4o"#]]);
    check_error("-4", expect![[r#"topology dimension "-4" is not a number, expected one such as 4 or 4o"#]]);
    check_error(
        "4o4",
        expect![[r#"topology dimension "4o4" is not a number, expected one such as 4 or 4o"#]],
    );
    check_error("2x2x2x2", expect!["topology has 4 dimensions, expected 1 to 3"]);
    check_error("4x0", expect!["topology 4x0 has a dimension of 0 chips, expected at least 1"]);
    check_error(
        "99999x99999",
        expect!["topology 99999x99999 has 9999800001 chips, expected at most 16777216"],
    );
    check_error(
        "4294967296",
        expect![[r#"topology dimension "4294967296" is not a number, expected one such as 4 or 4o"#]],
    );
}

#[test]
fn faults_must_exist() {
    let error = |result: Result<Torus, TopologyError>| result.unwrap_err().to_string();
    expect!["topology 4x4 has no link between chips 0 and 5, expected neighbours"]
        .assert_eq(&error(torus("4x4").without_links([Link::new(5, 0)])));
    expect!["topology 4ox4 has no link between chips 0 and 12, expected neighbours"]
        .assert_eq(&error(torus("4ox4").without_links([Link::new(12, 0)])));
    expect!["topology 4x4 has no chip 16, expected 0 to 15"]
        .assert_eq(&error(torus("4x4").without_chips([16])));
}

#[test]
fn ranks_need_a_chip_each() {
    assert!(torus("4x4x4").check_ranks(64).is_ok());
    let error = torus("4x4").check_ranks(64).unwrap_err();
    expect!["topology 4x4 has 16 chips, expected at least 64 ranks"].assert_eq(&error.to_string());
    let torus = torus("4x4").without_chips([0, 6]).unwrap();
    assert_eq!((torus.live_chips(), torus.check_ranks(15).is_err()), (14, true));
}

#[test]
fn ranks_pass_over_dead_chips() {
    let torus = torus("2x4").without_chips([0, 3, 4]).unwrap();
    let chips: Vec<_> = (0..6).map(|rank| torus.chip_of_rank(rank)).collect();
    assert_eq!(chips, [Some(1), Some(2), Some(5), Some(6), Some(7), None]);
}

#[test]
fn coordinates_are_row_major() {
    let torus = torus("2x3x4");
    assert_eq!(torus.coordinates(23), [1, 2, 3]);
    assert_eq!(torus.coordinates(1), [0, 0, 1]);
    assert!((0..24).all(|chip| torus.chip_at(&torus.coordinates(chip)) == chip));
}

#[test]
fn every_shape_has_the_links_its_dimensions_say() {
    for dimensions in shapes(5, 60) {
        let torus = Torus::new(&dimensions).unwrap();
        let expected: u32 = dimensions.iter().map(|d| torus.chips() / d.size() * d.links()).sum();
        let links: BTreeSet<Link> = torus.links().collect();
        assert_eq!((links.len(), torus.links().count()), (expected as usize, expected as usize), "{torus}");
        for chip in 0..torus.chips() {
            assert!(torus.neighbours(chip).all(|other| torus.neighbours(other).any(|back| back == chip)));
            assert!(torus.neighbours(chip).all(|other| torus.distance(chip, other) == 1));
        }
    }
}

#[test]
fn a_dead_chip_takes_its_links_with_it() {
    let torus = torus("4x4").without_chips([5]).unwrap().without_links([Link::new(0, 3)]).unwrap();
    assert_eq!(torus.links().count(), 32 - 4 - 1);
    assert!(torus.neighbours(1).all(|chip| chip != 5));
    assert_eq!(torus.neighbours(0).collect::<Vec<_>>(), [12, 4, 1]);
}

#[test]
fn routes_go_dimension_by_dimension_the_shorter_way() {
    let torus = torus("4x4o");
    let router = Router::new(&torus);
    assert_eq!(router.route(0, 15), Some(vec![0, 12, 13, 14, 15]));
    // Two hops either way: up.
    assert_eq!(router.route(0, 8), Some(vec![0, 4, 8]));
    assert_eq!(router.route(12, 4), Some(vec![12, 0, 4]));
    assert_eq!(router.route(7, 7), Some(vec![7]));
}

#[test]
fn routes_go_around_what_is_dead() {
    let torus = torus("3ox3o").without_chips([4]).unwrap().without_links([Link::new(0, 1)]).unwrap();
    let router = Router::new(&torus);
    assert_eq!(router.route(1, 7).map(|way| way.len()), Some(5));
    assert_eq!(router.route(0, 1), Some(vec![0, 3, 6, 7, 8, 5, 2, 1]));
    assert_eq!(router.route(0, 4), None);
}

fn hops_by_search(torus: &Torus, from: u32, to: u32) -> Option<usize> {
    let mut seen = BTreeSet::from([from]);
    let mut ends = VecDeque::from([(from, 0)]);
    while let Some((chip, hops)) = ends.pop_front() {
        if chip == to {
            return Some(hops);
        }
        for next in torus.neighbours(chip).filter(|&next| seen.insert(next)) {
            ends.push_back((next, hops + 1));
        }
    }
    None
}

fn broken_torus() -> impl Strategy<Value = (Torus, u32, u32)> {
    let dimension = (1u32..=5, any::<bool>());
    prop::collection::vec(dimension, 1..=3).prop_flat_map(|sizes| {
        let dimensions = sizes.into_iter().map(|(n, wrap)| match wrap {
            true => Dimension::ring(n),
            false => Dimension::line(n),
        });
        let torus = Torus::new(&dimensions.collect::<Vec<_>>()).unwrap();
        let links: Vec<Link> = torus.links().collect();
        let (chips, most) = (torus.chips(), links.len() / 2);
        let dead = prop::sample::subsequence(links, 0..=most);
        (Just(torus), dead, 0..chips, 0..chips)
            .prop_map(|(torus, dead, from, to)| (torus.without_links(dead).unwrap(), from, to))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn routes_are_shortest_and_use_live_links((torus, from, to) in broken_torus()) {
        let way = Router::new(&torus).route(from, to);
        prop_assert_eq!(way.as_ref().map(|way| way.len() - 1), hops_by_search(&torus, from, to));
        for hop in way.iter().flat_map(|way| way.windows(2)) {
            prop_assert!(torus.neighbours(hop[0]).any(|next| next == hop[1]));
        }
    }
}

#[test]
fn presets_wrap_as_their_chips_do() {
    let shape = |text: &str| Topology::parse(text).unwrap().torus().to_string();
    assert_eq!(shape("v4:4x4x8"), "4x4x8");
    assert_eq!(shape("v5p:2x2x4"), "2x2x4o");
    assert_eq!(shape("tpu7x:4x4x6"), "4ox4ox6o");
    assert_eq!(shape("v5e:8x8"), "8ox8o");
    assert_eq!(shape("v6e:16x16"), "16x16");
    assert_eq!(shape("v5e:8x16"), "8ox16");
    // A dimension that is written as open stays open.
    assert_eq!(shape("v4:4x4x4o"), "4x4x4o");
}

#[test]
fn presets_know_their_limits() {
    check_error(
        "v9:4x4",
        expect![[r#"topology preset "v9" is unknown, expected one of v4, v5e, v5p, v6e, tpu7x"#]],
    );
    check_error(
        "v5e:4x4x4",
        expect!["topology 4x4x4 is no slice of v5e, expected 2 dimensions of at most 16 chips"],
    );
    check_error(
        "v6e:8x32",
        expect!["topology 8x32 is no slice of v6e, expected 2 dimensions of at most 16 chips"],
    );
    check_error(
        "v4:16x16x20",
        expect!["topology 16x16x20 is no slice of v4, expected 3 dimensions and at most 4096 chips"],
    );
    check_error("v5p:x", expect![[r#"topology dimension "" is not a number, expected one such as 4 or 4o"#]]);
}

#[test]
fn presets_are_machines() {
    for chip in CHIPS {
        let shape = if chip.dimensions == 2 { "4x4" } else { "4x4x4" };
        let text = format!("{}:{shape}", chip.name);
        let topology = Topology::parse(&text).unwrap();
        assert_eq!(topology.machine().unwrap().link_bytes_per_s, chip.link_bytes_per_s);
        assert_eq!(Topology::parse(&topology.to_string()).unwrap(), topology);
    }
    assert!(Topology::parse("4x4").unwrap().machine().is_none());
}
