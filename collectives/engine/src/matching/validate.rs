//! Checks of an operation that need no word from any other rank.

use tpurun_kernels::dtype::supported;
use tpurun_memory::failure::Failure;
use tpurun_memory::invalid_usage;
use tpurun_protocol::membership::Membership;
use tpurun_protocol::op::{Op, OpKind};

/// Refuses an operation that cannot work whatever the others do.
pub(crate) fn validate(op: &Op, members: &Membership) -> Result<(), Failure> {
    let (kind, ranks, me) = (op.kind, members.size() as usize, members.rank as usize);
    expect_peer(op, ranks)?;
    if kind.reduces() {
        supported(op.dtype, op.reduce_op).map_err(|error| invalid_usage!("{kind}: {error}"))?;
    }
    let (inputs, outputs) = chunks(op, ranks, me);
    expect_chunks(kind, "input", inputs, op.inputs.chunks())?;
    expect_chunks(kind, "output", outputs, op.outputs.chunks())?;
    expect_whole_elements(op)?;
    match own_chunks(op, me) {
        Some((input, output)) => expect_room(op, input, output),
        None => Ok(()),
    }
}

/// The root, the destination or the source is a rank of the communicator; only a source may be any.
fn expect_peer(op: &Op, ranks: usize) -> Result<(), Failure> {
    let kind = op.kind;
    let what = match kind {
        OpKind::Send => "destination",
        OpKind::Recv if op.root.is_some() => "source",
        _ if kind.is_rooted() => "root",
        _ => return Ok(()),
    };
    match op.root {
        Some(root) if (root as usize) < ranks => Ok(()),
        given => {
            let given = given.map_or(-1, i64::from);
            Err(invalid_usage!("invalid {what} rank {given} in {kind}: expected 0 to {}", ranks - 1))
        }
    }
}

/// How many chunks a rank has as input and as output.
fn chunks(op: &Op, ranks: usize, me: usize) -> (usize, usize) {
    let at_root = |chunks: usize| if is_root(op, me) { chunks } else { 0 };
    match op.kind {
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
    }
}

/// A chunk of the input and the one of the output that takes what it becomes, where a rank has both.
fn own_chunks(op: &Op, me: usize) -> Option<(usize, usize)> {
    match op.kind {
        OpKind::AllReduce => Some((0, 0)),
        OpKind::Reduce if is_root(op, me) => Some((0, 0)),
        OpKind::AllGather => Some((0, me)),
        OpKind::Gather if is_root(op, me) => Some((0, me)),
        OpKind::ReduceScatter => Some((me, 0)),
        OpKind::Scatter if is_root(op, me) => Some((me, 0)),
        OpKind::AllToAll => Some((me, me)),
        _ => None,
    }
}

fn is_root(op: &Op, me: usize) -> bool {
    op.root.is_some_and(|root| root as usize == me)
}

fn expect_whole_elements(op: &Op) -> Result<(), Failure> {
    let (kind, dtype) = (op.kind, op.dtype);
    for (side, spans) in [("input", &op.inputs), ("output", &op.outputs)] {
        if let Some(bytes) = spans.piece_bytes().find(|bytes| !bytes.is_multiple_of(dtype.size())) {
            return Err(invalid_usage!(
                "{kind}: an {side} of {bytes} bytes holds no whole number of {dtype}"
            ));
        }
    }
    Ok(())
}

/// A chunk of the output has room for as many elements as one of the input.
fn expect_room(op: &Op, input: usize, output: usize) -> Result<(), Failure> {
    let (kind, size) = (op.kind, op.dtype.size());
    let (given, expected) = (op.outputs.chunk_bytes(output) / size, op.inputs.chunk_bytes(input) / size);
    if given == expected {
        return Ok(());
    }
    Err(invalid_usage!(
        "{kind}: expected room for this rank's {expected} elements in its output, given {given}"
    ))
}

fn expect_chunks(kind: OpKind, side: &str, expected: usize, given: usize) -> Result<(), Failure> {
    if expected == given {
        return Ok(());
    }
    Err(invalid_usage!("{kind}: expected {expected} {side}s on this rank, given {given}"))
}
