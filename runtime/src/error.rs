//! Why device memory could not be had.

use tpurun_memory::{Failure, FailureKind};

use crate::shortage::Shortage;
use crate::units::Bytes;

/// A refused request. Its text is one line.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// There is not enough of it.
    #[error("{}", .shortage.text(*.device))]
    OutOfMemory {
        /// Its number.
        device: u32,
        /// The report of who holds what.
        shortage: Box<Shortage>,
    },
    /// This process is the fork of one that had used the device.
    #[error(
        "device tpu was used before this process was forked: use the start method spawn or forkserver, or \
         fork before the first use"
    )]
    Forked,
    /// The process has opened its memory with another limit.
    #[error("expected --hbm {}, with which this process has opened device tpu, given {}", Bytes(*.opened), Bytes(*.given))]
    OtherLimit {
        /// In bytes.
        opened: u64,
        /// In bytes.
        given: u64,
    },
    /// Nobody has opened it.
    #[error("expected the memory of device tpu to be open before the first allocation, it is not")]
    NotOpen,
    /// The host refuses the arena, or a bug of ours.
    #[error(transparent)]
    Failed(#[from] Failure),
}

impl MemoryError {
    /// As in `tpurun.h` and `runtime.h`.
    pub(crate) fn status(&self) -> i32 {
        match self {
            Self::OutOfMemory { .. } => 9,
            Self::Forked => 10,
            Self::OtherLimit { .. } | Self::NotOpen => FailureKind::InvalidUsage as i32,
            Self::Failed(failure) => failure.kind() as i32,
        }
    }
}
