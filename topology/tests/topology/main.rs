//! The promises of the crate, tested from the outside.

mod cost;
mod damage;
mod placement;
mod planner;
mod proofs;
mod shapes;
mod tables;

use tpurun_topology::{Algorithm, Collective, Dimension, Placement, Schedule, Torus, algorithm};

/// Every collective, a broadcast from each of the roots.
fn collectives(roots: impl IntoIterator<Item = u32>) -> Vec<Collective> {
    use Collective::{AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter};
    let broadcasts = roots.into_iter().map(|root| Broadcast { root });
    [AllReduce, AllGather, ReduceScatter, AllToAll].into_iter().chain(broadcasts).collect()
}

fn all_ranks(algorithm: Algorithm, collective: Collective, placement: &Placement) -> Vec<Schedule> {
    let of_rank = |rank| algorithm::schedule(algorithm, collective, placement, rank);
    (0..placement.ranks()).map(of_rank).collect()
}

/// All ranks of a torus as one communicator.
fn whole(torus: &Torus) -> Placement {
    Placement::new(torus, &(0..torus.live_chips()).collect::<Vec<_>>()).unwrap()
}

fn placed(shape: &str) -> Placement {
    whole(&shape.parse().unwrap())
}

/// Shapes of one to three dimensions of at most `longest` and at most `most` chips in all, each dimension of
/// three and more with and without wrap.
fn shapes(longest: u32, most: u32) -> Vec<Vec<Dimension>> {
    let mut shapes: Vec<Vec<Dimension>> = vec![vec![]];
    let mut all = Vec::new();
    for _ in 0..3 {
        let longer = shapes.iter().flat_map(|shape| {
            (1..=longest)
                .flat_map(|size| {
                    let lines = [Dimension::line(size), Dimension::ring(size)];
                    lines.into_iter().take(if size >= 3 { 2 } else { 1 })
                })
                .map(|dimension| shape.iter().copied().chain([dimension]).collect::<Vec<_>>())
        });
        let fits = |shape: &Vec<Dimension>| shape.iter().map(|d| d.size()).product::<u32>() <= most;
        shapes = longer.filter(fits).collect();
        all.extend(shapes.iter().cloned());
    }
    all
}
