//! A command line that can not work is refused in one line, before anything starts.

use std::process::Command;

use crate::sandbox::{Job, Sandbox};

#[test]
fn bad_input_is_one_line_and_exit_code_2() {
    let sandbox = Sandbox::new();
    for (arguments, error) in [
        (&["nope.py"][..], "expected a script or program, given nope.py: no such file"),
        (&["-n", "0", "true"], "-n: expected a number of ranks from 1 to 65536, auto or cpu, given 0"),
        (&[], "expected a program to run, given none (see tpurun --help)"),
        (
            &["-n", "9", "--topology", "2x2x2", "true"],
            "--topology 2x2x2: expected -n 8, one rank per chip, given 9",
        ),
        (
            &["--nnodes", "2", "true"],
            "--node-rank: expected 0 to 1, which of the 2 nodes this is, given none",
        ),
        (
            &["--timeout", "soon", "true"],
            "--timeout: expected a time such as 500ms, 30s, 10m or 1h, given soon",
        ),
    ] {
        sandbox.run(arguments).expect_error(error);
    }
    let outcome = sandbox.run(&["--no-such-option", "true"]);
    assert_eq!((outcome.code, outcome.err.lines().count()), (2, 1), "{outcome:?}");
    assert!(!sandbox.path().join("tpurun-runs").exists());
}

#[test]
fn too_few_descriptors_are_named() {
    let sandbox = Sandbox::new();
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -n 100; exec \"$0\" -n 64 true", env!("CARGO_BIN_EXE_tpurun")]);
    sandbox.prepare(&mut shell);
    let outcome = Job::new(shell.spawn().unwrap()).wait();
    outcome.expect_error("expected at least 320 file descriptors for 64 ranks, given 100 (see ulimit -n)");
}

#[test]
fn a_soft_limit_is_raised() {
    let sandbox = Sandbox::new();
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -Sn 100; exec \"$0\" -n 64 true", env!("CARGO_BIN_EXE_tpurun")]);
    sandbox.prepare(&mut shell);
    assert_eq!(Job::new(shell.spawn().unwrap()).wait().code, 0);
}

#[test]
fn a_directory_that_can_not_be_made_is_named() {
    let sandbox = Sandbox::new();
    sandbox.file("taken", "");
    let outcome = sandbox.run(&["--log-dir", "taken/logs", "true"]);
    assert_eq!((outcome.code, outcome.err.lines().count()), (2, 1), "{outcome:?}");
    assert!(
        outcome.err.starts_with("tpurun: error: cannot make a run directory in taken/logs"),
        "{outcome:?}"
    );
}

#[test]
fn options_come_from_torchruns_variables() {
    let mut sandbox = Sandbox::new();
    sandbox.variable("PET_NPROC_PER_NODE", "3");
    sandbox.variable("PET_RDZV_BACKEND", "c10d");
    let outcome = sandbox.run(&["sh", "-c", "echo $WORLD_SIZE"]);
    assert_eq!(outcome.by_rank(), ["0| 3", "1| 3", "2| 3"]);
}

#[test]
fn what_is_printed_needs_no_job() {
    let sandbox = Sandbox::new();
    let version = sandbox.run(&["--version"]);
    assert_eq!(version.out, format!("tpurun {}\n", env!("CARGO_PKG_VERSION")));
    for shell in ["bash", "zsh", "fish"] {
        assert!(sandbox.run(&["completions", shell]).out.contains("nproc-per-node"));
    }
    assert!(sandbox.run(&["man"]).out.contains(".TH tpurun 1"));
    let dry = sandbox.run(&["--dry-run", "-n", "4", "--topology", "2x2", "--timeout", "30s", "true"]);
    assert_eq!(dry.code, 0);
    for part in ["3 at (1,1)", "TPURUN_TIMEOUT_MS=30000", "TPURUN_TOPOLOGY=2x2", "MASTER_ADDR=127.0.0.1"] {
        assert!(dry.out.contains(part), "{}", dry.out);
    }
    assert!(!sandbox.path().join("tpurun-runs").exists());
}
