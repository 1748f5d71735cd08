//! Signals by which a person or a scheduler asks something of a running job.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::sandbox::Sandbox;

const GRACEFUL: &str = "trap 'echo saved; exit 0' INT; echo ready; while :; do sleep 0.05 & wait; done";
const STUBBORN: &str = "trap '' TERM INT; echo ready; while :; do sleep 1; done";

#[test]
fn ctrl_c_lets_ranks_end_by_themselves() {
    let sandbox = Sandbox::new();
    let mut job = sandbox.start(&["-n", "4", "sh", "-c", GRACEFUL]);
    job.wait_for_lines("ready", 4);
    job.signal(Signal::INT);
    let outcome = job.wait();
    assert_eq!(outcome.code, 130);
    assert_eq!(outcome.by_rank().iter().filter(|line| line.contains("saved")).count(), 4, "{outcome:?}");
    assert!(
        outcome.err.contains("interrupted: stopping 4 ranks; Ctrl-C again ends them at once"),
        "{outcome:?}"
    );
    assert!(!outcome.err.contains("FAILED"), "{outcome:?}");
    assert_eq!([0, 1, 2, 3].map(|rank| sandbox.ending(rank)), [0; 4]);
}

#[test]
fn a_second_ctrl_c_ends_them_at_once() {
    let sandbox = Sandbox::new();
    let mut job = sandbox.start(&["-n", "4", "--shutdown-timeout", "1h", "sh", "-c", STUBBORN]);
    job.wait_for_lines("ready", 4);
    job.signal(Signal::INT);
    job.wait_for_note("stopping 4 ranks");
    job.signal(Signal::INT);
    let outcome = job.wait();
    assert_eq!(outcome.code, 130);
    assert!(outcome.err.contains("4 ranks killed"), "{outcome:?}");
}

#[test]
fn patience_after_sigterm_ends() {
    let sandbox = Sandbox::new();
    let mut job = sandbox.start(&["-n", "2", "--shutdown-timeout", "300ms", "sh", "-c", STUBBORN]);
    job.wait_for_lines("ready", 2);
    let asked = Instant::now();
    job.signal(Signal::TERM);
    assert_eq!(job.wait().code, 143);
    assert!(asked.elapsed() >= Duration::from_millis(300));
    assert_eq!([0, 1].map(|rank| sandbox.ending(rank)), [-9, -9]);
}

#[test]
fn other_signals_reach_the_ranks() {
    let sandbox = Sandbox::new();
    let script = "trap 'echo got usr1; exit 0' USR1; echo ready; while :; do sleep 0.05 & wait; done";
    let mut job = sandbox.start(&["-n", "3", "sh", "-c", script]);
    job.wait_for_lines("ready", 3);
    job.signal(Signal::USR1);
    let outcome = job.wait();
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert_eq!(outcome.by_rank().iter().filter(|line| line.contains("got usr1")).count(), 3, "{outcome:?}");
}
