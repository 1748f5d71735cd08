//! One line of /proc/PID/stat, as much of it as is needed.

/// Field names are those of proc_pid_stat(5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    /// As in `ps`: R, S, D, T (stopped), t (traced), Z.
    pub(crate) state: char,
    pub(crate) parent: i32,
    /// On a CPU so far, in the unit of the file; of all threads when the line is a process's.
    pub(crate) cpu_ticks: u64,
    /// The same of its children that have ended and were waited for, and of theirs.
    pub(crate) waited_ticks: u64,
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
        let cpu_ticks = user.saturating_add(system);
        let waited_ticks = waited_user.saturating_add(waited_system);
        Some(Stat { state, parent, cpu_ticks, waited_ticks, start_ticks })
    }
}

/// Whatever the line is, it is read or it is not.
#[cfg(any(test, fuzzing))]
pub(crate) fn survives(line: &[u8]) {
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
        let stat = Stat { state: 'D', parent: 1, cpu_ticks: 300, waited_ticks: 15, start_ticks: 777 };
        assert_eq!(Stat::parse(line), Some(stat));
        assert_eq!(Stat::parse("9 (short) S 1 2"), None);
    }
}
