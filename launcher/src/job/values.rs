//! The values of options, each checked by itself: what was expected and what was given, in one line.

use std::time::Duration;

use rustix::process::Signal;
use tpurun_protocol::control::{STACK_SIGNAL, realtime_signal};
use tpurun_protocol::tuning::Tuning;
use tpurun_topology::{Algorithm, Topology};

use crate::base::rank_set::RankSet;
use crate::processes::cpus::usable_cpus;

/// The value of `-n`.
pub(crate) fn parse_ranks(text: &str) -> Result<u32, String> {
    ranks_from(text).map_err(|error| format!("-n: {error}"))
}

/// A number of ranks as people write it.
pub(crate) fn ranks_from(text: &str) -> Result<u32, String> {
    match text {
        "auto" | "cpu" => Ok(u32::try_from(usable_cpus()).unwrap_or(MAX_RANKS)),
        _ => text.parse().ok().filter(|ranks| (1..=MAX_RANKS).contains(ranks)).ok_or_else(|| {
            format!("expected a number of ranks from 1 to {MAX_RANKS}, auto or cpu, given {text}")
        }),
    }
}

pub(crate) fn parse_port(text: Option<&str>) -> Result<u16, String> {
    let Some(text) = text else { return Ok(0) };
    text.parse().map_err(|_| format!("--master-port: expected a port from 0 (any) to 65535, given {text}"))
}

pub(crate) fn parse_only(text: Option<&str>, ranks: u32) -> Result<RankSet, String> {
    let Some(text) = text else { return Ok(RankSet::all(ranks)) };
    let only: RankSet = text.parse().map_err(|error| format!("--only-ranks: {error}"))?;
    match only.last() {
        Some(last) if last >= ranks => {
            Err(format!("--only-ranks: expected ranks below {ranks}, given {text}"))
        }
        _ => Ok(only),
    }
}

pub(crate) fn parse_topology(text: &str) -> Result<Topology, String> {
    text.parse().map_err(|error| format!("--topology {text}: {error}"))
}

pub(crate) fn parse_algorithm(text: &str) -> Result<Algorithm, String> {
    text.parse().map_err(|_| {
        let known = Algorithm::ALL.map(|algorithm| algorithm.to_string()).join(", ");
        format!("--algorithm: expected {known}, given {text}")
    })
}

/// A file, or what would be in one, in braces.
pub(crate) fn parse_tuning(value: &str) -> Result<Tuning, String> {
    Tuning::from_variable(value).map_err(|error| format!("--tuning {error}"))
}

/// `500ms`, `30s`, `10m`, `1h`; a bare number is seconds, as in torchrun.
pub(crate) fn parse_duration(flag: &str, text: &str) -> Result<Duration, String> {
    let wrong = || format!("{flag}: expected a time such as 500ms, 30s, 10m or 1h, given {text}");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let millis_per_unit = match &text[digits.len()..] {
        "ms" => 1.0,
        "" | "s" => 1e3,
        "m" | "min" => 6e4,
        "h" => 3.6e6,
        _ => return Err(wrong()),
    };
    let millis = digits.parse::<f64>().map_err(|_| wrong())? * millis_per_unit;
    // A year: what is longer is a mistake, and what is not finite is not a time.
    if (1.0..=3.2e10).contains(&millis) { Ok(Duration::from_millis(millis as u64)) } else { Err(wrong()) }
}

pub(crate) fn parse_backend_for(text: &str) -> Result<(), String> {
    match text {
        "gloo" => Ok(()),
        _ => Err(format!("--backend-for: expected gloo, given {text}")),
    }
}

/// `tpu` or `cpu`: whether ranks have the device.
pub(crate) fn parse_device(text: &str) -> Result<bool, String> {
    match text {
        "tpu" => Ok(true),
        "cpu" => Ok(false),
        _ => Err(format!("--device: expected tpu or cpu, given {text}")),
    }
}

/// `per-rank`: each rank has a hash seed of its own.
///
/// A forked interpreter has the seed of the one that it was forked from, and nothing can change it.
pub(crate) fn parse_hash_seed(text: &str) -> Result<(), String> {
    match text {
        "per-rank" => Ok(()),
        _ => Err(format!("--hash-seed: expected per-rank, given {text} (PYTHONHASHSEED fixes one for all)")),
    }
}

/// `on` or `off`: whether programs are loaded at random addresses.
pub(crate) fn parse_aslr(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("--aslr: expected on or off, given {text}")),
    }
}

/// `512MiB`, `16GiB`, `16G`: powers of two; a bare number is bytes. `python/tpurun/_variables.py` reads the same.
pub(crate) fn parse_size(flag: &str, text: &str) -> Result<u64, String> {
    let wrong = || format!("{flag}: expected a size of 1MiB to 16TiB such as 512MiB or 16GiB, given {text}");
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let are_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let unit = text[number.len()..].split_at_checked(1).unwrap_or_default();
    let shift = match unit {
        ("", "") | ("B", "") => 0,
        ("K", "" | "B" | "i" | "iB") => 10,
        ("M", "" | "B" | "i" | "iB") => 20,
        ("G", "" | "B" | "i" | "iB") => 30,
        ("T", "" | "B" | "i" | "iB") => 40,
        _ => return Err(wrong()),
    };
    let number = number.parse::<f64>().ok().filter(|_| are_digits(whole) && are_digits(part));
    let bytes = number.ok_or_else(wrong)? * (1u64 << shift) as f64;
    let sizes = (1u64 << 20) as f64..=(1u64 << 44) as f64;
    if sizes.contains(&bytes) { Ok(bytes as u64) } else { Err(wrong()) }
}

/// The signal that the text of `TPURUN_STACK_SIGNAL` says, as `python/tpurun/stacks.py` reads it, too.
///
/// # Errors
/// What was expected and given.
pub(crate) fn parse_stack_signal(text: &str) -> Result<Option<Signal>, String> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse().ok().filter(|_| is_number) {
        None if text.is_empty() => Ok(realtime_signal(STACK_SIGNAL)),
        Some(0) => Ok(None),
        number => number.and_then(realtime_signal).map(Some).ok_or_else(|| {
            format!("expected the number of a signal from 36 to 63, or 0 for none, given {text:?}")
        }),
    }
}

/// `2`, or `2:2` as torchrun has it.
pub(crate) fn parse_count(text: &str) -> Option<u32> {
    let (least, most) = text.split_once(':').unwrap_or((text, text));
    least.parse().ok().filter(|count| least == most && (1..=MAX_RANKS).contains(count))
}

/// Ranks that a job may have.
pub(crate) const MAX_RANKS: u32 = tpurun_protocol::board::MAX_RANKS;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        let of = |text| parse_duration("--timeout", text);
        assert_eq!(of("500ms").unwrap(), Duration::from_millis(500));
        assert_eq!(of("30").unwrap(), Duration::from_secs(30));
        assert_eq!(of("1.5s").unwrap(), Duration::from_millis(1500));
        assert_eq!(of("10m").unwrap(), Duration::from_secs(600));
        for text in ["", "s", "-1s", "0", "1e99h", "NaN", "3 s", "3d"] {
            assert!(of(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_read_as_ranks_read_them() {
        let table = include_str!("../../../tests/variables/sizes.json");
        let table: serde_json::Value = serde_json::from_str(table).unwrap();
        for (text, bytes) in table["accepted"].as_object().unwrap() {
            assert_eq!(parse_size("--hbm", text).ok(), bytes.as_u64(), "{text}");
        }
        for text in table["refused"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()) {
            let said =
                format!("--hbm: expected a size of 1MiB to 16TiB such as 512MiB or 16GiB, given {text}");
            assert_eq!(parse_size("--hbm", text), Err(said));
        }
        assert!(parse_size("--hbm", "").is_err());
    }

    #[test]
    fn the_signal_is_read_as_ranks_read_it() {
        let table = include_str!("../../../tests/variables/stack_signals.json");
        let table: serde_json::Value = serde_json::from_str(table).unwrap();
        for (text, number) in table["accepted"].as_object().unwrap() {
            let number = i32::try_from(number.as_i64().unwrap()).unwrap();
            assert_eq!(parse_stack_signal(text), Ok(realtime_signal(number)), "{text}");
        }
        for text in table["refused"].as_array().unwrap() {
            let text = text.as_str().unwrap();
            let said =
                format!("expected the number of a signal from 36 to 63, or 0 for none, given {text:?}");
            assert_eq!(parse_stack_signal(text), Err(said));
        }
    }
}
