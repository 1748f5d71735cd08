//! Plans for one communicator: its ranks on the torus, the host they share, and what the user forced.

use tpurun_topology::{Algorithm, Collective, Machine, Placement, Request, Schedule, SharedMemory, plan};

use crate::config::Config;
use crate::failure::{Failure, FailureKind, invalid_usage};
use crate::op::{Op, OpKind};
use crate::segment::Membership;

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
    pub(crate) fn new(members: &Membership, config: &Config) -> Result<Self, Failure> {
        let placement = match &config.topology {
            None => Placement::ring(members.size()),
            Some(topology) => Placement::new(topology.torus(), &members.world_ranks)
                .map_err(|error| invalid_usage!("placing {} on TPURUN_TOPOLOGY: {error}", members.name))?,
        };
        // Measured orders of magnitude of one server: they choose between algorithms, nothing else.
        let shared = SharedMemory { cores: config.cpus, wake_s: 3e-6, memory_bytes_per_s: 15e9 };
        let machine = Machine { alpha_s: 5e-6, link_bytes_per_s: 5e9, shared: Some(shared) };
        Ok(Self { placement, machine, rank: members.rank, forced: config.algorithm })
    }

    /// The schedule for a size class of `bytes`.
    pub(crate) fn plan(&self, collective: Collective, bytes: usize, op: &Op) -> Result<Schedule, Failure> {
        let request = Request {
            collective,
            bytes: bytes as u64,
            placement: &self.placement,
            rank: self.rank,
            machine: &self.machine,
            forced: if flat_only(op) { Some(Algorithm::Flat) } else { self.forced },
        };
        plan(&request)
            .map_err(|error| Failure::new(FailureKind::InvalidUsage, format!("{}: {error}", op.kind)))
    }
}

/// Collectives that only the flat algorithm has: rooted ones but broadcast, and sizes that differ by pair.
fn flat_only(op: &Op) -> bool {
    match op.kind {
        OpKind::Reduce | OpKind::Gather | OpKind::Scatter => true,
        OpKind::AllToAll => {
            let sizes = op.inputs.chunk_sizes();
            let first = sizes.first();
            sizes.iter().chain(&op.outputs.chunk_sizes()).any(|size| Some(size) != first)
        }
        _ => false,
    }
}
