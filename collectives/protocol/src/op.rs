//! An operation that a communicator is asked for: one collective, or one message.

use std::fmt;
use std::time::Duration;

use tpurun_topology::Collective;

use crate::site::Site;
use tpurun_kernels::dtype::{Dtype, ReduceOp};
use tpurun_kernels::reduce::Reduction;
use tpurun_memory::buffer::Spans;

/// The collectives of torch.distributed, numbered as `TpurunCollective` in the C ABI.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum OpKind {
    AllReduce = 0,
    AllGather = 1,
    ReduceScatter = 2,
    Broadcast = 3,
    AllToAll = 4,
    Reduce = 5,
    Gather = 6,
    Scatter = 7,
    Barrier = 8,
    Send = 9,
    Recv = 10,
}

impl OpKind {
    const ALL: [OpKind; 11] = [
        OpKind::AllReduce,
        OpKind::AllGather,
        OpKind::ReduceScatter,
        OpKind::Broadcast,
        OpKind::AllToAll,
        OpKind::Reduce,
        OpKind::Gather,
        OpKind::Scatter,
        OpKind::Barrier,
        OpKind::Send,
        OpKind::Recv,
    ];

    /// The kind with this number.
    #[inline]
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.get(code as usize).copied()
    }

    /// Whether elements of the ranks become one.
    #[inline]
    pub fn reduces(self) -> bool {
        matches!(self, OpKind::AllReduce | OpKind::ReduceScatter | OpKind::Reduce)
    }

    /// Whether one rank is special.
    #[inline]
    pub fn is_rooted(self) -> bool {
        matches!(self, OpKind::Broadcast | OpKind::Reduce | OpKind::Gather | OpKind::Scatter)
    }

    /// The schedule this collective is executed by; rooted ones leave out what only the root needs.
    pub fn schedule(self, root: u32) -> Option<Collective> {
        Some(match self {
            OpKind::AllReduce | OpKind::Reduce => Collective::AllReduce,
            OpKind::AllGather | OpKind::Gather => Collective::AllGather,
            OpKind::ReduceScatter => Collective::ReduceScatter,
            OpKind::Broadcast => Collective::Broadcast { root },
            OpKind::AllToAll | OpKind::Scatter => Collective::AllToAll,
            OpKind::Barrier | OpKind::Send | OpKind::Recv => return None,
        })
    }
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OpKind::AllReduce => "all_reduce",
            OpKind::AllGather => "all_gather",
            OpKind::ReduceScatter => "reduce_scatter",
            OpKind::Broadcast => "broadcast",
            OpKind::AllToAll => "all_to_all",
            OpKind::Reduce => "reduce",
            OpKind::Gather => "gather",
            OpKind::Scatter => "scatter",
            OpKind::Barrier => "barrier",
            OpKind::Send => "send",
            OpKind::Recv => "recv",
        })
    }
}

/// The bytes that a job can hope to have in caches. Measured on a guest of a processor that says it has 480
/// MiB: copies past the caches and the reads after them take two thirds of the time from 64 MiB on, and more
/// time up to 32 MiB.
const CACHES: usize = 64 << 20;

/// Dimensions of a shape that are kept for messages.
pub const MAX_DIMS: usize = 6;

/// The shape of an operation's first tensor, as far as a message shows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Shape {
    dims: [i64; MAX_DIMS],
    ndim: u32,
}

impl Shape {
    /// Keeps the first dimensions of `dims`.
    #[inline]
    pub fn new(dims: &[i64]) -> Self {
        let mut shape = Self { dims: [0; MAX_DIMS], ndim: dims.len() as u32 };
        let kept = dims.len().min(MAX_DIMS);
        shape.dims[..kept].copy_from_slice(&dims[..kept]);
        shape
    }

    /// The dimensions that were kept.
    #[inline]
    pub fn dims(&self) -> &[i64] {
        &self.dims[..(self.ndim as usize).min(MAX_DIMS)]
    }

    /// Dimensions of the tensor; more than are shown count, too.
    #[inline]
    pub fn ndim(&self) -> u32 {
        self.ndim
    }

    /// A shape as it was read from a slot.
    #[inline]
    pub fn from_parts(dims: [i64; MAX_DIMS], ndim: u32) -> Self {
        Self { dims, ndim }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = self.dims().iter().map(i64::to_string).collect();
        let more = if self.ndim as usize > MAX_DIMS { ", .." } else { "" };
        write!(f, "[{}{more}]", dims.join(", "))
    }
}

/// One operation of this rank.
#[derive(Debug)]
pub struct Op {
    /// The kind of the operation.
    pub kind: OpKind,
    /// Element type of every input and output.
    pub dtype: Dtype,
    /// How elements become one, for the collectives that reduce.
    pub reduce_op: ReduceOp,
    /// The factor of `PremulSum`.
    pub scale: f64,
    /// Root of a rooted collective, or the peer of a message; `None` receives from any rank.
    pub root: Option<u32>,
    /// Tag of a message.
    pub tag: i32,
    /// The data that this rank contributes, in chunks (see the C ABI for which collective has how many).
    pub inputs: Spans,
    /// Where this rank's result goes.
    pub outputs: Spans,
    /// Shape of the first tensor.
    pub shape: Shape,
    /// Hash of all tensors' shapes where they must be the same on every rank.
    pub shape_hash: Option<u64>,
    /// Longest time this operation may take once it is its turn; the communicator's if `None`.
    pub timeout: Option<Duration>,
    /// Where the program called.
    pub site: Site,
    /// Python threads of the process; 0 when the caller is none.
    pub python_threads: u32,
}

impl Op {
    /// How the elements of `ranks` ranks are folded.
    #[inline]
    pub fn reduction(&self, ranks: u32) -> Reduction {
        if self.kind.reduces() {
            let reduction = Reduction::new(self.dtype, self.reduce_op, self.scale, ranks);
            reduction.expect("checked when the operation was posted")
        } else {
            Reduction::none(self.dtype)
        }
    }

    /// Whether so many ranks of a host read and write more of it than caches keep until it is used again.
    pub fn outgrows_caches(&self, ranks_here: usize, is_bridged: bool) -> bool {
        // In a gather or a scatter, one rank has the whole of which all others have parts.
        let is_whole = matches!(self.kind, OpKind::Gather | OpKind::Scatter)
            && self.inputs.chunks().max(self.outputs.chunks()) > 1;
        let ranks = if is_whole { 1 } else { ranks_here };
        // Data that goes to other hosts is copied to sockets, and data that comes from there out of them.
        let copies = if is_bridged { 2 } else { 1 };
        let (inputs, outputs) = (self.inputs.total(), self.outputs.total());
        let least = CACHES / ranks / copies;
        inputs + outputs >= least
            && (inputs.max(outputs) >= least || !self.outputs.is_same_memory(&self.inputs))
    }

    /// Whether what so many ranks give to a fold does by itself: the same on each of them, whatever it makes of the
    /// result.
    #[inline]
    pub fn operands_outgrow_caches(&self, ranks: usize) -> bool {
        self.inputs.total() >= CACHES / ranks
    }

    /// Elements that this rank has part in, the figure a message shows.
    #[inline]
    pub fn count(&self) -> u64 {
        (self.inputs.total().max(self.outputs.total()) / self.dtype.size()) as u64
    }
}

#[cfg(test)]
#[cfg(not(tpurun_loom))]
mod tests {
    use super::*;
    use crate::testing::{self as memory, nowhere};

    #[test]
    fn what_all_ranks_of_a_host_use_counts() {
        let outgrows = |kind, [inputs, outputs]: [Spans; 2], ranks, is_bridged| {
            memory::op(kind, Dtype::F32, inputs, outputs).outgrows_caches(ranks, is_bridged)
        };
        let apart = |inputs, outputs, chunks| [nowhere(64, inputs, 1), nowhere(CACHES, outputs, chunks)];
        let in_place = |bytes| [nowhere(64, bytes, 1), nowhere(64, bytes, 1)];
        // Ranks share the caches, and a tensor that is its own result is there once.
        assert!(outgrows(OpKind::AllReduce, in_place(CACHES / 8), 8, false));
        assert!(!outgrows(OpKind::AllReduce, in_place(CACHES / 8), 7, false));
        assert!(outgrows(OpKind::AllReduce, apart(CACHES / 16, CACHES / 16, 1), 8, false));
        assert!(!outgrows(OpKind::AllGather, apart(CACHES / 32, CACHES / 16, 8), 8, false));
        // Sockets have a part of what goes to other hosts.
        assert!(outgrows(OpKind::AllReduce, in_place(CACHES / 16), 8, true));
        assert!(!outgrows(OpKind::AllReduce, in_place(CACHES / 16), 7, true));
        // The root alone has all.
        assert!(!outgrows(OpKind::Gather, apart(CACHES / 16, CACHES / 2, 8), 8, false));
        assert!(outgrows(OpKind::Gather, apart(CACHES / 8, CACHES, 8), 8, false));
        assert!(outgrows(OpKind::Gather, apart(CACHES / 8, 0, 1), 8, false));
        assert!(!outgrows(OpKind::Barrier, apart(0, 0, 1), 64, false));
    }
}
