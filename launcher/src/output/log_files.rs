//! One file per rank with the raw bytes of both of its streams, in the order in which they arrived.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::PathBuf;

use crate::base::private;
use crate::output::labels::Labels;

/// Files open at a time: the launcher also needs descriptors for pipes and sockets of every rank.
const MAX_OPEN_FILES: usize = 64;

#[derive(Debug)]
pub(super) struct LogFiles {
    dir: PathBuf,
    labels: Labels,
    open: HashMap<u32, OpenFile>,
    writes: u64,
    error: Option<io::Error>,
}

#[derive(Debug)]
struct OpenFile {
    file: File,
    last_write: u64,
}

impl LogFiles {
    pub(super) fn new(dir: PathBuf, labels: Labels) -> Self {
        Self { dir, labels, open: HashMap::new(), writes: 0, error: None }
    }

    /// Appends to the file of a rank. The first failure ends the logging: the run is worth more than its log.
    pub(super) fn write(&mut self, rank: u32, bytes: &[u8]) {
        if self.error.is_none() {
            self.error = self.try_write(rank, bytes).err();
        }
    }

    pub(super) fn close(&mut self, rank: u32) {
        self.open.remove(&rank);
    }

    pub(super) fn error(&self) -> Option<&io::Error> {
        self.error.as_ref()
    }

    fn try_write(&mut self, rank: u32, bytes: &[u8]) -> io::Result<()> {
        self.writes += 1;
        if !self.open.contains_key(&rank) {
            self.make_room();
            let path = self.dir.join(self.labels.log_name(rank));
            let file = private::appended(&path)?;
            self.open.insert(rank, OpenFile { file, last_write: self.writes });
        }
        let open = self.open.get_mut(&rank).expect("opened above");
        open.last_write = self.writes;
        open.file.write_all(bytes)
    }

    fn make_room(&mut self) {
        if self.open.len() < MAX_OPEN_FILES {
            return;
        }
        let idlest = self.open.iter().min_by_key(|(_, open)| open.last_write).map(|(&rank, _)| rank);
        if let Some(rank) = idlest {
            self.open.remove(&rank);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_ranks_than_files_may_be_open() {
        let dir = tempfile::tempdir().unwrap();
        let mut logs = LogFiles::new(dir.path().to_path_buf(), Labels::default());
        let ranks = 3 * MAX_OPEN_FILES as u32;
        for round in 0..2 {
            for rank in 0..ranks {
                logs.write(rank, format!("round {round}\n").as_bytes());
                assert!(logs.open.len() <= MAX_OPEN_FILES);
            }
        }
        assert!(logs.error().is_none());
        for rank in 0..ranks {
            let text = std::fs::read_to_string(dir.path().join(format!("rank-{rank:04}.log"))).unwrap();
            assert_eq!(text, "round 0\nround 1\n");
        }
    }

    #[test]
    fn logs_are_of_this_user_alone_and_follow_no_link() {
        use std::os::unix::fs::{PermissionsExt, symlink};

        let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
        symlink(outside.path(), dir.path().join("rank-0001.log")).unwrap();
        let mut logs = LogFiles::new(dir.path().to_path_buf(), Labels::default());
        logs.write(0, b"secret");
        let mode = std::fs::metadata(dir.path().join("rank-0000.log")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        logs.write(1, b"secret");
        assert!(logs.error().unwrap().to_string().contains("given a link"));
        assert_eq!(outside.as_file().metadata().unwrap().len(), 0);
    }

    #[test]
    fn a_directory_that_is_gone_is_reported_and_nothing_more() {
        let dir = tempfile::tempdir().unwrap();
        let mut logs = LogFiles::new(dir.path().join("gone"), Labels::default());
        logs.write(0, b"text");
        logs.write(0, b"text");
        assert_eq!(logs.error().map(io::Error::kind), Some(io::ErrorKind::NotFound));
    }
}
