//! The facts that an agent must know of the process that starts it, as a word of its command line.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::process::getpid;
use tpurun_protocol::board::now_ns;

/// First argument of the agent's command line; what it must know of this process follows.
pub(crate) const AGENT: &str = "--agent-of";

/// The facts that the agent must know of its front. Times are CLOCK_MONOTONIC.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    /// The process that waits for it.
    pub(crate) front: i32,
    /// When the command was started.
    pub(crate) begun_ns: u64,
    /// When it was known what to run.
    pub(crate) understood_ns: u64,
    /// The socket of the warm server that is to fork the job's fork server.
    pub(crate) warm: Option<PathBuf>,
}

impl Origin {
    pub(crate) fn here(begun_ns: u64) -> Origin {
        Origin { front: getpid().as_raw_nonzero().get(), begun_ns, understood_ns: now_ns(), warm: None }
    }

    pub(crate) fn to_word(&self) -> OsString {
        let numbers = format!("{},{},{},", self.front, self.begun_ns, self.understood_ns);
        let mut word = OsString::from(numbers);
        word.extend(self.warm.as_deref().map(Path::as_os_str));
        word
    }

    /// Reads it back in the agent.
    pub(crate) fn parse(word: &OsStr) -> Option<Origin> {
        let mut parts = word.as_bytes().splitn(4, |byte| *byte == b',');
        let mut number = || std::str::from_utf8(parts.next()?).ok();
        Some(Origin {
            front: number()?.parse().ok()?,
            begun_ns: number()?.parse().ok()?,
            understood_ns: number()?.parse().ok()?,
            warm: parts.next().filter(|path| !path.is_empty()).map(|path| OsStr::from_bytes(path).into()),
        })
    }
}
