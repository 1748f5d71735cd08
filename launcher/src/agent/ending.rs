//! How the ranks of a world are ended that were asked to end: they have their time, and then they are killed.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::command::{Instruction, Scope};
use super::phase::{Stopping, Why, WorldPhase};
use super::starter::Starter;
use super::timings::WATCH_EVERY;
use super::world::World;
use crate::base::rank_set::RankSet;
use crate::processes::kill;

impl World {
    /// The ranks have been asked to end, and are killed after `grace`. Returns the processes that run.
    pub(super) fn begin_stop(&mut self, why: Why, grace: Duration) -> HashMap<i32, u32> {
        let (now, is_hurried) = (Instant::now(), matches!(why, Why::FrontDied));
        let running = self.roster.running();
        let mut victims: Vec<u32> = running.values().copied().collect();
        victims.sort_unstable();
        self.phase = WorldPhase::Stopping(Stopping {
            why,
            asked_at: now,
            kill_at: now + grace,
            victims,
            killing_since: None,
            is_hurried,
            has_spared: false,
        });
        running
    }

    /// The ranks had their time to end. Ranks whose programs have ended are left alone as long as ranks are that were
    /// asked to end: what their processes do still, such as their exit handlers, is theirs to end.
    pub(super) fn kill_or_spare(&mut self, starter: &Starter, now: Instant) -> Option<Instruction> {
        let WorldPhase::Stopping(stopping) = &self.phase else { return None };
        let may_finish = !stopping.is_hurried && now < stopping.asked_at + self.job.stop_grace;
        let finishing = if may_finish { self.ended_programs() } else { HashMap::new() };
        if finishing.is_empty() {
            return self.kill_what_is_left(starter, now);
        }
        self.spare(finishing, now);
        None
    }

    fn spare(&mut self, finishing: HashMap<i32, u32>, now: Instant) {
        let WorldPhase::Stopping(stopping) = &mut self.phase else { return };
        stopping.kill_at = now + WATCH_EVERY;
        let is_news = !std::mem::replace(&mut stopping.has_spared, true);
        let running = self.roster.running().into_keys();
        running.filter(|pid| !finishing.contains_key(pid)).for_each(kill::kill_group);
        if is_news {
            self.say_who_finishes(finishing.into_values().collect());
        }
    }

    /// Returns what follows when the ranks stand in the way of another world.
    fn kill_what_is_left(&mut self, starter: &Starter, now: Instant) -> Option<Instruction> {
        let WorldPhase::Stopping(stopping) = &mut self.phase else { return None };
        let is_first = stopping.killing_since.is_none();
        let since = *stopping.killing_since.get_or_insert(now);
        stopping.kill_at = now + KILL_EVERY;
        let is_restart = matches!(stopping.why, Why::Restart(..));
        match starter.server_pid().filter(|_| is_restart) {
            Some(server) => kill::kill_descendants_but(server),
            None => kill::kill_descendants(starter.cgroup.as_ref()),
        }
        if is_first {
            self.say_who_is_killed();
        }
        let is_stuck = is_restart && now >= since + CLEARED_WITHIN;
        is_stuck.then(|| Instruction::CallOff { why: self.leftover(), scope: Scope::AllNodes })
    }

    fn say_who_finishes(&mut self, ranks: RankSet) {
        let (of, goes) =
            if ranks.len() == 1 { ("rank", "its process goes") } else { ("ranks", "their processes go") };
        let grace = self.stop_grace_text();
        self.say(&format!(
            "the program of {of} {ranks} has ended, and {goes} on (an exit handler, or a thread that is no daemon): \
             killed after {grace}"
        ));
    }

    /// Names the ranks that somebody has asked to end, and that did not.
    fn say_who_is_killed(&mut self) {
        let WorldPhase::Stopping(Stopping { why: Why::Asked(_), is_hurried: false, .. }) = &self.phase else {
            return;
        };
        let late: RankSet = self.roster.running().into_values().collect();
        if late.is_empty() {
            return;
        }
        let grace = self.stop_grace_text();
        self.say(&format!("killed after {grace}: ranks {late}, which had not ended"));
    }

    /// Says why the next world cannot begin here.
    pub(super) fn leftover(&self) -> String {
        let place = self.job.nodes.as_ref().map_or(String::new(), |_| format!(" on host {}", self.host));
        format!("some processes of the ranks{place} do not end")
    }
}

const KILL_EVERY: Duration = Duration::from_millis(20);
/// Processes that take longer wait for a device.
pub(super) const CLEARED_WITHIN: Duration = Duration::from_secs(5);
