//! The bell of a host: whatever the ranks of a communicator do that other hosts must know, they ring it, and the
//! network thread of the host's first rank wakes up.
//!
//! It is a pipe, which that thread can wait for together with its sockets; the others open it through /proc, as
//! they do the segment. A word in the segment says whether a ring is on its way already, so that many of them
//! are one system call.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::pipe::{PipeFlags, pipe_with};
use tokio::net::unix::pipe::Receiver;

use crate::bootstrap::open_of_process;
use crate::failure::{Failure, FailureKind};
use crate::sync::{AtomicU32, Ordering};

/// To ring with.
#[derive(Debug)]
pub(crate) struct Bell(OwnedFd);

/// To wait for rings with.
#[derive(Debug)]
pub struct Ears(OwnedFd);

impl Bell {
    /// Of the rank that listens.
    pub(crate) fn new() -> Result<(Self, Ears), Failure> {
        let (ears, bell) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(|error| {
            Failure::new(FailureKind::Transport, format!("cannot make a pipe to the network thread: {error}"))
        })?;
        Ok((Self(bell), Ears(ears)))
    }

    /// Of any other rank of the host.
    pub(crate) fn open(pid: u32, fd: u32) -> Result<Self, Failure> {
        // For reading, too: then there always is a reader, and no SIGPIPE when the first rank is gone.
        open_of_process("the pipe to the network thread", pid, fd).map(Self)
    }

    pub(crate) fn descriptor(&self) -> u32 {
        self.0.as_fd().as_raw_fd() as u32
    }

    /// `rung` is a word that all ranks of the host share.
    pub(crate) fn ring(&self, rung: &AtomicU32) {
        // Pairs with the swap of who hears it: that sees what was done before.
        if rung.swap(1, Ordering::AcqRel) == 0 {
            // A full pipe has rung enough.
            let _ = rustix::io::write(&self.0, &[1]);
        }
    }
}

/// Rings as they come.
#[derive(Debug)]
pub(crate) struct Heard {
    ears: Ears,
    receiver: Option<Receiver>,
    segment: std::sync::Arc<crate::segment::Segment>,
}

impl Heard {
    pub(crate) fn new(ears: Ears, segment: std::sync::Arc<crate::segment::Segment>) -> Self {
        Self { ears, receiver: None, segment }
    }

    /// Waits for a ring; who looks after it sees all that was rung for. On the thread of the network.
    pub(crate) async fn ring(&mut self) {
        if self.receiver.is_none() {
            let ears = self.ears.0.try_clone().map_err(|error| error.to_string());
            let receiver = ears.and_then(|fd| Receiver::from_owned_fd(fd).map_err(|error| error.to_string()));
            match receiver {
                Ok(receiver) => self.receiver = Some(receiver),
                // Looks come at intervals, too.
                Err(error) => {
                    tracing::warn!(%error, "the network thread hears no bell");
                    return std::future::pending().await;
                }
            }
        }
        let receiver = self.receiver.as_ref().expect("it was just made");
        let mut bytes = [0; 64];
        loop {
            if receiver.readable().await.is_err() {
                return std::future::pending().await;
            }
            match receiver.try_read(&mut bytes) {
                Ok(0) => return std::future::pending().await,
                Ok(_) => {
                    self.segment.rung().swap(0, Ordering::AcqRel);
                    return;
                }
                Err(_) => {}
            }
        }
    }
}
