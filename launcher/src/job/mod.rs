//! One job as decided from the command line: every value checked, nothing started yet.
//!
//! This room knows no command line, and starts nothing.

pub(crate) mod environment;
pub(crate) mod policy;
pub(crate) mod program;
pub(crate) mod target;
pub(crate) mod values;

use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use tpurun_protocol::network::{Bulk, Link};
use tpurun_protocol::tuning::Tuning;
use tpurun_topology::{Algorithm, Topology};

use crate::base::rank_set::RankSet;
use crate::job::policy::Policy;
use crate::job::program::Programs;
use crate::nodes::Plan;
use crate::place::cluster::Cluster;
use crate::place::hosts::JobHosts;
use crate::place::ssh_hosts::Remote;
use crate::processes::addresses;

/// The decided job: its programs, and how they run.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// The number of ranks on all hosts.
    pub(crate) ranks: u32,
    /// Those that this tpurun runs.
    pub(crate) here: Range<u32>,
    /// Where the ranks are, or are pretended to be.
    pub(crate) hosts: JobHosts,
    /// The faults that the network between them is to have for what ranks here send.
    pub(crate) link: Option<Link>,
    pub(crate) connections: Option<usize>,
    pub(crate) bulk: Option<Bulk>,
    /// How to find the other nodes, when there are any.
    pub(crate) nodes: Option<Plan>,
    /// The scheduler that has placed this tpurun.
    pub(crate) cluster: Option<Cluster>,
    /// The hosts on which this tpurun only starts others.
    pub(crate) remote: Option<Remote>,
    pub(crate) programs: Programs,
    /// None when no program is Python.
    pub(crate) python: Option<PathBuf>,
    /// The fork server is needed: for ranks to fork, or for a store that outlives every rank.
    ///
    /// If there are several programs, the one of rank 0 may hold no store, or be done long before the others.
    pub(crate) wants_server: bool,
    pub(crate) preload: Vec<String>,
    /// Whether the fork server is that of a process which stays for the next job.
    pub(crate) is_warm: bool,
    /// Whether each rank has a hash seed of its own, whatever PYTHONHASHSEED says here.
    pub(crate) has_own_hash_seeds: bool,
    /// Whether what each rank executes for itself is at random addresses; None when the number of ranks decides.
    pub(crate) aslr: Option<bool>,
    pub(crate) cores: usize,
    /// OMP_NUM_THREADS of each rank; None when the user has set it.
    pub(crate) threads: Option<usize>,
    pub(crate) master_addr: String,
    /// 0: any free one.
    pub(crate) master_port: u16,
    pub(crate) run_id: Option<String>,
    pub(crate) log_dir: Option<PathBuf>,
    /// Whether lines say which rank they are from.
    pub(crate) labels: bool,
    pub(crate) only: RankSet,
    /// The rank that reads our standard input.
    pub(crate) stdin_rank: u32,
    /// Whether tracebacks that only echo another rank's failure are shown in full.
    pub(crate) shows_victims: bool,
    pub(crate) topology: Option<Topology>,
    pub(crate) algorithm: Option<Algorithm>,
    /// The numbers by which collectives are planned; None when each rank reads its own variable.
    pub(crate) tuning: Option<Tuning>,
    /// Whether ranks compare results that must be equal.
    pub(crate) verify_results: bool,
    /// Whether each rank has device tpu; None when its program decides.
    pub(crate) device: Option<bool>,
    /// Whether groups of Gloo are those of this backend.
    pub(crate) serves_gloo: bool,
    /// Bytes of device memory of each rank.
    pub(crate) hbm: Option<u64>,
    pub(crate) timeout: Option<Duration>,
    /// The policy for ranks that fail.
    pub(crate) policy: Policy,
    /// Between SIGTERM and SIGKILL after a failure.
    pub(crate) failure_grace: Duration,
    /// Between SIGINT or SIGTERM and SIGKILL when somebody asked the job to stop.
    pub(crate) stop_grace: Duration,
    pub(crate) dry_run: bool,
    /// Whether to show where the time until the first collective goes.
    pub(crate) timings: bool,
}

impl Job {
    /// Checks what can be checked only when it is known how many ranks the other nodes have.
    pub(crate) fn check_size(&self) -> Result<(), String> {
        match &self.topology {
            Some(topology) if topology.torus().live_chips() != self.ranks => Err(format!(
                "--topology {topology}: expected {} {}, one rank per chip, given {}",
                if self.nodes.is_some() { "in all" } else { "-n" },
                topology.torus().live_chips(),
                self.ranks
            )),
            _ => Ok(()),
        }
    }

    /// The job of which the ranks `here` are on this node.
    pub(crate) fn spread(&mut self, hosts: JobHosts, here: Range<u32>) -> Result<(), String> {
        let ranks = hosts.iter().map(|host| host.ranks.end).max().unwrap_or(self.ranks);
        (self.ranks, self.here, self.hosts) = (ranks, here, hosts);
        self.programs.resize(ranks);
        if self.programs.ranks() != ranks {
            let wanted = self.programs.ranks();
            return Err(format!(
                "-n: expected {ranks}, the ranks of all nodes together, given {wanted} in all programs"
            ));
        }
        self.check_size()
    }

    /// Another number of ranks, which share the cores anew.
    pub(crate) fn resize(&mut self, ranks: u32) {
        (self.ranks, self.here) = (ranks, 0..ranks);
        self.programs.resize(ranks);
        self.threads = self.threads.map(|_| threads_per_rank(self.cores, ranks));
    }

    /// Whether what each rank executes for itself is at the same addresses in all of them.
    pub(crate) fn has_same_addresses(&self) -> bool {
        let is_crowded = self.here.len() >= addresses::MANY as usize * self.cores;
        !self.aslr.unwrap_or(!is_crowded)
    }

    /// Where a rank sits on the torus, as `0,1,0`.
    pub(crate) fn coordinates(&self, rank: u32) -> Option<String> {
        let torus = self.topology.as_ref()?.torus();
        let at = torus.coordinates(torus.chip_of_rank(rank)?);
        let shown: Vec<String> = at.iter().take(torus.dimensions().len()).map(ToString::to_string).collect();
        Some(shown.join(","))
    }
}

/// The threads of each rank, where ranks share the cores.
pub(crate) fn threads_per_rank(cores: usize, ranks: u32) -> usize {
    (cores / ranks as usize).max(1)
}
