//! Ends everything that descends from this process, whatever it did to get away: the front, the agent and the
//! fork server are subreapers, so a process that is orphaned or starts its own session still is our descendant.

use std::time::{Duration, Instant};

use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, WaitStatus, kill_process, kill_process_group, pidfd_open,
    pidfd_send_signal, wait,
};

use crate::processes::cgroup::JobCgroup;
use crate::processes::{Process, ours};

/// Asks ranks to end, also those that are stopped. The processes that a rank has started, such as the workers of a data
/// loader, are its own to end; but a shell only waits for the program, so all that it has started is asked.
///
/// One after the other without anything between: the first one may end at once, and the others should learn that they
/// are to end before they learn of its loss. They are not stopped meanwhile, because any thread may take a signal that
/// comes to a stopped process, and the main one, which has to answer it, would sleep on.
pub(crate) fn ask_to_end(ranks: impl IntoIterator<Item = i32>, signal: Signal) {
    let asked: Vec<(Pid, bool)> =
        ranks.into_iter().filter_map(|rank| Some((Pid::from_raw(rank)?, is_shell(rank)))).collect();
    for (pid, is_shell) in &asked {
        let _ = if *is_shell { kill_process_group(*pid, signal) } else { kill_process(*pid, signal) };
    }
    for (pid, _) in asked {
        let _ = kill_process_group(pid, Signal::CONT);
    }
}

fn is_shell(pid: i32) -> bool {
    let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    program.file_name().and_then(|name| name.to_str()).is_some_and(|name| SHELLS.contains(&name))
}

/// Kills what is left of the process group of a process that has ended.
pub(crate) fn kill_group(leader: i32) {
    if let Some(group) = Pid::from_raw(leader) {
        let _ = kill_process_group(group, Signal::KILL);
    }
}

/// Kills all descendants that are there now but one, and spares what that one starts later.
pub(crate) fn kill_descendants_but(spared: i32) {
    ours().into_iter().filter(|process| process.pid != spared).for_each(kill);
}

/// Kills all descendants that are there now.
pub(crate) fn kill_descendants(cgroup: Option<&JobCgroup>) {
    if let Some(group) = cgroup {
        group.kill();
    }
    for process in ours() {
        kill(process);
    }
}

/// Kills and reaps until no descendant is left; false when some would not go in [`LIMIT`], as a process in
/// the middle of a broken disk access does.
pub(crate) fn end_all_descendants(
    cgroup: Option<&JobCgroup>,
    mut on_reaped: impl FnMut(Pid, WaitStatus),
) -> bool {
    let deadline = Instant::now() + LIMIT;
    loop {
        kill_descendants(cgroup);
        let has_children = reap(&mut on_reaped);
        // A warm server's are no children of ours once the process that has forked them is gone.
        let is_anybody_left = has_children || cgroup.is_some_and(JobCgroup::has_processes);
        if !is_anybody_left && ours().is_empty() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
}

/// Reaps what has ended; false when there are no children at all.
pub(crate) fn reap(on_reaped: &mut impl FnMut(Pid, WaitStatus)) -> bool {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) => on_reaped(pid, status),
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
}

fn kill(process: Process) {
    if process.is_zombie() {
        return;
    }
    let Some(pid) = Pid::from_raw(process.pid) else { return };
    let Ok(fd) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    // The number may have gone to somebody else since the table was read; the descriptor can not.
    if Process::read(process.pid).is_some_and(|now| now.start_ticks == process.start_ticks) {
        let _ = pidfd_send_signal(fd, Signal::KILL);
    }
}

/// Processes that take longer to end wait for a device.
pub(crate) const LIMIT: Duration = Duration::from_secs(5);
const SHELLS: [&str; 6] = ["bash", "dash", "sh", "zsh", "ksh", "busybox"];
const PAUSE: Duration = Duration::from_millis(2);
