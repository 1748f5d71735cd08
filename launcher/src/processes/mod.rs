//! The process table: who descends from us, in which state a process is, and what it did meanwhile.
//!
//! This room knows processes alone, whatever job they are of.

pub(crate) mod addresses;
pub(crate) mod cgroup;
pub(crate) mod cpus;
pub(crate) mod kill;
pub(crate) mod proc_stat;

mod activity;
mod stores;

use std::collections::{HashMap, HashSet};
use std::fs;
use std::sync::{Mutex, PoisonError};

use crate::processes::proc_stat::Stat;

pub(crate) use activity::{Activity, Sample, classify};
pub(crate) use stores::{holds_store, waiting_for};

/// One process of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    parent: i32,
    /// As in `ps`: R, S, D, T (stopped), t (traced), Z.
    pub(crate) state: char,
    /// Tells a process from a later one with the same number.
    pub(crate) start_ticks: u64,
}

impl Process {
    pub(crate) fn read(pid: i32) -> Option<Process> {
        let line = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let Stat { state, parent, start_ticks, .. } = Stat::parse(&line)?;
        Some(Process { pid, parent, state, start_ticks })
    }

    pub(crate) fn is_zombie(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

/// The fork server that a warm one has forked for this job: no child of ours, but all that it starts is the job's.
static ADOPTED: Mutex<Option<Process>> = Mutex::new(None);

/// Takes in the process with this number, and all that descends from it, as if we had started it.
pub(crate) fn adopt(pid: i32) {
    *ADOPTED.lock().unwrap_or_else(PoisonError::into_inner) = Process::read(pid);
}

/// The adopted process while it is there.
fn adopted() -> Option<Process> {
    let adopted = (*ADOPTED.lock().unwrap_or_else(PoisonError::into_inner))?;
    Process::read(adopted.pid).filter(|now| now.start_ticks == adopted.start_ticks && !now.is_zombie())
}

/// Whether a process descends from this one, or from the adopted one.
pub(crate) fn is_ours(pid: i32) -> bool {
    descends(pid, own_pid()) || adopted().is_some_and(|adopted| descends(pid, adopted.pid))
}

/// All that descends from this process, or from the adopted one.
pub(crate) fn ours() -> Vec<Process> {
    below(own_pid())
}

/// All that descends from a process of the job, or from the adopted one.
pub(crate) fn below(root: i32) -> Vec<Process> {
    let mut found = descendants(root);
    if let Some(adopted) = adopted() {
        found.push(adopted);
        found.extend(descendants(adopted.pid));
    }
    found
}

fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// Whether a process is `root`, or its child, or a child's child, and so on.
fn descends(pid: i32, root: i32) -> bool {
    let mut at = pid;
    // The table changes while it is read, so that a chain of parents could close on itself.
    for _ in 0..MOST_GENERATIONS {
        if at == root || at <= 1 {
            return at == root && at > 0;
        }
        let Some(process) = Process::read(at) else { return false };
        at = process.parent;
    }
    false
}

/// Shells in shells in shells.
const MOST_GENERATIONS: u32 = 1000;

/// Whether a process has a handler for a signal; false when it is gone.
pub(crate) fn handles_signal(pid: i32, number: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    catches(&status, number)
}

/// SigCgt is a mask in hexadecimal; its lowest bit is signal 1.
fn catches(status: &str, number: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = mask.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(0);
    (1..=64).contains(&number) && mask >> (number - 1) & 1 == 1
}

/// Children of `root`, their children and so on, nearest first; not `root` itself.
fn descendants(root: i32) -> Vec<Process> {
    let mut children: HashMap<i32, Vec<Process>> = HashMap::new();
    for process in all() {
        children.entry(process.parent).or_default().push(process);
    }
    let mut found: Vec<Process> = Vec::new();
    // The table changes while it is read, so that a chain of parents could close on itself.
    let mut seen = HashSet::from([root]);
    let mut parents = vec![root];
    while let Some(parent) = parents.pop() {
        for child in children.remove(&parent).unwrap_or_default() {
            if seen.insert(child.pid) {
                parents.push(child.pid);
                found.push(child);
            }
        }
    }
    found
}

fn all() -> impl Iterator<Item = Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter_map(Process::read)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_mask_tells_what_is_handled() {
        let status = "Name:\tpython3\nSigIgn:\t0000000001001000\nSigCgt:\t0020000000000002\n";
        let handled: Vec<i32> = (-1..=65).filter(|number| catches(status, *number)).collect();
        assert_eq!(handled, [2, 54]);
        assert!(!catches("SigCgt:\txyz\n", 2) && !catches("", 2));
        // The test runner itself handles none.
        assert!(!handles_signal(std::process::id() as i32, 54) && !handles_signal(-1, 54));
    }

    #[test]
    fn grandchildren_are_descendants() {
        let mut child = Command::new("sh")
            .args(["-c", "sleep 100 & echo $!; wait"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line)
            .unwrap();
        let grandchild: i32 = line.trim().parse().unwrap();
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let found: Vec<i32> = descendants(own).iter().map(|process| process.pid).collect();
        assert!(found.contains(&(child.id() as i32)) && found.contains(&grandchild) && !found.contains(&own));
        let pid = rustix::process::Pid::from_raw(grandchild).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        child.wait().unwrap();
    }
}
