//! The processes beside the ranks that they cannot do without: the fork server, and the store of the job.

use std::time::{Duration, Instant};

use crate::processes::Process;

/// A process beside the ranks, which somebody may stop.
#[derive(Clone, Copy, Debug)]
pub(super) struct Helper {
    pid: i32,
    /// The beginning of the line about the process, before its number, and the part after that when it is stopped.
    name: &'static str,
    stopped: &'static str,
    since: Option<Instant>,
    is_told: bool,
}

impl Helper {
    pub(super) fn fork_server(pid: i32) -> Helper {
        let stopped = "which starts the ranks and hears how they end, is stopped: they wait for it";
        Helper { pid, name: "the fork server", stopped, since: None, is_told: false }
    }

    pub(super) fn store(pid: i32) -> Helper {
        let stopped = "through which the ranks meet, is stopped: they wait for it";
        Helper { pid, name: "the store of the job", stopped, since: None, is_told: false }
    }

    /// Returns the line that is due now, if one is.
    fn look(&mut self, is_stopped: bool, now: Instant) -> Option<String> {
        let Helper { pid, name, stopped, .. } = *self;
        if !is_stopped {
            self.since = None;
            return std::mem::take(&mut self.is_told).then(|| format!("{name} (pid {pid}) goes on"));
        }
        let since = *self.since.get_or_insert(now);
        let is_news = !self.is_told && now.duration_since(since) >= TOLD_AFTER;
        self.is_told |= is_news;
        is_news.then(|| format!("{name} (pid {pid}), {stopped} (kill -CONT {pid} lets it go on)"))
    }
}

/// The helpers of the job.
#[derive(Debug, Default)]
pub(super) struct Helpers {
    all: Vec<Helper>,
}

impl Helpers {
    /// Names the helpers that are stopped: a line for each that is news.
    pub(super) fn look(&mut self, now: Instant) -> Vec<String> {
        let look = |helper: &mut Helper| {
            let is_stopped = Process::read(helper.pid).is_some_and(|process| process.state == 'T');
            helper.look(is_stopped, now)
        };
        self.all.iter_mut().filter_map(look).collect()
    }

    /// Notes a helper that has come; the one whose place it takes is gone.
    pub(super) fn note(&mut self, helper: Helper) {
        self.all.retain(|known| known.name != helper.name && known.pid != helper.pid);
        self.all.push(helper);
    }

    /// The store has ended.
    pub(super) fn forget_store(&mut self) {
        self.all.retain(|helper| helper.name != Helper::store(0).name);
    }

    /// The fork server has ended, and with it the store.
    pub(super) fn forget_all(&mut self) {
        self.all.clear();
    }
}

/// Ctrl-Z stops all of the job at once, and fg lets all of it go on.
const TOLD_AFTER: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_helper_is_named_once_and_so_is_its_going_on() {
        let (mut store, began) = (Helper::store(7), Instant::now());
        let mut look = |is_stopped, ms| store.look(is_stopped, began + Duration::from_millis(ms));
        assert_eq!((look(false, 0), look(true, 100), look(true, 599)), (None, None, None));
        let named = "the store of the job (pid 7), through which the ranks meet, is stopped: they wait for it \
                     (kill -CONT 7 lets it go on)";
        assert_eq!((look(true, 600), look(true, 9000)), (Some(named.to_owned()), None));
        assert_eq!(
            (look(false, 9100), look(false, 9200)),
            (Some("the store of the job (pid 7) goes on".into()), None)
        );
        // Shorter than a person would notice.
        assert_eq!((look(true, 9300), look(false, 9400), look(true, 9900)), (None, None, None));
    }
}
