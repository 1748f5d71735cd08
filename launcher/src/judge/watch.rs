//! Looks at the ranks from time to time, for failures that no exit code tells of.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use tpurun_protocol::board::{self, Board, RankView};

use crate::base::rank_set::RankSet;
use crate::judge::verdict::{self, Verdict};
use crate::processes::{self, Process};
use crate::ranks::Rank;

/// Remembers since when ranks have been stopped.
#[derive(Debug, Default)]
pub(crate) struct StoppedRanks {
    stopped_since: HashMap<u32, Instant>,
    /// The ranks that ask the store which a stopped rank holds, and since when.
    asking: BTreeMap<u32, (RankSet, Instant)>,
    looked: Option<Instant>,
}

impl StoppedRanks {
    /// A failure that shows only in what the others wait for. `left` are the ranks that exited with code 0.
    pub(crate) fn look(
        &mut self,
        views: &[RankView],
        ranks: &[Rank],
        left: &[u32],
        now: Instant,
    ) -> Option<Verdict> {
        let now_ns = board::now_ns();
        // Whoever waits for a store is not on the board.
        let is_time = self.looked.is_none_or(|looked| now >= looked + LOOK_EVERY);
        if is_time || verdict::is_anybody_blocked(views, now_ns, verdict::NOTICED_AFTER) {
            self.note_stopped(ranks, now);
        }
        if is_time {
            self.looked = Some(now);
            self.note_asking(ranks, now);
        }
        let stopped: Vec<(u32, Duration)> =
            self.stopped_since.iter().map(|(rank, since)| (*rank, now - *since)).collect();
        verdict::of_leaving(left, views, now_ns, now)
            .or_else(|| verdict::of_stopping(&stopped, views, now_ns, now))
            .or_else(|| verdict::of_stores(&stopped, &self.asked_for(now), now))
    }

    fn asked_for(&self, now: Instant) -> BTreeMap<u32, (RankSet, Duration)> {
        self.asking.iter().map(|(rank, (asking, since))| (*rank, (asking.clone(), now - *since))).collect()
    }

    fn note_asking(&mut self, ranks: &[Rank], now: Instant) {
        let alive = || (0_u32..).zip(ranks).filter(|(_, state)| state.is_alive());
        let pids = || alive().filter_map(|(rank, state)| Some((rank, state.pid()?)));
        let held = pids()
            .filter(|(rank, pid)| self.stopped_since.contains_key(rank) && processes::holds_store(*pid));
        // A rank that is stopped, too, waits for nothing.
        let others = || pids().filter(|(rank, _)| !self.stopped_since.contains_key(rank));
        let asked = held.map(|(rank, pid)| (rank, processes::waiting_for(pid, others())));
        let asked: Vec<(u32, RankSet)> = asked.filter(|(_, asking)| !asking.is_empty()).collect();
        let before = std::mem::take(&mut self.asking);
        self.asking = asked
            .into_iter()
            .map(|(rank, asking)| (rank, (asking, before.get(&rank).map_or(now, |(_, since)| *since))))
            .collect();
    }

    fn note_stopped(&mut self, ranks: &[Rank], now: Instant) {
        for (rank, state) in (0_u32..).zip(ranks) {
            let pid = if state.is_alive() { state.pid() } else { None };
            // A debugger stops its process in another way ('t'), on purpose.
            if pid.and_then(Process::read).is_some_and(|process| process.state == 'T') {
                self.stopped_since.entry(rank).or_insert(now);
            } else {
                self.stopped_since.remove(&rank);
            }
        }
    }
}

/// How often ranks are looked at while none waits in the engine: each look reads a file for every rank.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The views of all ranks, as they say of themselves.
pub(crate) fn views(board: &Board) -> Vec<RankView> {
    (0..board.world()).map(|rank| board.read(rank)).collect()
}
