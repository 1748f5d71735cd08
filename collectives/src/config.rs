//! Every `TPURUN_*` variable of the engine, read once per communicator; where this host is, `bootstrap.rs` reads.

use std::env;
use std::time::Duration;

use tpurun_topology::{Algorithm, Topology};

use crate::arena::{self, Arenas};
use crate::failure::{Failure, invalid_usage};

/// What is compared when operations are matched.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Matching {
    /// Everything that must be equal for the operation to make sense.
    #[default]
    Normal,
    /// The call site, too: ranks that run the same program catch two same-shaped operations swapped.
    Strict,
}

/// What is done with results that must be equal on all ranks.
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
    /// `TPURUN_VERIFY_RESULTS`: `0` (default) or `1`, which costs one more meeting and a hash of the result
    /// per all_reduce, all_gather and broadcast.
    pub results: Results,
    /// `TPURUN_ALGORITHM`: force one algorithm instead of the cheapest (`flat`, `ring`, `bucket`).
    pub algorithm: Option<Algorithm>,
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

    fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, Failure> {
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
            config.results = match verify.as_str() {
                "0" => Results::Trusted,
                "1" => Results::Verified,
                _ => return Err(bad("TPURUN_VERIFY_RESULTS", "0 or 1", &verify)),
            };
        }
        if let Some(algorithm) = variable("TPURUN_ALGORITHM") {
            let parsed = algorithm.parse();
            let parsed = parsed.map_err(|_| bad("TPURUN_ALGORITHM", "flat, ring or bucket", &algorithm))?;
            config.algorithm = Some(parsed);
        }
        if let Some(topology) = variable("TPURUN_TOPOLOGY") {
            let parsed =
                Topology::parse(&topology).map_err(|error| invalid_usage!("TPURUN_TOPOLOGY: {error}"))?;
            config.topology = Some(parsed);
        }
        if let Some(timeout) = variable("TPURUN_TIMEOUT_MS") {
            let ms = timeout.parse::<u64>().ok().filter(|ms| *ms > 0);
            let ms =
                ms.ok_or_else(|| bad("TPURUN_TIMEOUT_MS", "a number of milliseconds above 0", &timeout))?;
            config.timeout = Some(Duration::from_millis(ms));
        }
        Ok(config)
    }
}

/// The affinity mask, or less where a cgroup grants less.
pub(crate) fn usable_cpus() -> u32 {
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
            "TPURUN_TIMEOUT_MS: expected a number of milliseconds above 0, given \"0\""
        );
        assert_eq!(
            text("TPURUN_VERIFY_RESULTS", "yes"),
            "TPURUN_VERIFY_RESULTS: expected 0 or 1, given \"yes\""
        );
        assert!(text("TPURUN_TOPOLOGY", "4xx").starts_with("TPURUN_TOPOLOGY: "));
    }
}
