//! The agent's words about ranks that keep others waiting, and where all ranks are when that ends in a failure.

use std::time::Instant;

use tpurun_protocol::board::{self, RankView};

use super::{Agent, Phase};
use crate::ranks::Rank;
use crate::suspects;

impl Agent {
    /// Names the ranks that keep others waiting, in the log and in the text of timeouts to come.
    pub(super) fn look_for_suspects(&mut self, views: &[RankView], now: Instant) {
        if let Some(notice) = self.suspects.look(views, &self.ranks, now, board::now_ns()) {
            self.run_dir.event(notice.event, notice.details);
            self.say(&notice.line);
        }
        if self.suspects.has_news() {
            self.tell_suspects();
            self.note_suspects();
        }
    }

    /// Says which ranks wait in groups of other backends.
    pub(super) fn look_for_sleepers(&mut self, now: Instant) {
        if !matches!(self.phase, Phase::Running) || !self.sleepers.is_due(now) {
            return;
        }
        let views = self.views();
        let is_in_engine = |rank: u32| views.get(rank as usize).is_some_and(|view| !view.waits.is_empty());
        let elsewhere = |(rank, one): (u32, &Rank)| {
            Some((rank, one.pid().filter(|_| one.is_alive() && !is_in_engine(rank))?))
        };
        let ranks: Vec<(u32, i32)> = (0..).zip(&self.ranks).filter_map(elsewhere).collect();
        if let Some(notice) = self.sleepers.look(&ranks, now) {
            self.run_dir.event(notice.event, notice.details);
            self.say(&notice.line);
        }
    }

    /// Lets timeouts to come say which ranks keep which waiting, on whatever host.
    pub(super) fn note_suspects(&self) {
        let elsewhere = || self.others.iter().flat_map(|others| others.looks.suspects()).cloned();
        let lines: Vec<(u32, String)> = self.suspects.lines().chain(elsewhere()).collect();
        for group in self.control.supervisor().all() {
            group.note(&suspects::note(&lines, group.world_ranks()));
        }
    }

    /// Asks the ranks where they are in their programs, before they hear that they wait in vain.
    pub(super) fn ask_for_stacks(&mut self) {
        let mut ranks: Vec<(u32, i32)> = self.running().into_iter().map(|(pid, rank)| (rank, pid)).collect();
        ranks.sort_unstable();
        self.stacks = self.suspects.stacks("when the job hung", &ranks);
    }
}
