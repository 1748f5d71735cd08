//! The rings of a communicator's bell, as the network thread hears them.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use tpurun_protocol::segment::Segment;
use tpurun_protocol::segment::bell::Ears;

/// The rings of a bell, as they come.
#[derive(Debug)]
pub(crate) struct BellRings {
    ears: Ears,
    segment: Arc<Segment>,
}

impl BellRings {
    pub(crate) fn new(ears: Ears, segment: Arc<Segment>) -> Self {
        Self { ears, segment }
    }

    /// Takes in a ring. A look after this call sees everything that the ring was for.
    pub(crate) fn clear(&self) {
        self.ears.clear(self.segment.rung());
    }
}

/// The descriptor can be read when a ring comes.
impl AsFd for BellRings {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ears.as_fd()
    }
}
