//! Exchanges along one dimension, round by round.
//!
//! Slot y of a dimension stands for all blocks that the rank at coordinate y ends with (or starts with).
//! On a ring the slots all go one way around. On a line they go both ways: slot y collects the partial
//! results of its left side going right and of its right side going left, and spreads back the same way.

use super::lane::Direction;
use super::walk::{Pass, Round};
use crate::shape::Dimension;

type Rounds = Box<dyn Iterator<Item = Round<u32>>>;

/// The n-1 rounds after which slot y is complete at coordinate y.
pub(super) fn reduce_scatter(dimension: Dimension, way: Direction, at: u32) -> Rounds {
    let n = dimension.size();
    let rounds = 0..n - 1;
    if dimension.wraps() {
        return Box::new(rounds.map(move |round| {
            let ring = Around { n, at, way };
            ring.round(ring.behind(round + 1), ring.behind(round + 2))
        }));
    }
    // The farthest slot leaves an end first; every slot arrives in the last round, having waited nowhere.
    let (left, right) = (at, n - 1 - at);
    Box::new(rounds.map(move |round| {
        let towards_right = |hops: u32| round.checked_sub(hops).map(|late| n - 1 - late);
        let towards_left = |hops: u32| round.checked_sub(hops);
        Round {
            sends: [
                towards_right(left).map(|slot| Pass { with: at + 1, what: slot }),
                towards_left(right).map(|slot| Pass { with: at - 1, what: slot }),
            ],
            receives: [
                left.checked_sub(1).and_then(towards_right).map(|slot| Pass { with: at - 1, what: slot }),
                right.checked_sub(1).and_then(towards_left).map(|slot| Pass { with: at + 1, what: slot }),
            ],
        }
    }))
}

/// The n-1 rounds after which every coordinate has the slots of all.
pub(super) fn all_gather(dimension: Dimension, way: Direction, at: u32) -> Rounds {
    let n = dimension.size();
    let rounds = 0..n - 1;
    if dimension.wraps() {
        return Box::new(rounds.map(move |round| {
            let ring = Around { n, at, way };
            ring.round(ring.behind(round), ring.behind(round + 1))
        }));
    }
    Box::new(rounds.map(move |round| {
        let left_of = |x: u32| x.checked_sub(round);
        let right_of = |x: u32| Some(x + round).filter(|&slot| slot < n);
        let (before, after) = (at.checked_sub(1), Some(at + 1).filter(|&x| x < n));
        let pass = |with: Option<u32>, slot: Option<u32>| Some(Pass { with: with?, what: slot? });
        Round {
            sends: [pass(after, left_of(at)), pass(before, right_of(at))],
            receives: [pass(before, before.and_then(left_of)), pass(after, after.and_then(right_of))],
        }
    }))
}

/// A place on a ring and the way the slots go.
#[derive(Clone, Copy)]
struct Around {
    n: u32,
    at: u32,
    way: Direction,
}

impl Around {
    /// The coordinate this many hops before this one, seen the way the slots go.
    fn behind(self, hops: u32) -> u32 {
        match self.way {
            Direction::Up => (self.at + self.n - hops % self.n) % self.n,
            Direction::Down => (self.at + hops) % self.n,
        }
    }

    fn round(self, sent: u32, received: u32) -> Round<u32> {
        let (next, previous) = (self.behind(self.n - 1), self.behind(1));
        Round {
            sends: [Some(Pass { with: next, what: sent }), None],
            receives: [Some(Pass { with: previous, what: received }), None],
        }
    }
}
