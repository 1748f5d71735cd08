//! Looks at the ranks of all nodes at once, so that each agent sees who waits for whom wherever they are.
//!
//! While ranks of any node have waited for a while, node 0 asks all nodes what their ranks do, passes the answers on,
//! and says when they are complete; then all agents judge the same picture. Node 0 asks again only after that. Ranks
//! that two looks in a row have seen in the very same wait have all waited at one moment between the looks, although
//! no two clocks agree. A proof of deadlock takes just that (`wait_graph.rs`).

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use tpurun_protocol::board::{self, RankView};

use super::deliver::SECOND_LOOK;
use super::{Agent, WATCH_EVERY};
use crate::nodes::{Frame, RankSays, Said};
use crate::verdict;

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

    /// A node is gone.
    pub(super) fn expect_no_answer(&mut self, node: u32) {
        self.missing.remove(&node);
    }

    pub(super) fn keep_suspects(&mut self, node: u32, lines: Vec<(u32, String)>) {
        self.suspects.insert(node, lines);
    }
}

impl Agent {
    /// Asks for a look where ranks here have waited for a while; node 0 begins it.
    pub(super) fn look_with_others(&mut self, now: Instant) {
        let here: Vec<RankView> = self.views_here().map(|(_, view)| view).collect();
        let is_uneasy = verdict::is_anybody_blocked(&here, board::now_ns(), UNEASY_AFTER);
        let Some(others) = &mut self.others else { return };
        let is_first = others.nodes().is_first();
        if is_uneasy && !is_first {
            others.nodes().tell(&Frame::Uneasy);
        }
        if is_uneasy && is_first {
            others.looks.wanted_until = Some(now + WANTED_FOR);
        }
        let looks = &others.looks;
        let is_wanted = looks.wanted_until.is_some_and(|until| now < until);
        if is_first && is_wanted && looks.missing.is_empty() && now >= looks.next {
            let number = looks.number + 1;
            let count = others.nodes().count();
            others.looks.missing = (1..count).collect();
            others.nodes().tell(&Frame::Look { number });
            self.say_what_ranks_do(number);
        }
    }

    pub(super) fn on_uneasy(&mut self) {
        if let Some(others) = &mut self.others {
            others.looks.wanted_until = Some(Instant::now() + WANTED_FOR);
            self.next_watch = self.next_watch.min(others.looks.next);
        }
    }

    /// A look begins: tells all nodes what the ranks here do.
    pub(super) fn say_what_ranks_do(&mut self, number: u64) {
        let now_ns = board::now_ns();
        let (mut groups, messages) = self.control.supervisor().known();
        self.control.supervisor_mut().begin_look();
        let fresh: Vec<(u32, RankView)> = self.views_here().collect();
        let Some(others) = &mut self.others else { return };
        let looks = &mut others.looks;
        looks.number = number;
        let told = &mut looks.told_groups;
        groups.retain(|group| told.insert(group.comm_id, group.has_failed) != Some(group.has_failed));
        let mut said = Said { ranks: vec![], groups, messages };
        for (rank, view) in fresh {
            let before = &mut looks.views[rank as usize];
            if *before != view {
                said.ranks.push(RankSays::new(rank, &view, now_ns));
                *before = view;
            }
        }
        let node = others.nodes().node;
        others.nodes().tell(&Frame::Seen { number, node, said });
    }

    /// Takes in what another node says of its ranks; node 0 passes that on to all.
    pub(super) fn on_seen(&mut self, number: u64, node: u32, said: Said) {
        let now_ns = board::now_ns();
        let Some(others) = &mut self.others else { return };
        let (nodes, looks) = others.parts();
        let is_of_node = |rank: u32| nodes.ranks_of(node).contains(&rank);
        let is_known = |rank: &u32| *rank < nodes.ranks();
        let is_plausible = number == looks.number
            && said.ranks.iter().all(|says| is_of_node(says.rank))
            && said.groups.iter().all(|group| group.members.iter().all(is_known));
        if !is_plausible {
            return self.run_dir.event("unexpected look", serde_json::json!({"node": node}));
        }
        if nodes.is_first() {
            nodes.tell_but(&Frame::Seen { number, node, said: said.clone() }, Some(node));
            looks.missing.remove(&node);
        }
        for says in said.ranks {
            let rank = says.rank as usize;
            looks.views[rank] = says.view(now_ns).unwrap_or_default();
        }
        let is_complete = nodes.is_first() && looks.missing.is_empty();
        if is_complete {
            nodes.tell(&Frame::Complete { number });
        }
        self.control.supervisor_mut().hear(node, said.groups, &said.messages);
        if is_complete {
            self.on_complete(number);
        }
    }

    /// All agents have the same picture now.
    pub(super) fn on_complete(&mut self, number: u64) {
        let now = Instant::now();
        let Some(others) = &mut self.others else { return };
        if others.looks.number != number {
            return;
        }
        self.control.supervisor_mut().end_look();
        let mut views = others.looks.views.clone();
        for (rank, view) in &self.views_elsewhere {
            views[*rank as usize] = view.clone();
        }
        self.judge_waits(&views, now);
        // Only node 0 is ever suspicious, and begins the next one.
        let pause = if self.is_suspicious() { SECOND_LOOK } else { WATCH_EVERY };
        if let Some(others) = &mut self.others {
            others.looks.next = now + pause;
            self.next_watch = self.next_watch.min(now + pause);
        }
    }

    /// The ranks of this node, each with its view on the board.
    fn views_here(&self) -> impl Iterator<Item = (u32, RankView)> {
        self.job.here.clone().map(|rank| (rank, self.board.read(rank)))
    }
}

/// Ranks wait for each other all the time; looks at all nodes are for those that wait for long.
const UNEASY_AFTER: Duration = Duration::from_millis(500);
/// Time for which looks go on after a node was uneasy, so that all see, too, that it is over.
const WANTED_FOR: Duration = Duration::from_secs(1);
