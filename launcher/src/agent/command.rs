//! The requests of a service of the agent to the loop, because it concerns the other services, too.

use std::time::Instant;

use rustix::process::Signal;
use tpurun_protocol::board::RankView;

use crate::nodes::{DeadlockProof, JobFailure};

/// One thing to do; the loop does it in [`Agent::execute`](super::Agent::execute).
#[derive(Debug)]
pub(super) enum Instruction {
    /// To end the world for the reason that node 0 says, or that stands without it.
    Obey { told: JobFailure, may_restart: MayRestart },
    /// To judge who waits for whom, in a picture that all nodes have.
    JudgeTogether(Vec<RankView>),
    /// To look around at this time, if not before.
    LookBy(Instant),
    /// To tell the ranks here of a deadlock that stands on the other nodes.
    Deadlock(DeadlockProof),
    /// To let timeouts to come say which ranks keep others waiting.
    NoteSuspects,
    /// To begin no other world, for this reason.
    CallOff { why: String, scope: Scope },
    /// To end the job, as somebody on that node has asked for.
    StopAsAskedOn { node: u32, signal: Signal },
}

/// Whether another world may follow the one that ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MayRestart {
    Yes,
    No,
}

/// The nodes that a decision is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    ThisNode,
    AllNodes,
}
