//! Lines of /proc/PID/stat and schedstat, as much of them as is needed.

use std::time::Duration;

/// Field names are those of proc_pid_stat(5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    /// As in `ps`: R, S, D, T (stopped), t (traced), Z.
    pub(crate) state: char,
    pub(crate) parent: i32,
    /// On a CPU so far; of all threads when the line is a process's.
    pub(crate) cpu: Duration,
    /// The same of its children that have ended and were waited for, and of theirs.
    pub(crate) waited: Duration,
    /// Since the host was started; tells a process from a later one with the same number.
    pub(crate) start_ticks: u64,
}

impl Stat {
    /// The name is in parentheses and may contain anything, parentheses too.
    pub(crate) fn parse(line: &str) -> Option<Stat> {
        let (_, fields) = line.rsplit_once(')')?;
        // From field 3 on.
        let mut fields = fields.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        // Fields 14 and 15: of the program, and of the kernel for it.
        let user: u64 = fields.nth(9)?.parse().ok()?;
        let system: u64 = fields.next()?.parse().ok()?;
        let [waited_user, waited_system]: [u64; 2] =
            [fields.next()?.parse().ok()?, fields.next()?.parse().ok()?];
        // Field 22.
        let start_ticks = fields.nth(4)?.parse().ok()?;
        let (cpu, waited) = (ticks(user, system), ticks(waited_user, waited_system));
        Some(Stat { state, parent, cpu, waited, start_ticks })
    }
}

fn ticks(user: u64, system: u64) -> Duration {
    Duration::from_millis(user.saturating_add(system).saturating_mul(TICK_MS))
}

/// The unit of the file: USER_HZ, which is 100 on every architecture that tpurun runs on.
const TICK_MS: u64 = 10;

/// The times of one thread, finer than ticks, where the kernel counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Schedstat {
    pub(crate) on_cpu: Duration,
    /// In the queue for a CPU. A stay there is counted when it is over.
    pub(crate) queued: Duration,
}

impl Schedstat {
    pub(crate) fn parse(line: &str) -> Option<Schedstat> {
        let mut fields = line.split_ascii_whitespace().map(|field| field.parse().map(Duration::from_nanos));
        Some(Schedstat { on_cpu: fields.next()?.ok()?, queued: fields.next()?.ok()? })
    }
}

/// Any line is read or it is not.
#[cfg(any(test, fuzzing))]
pub(crate) fn survives(line: &[u8]) {
    let _ = Schedstat::parse(&String::from_utf8_lossy(line));
    if let Some(stat) = Stat::parse(&String::from_utf8_lossy(line)) {
        assert!(!stat.state.is_ascii_whitespace());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_names_do_not_shift_the_fields() {
        let line = "9 (a ) Z 5 (b) D 1 1 1 0 -1 4194304 1 2 3 4 250 50 7 8 20 0 1 0 777 1000 2";
        let (cpu, waited) = (Duration::from_secs(3), Duration::from_millis(150));
        let stat = Stat { state: 'D', parent: 1, cpu, waited, start_ticks: 777 };
        assert_eq!(Stat::parse(line), Some(stat));
        assert_eq!(Stat::parse("9 (short) S 1 2"), None);
    }

    #[test]
    fn schedstats_are_read() {
        let (on_cpu, queued) = (Duration::from_nanos(1_234_567), Duration::from_millis(1));
        assert_eq!(Schedstat::parse("1234567 1000000 3\n"), Some(Schedstat { on_cpu, queued }));
        assert_eq!([Schedstat::parse("5"), Schedstat::parse(""), Schedstat::parse("5 -1 3")], [None; 3]);
    }
}
