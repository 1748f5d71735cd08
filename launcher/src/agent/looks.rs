//! Looks at the ranks of all nodes at once, so that each agent sees who waits for whom wherever they are.
//!
//! While ranks of any node have waited for a while, node 0 asks all nodes what their ranks do, passes the answers on,
//! and says when they are complete; then all agents judge the same picture. Node 0 asks again only after that. Ranks
//! that two looks in a row have seen in the very same wait have all waited at one moment between the looks, although
//! no two clocks agree. A proof of deadlock takes just that (`judge/wait_graph/`).

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use tpurun_protocol::board::{self, RankView};

use super::command::Instruction;
use super::world::World;
use crate::judge::verdict;
use crate::nodes::{Frame, LookAnswer, Nodes, RankSays};

/// The views of all ranks at the last complete look, and the state of the next one.
#[derive(Debug)]
pub(super) struct Looks {
    views: Vec<RankView>,
    /// Number of the look that is under way, or of the last one.
    number: u64,
    /// Node 0: the nodes that have not answered yet.
    missing: HashSet<u32>,
    /// Node 0: somebody wants to know until then.
    wanted_until: Option<Instant>,
    next: Instant,
    /// Communicators, and whether they have failed.
    told_groups: HashMap<u64, bool>,
    /// By node: lines that timeouts add.
    suspects: HashMap<u32, Vec<(u32, String)>>,
}

impl Looks {
    pub(super) fn new(ranks: u32) -> Looks {
        Looks {
            views: vec![RankView::default(); ranks as usize],
            number: 0,
            missing: HashSet::new(),
            wanted_until: None,
            next: Instant::now(),
            told_groups: HashMap::new(),
            suspects: HashMap::new(),
        }
    }

    /// Lines of ranks on other nodes that keep others waiting.
    pub(super) fn suspects(&self) -> impl Iterator<Item = &(u32, String)> {
        self.suspects.values().flatten()
    }

    /// Somebody wants to know, here or on another node. Returns the time of the next look.
    pub(super) fn want(&mut self, now: Instant) -> Instant {
        self.wanted_until = Some(now + WANTED_FOR);
        self.next
    }

    /// Whether the next look begins now.
    fn is_due(&self, now: Instant) -> bool {
        let is_wanted = self.wanted_until.is_some_and(|until| now < until);
        is_wanted && self.missing.is_empty() && now >= self.next
    }

    /// The next look does not begin before this time.
    pub(super) fn pause_until(&mut self, next: Instant) {
        self.next = next;
    }

    /// A node is gone.
    pub(super) fn expect_no_answer(&mut self, node: u32) {
        self.missing.remove(&node);
    }

    pub(super) fn keep_suspects(&mut self, node: u32, lines: Vec<(u32, String)>) {
        self.suspects.insert(node, lines);
    }

    /// Asks for a look where ranks here have waited for a while; node 0 begins it.
    pub(super) fn ask(&mut self, nodes: &Nodes, world: &mut World, now: Instant) {
        let here: Vec<RankView> = world.views_here().map(|(_, view)| view).collect();
        let is_uneasy = verdict::is_anybody_blocked(&here, board::now_ns(), UNEASY_AFTER);
        let is_first = nodes.is_first();
        if is_uneasy && !is_first {
            nodes.tell(&Frame::Uneasy);
        }
        if is_uneasy && is_first {
            self.want(now);
        }
        if is_first && self.is_due(now) {
            let number = self.number + 1;
            self.missing = (1..nodes.count()).collect();
            nodes.tell(&Frame::Look { number });
            self.say_what_ranks_do(nodes, world, number);
        }
    }

    /// A look begins: tells all nodes what the ranks here do.
    pub(super) fn say_what_ranks_do(&mut self, nodes: &Nodes, world: &mut World, number: u64) {
        let now_ns = board::now_ns();
        let (mut groups, messages) = world.control.supervisor().known();
        world.control.supervisor_mut().begin_look();
        self.number = number;
        let told = &mut self.told_groups;
        groups.retain(|group| told.insert(group.comm_id, group.has_failed) != Some(group.has_failed));
        let mut said = LookAnswer { ranks: vec![], groups, messages };
        for (rank, view) in world.views_here() {
            let before = &mut self.views[rank as usize];
            if *before != view {
                said.ranks.push(RankSays::new(rank, &view, now_ns));
                *before = view;
            }
        }
        nodes.tell(&Frame::Seen { number, node: nodes.node, said });
    }

    /// Takes in what another node says of its ranks; node 0 passes that on to all.
    pub(super) fn on_seen(
        &mut self,
        nodes: &Nodes,
        world: &mut World,
        number: u64,
        node: u32,
        said: LookAnswer,
    ) -> Option<Instruction> {
        let now_ns = board::now_ns();
        let is_of_node = |rank: u32| nodes.ranks_of(node).contains(&rank);
        let is_known = |rank: &u32| *rank < nodes.ranks();
        let is_plausible = number == self.number
            && said.ranks.iter().all(|says| is_of_node(says.rank))
            && said.groups.iter().all(|group| group.members.iter().all(is_known));
        if !is_plausible {
            world.run_dir.event("unexpected look", serde_json::json!({"node": node}));
            return None;
        }
        if nodes.is_first() {
            nodes.tell_but(&Frame::Seen { number, node, said: said.clone() }, Some(node));
            self.missing.remove(&node);
        }
        for says in said.ranks {
            let rank = says.rank as usize;
            self.views[rank] = says.view(now_ns).unwrap_or_default();
        }
        let is_complete = nodes.is_first() && self.missing.is_empty();
        if is_complete {
            nodes.tell(&Frame::Complete { number });
        }
        world.control.supervisor_mut().hear(node, said.groups, &said.messages);
        if is_complete { self.on_complete(world, number) } else { None }
    }

    /// All agents have the same picture now.
    pub(super) fn on_complete(&mut self, world: &mut World, number: u64) -> Option<Instruction> {
        if self.number != number {
            return None;
        }
        world.control.supervisor_mut().end_look();
        let mut views = self.views.clone();
        world.add_views_elsewhere(&mut views);
        Some(Instruction::JudgeTogether(views))
    }
}

/// Ranks wait for each other all the time; looks at all nodes are for those that wait for long.
const UNEASY_AFTER: Duration = Duration::from_millis(500);
/// Time for which looks go on after a node was uneasy, so that all see, too, that it is over.
const WANTED_FOR: Duration = Duration::from_secs(1);
