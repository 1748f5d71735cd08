//! Executes schedules of sends and receives over the byte rings of a segment, on the thread that calls.

use std::sync::Arc;
use std::time::Instant;

use tpurun_topology::Schedule;

use crate::execution::{Buffers, Execution, ExecutionError, Operation};
use crate::failure::{Failure, FailureKind};
use crate::op::Op;
use crate::process::LOOK_PERIOD;
use crate::segment::{Segment, Verdict};
use crate::traffic::Traffic;
use crate::transport::shm::ShmTransport;
use crate::transport::{DriveError, Round, drive};

/// Says from the ranks that are needed next why an operation can not complete.
pub(crate) type Hopeless<'a> = &'a dyn Fn(&[u32]) -> Option<Verdict>;

/// Runs one operation whose keys have matched, and says what it has moved. `hopeless` tells from the ranks that the next steps need
/// whether they can still be done.
pub(crate) fn run(
    segment: &Segment,
    op: &Op,
    schedule: &Arc<Schedule>,
    seq: u64,
    deadline: Instant,
    hopeless: Hopeless<'_>,
) -> Result<Traffic, Failure> {
    let buffers = Buffers { input: op.inputs.clone(), output: op.outputs.clone() };
    let mut transport = ShmTransport::new(segment, schedule.channels.len());
    let operation = Operation { epoch: segment.members().epoch, seq };
    let segment_bytes = ShmTransport::segment_bytes(segment);
    let execution = Execution::new(schedule, op.reduction(segment.size()), buffers, operation, segment_bytes);
    let mut execution = execution.map_err(|error| broken(segment, op, &error))?;
    let doorbell = segment.doorbell(segment.rank());
    let mut look = Instant::now() + LOOK_PERIOD;
    let mut verdict: Option<Verdict> = None;
    let mut departures = 0;
    loop {
        let seen = doorbell.rings();
        let round = drive(&mut execution, &mut transport);
        if let Some((rank, what)) = transport.corrupt() {
            return Err(segment.corrupt(rank, &what));
        }
        let round = round.map_err(|error| match error {
            DriveError::Lost { rank } => segment.corrupt(rank, "a ring that can not be used"),
            DriveError::Execution(error) => broken(segment, op, &error),
        })?;
        if execution.is_done() {
            return Ok(execution.traffic());
        }
        if let Some(failure) = segment.failure() {
            return Err(failure);
        }
        if round == Round::Moved {
            // What moved may be what the gone ones had sent: look at them again.
            (verdict, departures) = (None, 0);
            continue;
        }
        // A rank that died had sent what it could before it was seen dead: only a round after that counts.
        if let Some(verdict) = verdict.take() {
            return Err(segment.fail_by(&verdict));
        }
        let now_left = segment.departures();
        if now_left == departures {
            doorbell.wait(seen, Some(deadline.min(look)));
        }
        if now_left != departures || Instant::now() >= deadline.min(look) {
            departures = now_left;
            look = Instant::now() + LOOK_PERIOD;
            verdict = hopeless(&execution.waits_for());
        }
    }
}

fn broken(segment: &Segment, op: &Op, error: &ExecutionError) -> Failure {
    let text = format!("{} of {}: {error}", op.kind, segment.members().name);
    segment.fail(FailureKind::Internal, &text)
}
