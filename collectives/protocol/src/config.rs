//! Every `TPURUN_*` variable of the engine, read once per communicator; where this host is, `bootstrap.rs` reads.

use std::env;
use std::time::Duration;

use tpurun_topology::{Algorithm, Topology};

use crate::tuning::Tuning;
use tpurun_memory::arena::{self, Arenas};
use tpurun_memory::failure::Failure;
use tpurun_memory::invalid_usage;

/// The properties that are compared when operations are matched.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Matching {
    /// Everything that must be equal for the operation to make sense.
    #[default]
    Normal,
    /// The call site, too: ranks that run the same program catch two same-shaped operations swapped.
    Strict,
}

/// The check of results that must be equal on all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Results {
    /// Nothing.
    #[default]
    Trusted,
    /// They are hashed and compared before an operation ends: finds memory that something else writes to.
    Verified,
}

/// Settings of a communicator.
#[derive(Clone, Debug)]
pub struct Config {
    /// Shared memory all ranks of a communicator may stage in, in bytes (`TPURUN_STAGING_BYTES`, 256 KiB to
    /// 4 GiB). Each rank has two windows of its share; larger messages pass through in several rounds. By
    /// default 1 MiB for each of up to 128 ranks, and 128 MiB for more; only pages that are used take memory.
    pub staging_bytes: Option<usize>,
    /// `TPURUN_MATCH`: `normal` (default) or `strict`.
    pub matching: Matching,
    /// `TPURUN_VERIFY_RESULTS`, a [`switch`]: off by default; on costs one more meeting and a hash of the result
    /// per all_reduce, all_gather and broadcast.
    pub results: Results,
    /// `TPURUN_ALGORITHM`: force one algorithm instead of the cheapest (`flat`, `ring`, `bucket`).
    pub algorithm: Option<Algorithm>,
    /// `TPURUN_TUNING`: a file with numbers by which operations are planned, or its text in braces; rank 0 decides.
    pub tuning: Tuning,
    /// `TPURUN_TOPOLOGY`: the torus the ranks are placed on; default one dimension of all ranks.
    pub topology: Option<Topology>,
    /// `TPURUN_TIMEOUT_MS`: replaces every group's timeout.
    pub timeout: Option<Duration>,
    /// CPUs this process may use: decides whether waiting ranks may spin.
    pub cpus: u32,
    /// Memory that the other ranks of the host can map: tensors that lie there are used in place.
    pub arenas: Arenas,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            staging_bytes: None,
            matching: Matching::Normal,
            results: Results::Trusted,
            algorithm: None,
            tuning: Tuning::default(),
            topology: None,
            timeout: None,
            cpus: usable_cpus(),
            arenas: arena::current(),
        }
    }
}

impl Config {
    /// Reads the environment.
    ///
    /// # Errors
    /// `InvalidUsage` naming the variable, what was expected and what was given.
    pub fn from_env() -> Result<Self, Failure> {
        Self::read(|name| env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// Reads variables that have these values; an empty one must be `None`.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, Failure> {
        let mut config = Self::default();
        if let Some(bytes) = variable("TPURUN_STAGING_BYTES") {
            let parsed = bytes.parse().ok().filter(|bytes| (256 << 10..=4 << 30).contains(bytes));
            let expected = "a number from 262144 to 4294967296";
            config.staging_bytes = Some(parsed.ok_or_else(|| bad("TPURUN_STAGING_BYTES", expected, &bytes))?);
        }
        if let Some(matching) = variable("TPURUN_MATCH") {
            config.matching = match matching.as_str() {
                "normal" => Matching::Normal,
                "strict" => Matching::Strict,
                _ => return Err(bad("TPURUN_MATCH", "normal or strict", &matching)),
            };
        }
        if let Some(verify) = variable("TPURUN_VERIFY_RESULTS") {
            let is_on = switch(&verify).map_err(|error| invalid_usage!("TPURUN_VERIFY_RESULTS: {error}"))?;
            config.results = if is_on { Results::Verified } else { Results::Trusted };
        }
        if let Some(algorithm) = variable("TPURUN_ALGORITHM") {
            let parsed = algorithm.parse();
            let parsed = parsed.map_err(|_| bad("TPURUN_ALGORITHM", "flat, ring or bucket", &algorithm))?;
            config.algorithm = Some(parsed);
        }
        if let Some(tuning) = variable("TPURUN_TUNING") {
            let parsed = Tuning::from_variable(&tuning);
            config.tuning = parsed.map_err(|error| invalid_usage!("TPURUN_TUNING: {error}"))?;
        }
        if let Some(topology) = variable("TPURUN_TOPOLOGY") {
            let parsed =
                Topology::parse(&topology).map_err(|error| invalid_usage!("TPURUN_TOPOLOGY: {error}"))?;
            config.topology = Some(parsed);
        }
        if let Some(timeout) = variable("TPURUN_TIMEOUT_MS") {
            let parsed = parse_timeout_ms(&timeout);
            let ms = parsed.map_err(|error| invalid_usage!("TPURUN_TIMEOUT_MS: {error}"))?;
            config.timeout = Some(Duration::from_millis(ms));
        }
        Ok(config)
    }
}

/// Whether the value of a variable that is a switch turns it on, for the launcher and for a rank. The table
/// `tests/variables/switches.json` holds `python/tpurun/_variables.py` to the same answers.
///
/// # Errors
/// A text with what was expected and given.
pub fn switch(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "on" | "yes" => Ok(true),
        "" | "0" | "false" | "off" | "no" => Ok(false),
        _ => Err(format!("expected 1, true, on or yes, or 0, false, off or no, given {text:?}")),
    }
}

/// The value of `TPURUN_TIMEOUT_MS`.
///
/// # Errors
/// A text with what was expected and given.
pub fn parse_timeout_ms(text: &str) -> Result<u64, String> {
    let ms = text.parse().ok().filter(|ms| (1..=MOST_TIMEOUT_MS).contains(ms));
    ms.ok_or_else(|| format!("expected a number of milliseconds from 1 to {MOST_TIMEOUT_MS}, given {text:?}"))
}

/// A year, about: a longer timeout is a mistake. The bound of `tpurun --timeout`, too.
const MOST_TIMEOUT_MS: u64 = 32_000_000_000;

/// The affinity mask, or less where a cgroup grants less.
pub fn usable_cpus() -> u32 {
    std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u32)
}

fn bad(name: &str, expected: &str, given: &str) -> Failure {
    invalid_usage!("{name}: expected {expected}, given {given:?}")
}

#[cfg(test)]
#[cfg(not(tpurun_loom))]
mod tests {
    use super::*;

    fn with(name: &'static str, value: &'static str) -> Result<Config, Failure> {
        Config::read(|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn variables_are_read() {
        assert_eq!(with("TPURUN_MATCH", "strict").expect("valid").matching, Matching::Strict);
        assert_eq!(with("TPURUN_VERIFY_RESULTS", "1").expect("valid").results, Results::Verified);
        assert_eq!(with("TPURUN_ALGORITHM", "ring").expect("valid").algorithm, Some(Algorithm::Ring));
        assert_eq!(
            with("TPURUN_TIMEOUT_MS", "1500").expect("valid").timeout,
            Some(Duration::from_millis(1500))
        );
        assert_eq!(with("TPURUN_STAGING_BYTES", "1048576").expect("valid").staging_bytes, Some(1 << 20));
    }

    #[test]
    fn bad_values_say_what_was_expected_and_given() {
        let text = |name, value| with(name, value).expect_err("invalid").to_string();
        assert_eq!(
            text("TPURUN_ALGORITHM", "rings"),
            "TPURUN_ALGORITHM: expected flat, ring or bucket, given \"rings\""
        );
        assert_eq!(
            text("TPURUN_TIMEOUT_MS", "0"),
            "TPURUN_TIMEOUT_MS: expected a number of milliseconds from 1 to 32000000000, given \"0\""
        );
        assert_eq!(
            text("TPURUN_VERIFY_RESULTS", "maybe"),
            "TPURUN_VERIFY_RESULTS: expected 1, true, on or yes, or 0, false, off or no, given \"maybe\""
        );
        assert!(text("TPURUN_TOPOLOGY", "4xx").starts_with("TPURUN_TOPOLOGY: "));
        let tuning = text("TPURUN_TUNING", "{ wake_ns = 0 }");
        assert!(
            tuning.starts_with("TPURUN_TUNING: { wake_ns = 0 }: wake_ns: expected a number from 1 to "),
            "{tuning}"
        );
        for timeout in ["5s", "-1", "1.5", "99999999999"] {
            assert!(text("TPURUN_TIMEOUT_MS", timeout).contains(timeout));
        }
    }

    #[test]
    fn switches_have_few_words() {
        for (text, is_on) in [("1", true), ("true", true), ("Yes", true), ("off", false), ("", false)] {
            assert_eq!(switch(text), Ok(is_on), "{text}");
        }
        ["2", "y", " 1", "maybe"].iter().for_each(|text| assert!(switch(text).is_err(), "{text}"));
    }
}
