//! Moving segments between ranks: one trait, several drivers.

pub mod mem;
pub(crate) mod shm;

use crate::execute::execution::{Delivery, Execution, ExecutionError};
use tpurun_protocol::wire::Header;

/// This rank's end of the links to all other ranks of one communicator.
///
/// Segments of one sender and one channel arrive in order and once; different ones are independent, and none
/// may hold up another. Every queue is bounded.
pub trait Transport {
    /// Hands over a segment for `to`, unless its queue is full.
    fn try_send(&mut self, to: u32, header: &Header, payload: &[u8]) -> Sending;

    /// Offers segments that arrived to `deliver`, with their senders, until one is taken; those left for
    /// later stay first in their queues. Returns whether one was taken.
    fn try_receive(&mut self, deliver: &mut dyn FnMut(u32, &Header, &[u8]) -> Delivery) -> bool;
}

/// The fate of a segment to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sending {
    /// It is on its way; the payload is not needed any more.
    Sent,
    /// There is no room now.
    Full,
    /// The receiver is gone.
    Lost,
}

/// The result of one round of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    /// Something moved: another round may move more.
    Moved,
    /// Nothing did: wait until the transport has room or segments.
    Idle,
}

/// Why a driver can not go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriveError {
    /// A rank that this one must send to is gone.
    #[error("rank {rank} is gone")]
    Lost {
        /// Which one.
        rank: u32,
    },
    /// A segment was not what the schedule says.
    #[error(transparent)]
    Execution(#[from] ExecutionError),
}

/// Moves what can be moved without waiting: every send that has room, then every segment that can be taken.
///
/// # Errors
/// When a receiver is gone or a segment does not belong here; the execution is of no use afterwards.
pub fn drive(execution: &mut Execution, transport: &mut dyn Transport) -> Result<Round, DriveError> {
    let mut round = Round::Idle;
    execution.retry();
    while let Some(transmit) = execution.poll_transmit() {
        let rank = transmit.to;
        match transport.try_send(rank, &transmit.header, transmit.payload) {
            Sending::Sent => {
                execution.sent();
                round = Round::Moved;
            }
            Sending::Full => execution.refused(),
            Sending::Lost => return Err(DriveError::Lost { rank }),
        }
    }
    while receive(execution, transport)? == Round::Moved {
        round = Round::Moved;
    }
    Ok(round)
}

/// Takes at most one segment.
pub(crate) fn receive(execution: &mut Execution, transport: &mut dyn Transport) -> Result<Round, DriveError> {
    let mut failure = None;
    let taken = transport.try_receive(&mut |from, header, bytes| {
        execution.handle_segment(from, header, bytes).unwrap_or_else(|error| {
            failure = Some(error);
            // Out of the way; the caller hears of it.
            Delivery::Taken
        })
    });
    match failure {
        Some(error) => Err(error.into()),
        None => Ok(if taken { Round::Moved } else { Round::Idle }),
    }
}
