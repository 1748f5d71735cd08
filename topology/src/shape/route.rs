//! Shortest ways through a torus, around what is dead in it.

use petgraph::algo::astar;
use petgraph::graph::{NodeIndex, UnGraph};

use super::torus::{Link, Torus};

/// Finds shortest ways through one torus.
#[derive(Clone, Debug)]
pub struct Router<'a> {
    torus: &'a Torus,
    /// Absent when nothing is dead: then the coordinates alone give every route.
    live: Option<UnGraph<(), ()>>,
}

impl<'a> Router<'a> {
    /// A router for `torus`.
    pub fn new(torus: &'a Torus) -> Self {
        let live = (!torus.is_whole()).then(|| {
            let links = torus.links().map(Link::ends);
            let mut graph = UnGraph::from_edges(links);
            while graph.node_count() < torus.chips() as usize {
                graph.add_node(());
            }
            graph
        });
        Self { torus, live }
    }

    /// The torus it finds ways through.
    pub fn torus(&self) -> &'a Torus {
        self.torus
    }

    /// The chips on a shortest way, both ends included, or nothing when no way is left.
    ///
    /// A route goes dimension by dimension, the first one first, upwards on a tie, as long as everything
    /// on it works; otherwise it is a shortest way through what works, the same one in every process.
    pub fn route(&self, from: u32, to: u32) -> Option<Vec<u32>> {
        let direct = self.dimension_ordered(from, to);
        let Some(live) = &self.live else { return Some(direct) };
        if self.torus.dead_chips().contains(&from) || self.torus.dead_chips().contains(&to) {
            return None;
        }
        if direct.windows(2).all(|hop| self.torus.is_live(Link::new(hop[0], hop[1]))) {
            return Some(direct);
        }
        let (start, goal) = (NodeIndex::from(from), NodeIndex::from(to));
        let remaining = |node: NodeIndex| self.torus.distance(node.index() as u32, to);
        let (_, nodes) = astar(live, start, |node| node == goal, |_| 1, remaining)?;
        Some(nodes.into_iter().map(|node| node.index() as u32).collect())
    }

    fn dimension_ordered(&self, from: u32, to: u32) -> Vec<u32> {
        let goal = self.torus.coordinates(to);
        let mut at = self.torus.coordinates(from);
        let mut chips = vec![from];
        for (d, dimension) in self.torus.dimensions().iter().enumerate() {
            let downwards = goal[d] < at[d];
            let straight = at[d].abs_diff(goal[d]);
            let around = dimension.size() - straight;
            // A wrap turns the way round where it is shorter, and on a tie leads up.
            let upwards = match dimension.wraps() {
                true if downwards => around <= straight,
                true => straight <= around,
                false => !downwards,
            };
            while at[d] != goal[d] {
                let next = if upwards { dimension.up(at[d]) } else { dimension.down(at[d]) };
                at[d] = next.expect("a line is left only towards the goal, which lies on it");
                chips.push(self.torus.chip_at(&at));
            }
        }
        chips
    }
}
