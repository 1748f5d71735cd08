//! The failure of a process that can not set up its end of the network.

use std::fmt;

use tpurun_memory::failure::{Failure, FailureKind};

pub(super) fn refused(what: &str, error: &dyn fmt::Display) -> Failure {
    Failure::new(FailureKind::Transport, format!("cannot {what} for other hosts: {error}"))
}
