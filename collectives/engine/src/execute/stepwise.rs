//! Executes schedules of sends and receives over the byte rings of a segment, on the thread that calls.

use std::sync::Arc;

use tpurun_topology::Schedule;

use crate::execute::execution::{Buffers, Execution, ExecutionError, Operation};
use crate::execute::lookout::Lookout;
use crate::execute::transport::shm::ShmTransport;
use crate::execute::transport::{DriveError, Round, drive};
use tpurun_memory::failure::{Failure, FailureKind};
use tpurun_memory::traffic::Traffic;
use tpurun_protocol::op::Op;
use tpurun_protocol::segment::Segment;

/// Runs one operation whose keys have matched, and says what it has moved.
pub(crate) fn run(
    segment: &Segment,
    op: &Op,
    schedule: &Arc<Schedule>,
    seq: u64,
    mut lookout: Lookout<'_>,
) -> Result<Traffic, Failure> {
    let buffers = Buffers { input: op.inputs.clone(), output: op.outputs.clone() };
    let mut transport = ShmTransport::new(segment, schedule.channels.len());
    let operation = Operation { epoch: segment.members().epoch, seq };
    let segment_bytes = ShmTransport::segment_bytes(segment);
    let execution = Execution::new(schedule, op.reduction(segment.size()), buffers, operation, segment_bytes);
    let mut execution = execution.map_err(|error| broken(segment, op, &error))?;
    loop {
        let seen = lookout.rings();
        let round = drive(&mut execution, &mut transport);
        if let Some((rank, what)) = transport.corrupt() {
            return Err(segment.failure_word().corrupt(rank, &what));
        }
        let round = round.map_err(|error| match error {
            DriveError::Lost { rank } => segment.failure_word().corrupt(rank, "a ring that can not be used"),
            DriveError::Execution(error) => broken(segment, op, &error),
        })?;
        if execution.is_done() {
            return Ok(execution.traffic());
        }
        match round {
            Round::Moved => lookout.moved(),
            _ => lookout.wait(seen, || execution.waits_for())?,
        }
    }
}

fn broken(segment: &Segment, op: &Op, error: &ExecutionError) -> Failure {
    let text = format!("{} of {}: {error}", op.kind, segment.members().title());
    segment.failure_word().fail(FailureKind::Internal, &text)
}
