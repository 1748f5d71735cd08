//! Ranks whose programs have ended and whose processes have not, since a thread keeps them.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use serde_json::json;
use tpurun_protocol::board;

use super::phase::WorldPhase;
use super::world::World;
use crate::judge::verdict::{self, WaitingRanks};
use crate::ranks::Ending;

/// The ranks of one world that linger.
#[derive(Debug, Default)]
pub(super) struct Lingering {
    since: HashMap<u32, Instant>,
    /// Ranks that have been named because others wait for them.
    suspected: HashSet<u32>,
}

impl Lingering {
    /// A program that has failed is over, also while a thread that it has left keeps its process. Returns the ranks
    /// whose programs have failed so.
    pub(super) fn look(&mut self, world: &mut World, now: Instant) -> Vec<(u32, Ending)> {
        if !matches!(world.phase, WorldPhase::Running | WorldPhase::Settling { .. }) {
            return Vec::new();
        }
        let running = world.roster.running().into_values().filter(|rank| !world.roster.has_failed(*rank));
        let ended: Vec<(u32, Ending)> =
            running.filter_map(|rank| Some((rank, world.run_dir.program_end_of(rank)?))).collect();
        let mut failed = Vec::new();
        for (rank, ending) in ended {
            let since = *self.since.entry(rank).or_insert(now);
            if ending == Ending::Exit(0) {
                self.suspect(world, rank, now);
            } else if now >= since + LINGERS_FOR {
                world.run_dir.event("program ended", json!({"rank": rank}));
                failed.push((rank, ending));
            }
        }
        failed
    }

    /// A thread that outlives a program which has ended well may still post what others wait for: no proof, but they
    /// should know. Says so once.
    fn suspect(&mut self, world: &mut World, rank: u32, now: Instant) {
        if self.suspected.contains(&rank) {
            return;
        }
        let verdict = verdict::of_leaving(&[rank], &world.views(), board::now_ns(), now);
        let Some(waiting) = verdict.and_then(|verdict| verdict.waiting) else { return };
        self.suspected.insert(rank);
        let WaitingRanks { ranks, group, .. } = waiting;
        let (noun, verb) = if ranks.len() == 1 { ("rank", "waits") } else { ("ranks", "wait") };
        world.run_dir.event("program lingers", json!({"rank": rank, "waiting": ranks.to_string()}));
        world.say(&format!(
            "suspect: the program of rank {rank} has ended, but a thread that is no daemon keeps its process; \
             {noun} {ranks} {verb} for it in group {group}"
        ));
    }
}

/// An interpreter that goes down takes less.
const LINGERS_FOR: Duration = Duration::from_millis(500);
