//! The communicators of the job's ranks, as the agent sees them: where verdicts are delivered.
//!
//! Every segment that ranks hand to each other passes through the agent, which keeps it mapped while any of
//! its ranks may use it.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;

use tpurun_memory::FailureKind;
use tpurun_protocol::supervise::{MessagesBetween, Supervised};

use crate::judge::wait_graph::Groups;
use crate::nodes::{GroupSays, MessagesSays};

/// By the number that the board shows; a group that was destroyed and made again under its old name has
/// several lives.
#[derive(Debug, Default)]
pub(crate) struct Supervisor {
    groups: HashMap<u64, Vec<Supervised>>,
    lives: usize,
    /// The bytes of address space that the segments of all lives take.
    bytes: usize,
    /// Ranks of the job: no group has more.
    ranks: u32,
    elsewhere: Elsewhere,
}

impl Supervisor {
    pub(crate) fn new(ranks: u32, spread: Spread) -> Supervisor {
        Supervisor { ranks, elsewhere: Elsewhere { spread, ..Elsewhere::default() }, ..Supervisor::default() }
    }

    /// Keeps an eye on a segment; one that is not ours, or one too many, goes on without.
    pub(crate) fn add(&mut self, segment: &OwnedFd) -> Option<&Supervised> {
        if self.lives >= MAX_LIVES {
            return None;
        }
        let supervised = Supervised::open(segment, self.ranks).ok()?;
        if self.bytes.saturating_add(supervised.bytes()) > MAX_BYTES {
            return None;
        }
        self.lives += 1;
        self.bytes += supervised.bytes();
        let lives = self.groups.entry(supervised.comm_id()).or_default();
        lives.push(supervised);
        lives.last()
    }

    /// Lets go of communicators that every rank has destroyed or left.
    pub(crate) fn forget(&mut self, has_ended: impl Fn(u32) -> bool) {
        let is_over = |group: &Supervised| {
            (0_u32..)
                .zip(group.world_ranks())
                .all(|(rank, world_rank)| group.is_closed(rank) || has_ended(*world_rank))
        };
        for lives in self.groups.values_mut() {
            lives.retain(|group| !is_over(group));
        }
        self.groups.retain(|_, lives| !lives.is_empty());
        self.lives = self.groups.values().map(Vec::len).sum();
        self.bytes = self.all().map(Supervised::bytes).sum();
    }

    /// Communicators that need `rank`: it is in them, and has not destroyed its end.
    pub(crate) fn of_rank(&self, rank: u32) -> impl Iterator<Item = &Supervised> {
        self.groups.values().flatten().filter(move |group| {
            let place = (0_u32..).zip(group.world_ranks()).find(|(_, world_rank)| **world_rank == rank);
            place.is_some_and(|(place, _)| !group.is_closed(place))
        })
    }

    /// All of them.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Supervised> {
        self.groups.values().flatten()
    }

    /// All ranks of these communicators will raise the same text, and blame the same; who sleeps does so only when
    /// [`announce`](Self::announce) wakes it.
    pub(crate) fn fail_quietly(&self, comm_ids: &[u64], kind: FailureKind, text: &str, guilty: &[u32]) {
        self.lives_of(comm_ids).for_each(|group| group.fail_quietly(kind, text, guilty));
    }

    pub(crate) fn announce(&self, comm_ids: &[u64]) {
        self.lives_of(comm_ids).for_each(Supervised::announce);
    }

    fn lives_of(&self, comm_ids: &[u64]) -> impl Iterator<Item = &Supervised> {
        comm_ids.iter().filter_map(|comm_id| self.groups.get(comm_id)).flatten()
    }

    /// Whether it has failed, or is not known.
    pub(crate) fn has_failed(&self, comm_id: u64) -> bool {
        let elsewhere = &self.elsewhere;
        match self.current(comm_id) {
            Some(group) => group.failure().is_some(),
            None => elsewhere.failed.contains(&comm_id) || !elsewhere.members.contains_key(&comm_id),
        }
    }

    /// This rank cannot join its communicator, which the others wait for.
    pub(crate) fn fail_creation(&self, comm_id: u64, rank: u32, text: &str) {
        if let Some(group) = self.current(comm_id).filter(|group| group.world_ranks().contains(&rank)) {
            group.fail_creation(FailureKind::Aborted, text, &[rank]);
        }
    }

    fn current(&self, comm_id: u64) -> Option<&Supervised> {
        self.groups.get(&comm_id)?.last()
    }

    /// Communicators of ranks here, and what is known here of the messages between their ranks.
    pub(crate) fn known(&self) -> (Vec<GroupSays>, Vec<MessagesSays>) {
        let (mut groups, mut messages) = (Vec::new(), Vec::new());
        for (comm_id, lives) in &self.groups {
            let Some(current) = lives.last() else { continue };
            let members = current.world_ranks();
            let has_failed = current.failure().is_some();
            groups.push(GroupSays { comm_id: *comm_id, members: members.to_vec(), has_failed });
            let is_here = |rank: u32| self.elsewhere.spread.is_here(members[rank as usize]);
            let size = members.len() as u32;
            for here in (0..size).filter(|rank| is_here(*rank)) {
                // If both ranks are here, the sender's host speaks.
                let pairs = (0..size).flat_map(|other| [(here, other), (other, here)]);
                for (from, to) in pairs.filter(|(from, _)| *from == here || !is_here(*from)) {
                    let between = between(lives, from, to);
                    if between != MessagesBetween::default() {
                        messages.push(MessagesSays::new(*comm_id, from, to, between));
                    }
                }
            }
        }
        (groups, messages)
    }

    /// Another look at all ranks begins: what nodes said of messages at the one before is over.
    pub(crate) fn begin_look(&mut self) {
        self.elsewhere.messages.clear();
    }

    /// All nodes have said what they know.
    pub(crate) fn end_look(&mut self) {
        let here =
            self.groups.iter().filter_map(|(comm_id, lives)| Some((*comm_id, lives.last()?.world_ranks())));
        let there = self.elsewhere.members.iter().map(|(comm_id, members)| (*comm_id, &**members));
        let told = here.chain(there).filter(|(comm_id, members)| self.elsewhere.is_known(*comm_id, members));
        self.elsewhere.told = told.map(|(comm_id, _)| comm_id).collect();
    }

    /// Takes in what a node says at a look.
    pub(crate) fn hear(&mut self, node: u32, groups: Vec<GroupSays>, messages: &[MessagesSays]) {
        let elsewhere = &mut self.elsewhere;
        for GroupSays { comm_id, members, has_failed } in groups {
            elsewhere.known_by.insert((comm_id, node));
            if has_failed {
                elsewhere.failed.insert(comm_id);
            } else {
                elsewhere.failed.remove(&comm_id);
            }
            elsewhere.members.insert(comm_id, members);
        }
        for crossing in messages {
            let between =
                elsewhere.messages.entry((crossing.comm_id, crossing.from, crossing.to)).or_default();
            *between = between.and(crossing.between());
        }
    }
}

/// Each life has what its ranks posted; of pretended hosts each has a segment of the same life.
fn between(lives: &[Supervised], from: u32, to: u32) -> MessagesBetween {
    let current = lives.last().is_some_and(|group| !group.is_bridged());
    let first = if current { lives.len() - 1 } else { 0 };
    lives[first..]
        .iter()
        .map(|group| group.between(from, to))
        .fold(MessagesBetween::default(), MessagesBetween::and)
}

/// Which node each rank of the world is on; nothing where there is only one.
#[derive(Debug, Default)]
pub(crate) struct Spread {
    pub(crate) node_of: Vec<u32>,
    pub(crate) own: u32,
}

impl Spread {
    fn is_here(&self, rank: u32) -> bool {
        self.node_of.get(rank as usize).is_none_or(|node| *node == self.own)
    }
}

/// The words of agents of other nodes.
#[derive(Debug, Default)]
struct Elsewhere {
    spread: Spread,
    members: HashMap<u64, Vec<u32>>,
    failed: HashSet<u64>,
    /// Communicators, and who has said that it knows them.
    known_by: HashSet<(u64, u32)>,
    /// Communicators that all nodes with ranks of them know, as of the last look.
    told: HashSet<u64>,
    /// By communicator, sender and receiver.
    messages: HashMap<(u64, u32, u32), MessagesBetween>,
}

impl Elsewhere {
    fn is_known(&self, comm_id: u64, members: &[u32]) -> bool {
        let nodes = members.iter().filter_map(|rank| self.spread.node_of.get(*rank as usize));
        nodes.copied().all(|node| node == self.spread.own || self.known_by.contains(&(comm_id, node)))
    }

    /// Whether all that is known of the messages of a communicator is known here.
    fn is_told(&self, comm_id: u64) -> bool {
        self.spread.node_of.is_empty() || self.told.contains(&comm_id)
    }
}

impl Groups for Supervisor {
    fn members(&self, comm_id: u64) -> Option<&[u32]> {
        let here = self.current(comm_id).map(Supervised::world_ranks);
        here.or_else(|| self.elsewhere.members.get(&comm_id).map(Vec::as_slice))
    }

    fn between(&self, comm_id: u64, from: u32, to: u32) -> Option<MessagesBetween> {
        let lives = self.groups.get(&comm_id);
        if lives.is_none() && !self.elsewhere.members.contains_key(&comm_id) {
            return None;
        }
        if !self.elsewhere.is_told(comm_id) {
            // A message that is not known may be on its way.
            return Some(MessagesBetween { sends: 1, receives: 1, any_receives: 0, in_flight: true });
        }
        let here = lives.map(|lives| between(lives, from, to)).unwrap_or_default();
        let there = self.elsewhere.messages.get(&(comm_id, from, to)).copied().unwrap_or_default();
        Some(here.and(there))
    }
}

/// Each is a mapping of this process, of which Linux allows 65,530 by default.
const MAX_LIVES: usize = 32_768;
/// A quarter of the addresses that a process has: what ranks offer leaves room for what the agent needs.
const MAX_BYTES: usize = 1 << 45;
