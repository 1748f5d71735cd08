//! Either process of the launcher may be killed: no rank and no grandchild survives.

use std::path::PathBuf;

use rustix::process::{Signal, kill_process};

use crate::sandbox::{Sandbox, control_groups_of};

/// Ranks that start a child in its own session, which ignores what it can.
const WITH_GRANDCHILDREN: &str = "setsid sh -c 'trap \"\" TERM HUP INT; echo ready; sleep 1000' & \
    (setsid sleep 1000 &) ; wait; sleep 1000";

#[test]
fn nothing_survives_the_front() {
    let sandbox = Sandbox::new();
    let mut job = sandbox.start(&["-n", "4", "sh", "-c", WITH_GRANDCHILDREN]);
    job.wait_for_lines("ready", 4);
    job.signal(Signal::KILL);
    assert_eq!(job.wait_without_reading(), 137);
    sandbox.expect_nothing_left();
}

#[test]
fn nothing_survives_the_agent() {
    let sandbox = Sandbox::new();
    let mut job = sandbox.start(&["-n", "4", "sh", "-c", WITH_GRANDCHILDREN]);
    job.wait_for_lines("ready", 4);
    kill_process(sandbox.agent(), Signal::KILL).unwrap();
    let outcome = job.wait();
    assert_eq!(outcome.code, 137);
    assert!(outcome.err.contains("was killed by signal 9; its ranks were ended"), "{outcome:?}");
    // The front has ended all of them before it returned.
    sandbox.expect_nothing_left();
}

#[test]
fn no_executable_survives_both() {
    let sandbox = Sandbox::new();
    let mut job =
        sandbox.start(&["-n", "4", "sh", "-c", "trap '' TERM HUP INT; echo ready; exec sleep 1000"]);
    job.wait_for_lines("ready", 4);
    let agent = sandbox.agent();
    // Else the agent ends its ranks when the front is gone.
    kill_process(agent, Signal::STOP).unwrap();
    job.signal(Signal::KILL);
    kill_process(agent, Signal::KILL).unwrap();
    let front = job.front();
    assert_eq!(job.wait_without_reading(), 137);
    sandbox.expect_nothing_left();
    // Nobody was left to remove the group of the job.
    assert_eq!(Sandbox::new().run(&["-n", "1", "true"]).code, 0);
    assert_eq!(control_groups_of(front), Vec::<PathBuf>::new());
}

#[test]
fn a_job_in_a_job_leaves_no_control_group() {
    let sandbox = Sandbox::new();
    let within =
        [env!("CARGO_BIN_EXE_tpurun"), "-n", "1", "sh", "-c", "trap '' TERM; echo ready; sleep 1000 & wait"];
    let mut job = sandbox.start(&[&["-n", "2"][..], &within[..]].concat());
    job.wait_for_lines("ready", 2);
    let front = job.front();
    // At the second one the job is killed, and so are both processes of the job within, at once.
    job.signal(Signal::TERM);
    job.wait_for_note("stopping 2 ranks");
    job.signal(Signal::TERM);
    assert_eq!(job.wait().code, 143);
    assert_eq!(control_groups_of(front), Vec::<PathBuf>::new());
}

#[test]
fn nothing_survives_the_front_while_nobody_reads_the_output() {
    let sandbox = Sandbox::new();
    let mut job = sandbox.start(&["-n", "4", "sh", "-c", "echo ready; exec yes"]);
    job.wait_for_lines("ready", 4);
    job.signal(Signal::KILL);
    assert_eq!(job.wait_without_reading(), 137);
    sandbox.expect_nothing_left();
}

#[test]
fn a_slow_reader_does_not_keep_ctrl_c_from_working() {
    let sandbox = Sandbox::new();
    let mut job = sandbox.start(&["-n", "2", "sh", "-c", "echo ready; exec yes"]);
    job.wait_for_lines("ready", 2);
    job.signal(Signal::INT);
    job.wait_for_note("stopping 2 ranks");
    // The ranks end; the text that they wrote waits for the reader until another signal says that nobody cares.
    job.signal(Signal::INT);
    job.signal(Signal::TERM);
    assert_eq!(job.wait().code, 130);
}

#[test]
fn an_agent_that_is_stopped_is_named() {
    let sandbox = Sandbox::new();
    let mut job =
        sandbox.start(&["-n", "2", "sh", "-c", "echo ready; while [ ! -e go ]; do sleep 0.01; done"]);
    job.wait_for_lines("ready", 2);
    kill_process(sandbox.agent(), Signal::STOP).unwrap();
    let pid = sandbox.agent().as_raw_nonzero();
    job.wait_for_note(&format!("tpurun: the agent (pid {pid}) is stopped: it shows nothing"));
    sandbox.file("go", "");
    kill_process(sandbox.agent(), Signal::CONT).unwrap();
    assert_eq!(job.wait().code, 0);
}
