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

    /// Elements that this rank has part in, the figure a message shows.
    #[inline]
    pub fn count(&self) -> u64 {
        (self.inputs.total().max(self.outputs.total()) / self.dtype.size()) as u64
    }
}
