//! Two ways to do a piece of work, of which now the one and now the other is faster, for reasons that no program is
//! told: tried as it goes.

use std::time::{Duration, Instant};

/// How a piece is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Method {
    /// Preferred, since it costs others less.
    Usual,
    /// For where the usual one takes more than half as long again.
    Other,
}

/// The findings from the times of pieces of the same size.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MeasuredChoice {
    turn: u32,
    usual: Estimate,
    other: Estimate,
}

/// One of so many pieces is done in the way that is not chosen, to see what it would take now.
const PERIOD: u32 = 32;

impl MeasuredChoice {
    /// Does one piece.
    pub(crate) fn run(&mut self, piece: impl FnOnce(Method)) {
        let way = self.way();
        let since = Instant::now();
        piece(way);
        self.took(way, since.elapsed());
    }

    /// That of the next piece.
    fn way(&mut self) -> Method {
        let is_trial = self.turn == 0;
        self.turn = (self.turn + 1) % PERIOD;
        let is_slow = self.usual.nanoseconds > self.other.nanoseconds + self.other.nanoseconds / 2;
        if is_slow == is_trial { Method::Usual } else { Method::Other }
    }

    fn took(&mut self, way: Method, time: Duration) {
        match way {
            Method::Usual => self.usual.add(time),
            Method::Other => self.other.add(time),
        }
    }
}

/// Near the shortest of recent times, since a rank may have been preempted in any of them. 0 before the first one.
#[derive(Clone, Copy, Debug, Default)]
struct Estimate {
    nanoseconds: u64,
}

impl Estimate {
    /// Half the way down, or a little up.
    fn add(&mut self, time: Duration) {
        let (now, before) = (time.as_nanos().max(1) as u64, self.nanoseconds);
        self.nanoseconds = match before {
            0 => now,
            _ if now < before => now.midpoint(before),
            _ => now.min(before + before.div_ceil(32)),
        };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Pieces that take so many microseconds by each way, up to a tenth more, and one in seven 3 ms more. Returns how
    /// many of the last [`PERIOD`] were done the other way.
    fn run(trial: &mut MeasuredChoice, (usual, other): (u64, u64), noise: &[u8]) -> usize {
        let pieces = 100 * PERIOD as usize;
        let is_other = |index: usize| {
            let way = trial.way();
            let time = if way == Method::Usual { usual } else { other };
            let noise = u64::from(noise[index % noise.len()]);
            let preempted = if index.is_multiple_of(7) { 3_000_000 } else { 0 };
            trial.took(way, Duration::from_nanos(time * (1000 + noise * 100 / 255) + preempted));
            way == Method::Other
        };
        (0..pieces).map(is_other).skip(pieces - PERIOD as usize).filter(|other| *other).count()
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..ProptestConfig::default()
        })]

        /// Shows that the other way is taken whatever was so before, and although ranks are preempted.
        #[test]
        fn the_other_way_is_taken_where_the_usual_one_is_slow(
            times in prop::collection::vec((50u64..500, any::<bool>(), 0u64..150), 1..4),
            noise in prop::collection::vec(any::<u8>(), 97),
        ) {
            let mut trial = MeasuredChoice::default();
            for (other, is_slow, more) in times {
                let percent = if is_slow { 190 + more } else { 120 - more / 2 };
                let others = run(&mut trial, (other * percent / 100, other), &noise);
                prop_assert_eq!(others, if is_slow { PERIOD as usize - 1 } else { 1 });
            }
        }
    }

    #[test]
    fn both_are_tried_first() {
        let mut trial = MeasuredChoice::default();
        let ways = [100, 151, 100].map(|time| {
            let way = trial.way();
            trial.took(way, Duration::from_micros(time));
            way
        });
        assert_eq!(ways, [Method::Other, Method::Usual, Method::Other]);
    }
}
