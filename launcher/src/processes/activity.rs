//! The activity of a process between two looks at it: it computed, slept, or waited for a CPU.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::time::{Duration, Instant};

use crate::processes::proc_stat::{Schedstat, Stat};

/// One look. All times count from the start of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    pub(crate) at: Instant,
    /// State of the main thread, as in `ps`.
    pub(crate) state: char,
    /// CPU time of all its threads, also of those that have ended.
    pub(crate) cpu: Duration,
    /// The time that each thread has stood in the queue for a CPU; empty where the kernel does not count it.
    /// The kernel counts a stay in the queue when that is over.
    pub(crate) queued: HashMap<i32, Duration>,
    /// Any of its threads is on a CPU, or in the queue for one.
    pub(crate) is_runnable: bool,
    /// The place in the kernel where the main thread sleeps, when the kernel tells.
    pub(crate) wait_channel: Option<String>,
}

/// The activity of a process between two looks.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Activity {
    /// The process is a zombie.
    Ended,
    /// The process is stopped, by SIGSTOP or from a terminal.
    Stopped,
    /// A debugger holds it.
    Traced,
    /// It waits in the engine for other ranks.
    Waiting,
    /// It had the CPU for this share of the time; more than 1 with several threads.
    Computing { share: f64 },
    /// It could run, and mostly was not let.
    Starved,
    /// It is in a sleep that signals do not end, as disks and network file systems cause.
    Uninterruptible { channel: Option<String> },
    /// It waits for something that the engine knows nothing of.
    Sleeping,
}

impl Sample {
    /// Looks at a process; None when it is gone.
    pub(crate) fn read(pid: i32) -> Option<Sample> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let stat = Stat::parse(&stat)?;
        let (state, cpu) = (stat.state, stat.cpu);
        let wait_channel = match state {
            'D' => fs::read_to_string(format!("/proc/{pid}/wchan")).ok().as_deref().and_then(parse_channel),
            _ => None,
        };
        let threads = threads(pid);
        let is_runnable = threads.iter().any(|(_, state, _)| *state == 'R');
        let queued = threads.into_iter().filter_map(|(thread, _, queued)| Some((thread, queued?))).collect();
        Some(Sample { at: Instant::now(), state, cpu, queued, is_runnable, wait_channel })
    }

    /// Time since `before` in which it could do what it wanted: it ran, or slept of its own will.
    pub(crate) fn own_time(&self, before: &Sample) -> Duration {
        let own = self.at.saturating_duration_since(before.at).saturating_sub(self.queued_since(before));
        // The rest may be a stay in the queue that is not over.
        if self.is_runnable { own.min(self.cpu_since(before)) } else { own }
    }

    fn cpu_since(&self, before: &Sample) -> Duration {
        self.cpu.saturating_sub(before.cpu)
    }

    /// Time in the queue of the thread that waited longest: the others may have waited for its work.
    fn queued_since(&self, before: &Sample) -> Duration {
        let since = |(thread, now): (&i32, &Duration)| {
            now.saturating_sub(before.queued.get(thread).copied().unwrap_or_default())
        };
        self.queued.iter().map(since).max().unwrap_or_default()
    }
}

/// Classifies the activity of a process from `before` to `after`. The board says whether it waits in the engine. A
/// process that computes meanwhile does that with another thread, and is as busy as it looks.
pub(crate) fn classify(before: &Sample, after: &Sample, is_in_engine: bool) -> Activity {
    let window = after.at.saturating_duration_since(before.at).as_secs_f64().max(1e-3);
    let share = after.cpu_since(before).as_secs_f64() / window;
    let counted = after.queued_since(before).as_secs_f64() / window;
    let queued = if after.is_runnable { counted.max(1.0 - share) } else { counted };
    match after.state {
        'Z' | 'X' => Activity::Ended,
        'T' => Activity::Stopped,
        't' => Activity::Traced,
        _ if share + queued >= BUSY && share < queued * LET_RUN => Activity::Starved,
        _ if share >= BUSY || (share + queued >= BUSY && !is_in_engine) => Activity::Computing { share },
        _ if is_in_engine => Activity::Waiting,
        'D' if before.state == 'D' => Activity::Uninterruptible { channel: after.wait_channel.clone() },
        _ => Activity::Sleeping,
    }
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Activity::Ended => f.write_str("ended"),
            Activity::Stopped => f.write_str("stopped (SIGSTOP)"),
            Activity::Traced => f.write_str("held by a debugger"),
            Activity::Waiting => f.write_str("waiting for others itself"),
            Activity::Computing { share } => write!(f, "computing ({:.0} % CPU)", share * 100.0),
            Activity::Starved => f.write_str("waiting for a CPU"),
            Activity::Uninterruptible { channel: Some(channel) } => {
                write!(f, "in uninterruptible I/O ({channel})")
            }
            Activity::Uninterruptible { channel: None } => f.write_str("in uninterruptible I/O"),
            Activity::Sleeping => f.write_str("sleeping"),
        }
    }
}

/// The threads of a process: number, state, and time in the queue where the kernel counts that.
fn threads(pid: i32) -> Vec<(i32, char, Option<Duration>)> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let read = |entry: fs::DirEntry| {
        let thread = entry.file_name().to_str()?.parse().ok()?;
        let state = Stat::parse(&fs::read_to_string(entry.path().join("stat")).ok()?)?.state;
        let schedstat = fs::read_to_string(entry.path().join("schedstat")).ok();
        let queued = schedstat.as_deref().and_then(Schedstat::parse).map(|stat| stat.queued);
        Some((thread, state, queued))
    };
    threads.take(MAX_THREADS).filter_map(read).collect()
}

/// A kernel that does not tell says 0.
fn parse_channel(text: &str) -> Option<String> {
    let name = text.trim();
    (!name.is_empty() && name != "0" && name.bytes().all(|b| b.is_ascii_graphic())).then(|| name.to_owned())
}

/// A process that wants the CPU for this share of the time is not asleep.
const BUSY: f64 = 0.2;
/// A process that gets less than this share of the CPU time that it queues for is starved.
const LET_RUN: f64 = 0.1;
const MAX_THREADS: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    /// One second later, with this much CPU and queueing, in this state.
    fn after(before: &Sample, state: char, cpu_ms: u64, queued_ms: u64) -> Sample {
        let queued =
            before.queued.iter().map(|(thread, time)| (*thread, *time + Duration::from_millis(queued_ms)));
        Sample {
            at: before.at + Duration::from_secs(1),
            state,
            cpu: before.cpu + Duration::from_millis(cpu_ms),
            queued: queued.collect(),
            is_runnable: state == 'R',
            wait_channel: None,
        }
    }

    fn before(state: char) -> Sample {
        let queued = HashMap::from([(7, Duration::from_secs(5))]);
        Sample {
            at: Instant::now(),
            state,
            cpu: Duration::from_secs(90),
            queued,
            is_runnable: state == 'R',
            wait_channel: None,
        }
    }

    #[test]
    fn activities() {
        let disk = || Activity::Uninterruptible { channel: None };
        for (states, cpu_ms, queued_ms, in_engine, expected) in [
            ("RR", 980, 10, false, Activity::Computing { share: 0.98 }),
            ("SR", 1950, 0, false, Activity::Computing { share: 1.95 }),
            // A worker computes while the main thread waits for it.
            ("SS", 900, 0, false, Activity::Computing { share: 0.9 }),
            ("SS", 900, 0, true, Activity::Computing { share: 0.9 }),
            // Half of what it wants is more than its turn.
            ("RR", 300, 700, false, Activity::Computing { share: 0.3 }),
            ("RR", 40, 950, false, Activity::Starved),
            ("RR", 0, 990, false, Activity::Starved),
            // The kernel counts a stay in the queue when it is over.
            ("RR", 0, 0, false, Activity::Starved),
            ("SR", 25, 100, false, Activity::Starved),
            // Starved before or while it comes out of the engine.
            ("SR", 10, 500, true, Activity::Starved),
            ("SS", 10, 50, true, Activity::Waiting),
            ("SS", 100, 150, true, Activity::Waiting),
            ("SS", 10, 20, false, Activity::Sleeping),
            ("SS", 0, 0, false, Activity::Sleeping),
            // A disk access now and then is none that does not end.
            ("SD", 10, 0, false, Activity::Sleeping),
            ("DD", 10, 0, false, disk()),
            ("DD", 10, 0, true, Activity::Waiting),
            ("RT", 500, 0, false, Activity::Stopped),
            ("TT", 0, 0, true, Activity::Stopped),
            ("St", 0, 0, false, Activity::Traced),
            ("RZ", 500, 0, false, Activity::Ended),
        ] {
            let mut letters = states.chars();
            let first = before(letters.next().unwrap());
            let second = after(&first, letters.next().unwrap(), cpu_ms, queued_ms);
            let found = classify(&first, &second, in_engine);
            assert_eq!(found, expected, "{states} {cpu_ms} {queued_ms} {in_engine}");
        }
    }

    #[test]
    fn time_in_the_queue_is_not_a_processs_own() {
        let first = before('R');
        let own =
            |state, cpu_ms, queued_ms| after(&first, state, cpu_ms, queued_ms).own_time(&first).as_millis();
        assert_eq!([own('S', 0, 0), own('S', 0, 940), own('S', 0, 3000)], [1000, 60, 0]);
        assert_eq!([own('R', 1000, 0), own('R', 30, 0), own('R', 3000, 0)], [1000, 30, 1000]);
        // The thread that waited longest counts, a new one from its start.
        let mut second = after(&first, 'S', 0, 100);
        second.queued.insert(8, Duration::from_millis(800));
        assert_eq!(second.own_time(&first).as_millis(), 200);
        // A clock that goes backwards is no reason to panic.
        assert_eq!(first.own_time(&second), Duration::ZERO);
        assert!(matches!(classify(&second, &first, false), Activity::Starved | Activity::Sleeping));
    }

    #[test]
    fn the_kernels_texts_are_read() {
        assert_eq!(parse_channel("nfs_wait\n").as_deref(), Some("nfs_wait"));
        assert_eq!([parse_channel("0"), parse_channel(""), parse_channel("\x1b[2J")], [None, None, None]);
    }

    #[test]
    fn a_process_that_computes_is_seen_computing() {
        let mut child = std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let first = Sample::read(child.id() as i32).unwrap();
        // Waits until the process has had a tenth of a second, however busy the machine is.
        let second = loop {
            let sample = Sample::read(child.id() as i32).unwrap();
            if sample.cpu_since(&first) >= Duration::from_millis(100) {
                break sample;
            }
            std::thread::yield_now();
        };
        child.kill().unwrap();
        child.wait().unwrap();
        let queued = second.queued_since(&first);
        assert!(second.own_time(&first) >= Duration::from_millis(80), "{first:?} {second:?} {queued:?}");
        let found = classify(&first, &second, false);
        assert!(matches!(found, Activity::Computing { .. } | Activity::Starved), "{found:?}");
        assert!(Sample::read(-1).is_none());
    }
}
