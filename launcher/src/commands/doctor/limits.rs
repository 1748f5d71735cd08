//! Resources that this process and its ranks may use: cores, memory, descriptors, processes.

use std::fs;

use rustix::process::{Resource, Rlimit, getrlimit};

use super::cgroup::Cgroups;
use super::{Finding, human_bytes};
use crate::processes::cpus::usable_cpus;

/// A forked rank of a small training script; the interpreter and torch are shared.
const RANK_BYTES: u64 = 100 << 20;

/// One process that imported torch.
const TORCH_BYTES: u64 = 600 << 20;

/// Pipes, the control connection and the mapping of each rank, as the launcher holds them.
const LAUNCHER_FILES_PER_RANK: u64 = 8;

/// Files that a rank opens besides one descriptor per peer: the interpreter, torch, a few data files.
const FILES_OF_A_RANK: u64 = 200;

/// The main thread, the progress thread, autograd's and one to spare.
const THREADS_PER_RANK: u64 = 4;

pub(super) fn cores() -> Finding {
    const NAME: &str = "cores";
    let usable = usable_cpus();
    let in_mask = rustix::thread::sched_getaffinity(None).map_or(usable, |mask| mask.count() as usize);
    let described = format!("{usable} usable, {in_mask} in the affinity mask");
    match Cgroups::of_this_process().cpu_quota() {
        Some(quota) if quota < in_mask as f64 => Finding::warn(
            NAME,
            format!("{described}, the cgroup grants {quota:.1}"),
            "raise the container's CPU limit: ranks are throttled when it is used up",
        ),
        _ => Finding::ok(NAME, format!("{described}, no cgroup quota below that")),
    }
}

pub(super) fn memory(ranks: u32) -> Finding {
    const NAME: &str = "memory";
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let Some(available) = parse_mem_available(&meminfo) else {
        return Finding::warn(NAME, "/proc/meminfo is unreadable", "mount /proc");
    };
    let group = Cgroups::of_this_process().memory_left();
    judge_memory(NAME, available.min(group.unwrap_or(u64::MAX)), group, ranks)
}

fn judge_memory(name: &'static str, usable: u64, group: Option<u64>, ranks: u32) -> Finding {
    let possible = usable.saturating_sub(TORCH_BYTES) / RANK_BYTES;
    let limited = if group == Some(usable) { " left in this cgroup" } else { " available" };
    let finding = format!(
        "{}{limited}: room for about {possible} ranks of a small script ({} each)",
        human_bytes(usable),
        human_bytes(RANK_BYTES)
    );
    if possible == 0 {
        Finding::fail(name, finding, "free memory or raise the limit: importing torch alone needs 600 MiB")
    } else if possible < u64::from(ranks) {
        Finding::warn(name, finding, format!("{ranks} ranks may not fit: use fewer, or free memory"))
    } else {
        Finding::ok(name, finding)
    }
}

pub(super) fn open_files(ranks: u32) -> Finding {
    const NAME: &str = "open files";
    let ranks = u64::from(ranks);
    let needed = (LAUNCHER_FILES_PER_RANK * ranks).max(ranks) + FILES_OF_A_RANK;
    judge_rlimit(NAME, getrlimit(Resource::Nofile), needed, "ulimit -n")
}

pub(super) fn processes(ranks: u32) -> Finding {
    const NAME: &str = "processes";
    let needed = THREADS_PER_RANK * u64::from(ranks);
    match Cgroups::of_this_process().pids_left() {
        Some(left) if left < needed => Finding::fail(
            NAME,
            format!("{left} more may start in this cgroup, {ranks} ranks need about {needed}"),
            "raise the container's pids limit",
        ),
        _ => judge_rlimit(NAME, getrlimit(Resource::Nproc), needed, "ulimit -u"),
    }
}

/// The hard limit decides: the launcher raises the soft one by itself.
fn judge_rlimit(name: &'static str, limit: Rlimit, needed: u64, command: &str) -> Finding {
    match limit.maximum {
        Some(maximum) if maximum < needed => Finding::fail(
            name,
            format!("at most {maximum}, about {needed} are needed"),
            format!("raise the hard limit ({command} {needed}, /etc/security/limits.conf)"),
        ),
        Some(maximum) => Finding::ok(name, format!("at most {maximum}, about {needed} are needed")),
        None => Finding::ok(name, "unlimited"),
    }
}

fn parse_mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn available_memory_is_read_from_meminfo() {
        let meminfo = "MemTotal:       24684096 kB\nMemAvailable:   24148612 kB\n";
        assert_eq!(parse_mem_available(meminfo), Some(24_148_612 * 1024));
        assert_eq!(parse_mem_available("MemTotal: 1 kB\n"), None);
    }

    #[test]
    fn memory_is_judged_against_the_ranks() {
        let level = |gib: u64| judge_memory("memory", gib << 30, None, 64).level;
        assert_eq!([level(0), level(4), level(16)], [Level::Fail, Level::Warn, Level::Ok]);
        let finding = judge_memory("memory", 1 << 30, Some(1 << 30), 2).finding;
        assert_eq!(
            finding,
            "1.0 GiB left in this cgroup: room for about 4 ranks of a small script (100 MiB each)"
        );
    }

    #[test]
    fn only_the_hard_limit_can_fail() {
        let level = |maximum| judge_rlimit("x", Rlimit { current: Some(1), maximum }, 700, "ulimit -n").level;
        assert_eq!([level(None), level(Some(700)), level(Some(699))], [Level::Ok, Level::Ok, Level::Fail]);
    }
}
