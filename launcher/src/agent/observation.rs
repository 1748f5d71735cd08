//! The agent's words about ranks that keep others waiting, and where all ranks are when that ends in a failure.

use std::time::Instant;

use tpurun_protocol::board::{self, RankView};

use super::world::World;
use crate::job::Job;
use crate::judge::foreign::Sleepers;
use crate::judge::suspects::{self, Notice, Suspects};
use crate::judge::verdict::Verdict;
use crate::judge::watch::StoppedRanks;
use crate::observe::run_dir::RunDir;
use crate::observe::stacks::StackClass;
use crate::ranks::Rank;

/// The remarkable things about ranks that run.
pub(super) struct Observation {
    watch: StoppedRanks,
    suspects: Suspects,
    /// Ranks that wait where nothing is seen of it.
    sleepers: Sleepers,
    /// The places where the ranks were when the job failed of a hang.
    stacks: Vec<StackClass>,
}

impl Observation {
    pub(super) fn new(job: &Job, run_dir: &RunDir) -> Observation {
        let (dir, file) = (run_dir.stacks_dir(), run_dir.stacks_file());
        Observation {
            watch: StoppedRanks::default(),
            suspects: Suspects::new(dir.clone(), file.clone(), job.hosts.clone()),
            sleepers: Sleepers::new(run_dir.path().to_owned(), dir, file),
            stacks: Vec::new(),
        }
    }

    /// Other ranks follow.
    pub(super) fn renew(&mut self) {
        self.watch = StoppedRanks::default();
        self.suspects = self.suspects.renewed();
        self.sleepers.forget();
        self.stacks.clear();
    }

    /// The verdict on a rank that has stopped, or left, while others wait for it.
    pub(super) fn judge(&mut self, world: &World, views: &[RankView], now: Instant) -> Option<Verdict> {
        self.watch.look(views, &world.roster.ranks, &world.roster.left, now)
    }

    /// Names the ranks that keep others waiting, in the log. Returns whether the text of timeouts to come has changed.
    pub(super) fn look_for_suspects(&mut self, world: &mut World, views: &[RankView], now: Instant) -> bool {
        if let Some(notice) = self.suspects.look(views, &world.roster.ranks, now, board::now_ns()) {
            tell(world, notice);
        }
        self.suspects.has_news()
    }

    /// The lines that timeouts of ranks here add.
    pub(super) fn suspects(&self) -> impl Iterator<Item = (u32, String)> {
        self.suspects.lines()
    }

    /// Says which ranks wait in groups of other backends.
    pub(super) fn look_for_sleepers(&mut self, world: &mut World, now: Instant) {
        if !world.phase.is_running() || !self.sleepers.is_due(now) {
            return;
        }
        let views = world.views();
        let is_in_engine = |rank: u32| views.get(rank as usize).is_some_and(|view| !view.waits.is_empty());
        let elsewhere = |(rank, one): (u32, &Rank)| {
            Some((rank, one.pid().filter(|_| one.is_alive() && !is_in_engine(rank))?))
        };
        let ranks: Vec<(u32, i32)> = (0..).zip(&world.roster.ranks).filter_map(elsewhere).collect();
        if let Some(notice) = self.sleepers.look(&ranks, now) {
            tell(world, notice);
        }
    }

    /// Asks the ranks where they are in their programs, before they hear that they wait in vain.
    pub(super) fn ask_for_stacks(&mut self, world: &World) {
        let running = world.roster.running().into_iter();
        let mut ranks: Vec<(u32, i32)> = running.map(|(pid, rank)| (rank, pid)).collect();
        ranks.sort_unstable();
        self.stacks = self.suspects.stacks("when the job hung", &ranks);
    }

    pub(super) fn stacks(&self) -> &[StackClass] {
        &self.stacks
    }
}

fn tell(world: &mut World, notice: Notice) {
    world.run_dir.event(notice.event, notice.details);
    world.say(&notice.line);
}

/// Lets timeouts to come say which ranks keep which waiting, on whatever host.
pub(super) fn note_suspects(world: &World, lines: &[(u32, String)]) {
    for group in world.control.supervisor().all() {
        group.note(&suspects::note(lines, group.world_ranks()));
    }
}
