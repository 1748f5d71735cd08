//! Reads what /proc says about another process of this host, and whether this one is a fork.
#![allow(unsafe_code)]

use std::fs;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// A waiter looks this often whether those it waits for still exist, if nothing else wakes it.
pub const LOOK_PERIOD: Duration = Duration::from_millis(500);

/// Whether a process still is what it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Liveness {
    /// It still is.
    Alive,
    /// Gone, a zombie, or another process with the same number.
    Gone,
    /// /proc cannot tell.
    Unknown,
}

/// Looks at other processes so far.
static LOOKS: AtomicU64 = AtomicU64::new(0);

/// Forks that lie between the first process of the program and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process that made it: a fork has a copy of whatever its parent made, but none of the threads that serve it.
/// To ask takes one load, where to ask for the number of the process takes a call of the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner(u32);

impl Owner {
    /// The calling process.
    pub fn here() -> Self {
        extern "C" fn count() {
            FORKS.fetch_add(1, Ordering::Relaxed);
        }
        static COUNTING: Once = Once::new();
        // SAFETY: the handler is a function of this library, which is never unloaded, and adds to a number.
        COUNTING.call_once(|| unsafe {
            libc::pthread_atfork(None, None, Some(count));
        });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Whether it is the calling process, and no fork of it calls.
    pub fn is_here(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }
}

/// The time the process started, in clock ticks since boot.
pub fn start_time(pid: u32) -> Option<u64> {
    stat(pid).map(|stat| stat.start)
}

/// Whether the process that had `pid` and `start` is still there; `start` 0 is any.
pub fn liveness(pid: u32, start: u64) -> Liveness {
    if pid == 0 {
        return Liveness::Unknown;
    }
    LOOKS.fetch_add(1, Ordering::Relaxed);
    match stat(pid) {
        Some(stat) if matches!(stat.state, b'Z' | b'X' | b'x') => Liveness::Gone,
        Some(stat) if start != 0 && stat.start != start => Liveness::Gone,
        Some(_) => Liveness::Alive,
        None if fs::exists("/proc/self/stat").unwrap_or(false) => Liveness::Gone,
        None => Liveness::Unknown,
    }
}

/// How often this process has looked whether another one is still there.
pub fn looks() -> u64 {
    LOOKS.load(Ordering::Relaxed)
}

struct Stat {
    state: u8,
    start: u64,
}

fn stat(pid: u32) -> Option<Stat> {
    parse(&fs::read(format!("/proc/{pid}/stat")).ok()?)
}

/// `pid (name) state ppid ..`: the name may hold anything, so fields count from the last parenthesis.
fn parse(stat: &[u8]) -> Option<Stat> {
    let after = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let fields: Vec<&str> = std::str::from_utf8(&stat[after..]).ok()?.split_ascii_whitespace().collect();
    let state = *fields.first()?.as_bytes().first()?;
    // proc_pid_stat(5): state is field 3, starttime field 22.
    let start = fields.get(19)?.parse().ok()?;
    Some(Stat { state, start })
}

/// Checks that any line at all is either read or not, without a panic.
#[cfg(any(test, fuzzing, feature = "testing"))]
pub fn survives(line: &[u8]) {
    if let Some(stat) = parse(line) {
        assert!(!stat.state.is_ascii_whitespace());
    }
}

#[cfg(test)]
#[cfg(not(tpurun_loom))]
mod tests {
    use super::*;

    #[test]
    fn names_with_parentheses_do_not_confuse() {
        let line = b"7 (a) b) (c) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0";
        let stat = parse(line).expect("well formed");
        assert_eq!((stat.state, stat.start), (b'S', 4242));
        assert!(parse(b"7 (a").is_none());
    }

    #[test]
    fn a_child_is_alive_until_it_is_not() {
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().expect("cat");
        let start = start_time(child.id()).expect("the child is in /proc");
        assert_eq!(liveness(child.id(), start), Liveness::Alive);
        assert_eq!(liveness(child.id(), start + 1), Liveness::Gone);
        drop(child.stdin.take());
        child.wait().expect("cat ends with its input");
        assert_eq!(liveness(child.id(), start), Liveness::Gone);
    }
}
