//! Checks of an operation that need no word from any other rank.

use tpurun_kernels::dtype::supported;
use tpurun_memory::failure::Failure;
use tpurun_memory::invalid_usage;
use tpurun_protocol::membership::Membership;
use tpurun_protocol::op::{Op, OpKind};

/// Refuses an operation that cannot work whatever the others do.
pub(crate) fn validate(op: &Op, members: &Membership) -> Result<(), Failure> {
    let ranks = members.size() as usize;
    let me = members.rank as usize;
    let kind = op.kind;
    if kind.is_rooted() || matches!(kind, OpKind::Send) {
        let what = if kind == OpKind::Send { "destination" } else { "root" };
        match op.root {
            Some(root) if (root as usize) < ranks => {}
            Some(root) => {
                return Err(invalid_usage!(
                    "invalid {what} rank {root} in {kind}: expected 0 to {}",
                    ranks - 1
                ));
            }
            None => {
                return Err(invalid_usage!("invalid {what} rank -1 in {kind}: expected 0 to {}", ranks - 1));
            }
        }
    }
    if let (OpKind::Recv, Some(source)) = (kind, op.root)
        && source as usize >= ranks
    {
        return Err(invalid_usage!("invalid source rank {source} in {kind}: expected 0 to {}", ranks - 1));
    }
    if kind.reduces() {
        supported(op.dtype, op.reduce_op).map_err(|error| invalid_usage!("{kind}: {error}"))?;
    }
    let root = op.root.map(|root| root as usize);
    let is_root = root == Some(me);
    let at_root = |chunks: usize| if is_root { chunks } else { 0 };
    let (inputs, outputs) = match kind {
        OpKind::AllReduce => (1, 1),
        OpKind::Reduce => (1, at_root(1)),
        OpKind::AllGather => (1, ranks),
        OpKind::Gather => (1, at_root(ranks)),
        OpKind::ReduceScatter => (ranks, 1),
        OpKind::Scatter => (at_root(ranks), 1),
        OpKind::AllToAll => (ranks, ranks),
        OpKind::Broadcast => (at_root(1), 1 - at_root(1)),
        OpKind::Barrier => (0, 0),
        OpKind::Send => (1, 0),
        OpKind::Recv => (0, 1),
    };
    expect_chunks(kind, "input", inputs, op.inputs.chunks())?;
    expect_chunks(kind, "output", outputs, op.outputs.chunks())?;
    let size = op.dtype.size();
    for (side, spans) in [("input", &op.inputs), ("output", &op.outputs)] {
        for bytes in spans.piece_bytes() {
            if !bytes.is_multiple_of(size) {
                return Err(invalid_usage!(
                    "{kind}: an {side} of {bytes} bytes holds no whole number of {}",
                    op.dtype
                ));
            }
        }
    }
    let pair = match kind {
        OpKind::AllReduce => Some((0, 0)),
        OpKind::Reduce if is_root => Some((0, 0)),
        OpKind::AllGather => Some((0, me)),
        OpKind::Gather if is_root => Some((0, me)),
        OpKind::ReduceScatter => Some((me, 0)),
        OpKind::Scatter if is_root => Some((me, 0)),
        OpKind::AllToAll => Some((me, me)),
        _ => None,
    };
    if let Some((input, output)) = pair {
        let (given, expected) = (op.outputs.chunk_bytes(output) / size, op.inputs.chunk_bytes(input) / size);
        if given != expected {
            return Err(invalid_usage!(
                "{kind}: expected room for this rank's {expected} elements in its output, given {given}"
            ));
        }
    }
    Ok(())
}

fn expect_chunks(kind: OpKind, side: &str, expected: usize, given: usize) -> Result<(), Failure> {
    if expected == given {
        return Ok(());
    }
    Err(invalid_usage!("{kind}: expected {expected} {side}s on this rank, given {given}"))
}
