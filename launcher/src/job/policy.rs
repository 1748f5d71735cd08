//! The policy of a job for a rank that fails: to go on without it, to start the world again, or to end. Pure: numbers
//! in, a decision out; `agent/restart.rs` acts on it. The words for people are in docs/failures.md.

/// As asked for on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Policy {
    pub(crate) tolerance: Tolerance,
    pub(crate) max_restarts: u32,
}

/// Whether a lost rank leaves the others alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tolerance {
    /// The first failure ends the world.
    Nothing,
    /// The survivors go on, whatever their number.
    Losses,
    /// They go on while at least `min` ranks are there; a new world may have fewer ranks than `max`.
    Elastic { min: u32, max: u32 },
}

/// How the ranks of one world have ended so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Census {
    pub(crate) ranks: u32,
    /// Failed by themselves.
    pub(crate) lost: u32,
    /// Failed only because others were lost.
    pub(crate) followed: u32,
    /// Ended with exit code 0.
    pub(crate) done: u32,
}

impl Census {
    /// Ranks that have not ended.
    pub(crate) fn running(&self) -> u32 {
        self.ranks.saturating_sub(self.lost + self.followed + self.done)
    }
}

impl Policy {
    /// From the values of `--on-failure`, `--elastic` and `--max-restarts`.
    ///
    /// # Errors
    /// One line: what was expected and what was given.
    pub(crate) fn new(
        on_failure: Option<&str>,
        elastic: Option<&str>,
        max_restarts: Option<&str>,
    ) -> Result<Policy, String> {
        let tolerance = match (on_failure, elastic) {
            (None | Some("stop"), None) => Tolerance::Nothing,
            (Some("continue"), None) => Tolerance::Losses,
            (None, Some(range)) => parse_range(range)?,
            (Some(_), Some(_)) => return Err("--elastic: expected no --on-failure beside it".into()),
            (Some(given), None) => {
                return Err(format!("--on-failure: expected stop or continue, given {given}"));
            }
        };
        let restarts = match max_restarts {
            Some(text) => text
                .parse()
                .map_err(|_| format!("--max-restarts: expected a number of restarts from 0, given {text}"))?,
            None if elastic.is_some() => ELASTIC_RESTARTS,
            None => 0,
        };
        Ok(Policy { tolerance, max_restarts: restarts })
    }

    /// Ranks that the job starts with, when that is decided here.
    pub(crate) fn ranks(&self) -> Option<u32> {
        match self.tolerance {
            Tolerance::Elastic { max, .. } => Some(max),
            _ => None,
        }
    }

    /// Whether the others go on after a loss. A rank that has ended with exit code 0 did its part: it counts
    /// as there.
    pub(crate) fn tolerates(&self, census: &Census) -> bool {
        match self.tolerance {
            Tolerance::Nothing => false,
            Tolerance::Losses => true,
            Tolerance::Elastic { min, .. } => census.running() + census.done >= min,
        }
    }

    /// Whether a world of which nobody runs any more has done what it should without the ranks it has lost.
    pub(crate) fn has_succeeded(&self, census: &Census) -> bool {
        let is_complete = census.lost == 0 || self.tolerates(census);
        is_complete && census.followed == 0 && census.done > 0
    }

    /// Ranks of the world that follows a failed one, if another may follow after so many `restarts`.
    pub(crate) fn next_world(&self, census: &Census, restarts: u32) -> Option<u32> {
        let kept = census.ranks.saturating_sub(census.lost);
        (restarts < self.max_restarts).then_some(match self.tolerance {
            Tolerance::Elastic { min, .. } if kept >= min => kept,
            Tolerance::Elastic { max, .. } => max,
            _ => census.ranks,
        })
    }
}

fn parse_range(text: &str) -> Result<Tolerance, String> {
    let numbers = text.split_once(':').and_then(|(min, max)| Some((min.parse().ok()?, max.parse().ok()?)));
    numbers
        .filter(|(min, max)| (1..=*max).contains(min))
        .map(|(min, max)| Tolerance::Elastic { min, max })
        .ok_or_else(|| format!("--elastic: expected MIN:MAX ranks with 1 <= MIN <= MAX, given {text}"))
}

/// As torchrun's for an elastic job.
const ELASTIC_RESTARTS: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    const STOP: (Option<&str>, Option<&str>) = (None, None);
    const CONTINUE: (Option<&str>, Option<&str>) = (Some("continue"), None);
    const ELASTIC: (Option<&str>, Option<&str>) = (None, Some("4:8"));

    fn policy((on_failure, elastic): (Option<&str>, Option<&str>), restarts: Option<&str>) -> Policy {
        Policy::new(on_failure, elastic, restarts).unwrap()
    }

    fn census(ranks: u32, lost: u32, followed: u32, done: u32) -> Census {
        Census { ranks, lost, followed, done }
    }

    #[test]
    fn values_are_checked() {
        let refused = |on_failure, elastic, restarts| Policy::new(on_failure, elastic, restarts).unwrap_err();
        assert_eq!(
            refused(Some("ignore"), None, None),
            "--on-failure: expected stop or continue, given ignore"
        );
        for given in ["", "4", "0:4", "5:4", "a:b", "1:2:3", "-1:2", "1:99999999999"] {
            let text = refused(None, Some(given), None);
            assert_eq!(
                text,
                format!("--elastic: expected MIN:MAX ranks with 1 <= MIN <= MAX, given {given}")
            );
        }
        assert_eq!(
            refused(None, None, Some("-1")),
            "--max-restarts: expected a number of restarts from 0, given -1"
        );
        assert_eq!(refused(Some("stop"), Some("1:2"), None), "--elastic: expected no --on-failure beside it");
    }

    #[test]
    fn restarts_have_defaults() {
        assert_eq!(policy(STOP, None).max_restarts, 0);
        assert_eq!(policy(CONTINUE, None).max_restarts, 0);
        assert_eq!(policy(ELASTIC, None).max_restarts, 3);
        assert_eq!(policy(ELASTIC, Some("0")).max_restarts, 0);
        assert_eq!((policy(ELASTIC, None).ranks(), policy(STOP, None).ranks()), (Some(8), None));
    }

    #[test]
    fn losses_are_tolerated_as_asked() {
        for (asked, given, expected) in [
            (STOP, census(8, 1, 0, 7), false),
            (CONTINUE, census(8, 1, 0, 0), true),
            (CONTINUE, census(8, 7, 1, 0), true),
            (ELASTIC, census(8, 4, 0, 0), true),
            (ELASTIC, census(8, 5, 0, 0), false),
            // Those that did not cope are as gone as those that failed.
            (ELASTIC, census(8, 1, 4, 0), false),
            // Those that are done are not missing.
            (ELASTIC, census(8, 4, 0, 4), true),
            (ELASTIC, census(8, 1, 0, 6), true),
        ] {
            assert_eq!(policy(asked, None).tolerates(&given), expected, "{asked:?} {given:?}");
        }
    }

    #[test]
    fn success_is_that_all_survivors_ended_well_and_that_there_are_some() {
        for (asked, given, expected) in [
            (STOP, census(2, 0, 0, 2), true),
            (STOP, census(2, 1, 0, 1), false),
            (CONTINUE, census(4, 1, 0, 3), true),
            (CONTINUE, census(4, 3, 0, 1), true),
            (CONTINUE, census(4, 1, 1, 2), false),
            (CONTINUE, census(4, 4, 0, 0), false),
            (CONTINUE, census(4, 1, 3, 0), false),
            (ELASTIC, census(8, 4, 0, 4), true),
            (ELASTIC, census(8, 5, 0, 3), false),
            (ELASTIC, census(8, 1, 1, 6), false),
        ] {
            assert_eq!(policy(asked, None).has_succeeded(&given), expected, "{asked:?} {given:?}");
        }
    }

    #[test]
    fn a_new_world_has_the_ranks_that_did_not_fail() {
        for (asked, given, restarts, expected) in [
            (STOP, census(8, 1, 0, 0), 0, None),
            (ELASTIC, census(8, 1, 0, 0), 0, Some(7)),
            (ELASTIC, census(8, 1, 7, 0), 0, Some(7)),
            (ELASTIC, census(8, 4, 4, 0), 2, Some(4)),
            (ELASTIC, census(8, 5, 0, 0), 0, Some(8)),
            // From a world that is smaller already.
            (ELASTIC, census(5, 1, 4, 0), 1, Some(4)),
            (ELASTIC, census(4, 1, 3, 0), 1, Some(8)),
            (ELASTIC, census(8, 1, 7, 0), 3, None),
        ] {
            assert_eq!(policy(asked, None).next_world(&given, restarts), expected, "{asked:?} {given:?}");
        }
        let thrice = policy(STOP, Some("3"));
        assert_eq!(thrice.next_world(&census(8, 1, 3, 0), 2), Some(8));
        assert_eq!(thrice.next_world(&census(8, 1, 3, 0), 3), None);
    }
}
