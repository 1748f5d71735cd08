//! The cost of a job's start: CPU and memory of all its processes, the launcher's own among them.

use std::fs;
use std::io;
use std::thread::JoinHandle;
use std::time::Duration;

use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};

use crate::processes::proc_stat::{Schedstat, Stat};
use crate::processes::{Process, below};

/// The cost until the last rank had its first collective done.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Cost {
    pub(crate) cpu_ms: u64,
    /// None when processes were leaving meanwhile: the memory that they shared would count for those that stay.
    pub(crate) memory: Option<JobMemory>,
}

/// The memory of all processes together; memory that several share is counted once.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct JobMemory {
    pub(crate) pss_bytes: u64,
    pub(crate) processes: usize,
}

impl Serialize for Cost {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut object = to.serialize_struct("Cost", 3)?;
        object.serialize_field("cpu_s", &(self.cpu_ms as f64 / 1e3))?;
        object.serialize_field("pss_bytes", &self.memory.as_ref().map(|memory| memory.pss_bytes))?;
        object.serialize_field("processes", &self.memory.as_ref().map(|memory| memory.processes))?;
        object.end()
    }
}

/// A look at all processes, on a thread of its own: to sum up the memory of a rank takes milliseconds.
#[derive(Debug)]
pub(crate) struct Measuring {
    thread: JoinHandle<Cost>,
}

impl Measuring {
    /// Starts to look at the job of this front, whose ranks run as these processes.
    ///
    /// # Errors
    /// When there can be no thread.
    pub(crate) fn start(front: i32, ranks: Vec<i32>) -> io::Result<Measuring> {
        let measure = move || measure(front, &ranks);
        Ok(Measuring { thread: std::thread::Builder::new().name("timings".into()).spawn(measure)? })
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits for the end; None when it has panicked.
    pub(crate) fn finish(self) -> Option<Cost> {
        self.thread.join().ok()
    }
}

/// CPU of the front, of all that descends from it, and of all that these have waited for.
pub(crate) fn cpu_ms(front: i32) -> u64 {
    cpu_of(front, &all(front))
}

fn measure(front: i32, ranks: &[i32]) -> Cost {
    let processes = all(front);
    // The CPU time comes first: it grows while the memory is looked at.
    let cpu_ms = cpu_of(front, &processes);
    let is_there = |pid: &i32| processes.iter().any(|process| process.pid == *pid && !process.is_zombie());
    if !ranks.iter().all(is_there) {
        return Cost { cpu_ms, memory: None };
    }
    let pss: Option<u64> = processes.iter().map(|process| pss(process.pid)).sum();
    let is_still_there = |process: &Process| {
        Process::read(process.pid)
            .is_some_and(|now| now.start_ticks == process.start_ticks && !now.is_zombie())
    };
    let pss = pss.filter(|_| processes.iter().all(is_still_there));
    let memory = pss.map(|pss_bytes| JobMemory { pss_bytes, processes: processes.len() });
    Cost { cpu_ms, memory }
}

/// Parents first: a child that ends meanwhile is not counted twice.
fn all(front: i32) -> Vec<Process> {
    Process::read(front).into_iter().chain(below(front)).collect()
}

fn cpu_of(front: i32, processes: &[Process]) -> u64 {
    let times = processes.iter().map(|process| {
        let stat = fs::read_to_string(format!("/proc/{}/stat", process.pid)).ok();
        let Some(stat) = stat.as_deref().and_then(Stat::parse) else { return Duration::ZERO };
        let own = stat.cpu.max(threads_time(process.pid));
        // The processes that the front has waited for were of other jobs.
        let waited = if process.pid == front { Duration::ZERO } else { stat.waited };
        own.saturating_add(waited)
    });
    times.fold(Duration::ZERO, Duration::saturating_add).as_millis() as u64
}

/// CPU time of the threads that have not ended, where the kernel counts it. It is finer than ticks, of which a rank
/// that has just started has few.
fn threads_time(pid: i32) -> Duration {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let texts = threads.filter_map(|entry| fs::read_to_string(entry.path().join("schedstat")).ok());
    let times = texts.filter_map(|text| Some(Schedstat::parse(&text)?.on_cpu));
    times.fold(Duration::ZERO, Duration::saturating_add)
}

/// Memory of one process; None when it is gone, or not ours to look at.
fn pss(pid: i32) -> Option<u64> {
    parse_pss(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?)
}

fn parse_pss(text: &str) -> Option<u64> {
    let kib = text.lines().find_map(|line| line.strip_prefix("Pss:"))?.trim().strip_suffix("kB")?;
    kib.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_read() {
        let rollup = "5581e000-7ffc ---p 00000000 00:00 0  [rollup]\nRss:    884 kB\nPss:    385 kB\n\
                      Pss_Dirty:  68 kB\n";
        assert_eq!(parse_pss(rollup), Some(385 << 10));
        assert_eq!(parse_pss("Pss_Dirty: 68 kB\nPss: -1 kB"), None);
    }

    #[test]
    fn this_process_costs_something() {
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let cost = Measuring::start(own, vec![own]).unwrap().finish().unwrap();
        assert!(cost.memory.is_none_or(|memory| memory.pss_bytes > 0 && memory.processes > 0));
        // A rank that is no process of the job any more has left.
        assert_eq!(Measuring::start(own, vec![-1]).unwrap().finish().unwrap().memory, None);
    }
}
