//! Files that another process of this user has open: memory and pipes, found by its process number and descriptor.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::failure::{Failure, FailureKind};
use crate::region::is_plain_memory;

/// The kind of file that another process is to have open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileKind {
    /// A memfd of plain pages.
    Memory,
    /// Either end of a pipe.
    Pipe,
}

/// Opens a file that another process has open: `what` it says it is. The writer of the store says which process and
/// which descriptor, so a file that is not of this user, or of another kind, is not even opened.
pub fn open_of_process(what: &str, kind: FileKind, pid: u32, fd: u32) -> Result<OwnedFd, Failure> {
    let path = format!("/proc/{pid}/fd/{fd}");
    let refused = |error: &dyn std::fmt::Display| {
        Failure::new(FailureKind::Transport, format!("cannot open {what} at {path}: {error}"))
    };
    let failed = |error: Errno| match error {
        // A process that is gone takes its descriptors along: the group has lost a rank.
        Errno::NOENT => Failure::new(FailureKind::RankLost, refused(&error).text()),
        _ => refused(&error),
    };
    // Finds out what it is without doing anything with it.
    let place = rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
    check(&place, kind, rustix::process::geteuid().as_raw()).map_err(|error| refused(&error))?;
    // Opening must not wait for anybody, nor give us a terminal, whatever the file is.
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let own = format!("/proc/self/fd/{}", place.as_raw_fd());
    rustix::fs::open(own, flags, Mode::empty()).map_err(failed)
}

/// # Errors
/// A text with what was expected, and what the file is.
fn check(place: &OwnedFd, kind: FileKind, own: u32) -> Result<(), String> {
    let found = rustix::fs::fstat(place).map_err(|error| error.to_string())?;
    let (is_so, shown) = match kind {
        FileKind::Memory => (is_plain_memory(place.as_fd()), "shared memory"),
        FileKind::Pipe => (FileType::from_raw_mode(found.st_mode) == FileType::Fifo, "a pipe"),
    };
    if !is_so {
        return Err("another kind of file is there".to_owned());
    }
    // A file of either kind belongs to the user of the process that made it.
    if found.st_uid != own {
        let uid = found.st_uid;
        return Err(format!("expected {shown} of this user (uid {own}), given one of uid {uid}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::Region;

    #[test]
    fn only_memory_of_this_user_is_opened() {
        let opened =
            |kind, fd: &OwnedFd| open_of_process("it", kind, std::process::id(), fd.as_raw_fd() as u32);
        let (_region, memory) = Region::create("tpurun-test", 4096).expect("memfds work here");
        let (out, _in) = rustix::pipe::pipe().expect("pipes work here");
        opened(FileKind::Memory, &memory).expect("memory of this process");
        opened(FileKind::Pipe, &out).expect("a pipe of this process");
        let file = OwnedFd::from(std::fs::File::open("Cargo.toml").expect("a file on disk"));
        let null = OwnedFd::from(std::fs::File::open("/dev/null").expect("a device"));
        for (kind, fd) in [
            (FileKind::Memory, &out),
            (FileKind::Memory, &null),
            (FileKind::Memory, &file),
            (FileKind::Pipe, &memory),
        ] {
            let refused = opened(kind, fd).expect_err("another kind of file");
            assert_eq!(refused.kind(), FailureKind::Transport);
            assert!(refused.text().ends_with(": another kind of file is there"), "{}", refused.text());
        }
        let own = rustix::process::geteuid().as_raw();
        check(&memory, FileKind::Memory, own).expect("it is ours");
        let refused = check(&memory, FileKind::Memory, own + 1).expect_err("another user's");
        assert_eq!(
            refused,
            format!("expected shared memory of this user (uid {}), given one of uid {own}", own + 1)
        );
        let gone = open_of_process("it", FileKind::Memory, std::process::id(), 1 << 20)
            .expect_err("nothing is there");
        assert_eq!(gone.kind(), FailureKind::RankLost);
    }
}
