//! Which groups of ranks are grids, and how far their neighbours are.

use expect_test::expect;
use tpurun_topology::shape::Stretch;
use tpurun_topology::{Arrangement, Link, Placement, Torus};

use crate::{placed, whole};

fn torus(text: &str) -> Torus {
    text.parse().unwrap()
}

fn grid(placement: &Placement) -> String {
    let dimensions = placement.grid().dimensions().iter().map(ToString::to_string);
    dimensions.collect::<Vec<_>>().join("x")
}

fn place(shape: &str, ranks: impl IntoIterator<Item = u32>) -> Placement {
    Placement::new(&torus(shape), &ranks.into_iter().collect::<Vec<_>>()).unwrap()
}

#[test]
fn all_ranks_are_the_whole_grid() {
    let placement = placed("4x1x2");
    assert_eq!((placement.arrangement(), grid(&placement)), (Arrangement::Grid, "4x2".to_owned()));
    assert_eq!(placement.grid_stretch(), Stretch::UNIT);
}

#[test]
fn a_box_wraps_where_it_covers_a_whole_dimension() {
    let plane = place("4x4x4", 16..32);
    assert_eq!((plane.arrangement(), grid(&plane)), (Arrangement::Grid, "4x4".to_owned()));
    let slab = place("4x4x4", (0..64).filter(|rank| rank % 4 < 3));
    assert_eq!(grid(&slab), "4x4x3o");
    let column = place("4x4ox4", [1, 5, 9, 13]);
    assert_eq!(grid(&column), "4o");
}

#[test]
fn anything_else_is_a_ring_in_rank_order() {
    let placement = place("4x4", [0, 1, 2, 5, 9]);
    assert_eq!((placement.arrangement(), grid(&placement)), (Arrangement::Ring, "5".to_owned()));
    assert_eq!(placement.ring_stretch(), placement.grid_stretch());
    assert_eq!(placement.ring_stretch().hops, 3);
}

#[test]
fn ranks_may_fill_their_box_in_any_order() {
    let placement = place("2x4", [7, 0, 5, 2, 3, 4, 1, 6]);
    assert_eq!(placement.arrangement(), Arrangement::Grid);
    assert_eq!(placement.grid().coordinates(0), [1, 3, 0]);
    assert_eq!(placement.grid().rank_at(&[1, 1, 0]), 2);
}

#[test]
fn a_single_rank_is_a_grid_without_dimensions() {
    let placement = place("4x4", [9]);
    assert_eq!((placement.ranks(), placement.grid().dimensions().len()), (1, 0));
}

#[test]
fn gaps_and_turns_stretch_the_way_to_the_neighbour() {
    assert_eq!(place("8o", [0, 2, 4]).grid_stretch(), Stretch { hops: 2, sharing: 1 });
    // Row by row the ring turns at each end of a row: through the wrap, and down.
    assert_eq!(placed("4x4").ring_stretch().hops, 2);
    // Without wraps it goes back along the whole row.
    let open = placed("4ox4o").ring_stretch();
    assert_eq!((open.hops, open.sharing), (6, 2));
}

#[test]
fn a_dead_link_is_gone_around() {
    let torus = torus("4x4").without_links([Link::new(0, 1)]).unwrap();
    assert_eq!(whole(&torus).grid_stretch().hops, 3);
}

#[test]
fn dead_chips_leave_a_smaller_grid_or_a_ring() {
    let row_dead = torus("4x4").without_chips(0..4).unwrap();
    assert_eq!(grid(&whole(&row_dead)), "3ox4");
    let one_dead = torus("4x4").without_chips([5]).unwrap();
    assert_eq!(whole(&one_dead).arrangement(), Arrangement::Ring);
}

#[test]
fn groups_that_cannot_be_placed_are_told_why() {
    let error = |shape: Torus, ranks: &[u32]| Placement::new(&shape, ranks).unwrap_err().to_string();
    expect!["group has 0 ranks, expected at least 1"].assert_eq(&error(torus("4x4"), &[]));
    expect!["group names rank 1 twice, expected each rank once"].assert_eq(&error(torus("4x4"), &[1, 2, 1]));
    expect!["group names rank 16, expected a rank below the 16 chips of topology 4x4"]
        .assert_eq(&error(torus("4x4"), &[15, 16]));
    let cut = torus("4o").without_links([Link::new(1, 2)]).unwrap();
    expect!["no working link leads from chip 1 to chip 2 on topology 4o"]
        .assert_eq(&error(cut, &[0, 1, 2, 3]));
}
