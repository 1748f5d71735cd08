//! The bell of a host. When a rank of a communicator does something that other hosts must know, it rings, and the
//! network thread of the host's first rank wakes up.
//!
//! The bell is a pipe, which that thread can wait for together with its sockets. The other ranks open it through
//! /proc, as they do the segment. A word in the segment says whether a ring is on its way already, so that many rings
//! are one system call.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::pipe::{PipeFlags, pipe_with};

use tpurun_memory::descriptor::{FileKind, open_of_process};
use tpurun_memory::failure::{Failure, FailureKind};
use tpurun_memory::sync::{AtomicU32, Ordering};

/// The end of the pipe that rings.
#[derive(Debug)]
pub struct Bell(OwnedFd);

/// The end of the pipe that waits for rings.
#[derive(Debug)]
pub struct Ears(OwnedFd);

impl Bell {
    /// Makes the bell of the rank that listens, and its ears.
    pub fn new() -> Result<(Self, Ears), Failure> {
        let (ears, bell) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(|error| {
            Failure::new(FailureKind::Transport, format!("cannot make a pipe to the network thread: {error}"))
        })?;
        Ok((Self(bell), Ears(ears)))
    }

    /// Opens the bell of process `pid` for another rank of the host.
    pub fn open(pid: u32, fd: u32) -> Result<Self, Failure> {
        // The pipe is opened for reading, too. So it always has a reader, and no SIGPIPE comes when the first rank is
        // gone.
        open_of_process("the pipe to the network thread", FileKind::Pipe, pid, fd).map(Self)
    }

    /// The descriptor by which other ranks of the host open it.
    pub fn descriptor(&self) -> u32 {
        self.0.as_fd().as_raw_fd() as u32
    }

    /// Rings, unless a ring is on its way already. `rung` is a word that all ranks of the host share.
    pub fn ring(&self, rung: &AtomicU32) {
        // This swap pairs with the one of the thread that hears the ring, which so sees everything that was done
        // before.
        if rung.swap(1, Ordering::AcqRel) == 0 {
            // A full pipe has rung enough.
            let _ = rustix::io::write(&self.0, &[1]);
        }
    }
}

impl Ears {
    /// Takes the rings that have come so far; `rung` is that of the bell. A reader sees all that was rung for.
    pub fn clear(&self, rung: &AtomicU32) {
        let _ = rustix::io::read(&self.0, &mut [0_u8; 64]);
        rung.swap(0, Ordering::AcqRel);
    }
}

/// The descriptor can be read when a ring comes.
impl AsFd for Ears {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
