#![allow(unsafe_code)]
//! Tensors for hostile input: kept until the operations that use them are gone.

use std::time::Duration;

use crate::op::{Op, OpKind, Shape};
use tpurun_kernels::dtype::{Dtype, ReduceOp};
use tpurun_memory::buffer::Spans;

/// Declared before what uses it, so that it is dropped after.
#[derive(Debug, Default)]
pub struct TestTensors {
    tensors: Vec<Box<[u8]>>,
}

impl TestTensors {
    /// `chunks` pieces of `bytes` bytes, one per chunk.
    pub fn spans(&mut self, chunks: usize, bytes: usize) -> Spans {
        let first = self.tensors.len();
        self.tensors.extend((0..chunks).map(|chunk| vec![chunk as u8; bytes].into_boxed_slice()));
        let pieces = self.tensors[first..].iter_mut().map(|tensor| (tensor.as_mut_ptr(), tensor.len()));
        let pieces: Vec<_> = pieces.collect();
        // SAFETY: boxes do not move when the list grows, nobody else touches them, and they are dropped after
        // all that has spans of them.
        unsafe { Spans::new(pieces, 1) }
    }
}

/// Returns spans of `bytes` bytes at an address, in chunks that are the same memory: to be counted and compared, not
/// to be read.
pub fn nowhere(at: usize, bytes: usize, chunks: usize) -> Spans {
    let data = std::ptr::without_provenance_mut(at);
    // SAFETY: a caller that promises not to touch them can not break a promise.
    unsafe { Spans::new(vec![(data, bytes / chunks); chunks], 1) }
}

/// The collectives.
pub const KINDS: [OpKind; 9] = [
    OpKind::Barrier,
    OpKind::AllReduce,
    OpKind::AllGather,
    OpKind::ReduceScatter,
    OpKind::Broadcast,
    OpKind::AllToAll,
    OpKind::Reduce,
    OpKind::Gather,
    OpKind::Scatter,
];

/// How many chunks rank 0 gives to one of them, and gets.
pub fn chunks(kind: OpKind, root: u32, ranks: usize) -> (usize, usize) {
    let is_root = usize::from(root == 0);
    match kind {
        OpKind::Barrier => (0, 0),
        OpKind::AllReduce => (1, 1),
        OpKind::AllGather => (1, ranks),
        OpKind::ReduceScatter => (ranks, 1),
        OpKind::AllToAll => (ranks, ranks),
        OpKind::Broadcast => (is_root, 1 - is_root),
        OpKind::Reduce => (1, is_root),
        OpKind::Gather => (1, is_root * ranks),
        _ => (is_root * ranks, 1),
    }
}

/// An operation over bytes.
pub fn op(kind: OpKind, dtype: Dtype, inputs: Spans, outputs: Spans) -> Op {
    let count = inputs.total().max(outputs.total()) / dtype.size();
    Op {
        kind,
        dtype,
        reduce_op: ReduceOp::Sum,
        scale: 1.0,
        root: None,
        tag: 0,
        inputs,
        outputs,
        shape: Shape::new(&[count as i64]),
        shape_hash: None,
        timeout: Some(Duration::from_millis(1)),
        site: "train.py:28".into(),
        python_threads: 0,
    }
}
