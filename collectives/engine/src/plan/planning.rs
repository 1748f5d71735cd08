//! Plans for one communicator: its ranks on the torus, the host they share, and what the user forced.

use std::hash::{DefaultHasher, Hash, Hasher};

use tpurun_topology::{Algorithm, Collective, Machine, Placement, Request, Schedule, SharedMemory, plan};

use tpurun_memory::failure::{Failure, FailureKind};
use tpurun_memory::invalid_usage;
use tpurun_protocol::config::Config;
use tpurun_protocol::membership::Membership;
use tpurun_protocol::op::{Op, OpKind};
use tpurun_protocol::tuning::Tuning;

/// Makes this rank's schedules.
#[derive(Debug)]
pub(crate) struct Planner {
    placement: Placement,
    machine: Machine,
    rank: u32,
    forced: Option<Algorithm>,
}

impl Planner {
    /// # Errors
    /// When the ranks do not fit the topology.
    pub(crate) fn new(
        members: &Membership,
        config: &Config,
        cpus: u32,
        tuning: &Tuning,
    ) -> Result<Self, Failure> {
        let placement = match &config.topology {
            None => Placement::ring(members.size()),
            Some(topology) => Placement::new(topology.torus(), &members.world_ranks)
                .map_err(|error| invalid_usage!("placing {} on TPURUN_TOPOLOGY: {error}", members.title()))?,
        };
        let shared = SharedMemory {
            cores: cpus,
            wake_s: tuning.wake_ns as f64 * 1e-9,
            memory_bytes_per_s: tuning.memory_bytes_per_s as f64,
        };
        let machine = Machine {
            alpha_s: tuning.message_ns as f64 * 1e-9,
            link_bytes_per_s: tuning.link_bytes_per_s as f64,
            shared: Some(shared),
        };
        Ok(Self { placement, machine, rank: members.rank, forced: config.algorithm })
    }

    /// The algorithm that the user wants.
    pub(crate) fn forced(&self) -> Option<Algorithm> {
        self.forced
    }

    /// Differs where ranks were given different topologies: their plans would not fit together.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        format!("{:?}", self.placement).hash(&mut hasher);
        hasher.finish()
    }

    /// The schedule for a size class of `bytes`.
    ///
    /// # Errors
    /// When the forced algorithm can not be used here.
    pub(crate) fn plan(&self, wanted: Wanted, op: OpKind) -> Result<Schedule, Failure> {
        let Wanted { collective, bytes, flat_only } = wanted;
        let request = Request {
            collective,
            bytes: bytes as u64,
            placement: &self.placement,
            rank: self.rank,
            machine: &self.machine,
            forced: if flat_only { Some(Algorithm::Flat) } else { self.forced },
        };
        plan(&request).map_err(|error| Failure::new(FailureKind::InvalidUsage, format!("{op}: {error}")))
    }
}

/// The properties by which plans differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Wanted {
    collective: Collective,
    bytes: usize,
    /// Rooted collectives but broadcast have no other algorithm.
    flat_only: bool,
}

impl Wanted {
    /// Returns what an operation needs; none that moves no tensor. Sizes are rounded up to a power of two, so
    /// that a program with many sizes has few plans.
    pub(crate) fn by(op: &Op, forced: Option<Algorithm>) -> Option<Self> {
        let collective = op.kind.schedule(op.root.unwrap_or(0))?;
        let bytes = op.inputs.total().max(op.outputs.total()).next_power_of_two();
        let flat_only = match op.kind {
            OpKind::Reduce | OpKind::Gather | OpKind::Scatter => true,
            // Its sizes differ from rank to rank, so a choice by size would, too.
            OpKind::AllToAll => forced.is_none(),
            _ => false,
        };
        Some(Self { collective, bytes, flat_only })
    }

    /// The same, by the flat algorithm.
    pub(crate) fn flat(self) -> Self {
        Self { flat_only: true, ..self }
    }
}
