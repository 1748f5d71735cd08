//! Lines about connections that are refused: a thousand of them are one line and a count.

use std::time::{Duration, Instant};

/// Time between two lines.
pub const PERIOD: Duration = Duration::from_secs(10);

/// The refusals of one kind: one line at once, then one for all of a period.
#[derive(Debug, Default)]
pub struct Refusals {
    told: Option<Instant>,
    since: u64,
    last: String,
}

impl Refusals {
    /// The line to say now, if any.
    pub fn add(&mut self, refusal: String, now: Instant) -> Option<String> {
        if self.told.is_none_or(|told| now.saturating_duration_since(told) >= PERIOD) && self.since == 0 {
            self.told = Some(now);
            return Some(refusal);
        }
        (self.since, self.last) = (self.since + 1, refusal);
        self.rest(now)
    }

    /// The line for those that were not told of, once the period is over.
    pub fn rest(&mut self, now: Instant) -> Option<String> {
        let told = self.told.filter(|_| self.since > 0)?;
        if now.saturating_duration_since(told) < PERIOD {
            return None;
        }
        self.told = Some(now);
        let (count, last) = (std::mem::take(&mut self.since), std::mem::take(&mut self.last));
        Some(format!("refused {count} more connections in {} s, the last: {last}", PERIOD.as_secs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thousand_refusals_are_one_line_and_a_count() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        let refused = |port: u32| format!("10.0.0.9:{port}: it did not say who it is");
        let lines: Vec<String> = (0..1000).filter_map(|port| refusals.add(refused(port), now)).collect();
        assert_eq!(lines, [refused(0)]);
        assert_eq!(refusals.rest(now), None);
        let text = format!("refused 999 more connections in 10 s, the last: {}", refused(999));
        assert_eq!(refusals.rest(now + PERIOD), Some(text));
        assert_eq!(refusals.rest(now + 2 * PERIOD), None);
        assert_eq!(refusals.add(refused(7), now + 2 * PERIOD), Some(refused(7)));
    }
}
