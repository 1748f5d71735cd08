//! `--hosts n0,n1`: one command starts a tpurun on each of several hosts by ssh, shows what all of them write, passes
//! signals on and returns how the job has ended.
//!
//! On the command line of ssh there is nothing of the job: what to run, where and with which environment goes over its
//! standard input, and so does every signal. When that ends, so does the job on that host.

mod conductor;
mod follower;
mod order;

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

pub(crate) use conductor::conduct;
pub(crate) use follower::follow;

/// Only argument of the command that ssh runs.
pub(crate) const FOLLOW: &str = "--follow";

/// As a shell counts it.
fn exit_code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}
