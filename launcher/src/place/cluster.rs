//! The nodes of a job, as whoever has started this process has placed them.

use std::path::PathBuf;

use crate::place::hosts::shares;

/// A variable of the environment; what is empty is not there.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The nodes of a job as a scheduler has placed them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cluster {
    /// For people.
    pub(crate) scheduler: &'static str,
    /// The variable that says so; none where tpurun itself has.
    pub(crate) variable: Option<&'static str>,
    pub(crate) nodes: u32,
    pub(crate) node: u32,
    /// `host:port` of node 0.
    pub(crate) rendezvous: String,
    /// Tasks that the scheduler has started on this node, each with a tpurun of its own.
    pub(crate) tasks: u32,
    /// Which of these this one is; the first one runs the ranks of all.
    pub(crate) task: u32,
    /// How many ranks this node has, where that is said.
    pub(crate) ranks: Option<u32>,
    /// The name that tells the job from all others of the scheduler.
    pub(crate) job: String,
    /// Where nodes find the token when nobody gives it: a file system that they share.
    pub(crate) token_file: Option<PathBuf>,
    /// Whether what all nodes write is shown in one place.
    pub(crate) is_one_terminal: bool,
}

impl Cluster {
    /// How many of the ranks of all nodes are on this one. The sum may be another: each node knows its own alone.
    pub(crate) fn own_ranks(&self, all: u32) -> u32 {
        let tasks =
            if self.scheduler == GKE { shares(all, self.nodes).nth(self.node as usize) } else { None };
        self.ranks.or(tasks).unwrap_or(self.tasks).max(1)
    }
}

/// The variables of this process.
pub(crate) fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

pub(crate) const GKE: &str = "GKE";
