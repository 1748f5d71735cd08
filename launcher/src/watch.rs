//! Looks at the ranks from time to time, for failures that no exit code tells of.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use tpurun_collectives::board::{self, Board, RankView};

use crate::processes::Process;
use crate::ranks::Rank;
use crate::verdict::{self, Verdict};

/// Remembers since when ranks have been stopped.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    stopped_since: HashMap<u32, Instant>,
}

impl Watch {
    /// A failure that shows only in what the others wait for. `left` are the ranks that exited with code 0.
    pub(crate) fn look(
        &mut self,
        views: &[RankView],
        ranks: &[Rank],
        left: &[u32],
        now: Instant,
    ) -> Option<Verdict> {
        let now_ns = board::now_ns();
        if !verdict::is_anybody_blocked(views, now_ns, verdict::NOTICED_AFTER) {
            self.stopped_since.clear();
        } else {
            self.note_stopped(ranks, now);
        }
        let stopped: Vec<(u32, Duration)> =
            self.stopped_since.iter().map(|(rank, since)| (*rank, now - *since)).collect();
        verdict::of_leaving(left, views, now_ns, now)
            .or_else(|| verdict::of_stopping(&stopped, views, now_ns, now))
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

/// What all ranks say of themselves.
pub(crate) fn views(board: &Board) -> Vec<RankView> {
    (0..board.world()).map(|rank| board.read(rank)).collect()
}
