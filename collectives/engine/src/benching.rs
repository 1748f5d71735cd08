//! Parts of the engine that `benches/` times alone, and what tests count. Nobody else should use them.

use tpurun_kernels::dtype::{Dtype, ReduceOp};
use tpurun_memory::buffer::Spans;
use tpurun_memory::process;
use tpurun_memory::region::Region;
use tpurun_protocol::config::Matching;
use tpurun_protocol::match_key::SLOT_BYTES;
use tpurun_protocol::match_key::{self, Planned, Slot};
use tpurun_protocol::op::{Op, OpKind, Shape};

/// How often this process has looked whether another one is still there: each is a read of a file in /proc.
pub fn looks() -> u64 {
    process::looks()
}

/// The slots of a group whose ranks all post the same all-reduce.
#[derive(Debug)]
pub struct Keys {
    region: Region,
    op: Op,
    ranks: usize,
}

impl Keys {
    /// Written for all ranks.
    ///
    /// # Panics
    /// When the host has no shared memory.
    pub fn new(ranks: usize) -> Self {
        let (region, _) = Region::create("tpurun-keys", ranks * SLOT_BYTES).expect("the host has memory");
        let op = Op {
            kind: OpKind::AllReduce,
            dtype: Dtype::F32,
            reduce_op: ReduceOp::Sum,
            scale: 1.0,
            root: None,
            tag: 0,
            inputs: Spans::empty(),
            outputs: Spans::empty(),
            shape: Shape::new(&[1024, 32]),
            shape_hash: Some(7),
            timeout: None,
            site: "train.py:28".into(),
            python_threads: 1,
        };
        let keys = Self { region, op, ranks };
        (0..ranks).for_each(|rank| keys.write(rank));
        keys
    }

    /// Writes the slot of a rank, as the rank does when it posts.
    pub fn write(&self, rank: usize) {
        let planned = Planned {
            seq: 1,
            epoch: 0,
            rounds: 1,
            mapped: None,
            strategy: None,
            print: 0,
            behind: 0,
            matching: Matching::Normal,
        };
        self.slot(rank).write(&self.op, &planned);
    }

    /// Compares the slots, as the last rank to arrive does.
    pub fn agree(&self) -> bool {
        let slots: Vec<Slot<'_>> = (0..self.ranks).map(|rank| self.slot(rank)).collect();
        match_key::compare(&slots, Matching::Normal).is_ok()
    }

    fn slot(&self, rank: usize) -> Slot<'_> {
        Slot::new(&self.region, rank * SLOT_BYTES)
    }
}
