//! The settings that rank 0 decides for all ranks of a communicator, on all hosts.

use std::fmt;

use crate::config::{Matching, Results};
use crate::tuning::Tuning;

/// Where the ranks' own settings might differ.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Bytes of each rank's window.
    pub window_bytes: usize,
    /// The fields of match keys that are compared.
    pub matching: Matching,
    /// Whether results are compared, too.
    pub results: Results,
    /// The CPUs that plans count on; ranks may be pinned to different CPUs.
    pub cpus: u32,
    /// The numbers by which operations are planned.
    pub tuning: Tuning,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            window_bytes: 4096,
            matching: Matching::Normal,
            results: Results::Trusted,
            cpus: 1,
            tuning: Tuning::default(),
        }
    }
}

impl Settings {
    /// Fewer and larger rounds where each costs the way to another host and back.
    pub fn window_bytes_for(&self, hosts: u32) -> usize {
        if hosts > 1 { self.window_bytes.max(self.tuning.window_between_hosts) } else { self.window_bytes }
    }

    /// Reads what [`Display`](fmt::Display) wrote.
    pub fn parse(text: &str) -> Option<Self> {
        let words: Vec<usize> = text.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
        let [window_bytes, strict, verified, cpus, ref tuning @ ..] = words[..] else { return None };
        let matching = if strict == 0 { Matching::Normal } else { Matching::Strict };
        let results = if verified == 0 { Results::Trusted } else { Results::Verified };
        let cpus = u32::try_from(cpus).ok()?;
        let tuning = Tuning::checked(tuning.try_into().ok()?).ok()?;
        (window_bytes <= MOST_WINDOW).then_some(Self { window_bytes, matching, results, cpus, tuning })
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let strict = u8::from(self.matching == Matching::Strict);
        let verified = u8::from(self.results == Results::Verified);
        write!(f, "{} {strict} {verified} {}", self.window_bytes, self.cpus)?;
        self.tuning.values().iter().try_for_each(|value| write!(f, " {value}"))
    }
}

/// The most bytes of any rank's window, whatever another process says.
pub(super) const MOST_WINDOW: usize = 1 << 32;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Any text may be in the store: a process that can write there can write anything.
        #[test]
        fn any_text_is_settings_or_is_refused(
            head in "[0-9]{1,20}( [0-9-]{1,11}){2,4}|.{0,20}",
            numbers in prop::collection::vec((0..Tuning::COUNT, any::<u64>()), 0..2),
            count in (Tuning::COUNT - 1)..Tuning::COUNT + 2,
        ) {
            let mut tuning = Tuning::default().values().map(|value| value as u64);
            numbers.into_iter().for_each(|(index, number)| tuning[index] = number);
            let tuning: Vec<String> = tuning.iter().cycle().take(count).map(u64::to_string).collect();
            let text = format!("{head} {}", tuning.join(" "));
            if let Some(settings) = Settings::parse(&text) {
                prop_assert!(settings.window_bytes <= MOST_WINDOW);
                let again = Settings::parse(&settings.to_string()).expect("what is written is read");
                prop_assert_eq!(again.to_string(), settings.to_string());
            }
        }
    }
}
