//! How jobs of programs that are not Python end.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::sandbox::Sandbox;

#[test]
fn every_rank_gets_the_contract_of_torchrun() {
    let sandbox = Sandbox::new();
    let script = "echo $RANK $LOCAL_RANK $ROLE_RANK of $WORLD_SIZE $LOCAL_WORLD_SIZE $ROLE_WORLD_SIZE; \
        echo $GROUP_RANK $GROUP_WORLD_SIZE $ROLE_NAME $MASTER_ADDR $TORCHELASTIC_RESTART_COUNT \
        $TORCHELASTIC_MAX_RESTARTS $TORCHELASTIC_USE_AGENT_STORE $OMP_NUM_THREADS; \
        test $MASTER_PORT -gt 0 && test -n \"$TORCHELASTIC_RUN_ID\" && test -n \"$TORCHELASTIC_ERROR_FILE\"";
    let outcome = sandbox.run(&["-n", "3", "--role", "trainer", "sh", "-c", script]);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let threads = (std::thread::available_parallelism().unwrap().get() / 3).max(1);
    let lines = (0..3).flat_map(|rank| {
        [
            format!("{rank}| {rank} {rank} {rank} of 3 3 3"),
            format!("{rank}| 0 1 trainer 127.0.0.1 0 0 False {threads}"),
        ]
    });
    assert_eq!(outcome.by_rank(), lines.collect::<Vec<_>>());
}

#[test]
fn sixty_four_ranks_of_true() {
    let sandbox = Sandbox::new();
    let outcome = sandbox.run(&["-n", "64", "true"]);
    assert_eq!((outcome.code, outcome.out.as_str()), (0, ""), "{outcome:?}");
    assert_eq!(sandbox.events().iter().filter(|event| event["event"] == "rank ended").count(), 64);
}

#[test]
fn stdin_goes_to_rank_0() {
    let outcome = Sandbox::new().run_with_input(&["-n", "3", "cat"], "one\ntwo\n");
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert_eq!(outcome.by_rank(), ["0| one", "0| two"]);
}

#[test]
fn the_first_failure_is_the_cause() {
    for ranks in ["4", "64"] {
        let sandbox = Sandbox::new();
        let script = "echo ready; [ $RANK = 2 ] && exit 3; exec sleep 1000";
        let outcome = sandbox.run(&["-n", ranks, "sh", "-c", script]);
        assert_eq!(outcome.code, 3);
        let report = outcome.report();
        assert!(report.contains("culprit   rank 2 (") && report.contains("exited with code 3"), "{report}");
        assert!(report.contains("victims   0-1,3"), "{report}");
        assert!(report.contains("last log  rank 2 | ready"), "{report}");
        // They obeyed: none had to be killed.
        assert_eq!((sandbox.ending(0), sandbox.ending(3)), (-15, -15));
        assert_eq!(fs::read_to_string(sandbox.run_dir().join("report.txt")).unwrap(), report);
        assert_eq!(fs::read_to_string(sandbox.run_dir().join("rank-0002.log")).unwrap(), "ready\n");
    }
}

#[test]
fn a_file_that_cannot_be_executed_is_named_with_the_reason() {
    let cases =
        [("#!/no/such/interpreter\n", "No such file or directory"), ("echo a shell\n", "Exec format error")];
    for (text, reason) in cases {
        let sandbox = Sandbox::new();
        sandbox.file("program", text);
        let path = sandbox.path().join("program");
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        let outcome = sandbox.run(&["-n", "2", "./program"]);
        assert_eq!((outcome.code, outcome.out.as_str()), (1, ""), "{outcome:?}");
        assert!(outcome.report().contains(&format!("could not be started: {reason}")), "{outcome:?}");
    }
}

#[test]
fn a_signal_is_named() {
    for (signal, code) in [("KILL", 137), ("SEGV", 139), ("ABRT", 134)] {
        let sandbox = Sandbox::new();
        let script = format!("[ $RANK = 1 ] && kill -{signal} $$; exec sleep 1000");
        let outcome = sandbox.run(&["-n", "4", "sh", "-c", &script]);
        assert_eq!(outcome.code, code);
        let report = outcome.report();
        assert!(
            report.contains("culprit   rank 1 (") && report.contains(&format!("was killed by SIG{signal}"))
        );
    }
}

#[test]
fn a_rank_that_ignores_sigterm_is_killed() {
    let sandbox = Sandbox::new();
    let script = "trap '' TERM; echo ready; [ $RANK = 0 ] && read line && exit 5; while :; do sleep 1; done";
    let outcome = sandbox.run_with_input(&["-n", "4", "sh", "-c", script], "go\n");
    assert_eq!(outcome.code, 5);
    assert_eq!([1, 2, 3].map(|rank| sandbox.ending(rank)), [-9, -9, -9]);
    assert!(outcome.report().contains("culprit   rank 0 ("));
}

#[test]
fn a_stopped_rank_is_ended_with_the_others() {
    let sandbox = Sandbox::new();
    let script = "[ $RANK = 0 ] && read line && exit 4; kill -STOP $$; exec sleep 1000";
    let mut job = sandbox.start(&["-n", "2", "sh", "-c", "echo ready; exec sleep 1000"]);
    job.wait_for_lines("ready", 2);
    job.signal(rustix::process::Signal::TERM);
    assert_eq!(job.wait().code, 143);
    let sandbox = Sandbox::new();
    let outcome = sandbox.run_with_input(&["-n", "4", "sh", "-c", script], "go\n");
    assert_eq!(outcome.code, 4);
    // Woken and asked, they went; a stopped process does not handle a signal.
    assert_eq!([1, 2, 3].map(|rank| sandbox.ending(rank)), [-15, -15, -15]);
}

#[test]
fn grandchildren_do_not_hold_up_the_end_nor_survive_it() {
    for start in ["sleep 1000 &", "setsid sleep 1000 &", "(setsid sh -c 'sleep 1000' &) &"] {
        let sandbox = Sandbox::new();
        let outcome = sandbox.run(&["-n", "2", "sh", "-c", &format!("{start} echo started")]);
        assert_eq!(outcome.code, 0, "{start}");
        assert_eq!(outcome.by_rank(), ["0| started", "1| started"], "{start}");
        sandbox.expect_nothing_left();
    }
}

#[test]
fn grandchildren_of_a_failed_job_are_ended() {
    let sandbox = Sandbox::new();
    let script = "setsid sh -c 'trap \"\" TERM; sleep 1000' & [ $RANK = 1 ] && exit 7; wait";
    assert_eq!(sandbox.run(&["-n", "4", "sh", "-c", script]).code, 7);
}

#[test]
fn a_reader_that_leaves_ends_the_job() {
    let sandbox = Sandbox::new();
    let mut job = sandbox.start(&["-n", "2", "yes"]);
    job.wait_for_lines("y", 2);
    let outcome = job.close_output();
    assert_eq!(outcome.code, 141, "{outcome:?}");
}

#[test]
fn only_the_ranks_asked_for_are_shown_and_all_are_logged() {
    let sandbox = Sandbox::new();
    let outcome =
        sandbox.run(&["-n", "4", "--only-ranks", "1,3", "--log-dir", "logs", "sh", "-c", "echo $RANK"]);
    assert_eq!(outcome.by_rank(), ["1| 1", "3| 3"]);
    let log =
        |rank: u32| fs::read_to_string(sandbox.path().join(format!("logs/rank-{rank:04}.log"))).unwrap();
    assert_eq!((0..4).map(log).collect::<String>(), "0\n1\n2\n3\n");
}

#[test]
fn a_full_disk_behind_the_output_is_a_line_and_an_exit_code() {
    let sandbox = Sandbox::new();
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    // One program is short, and one is so long that it ends only because of the full disk.
    for program in ["echo words", "echo words; exec sleep 1000"] {
        let mut command = sandbox.command(&["-n", "2", "--log-dir", "logs", "sh", "-c", program]);
        let ended = command.stdout(full()).output().unwrap();
        let err = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(1), "{err}");
        let line = "tpurun: error: cannot write to standard output: No space left on device";
        assert!(err.lines().any(|said| said.starts_with(line) && said.ends_with("are in logs)")), "{err}");
    }
    let mut command = sandbox.command(&["-n", "2", "--log-dir", "logs", "sh", "-c", "echo words >&2"]);
    let ended = command.stderr(full()).output().unwrap();
    let out = String::from_utf8(ended.stdout).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{out}");
    assert!(out.contains("tpurun: error: cannot write to standard error: No space left"), "{out}");
}

/// Stands for a full disk, or for a log that is not the launcher's to write.
#[test]
fn logs_that_cannot_be_written_are_a_line_and_an_exit_code() {
    let sandbox = Sandbox::new();
    for (run, lost, code) in [
        ("log", "mkdir run-log/rank-0000.log && echo words", 1),
        ("fails", "mkdir run-fails/rank-0000.log && echo words && exit 3", 3),
    ] {
        let ended = sandbox.run(&["-n", "1", "--log-dir", &format!("run-{run}"), "sh", "-c", lost]);
        assert_eq!(ended.code, code, "{}", ended.err);
        let line = format!("tpurun: error: the logs in run-{run} are incomplete: ");
        assert!(ended.err.lines().any(|said| said.starts_with(&line)), "{}", ended.err);
    }
}
