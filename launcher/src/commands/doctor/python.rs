//! Asks the interpreter that ranks would run in: torch, tpurun, its backend, and whether forking is sound.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use crate::job::target::LEAVE_DIRECTORY;

use super::Finding;
use super::probe::{self, ProbeError};

/// A cold `import torch` on a slow disk.
const LIMIT: Duration = Duration::from_secs(120);

/// The oldest Python that tpurun supports.
const OLDEST: (u32, u32) = (3, 11);

/// Prints one JSON object as its last line. A question that an earlier answer makes meaningless is left out.
const PROBE: &str = include_str!("probe.py");

#[derive(Debug, Deserialize)]
struct Answers {
    executable: String,
    version: (u32, u32, u32),
    torch: Option<Imported>,
    tpurun: Option<Imported>,
    backend_is_registered: Option<bool>,
    threads: Option<u32>,
    fork: Option<Forked>,
    /// PYTHONHASHSEED, `random` when it is not set.
    hash_seed: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Imported {
    Version(String),
    Error(String),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Forked {
    Worked,
    Failed(String),
}

/// The finding that there is no interpreter to ask.
pub(super) fn missing(error: &str) -> Finding {
    Finding::fail("python", error, ADVICE)
}

const ADVICE: &str = "activate the environment, or pass --python";

/// All findings about this interpreter; fewer where one makes the others meaningless.
pub(super) fn all(python: &Path) -> Vec<Finding> {
    // As the fork server is started; otherwise the linear algebra libraries start threads at import.
    let output = probe::run(
        Command::new(python).args(["-c", &format!("{LEAVE_DIRECTORY}\n{PROBE}")]).env("OMP_NUM_THREADS", "1"),
        LIMIT,
    );
    let name = python.display();
    let failed = |finding: String, advice: &str| vec![Finding::fail("python", finding, advice)];
    match output {
        Err(ProbeError::NotStarted(error)) => failed(format!("{name} does not start: {error}"), ADVICE),
        Err(ProbeError::TooSlow) => failed(
            format!("{name} gave no answer in {} s", LIMIT.as_secs()),
            "run `python -c 'import torch'`",
        ),
        Ok(output) => match parse(&output.stdout) {
            Some(answers) => judge(&answers),
            None => {
                let stderr = String::from_utf8_lossy(&output.stderr);
                let last = stderr.trim_end().lines().next_back().unwrap_or("nothing").to_owned();
                failed(
                    format!("{name} ended with {}: {last}", output.status),
                    "run `python -c 'import torch'`",
                )
            }
        },
    }
}

/// Imports may print, too: the answers are the last line.
fn parse(stdout: &[u8]) -> Option<Answers> {
    let text = String::from_utf8_lossy(stdout);
    serde_json::from_str(text.trim_end().lines().next_back()?).ok()
}

fn judge(answers: &Answers) -> Vec<Finding> {
    let (major, minor, micro) = answers.version;
    let python = format!("{major}.{minor}.{micro} at {}", answers.executable);
    if (major, minor) < OLDEST {
        return vec![Finding::fail(
            "python",
            python,
            format!("use Python {}.{} or newer", OLDEST.0, OLDEST.1),
        )];
    }
    let mut findings = vec![Finding::ok("python", python)];
    match &answers.torch {
        Some(Imported::Version(version)) => findings.push(Finding::ok("torch", version)),
        Some(Imported::Error(error)) => {
            findings.push(Finding::fail("torch", error, "install it: pip install torch"));
            return findings;
        }
        None => return findings,
    }
    findings.extend(answers.tpurun.as_ref().map(judge_tpurun));
    findings.extend(answers.backend_is_registered.map(judge_backend));
    findings.extend(answers.fork.as_ref().map(|fork| judge_fork(fork, answers.threads)));
    findings.extend(answers.hash_seed.as_deref().map(judge_hash_seed));
    findings
}

fn judge_hash_seed(seed: &str) -> Finding {
    let finding = match seed {
        "random" => {
            "forked ranks share one, so a set of names has the same order on all; --hash-seed per-rank \
                     and --spawn start an interpreter for each, with a seed of its own"
                .to_owned()
        }
        fixed => format!(
            "PYTHONHASHSEED={fixed}, so a set of names has the same order on all ranks, with --spawn, too; \
             --hash-seed per-rank gives each one of its own"
        ),
    };
    Finding::ok("hash seed", finding)
}

fn judge_tpurun(tpurun: &Imported) -> Finding {
    const NAME: &str = "tpurun";
    const OURS: &str = env!("CARGO_PKG_VERSION");
    match tpurun {
        Imported::Version(version) if version == OURS => Finding::ok(NAME, version),
        Imported::Version(version) => Finding::fail(
            NAME,
            format!("the module is {version}, this command is {OURS}"),
            "use the tpurun command of the same environment",
        ),
        Imported::Error(error) => Finding::fail(NAME, error, "install tpurun into this environment"),
    }
}

fn judge_backend(is_registered: bool) -> Finding {
    const NAME: &str = "backend";
    if is_registered {
        return Finding::ok(NAME, "tpu_dist is registered with torch.distributed");
    }
    Finding::fail(NAME, "torch.distributed does not know tpu_dist", "unset TORCH_DEVICE_BACKEND_AUTOLOAD")
}

fn judge_fork(fork: &Forked, threads: Option<u32>) -> Finding {
    const NAME: &str = "fork server";
    const ADVICE: &str = "use --spawn; each rank then imports torch by itself";
    match (fork, threads) {
        (Forked::Failed(how), _) => Finding::fail(NAME, format!("a forked child failed: {how}"), ADVICE),
        (Forked::Worked, Some(1)) => {
            Finding::ok(NAME, "one thread after import torch, a forked child computes")
        }
        (Forked::Worked, Some(threads)) => {
            Finding::warn(NAME, format!("{threads} threads after import torch: forking is not sound"), ADVICE)
        }
        (Forked::Worked, None) => Finding::warn(NAME, "the threads after import torch are not known", ADVICE),
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::super::report;
    use super::*;

    fn check(answers: &str, expected: Expect) {
        let mut out = Vec::new();
        for finding in judge(&parse(answers.as_bytes()).unwrap()) {
            report(&finding, false, &mut out).unwrap();
        }
        expected.assert_eq(&String::from_utf8(out).unwrap());
    }

    #[test]
    fn a_complete_environment() {
        check(
            concat!(
                "noise from an import\n",
                r#"{"executable": "/v/bin/python", "version": [3, 12, 1], "torch": {"version": "2.15.0"}, "#,
                r#""tpurun": {"version": ""#,
                env!("CARGO_PKG_VERSION"),
                r#""}, "backend_is_registered": true, "threads": 1, "fork": "worked", "hash_seed": "random"}"#
            ),
            expect![[r#"
                ok   python: 3.12.1 at /v/bin/python
                ok   torch: 2.15.0
                ok   tpurun: 0.1.0
                ok   backend: tpu_dist is registered with torch.distributed
                ok   fork server: one thread after import torch, a forked child computes
                ok   hash seed: forked ranks share one, so a set of names has the same order on all; --hash-seed per-rank and --spawn start an interpreter for each, with a seed of its own
            "#]],
        );
    }

    #[test]
    fn what_is_missing_is_said_and_nothing_that_follows_from_it() {
        check(
            r#"{"executable": "/usr/bin/python3", "version": [3, 12, 1], "torch": {"error": "No module named 'torch'"}}"#,
            expect![[r#"
                ok   python: 3.12.1 at /usr/bin/python3
                FAIL torch: No module named 'torch' -> install it: pip install torch
            "#]],
        );
        check(
            r#"{"executable": "/usr/bin/python3", "version": [3, 9, 2]}"#,
            expect![[r#"
                FAIL python: 3.9.2 at /usr/bin/python3 -> use Python 3.11 or newer
            "#]],
        );
    }

    #[test]
    fn other_versions_and_threads_are_noticed() {
        check(
            r#"{"executable": "p", "version": [3, 11, 0], "torch": {"version": "2.15.0"},
                "tpurun": {"version": "9.9"}, "backend_is_registered": false, "threads": 3, "fork": "worked", "hash_seed": "0"}"#
                .replace('\n', " ")
                .as_str(),
            expect![[r#"
                ok   python: 3.11.0 at p
                ok   torch: 2.15.0
                FAIL tpurun: the module is 9.9, this command is 0.1.0 -> use the tpurun command of the same environment
                FAIL backend: torch.distributed does not know tpu_dist -> unset TORCH_DEVICE_BACKEND_AUTOLOAD
                warn fork server: 3 threads after import torch: forking is not sound -> use --spawn; each rank then imports torch by itself
                ok   hash seed: PYTHONHASHSEED=0, so a set of names has the same order on all ranks, with --spawn, too; --hash-seed per-rank gives each one of its own
            "#]],
        );
    }

    #[test]
    fn an_interpreter_that_was_not_found() {
        let finding = missing("TPURUN_PYTHON: expected an interpreter, given /no: no such file");
        let mut out = Vec::new();
        report(&finding, false, &mut out).unwrap();
        expect![[r#"
            FAIL python: TPURUN_PYTHON: expected an interpreter, given /no: no such file -> activate the environment, or pass --python
        "#]]
        .assert_eq(&String::from_utf8(out).unwrap());
    }

    #[test]
    fn an_interpreter_that_is_not_there() {
        let findings = all(Path::new("/nonexistent/python"));
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].finding, "/nonexistent/python does not start: entity not found");
    }

    #[test]
    fn a_program_that_is_no_python() {
        let findings = all(Path::new("false"));
        assert_eq!(findings[0].finding, "false ended with exit status: 1: nothing");
    }
}
