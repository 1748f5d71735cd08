//! The other side: the arena of another process of this host, mapped.

use super::{Export, HEADER_BYTES, MAX_BYTES, PAGE, header, size};
use crate::descriptor::{FileKind, open_of_process};
use crate::failure::{Failure, FailureKind};
use crate::region::Region;

/// The arena of another process. It stays readable when that process ends.
#[derive(Debug)]
pub struct PeerArena {
    region: Region,
    export: Export,
}

impl PeerArena {
    /// Maps what another process has exported, to read and to write.
    ///
    /// # Errors
    /// `RankLost` when the process or its descriptor is gone; `Transport` when it may not be opened, or is
    /// not the arena that the export says: of that size, sealed, with that id.
    pub fn open(export: &Export) -> Result<Self, Failure> {
        let Export { pid, fd, bytes, .. } = *export;
        let refused = |why: &dyn std::fmt::Display| {
            let text = format!("expected the arena of process {pid} at its descriptor {fd}: {why}");
            Failure::new(FailureKind::Transport, text)
        };
        let size = size(bytes)
            .ok_or_else(|| refused(&format_args!("its size of {bytes} bytes is not 1 to {MAX_BYTES}")))?;
        let what = format!("the arena of process {pid}");
        let opened = open_of_process(&what, FileKind::Memory, pid, fd)?;
        let region = Region::open(&opened, size).map_err(|error| refused(&error))?;
        let mut found = [0; HEADER_BYTES];
        region.read(size - PAGE as usize, &mut found);
        if found != header(export) {
            return Err(refused(&"memory of something else is there"));
        }
        Ok(Self { region, export: *export })
    }

    /// The size of its data.
    pub fn bytes(&self) -> u64 {
        self.export.bytes
    }

    /// The first of `bytes` bytes at `offset`, which may come from the other process: none when they are not
    /// all in the arena.
    pub fn pointer(&self, offset: u64, bytes: u64) -> Option<*mut u8> {
        let end = offset.checked_add(bytes)?;
        (end <= self.bytes()).then(|| self.region.pointer(offset as usize, bytes as usize))
    }

    /// Copies bytes out of the arena, as they are at this moment.
    ///
    /// # Errors
    /// `Transport` when they are not all in it.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Failure> {
        self.check(offset, bytes.len())?;
        self.region.read(offset as usize, bytes);
        Ok(())
    }

    /// Copies bytes into the arena.
    ///
    /// # Errors
    /// As for `read`.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Failure> {
        self.check(offset, bytes.len())?;
        self.region.write(offset as usize, bytes);
        Ok(())
    }

    fn check(&self, offset: u64, count: usize) -> Result<(), Failure> {
        if self.pointer(offset, count as u64).is_some() {
            return Ok(());
        }
        let (pid, bytes) = (self.export.pid, self.bytes());
        let text = format!(
            "expected a range of the {bytes} bytes that the arena of process {pid} has, given {count} bytes \
             at offset {offset}"
        );
        Err(Failure::new(FailureKind::Transport, text))
    }
}
