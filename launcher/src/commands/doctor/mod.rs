//! `tpurun doctor`: looks at the machine and says what to do about what it finds.
//!
//! Every check is one function that answers with a [`Finding`]; none changes anything that outlives it, and
//! none waits without a bound. `limits` asks what this process may use, `kernel` tries what the engine and
//! the launcher need, `python` asks the interpreter.

mod cgroup;
mod kernel;
mod limits;
mod probe;
mod python;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use serde::Serialize;

/// The questions to `tpurun doctor`.
#[derive(Debug, Clone)]
pub(crate) struct DoctorOptions {
    /// How many ranks the machine shall run.
    pub(crate) ranks: u32,
    /// The interpreter that ranks would run in, or why there is none.
    pub(crate) python: Result<PathBuf, String>,
    /// One JSON object per finding instead of text.
    pub(crate) json: bool,
}

/// Checks the machine and reports on stdout. Fails if anything that is needed is missing.
///
/// # Errors
/// Only if the report can not be written.
pub(crate) fn run(options: &DoctorOptions) -> anyhow::Result<ExitCode> {
    let findings = CHECKS.iter().flat_map(|check| check(options));
    let worst = report_all(findings, options.json, &mut io::stdout().lock());
    let worst = worst.context("can not write the report")?;
    Ok(if worst == Level::Fail { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The worst level, which is known also where the reader leaves early, as `head` does.
fn report_all(
    findings: impl Iterator<Item = Finding>,
    json: bool,
    out: &mut impl Write,
) -> io::Result<Level> {
    let mut worst = Level::Ok;
    let mut is_read = true;
    for finding in findings {
        worst = worst.max(finding.level);
        if is_read {
            match report(&finding, json, out) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => is_read = false,
                reported => reported?,
            }
        }
    }
    Ok(worst)
}

/// In the order in which a person would ask.
const CHECKS: [fn(&DoctorOptions) -> Vec<Finding>; 13] = [
    |_| vec![limits::cores()],
    |options| vec![limits::memory(options.ranks)],
    |options| vec![limits::open_files(options.ranks)],
    |options| vec![limits::processes(options.ranks)],
    |options| match &options.python {
        Ok(python) => python::all(python),
        Err(error) => vec![python::missing(error)],
    },
    |_| vec![kernel::memfd()],
    |_| vec![kernel::proc_fd()],
    |_| vec![kernel::futex()],
    |_| vec![kernel::cgroup_kill()],
    |_| vec![kernel::shared_memory_folder()],
    |_| vec![kernel::huge_pages()],
    |_| vec![kernel::reverse_dns()],
    |_| vec![kernel::ports()],
];

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) enum Level {
    /// Nothing to do.
    #[serde(rename = "ok")]
    Ok,
    /// Jobs run, but worse than they could.
    #[serde(rename = "warn")]
    Warn,
    /// Jobs do not run.
    #[serde(rename = "FAIL")]
    Fail,
}

/// The result of one check, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    level: Level,
    name: &'static str,
    finding: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

impl Finding {
    fn ok(name: &'static str, finding: impl Into<String>) -> Self {
        Self { level: Level::Ok, name, finding: finding.into(), advice: None }
    }

    fn warn(name: &'static str, finding: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { level: Level::Warn, name, finding: finding.into(), advice: Some(advice.into()) }
    }

    fn fail(name: &'static str, finding: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { level: Level::Fail, name, finding: finding.into(), advice: Some(advice.into()) }
    }
}

fn report(finding: &Finding, json: bool, out: &mut impl Write) -> io::Result<()> {
    if json {
        serde_json::to_writer(&mut *out, finding)?;
        return writeln!(out);
    }
    let level = match finding.level {
        Level::Ok => "ok",
        Level::Warn => "warn",
        Level::Fail => "FAIL",
    };
    write!(out, "{level:<4} {}: {}", finding.name, finding.finding)?;
    match &finding.advice {
        Some(advice) => writeln!(out, " -> {advice}"),
        None => writeln!(out),
    }
}

/// `64 MiB`, `23.5 GiB`.
fn human_bytes(bytes: u64) -> String {
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    match bytes {
        GIB.. => format!("{:.1} GiB", bytes as f64 / GIB as f64),
        _ => format!("{} MiB", bytes / MIB),
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    fn reported(json: bool) -> String {
        let mut out = Vec::new();
        report(&Finding::ok("cores", "2 usable"), json, &mut out).unwrap();
        report(&Finding::warn("memory", "tight", "use fewer ranks"), json, &mut out).unwrap();
        report(&Finding::fail("python", "not found", "install it"), json, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_finding_is_one_line() {
        expect![[r#"
            ok   cores: 2 usable
            warn memory: tight -> use fewer ranks
            FAIL python: not found -> install it
        "#]]
        .assert_eq(&reported(false));
        expect![[r#"
            {"level":"ok","name":"cores","finding":"2 usable"}
            {"level":"warn","name":"memory","finding":"tight","advice":"use fewer ranks"}
            {"level":"FAIL","name":"python","finding":"not found","advice":"install it"}
        "#]]
        .assert_eq(&reported(true));
    }

    #[test]
    fn a_reader_that_leaves_changes_nothing_about_the_answer() {
        let (reader, mut writer) = io::pipe().unwrap();
        drop(reader);
        let findings =
            || [Finding::ok("cores", "2"), Finding::fail("memory", "none", "buy some")].into_iter();
        assert_eq!(report_all(findings(), false, &mut writer).unwrap(), Level::Fail);
        // Other errors are told.
        let full = &mut [0; 3][..];
        assert!(report_all(findings(), false, &mut &mut *full).is_err());
    }

    #[test]
    fn bytes_are_given_in_the_unit_that_fits() {
        assert_eq!(human_bytes(64 << 20), "64 MiB");
        assert_eq!(human_bytes((3 << 30) / 2), "1.5 GiB");
    }
}
