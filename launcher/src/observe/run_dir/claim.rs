//! The owner of a run directory: the agent that writes it holds a lock on a file in it. The file says where that agent
//! runs, and in the end that it has ended.

use std::fs::{File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::fstatfs;
use serde::{Deserialize, Serialize};

use crate::base::private;
use crate::place::hosts::own_name;
use crate::processes::Process;

/// The directory belongs to this process as long as the claim lives.
#[derive(Debug)]
pub(super) struct Claim(File);

/// The agent of a directory, as far as this process can know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Agent {
    /// No agent has been there.
    Nobody,
    Runs(String),
    /// It runs where this process cannot see it, or not any more.
    MayRun(String),
    Ended,
}

/// The first line of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Holder {
    pid: i32,
    /// With the pid it names one process of a boot and a PID namespace.
    start_ticks: u64,
    boot_id: String,
    pid_namespace: String,
    host: String,
    /// Device of the file, as the agent sees it.
    device: u64,
    is_locked: bool,
}

impl Claim {
    /// Takes a directory that no running agent has; the second value is the agent before.
    ///
    /// # Errors
    /// Also when it is in use.
    pub(super) fn take(dir: &Path) -> io::Result<(Claim, Agent)> {
        let path = dir.join(MARKER);
        loop {
            let mut file = private::shared(&path)?;
            let is_locked = match file.try_lock() {
                Ok(()) => true,
                Err(TryLockError::WouldBlock) => {
                    let used =
                        format!("{} uses it (wait for its end, or name another one)", holder_of(&mut file));
                    return Err(io::Error::other(used));
                }
                // The file system has no locks.
                Err(TryLockError::Error(_)) => false,
            };
            // The file may have been removed before it was locked; then this path has another one, or none.
            let found = file.metadata()?;
            if path
                .symlink_metadata()
                .is_ok_and(|there| there.ino() == found.ino() && there.dev() == found.dev())
            {
                let before = judge(&mut file);
                if let Agent::Runs(who) = &before {
                    return Err(io::Error::other(format!(
                        "{who} uses it (wait for its end, or name another one)"
                    )));
                }
                let holder = Holder { is_locked, device: found.dev(), ..Holder::this() };
                file.set_len(0)?;
                file.rewind()?;
                file.write_all(format!("{}\n", serde_json::to_string(&holder)?).as_bytes())?;
                return Ok((Claim(file), before));
            }
        }
    }
}

/// This process will write nothing more there.
impl Drop for Claim {
    fn drop(&mut self) {
        // Without this word nobody on another host will remove the directory, which harms nobody.
        let _ = self.0.write_all(format!("{ENDED}\n").as_bytes());
    }
}

/// Holds the directory of an agent that is known to have ended, so that nobody takes it meanwhile. None for an agent
/// that may run: where its end is not certain, it may.
pub(super) fn ended(dir: &Path) -> Option<File> {
    let mut file = private::existing(&dir.join(MARKER)).ok()?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => return None,
        // The file's own words are to be believed.
        Ok(()) | Err(TryLockError::Error(_)) => {}
    }
    (judge(&mut file) == Agent::Ended).then_some(file)
}

/// Judges the agent of a file whose lock nobody else has, as far as that is seen here.
fn judge(file: &mut File) -> Agent {
    let text = read(file);
    if text.is_empty() {
        return Agent::Nobody;
    }
    let mut lines = text.lines();
    let Some(holder) = lines.next().and_then(|line| serde_json::from_str::<Holder>(line).ok()) else {
        return Agent::MayRun("an agent that says nothing of itself".into());
    };
    if lines.next() == Some(ENDED) {
        return Agent::Ended;
    }
    let who = holder.to_string();
    let this = Holder::this();
    if this.boot_id.is_empty() || this.boot_id != holder.boot_id {
        return Agent::MayRun(who);
    }
    if this.pid_namespace == holder.pid_namespace && !this.pid_namespace.is_empty() && this.start_ticks > 0 {
        let process = Process::read(holder.pid);
        let runs = process.is_some_and(|found| found.start_ticks == holder.start_ticks && !found.is_zombie());
        return if runs { Agent::Runs(who) } else { Agent::Ended };
    }
    // The agent is of the same kernel; its lock would be seen if the file has local locks.
    let is_seen = file.metadata().is_ok_and(|found| found.dev() == holder.device) && has_local_locks(file);
    if holder.is_locked && is_seen { Agent::Ended } else { Agent::MayRun(who) }
}

/// Whether all processes of this kernel see each other's locks of a file; false where that is not known.
fn has_local_locks(file: &File) -> bool {
    fstatfs(file).is_ok_and(|found| LOCAL.contains(&(found.f_type as u64 & 0xffff_ffff)))
}

fn holder_of(file: &mut File) -> String {
    let text = read(file);
    let holder = text.lines().next().and_then(|line| serde_json::from_str::<Holder>(line).ok());
    holder.map_or_else(|| "another job".into(), |holder| holder.to_string())
}

fn read(file: &mut File) -> String {
    let mut text = String::new();
    let read = file.rewind().and_then(|()| Read::take(&mut *file, MAX_BYTES).read_to_string(&mut text));
    // A file that cannot be read is not an empty one.
    if read.is_ok() { text } else { "?".into() }
}

impl Holder {
    fn this() -> Holder {
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        Holder {
            pid,
            start_ticks: Process::read(pid).map_or(0, |process| process.start_ticks),
            boot_id: crate::observe::flight::notice::boot_id(),
            pid_namespace: namespace.to_string_lossy().into_owned(),
            host: own_name(),
            device: 0,
            is_locked: false,
        }
    }
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The name stays one line, whatever is in the file.
        let host = self.host.replace(char::is_control, "");
        write!(f, "a job of pid {} on host {host}", self.pid)
    }
}

/// The file that marks a directory as one of tpurun.
pub(super) const MARKER: &str = ".tpurun-run";
const ENDED: &str = "ended";
const MAX_BYTES: u64 = 4096;
/// File systems of one kernel alone, by the magic numbers of statfs(2): ext4, XFS, Btrfs, tmpfs, ramfs, F2FS, ZFS,
/// bcachefs, overlayfs.
const LOCAL: [u64; 9] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0x0102_1994,
    0x8584_58f6,
    0xf2f5_2010,
    0x2fc1_2fc1,
    0xca45_1a4e,
    0x794c_7630,
];

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory whose agent says this of itself, after its process has gone.
    fn left(change: impl FnOnce(&mut Holder)) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let file = private::shared(&dir.path().join(MARKER)).unwrap();
        let device = file.metadata().unwrap().dev();
        let mut holder = Holder { pid: i32::MAX, is_locked: true, device, ..Holder::this() };
        change(&mut holder);
        (&file).write_all(serde_json::to_string(&holder).unwrap().as_bytes()).unwrap();
        dir
    }

    #[test]
    fn a_directory_is_of_one_agent_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let (claim, before) = Claim::take(dir.path()).unwrap();
        assert_eq!(before, Agent::Nobody);
        let refused = Claim::take(dir.path()).unwrap_err().to_string();
        let own = format!("a job of pid {} on host {} uses it", std::process::id(), own_name());
        assert!(refused.starts_with(&own), "{refused}");
        assert!(ended(dir.path()).is_none());
        // Another path to it.
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert!(ended(&link).is_none() && Claim::take(&link).is_err());
        drop(claim);
        assert!(ended(dir.path()).is_some());
        assert_eq!(Claim::take(dir.path()).unwrap().1, Agent::Ended);
    }

    #[test]
    fn an_agent_that_is_not_known_to_have_ended_may_run() {
        let is_certain = |dir: tempfile::TempDir| ended(dir.path()).is_some();
        assert!(is_certain(left(|_| ())));
        assert!(!is_certain(left(|holder| holder.boot_id = "of another machine".into())));
        // In another PID namespace of this machine the lock tells, where it can be seen.
        let has_locks = has_local_locks(&tempfile::tempfile().unwrap());
        assert_eq!(is_certain(left(|holder| holder.pid_namespace = "pid:[1]".into())), has_locks);
        let elsewhere = |holder: &mut Holder| {
            holder.pid_namespace = "pid:[1]".into();
            holder.device += 1;
        };
        assert!(!is_certain(left(elsewhere)));
        let unlocked = |holder: &mut Holder| {
            holder.pid_namespace = "pid:[1]".into();
            holder.is_locked = false;
        };
        assert!(!is_certain(left(unlocked)));
        // A process that runs, although its lock is not seen.
        let running = left(|holder| *holder = Holder { is_locked: false, ..Holder::this() });
        assert!(Claim::take(running.path()).unwrap_err().to_string().contains(" uses it "));
        assert!(!is_certain(running));
    }

    #[test]
    fn what_is_no_claim_is_left_alone() {
        for text in ["", "1", "{}", "ended", "\u{fffd}"] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join(MARKER), text).unwrap();
            assert!(ended(dir.path()).is_none(), "{text:?}");
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(MARKER), [0xff, 0xfe]).unwrap();
        assert!(ended(dir.path()).is_none());
        assert!(matches!(Claim::take(dir.path()).unwrap().1, Agent::MayRun(_)));
    }
}
