//! The graph of the ranks that wait for each other, and the proof that none of them can ever go on.
//!
//! A rank is *stuck* when every thread of it that runs Python waits in the engine, and each of these waits,
//! and each of its operations in flight, needs a rank that is stuck itself or has finished. The largest such
//! set is found by taking away every rank that could still go on, until none is left to take away (the
//! greatest fixpoint; Knapp, "Deadlock Detection in Distributed Databases", 1987, for the AND/OR model).
//! Things that can not be seen (a thread in user code, a lock, another backend, a lane that is not on the board)
//! count as "could still go on": there is no false alarm, and some deadlocks end by timeout only.
//!
//! Ranks are not read all at once. A set is proven only when the same set was found twice, with every rank in
//! the very same waits: then all of them waited together at the time between, when the first was judged.

#[cfg(test)]
mod tests;
mod text;

use std::collections::{BTreeMap, BTreeSet};

use petgraph::algo::{astar, tarjan_scc};
use petgraph::graphmap::DiGraphMap;
use tpurun_protocol::board::{LANES, LaneView, RankView, WaitKind, WaitView};
use tpurun_protocol::supervise::MessagesBetween;

pub(crate) use text::{Names, describe};

/// The facts about communicators that are not on the board.
pub(crate) trait Groups {
    /// The ranks of a communicator by their rank in the world; `None` when it is not known.
    fn members(&self, comm_id: u64) -> Option<&[u32]>;
    /// The messages between two of its ranks (in its own numbering); `None` when it is not known.
    fn between(&self, comm_id: u64, from: u32, to: u32) -> Option<MessagesBetween>;
}

/// All ranks as seen at one time.
pub(crate) struct World<'a> {
    pub(crate) views: &'a [RankView],
    /// Whether each rank has ended: it will post nothing any more.
    pub(crate) ended: &'a [bool],
    pub(crate) groups: &'a dyn Groups,
}

/// Ranks that are stuck, with what tells whether they have been since.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stuck {
    ranks: BTreeMap<u32, Evidence>,
}

impl Stuck {
    pub(crate) fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }
}

/// Changes as soon as a rank does anything that matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Evidence {
    tokens: Vec<u64>,
    lanes: Vec<(u64, u64, u64)>,
}

/// The operation that `rank` waits for, and those of the ranks it needs that are stuck or finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Edge {
    pub(crate) rank: u32,
    pub(crate) comm_id: u64,
    pub(crate) kind: WaitKind,
    /// The token of the thread that waits; 0 for a collective that is in flight anyway.
    token: u64,
    /// Ranks of the world.
    pub(crate) needs: BTreeSet<u32>,
}

/// Operations that can never complete.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Deadlock {
    /// The edges of the graph, sorted by rank.
    pub(crate) edges: Vec<Edge>,
    /// Finished ranks that are waited for; empty for a circle.
    pub(crate) finished: BTreeSet<u32>,
}

impl Deadlock {
    /// The communicators that can not go on.
    pub(crate) fn comm_ids(&self) -> BTreeSet<u64> {
        self.edges.iter().map(|edge| edge.comm_id).collect()
    }

    /// The ranks that others of the circle wait for, without those that only hang on it.
    fn waited_for(&self) -> BTreeSet<u32> {
        let mut ranks: BTreeSet<u32> = self.edges.iter().map(|edge| edge.rank).collect();
        loop {
            let waiting = self.edges.iter().filter(|edge| ranks.contains(&edge.rank));
            let needed: BTreeSet<u32> = waiting.flat_map(|edge| edge.needs.iter().copied()).collect();
            let before = ranks.len();
            ranks.retain(|rank| needed.contains(rank));
            if ranks.len() == before {
                return ranks;
            }
        }
    }

    /// The ranks that are to blame: the finished, else the fewest of a circle that did it another way than all others
    /// of it.
    pub(crate) fn guilty(&self) -> Vec<u32> {
        if !self.finished.is_empty() {
            return self.finished.iter().copied().collect();
        }
        let waited_for = self.waited_for();
        let mut classes: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
        for edge in self.edges.iter().filter(|edge| waited_for.contains(&edge.rank)) {
            classes.entry(edge.comm_id).or_default().insert(edge.rank);
        }
        let fewest = classes.values().map(BTreeSet::len).min().unwrap_or(0);
        let mut smallest = classes.values().filter(|ranks| ranks.len() == fewest);
        match (smallest.next(), smallest.next()) {
            (Some(ranks), None) if classes.len() > 1 => ranks.iter().copied().collect(),
            _ => Vec::new(),
        }
    }
}

/// The condition for a wait to end.
enum Needs {
    /// Each of these ranks; none when it will end by itself.
    All(BTreeSet<u32>),
    /// Any one of these.
    Any(BTreeSet<u32>),
    Unknown,
}

impl World<'_> {
    /// Operations that need a rank which has finished: a proof as soon as the same was seen twice, whatever
    /// else is running.
    pub(crate) fn waits_for_finished(&self, has_failed: impl Fn(u64) -> bool) -> Option<Deadlock> {
        let mut found: BTreeMap<u64, Deadlock> = BTreeMap::new();
        for (rank, view) in (0_u32..).zip(self.views).filter(|(rank, _)| !self.is_ended(*rank)) {
            for (comm_id, kind, token) in observed(view).filter(|(comm_id, ..)| !has_failed(*comm_id)) {
                let needs = self.finished(rank, comm_id, kind);
                if !needs.is_empty() {
                    let deadlock = found.entry(comm_id).or_default();
                    deadlock.finished.extend(&needs);
                    deadlock.edges.push(Edge { rank, comm_id, kind, token, needs });
                }
            }
        }
        found.into_values().next()
    }

    /// The finished ranks without which this can not end.
    fn finished(&self, rank: u32, comm_id: u64, kind: WaitKind) -> BTreeSet<u32> {
        match self.needs(rank, comm_id, kind) {
            Needs::All(needs) => {
                needs.into_iter().filter(|other| self.is_out(*other, comm_id, kind)).collect()
            }
            Needs::Any(needs) if needs.iter().all(|other| self.is_out(*other, comm_id, kind)) => needs,
            _ => BTreeSet::new(),
        }
    }

    /// The ranks that seem stuck; with `before`, of those that seemed so then and have not moved since. Proven
    /// when the answer is `before` itself.
    pub(crate) fn stuck(&self, before: Option<&Stuck>) -> Stuck {
        let mut ranks: BTreeMap<u32, Evidence> = (0_u32..)
            .zip(self.views)
            .filter(|(rank, view)| !self.is_ended(*rank) && is_all_waiting(view))
            .map(|(rank, view)| (rank, evidence(view)))
            .filter(|(rank, now)| before.is_none_or(|before| before.ranks.get(rank) == Some(now)))
            .collect();
        loop {
            let could_go_on: Vec<u32> =
                ranks.keys().copied().filter(|rank| !self.is_doomed(*rank, &ranks)).collect();
            if could_go_on.is_empty() {
                return Stuck { ranks };
            }
            could_go_on.iter().for_each(|rank| drop(ranks.remove(rank)));
        }
    }

    /// A circle among ranks that are proven stuck, as short as there is one.
    pub(crate) fn circle(&self, proven: &Stuck) -> Option<Deadlock> {
        let edges: Vec<Edge> = proven.ranks.keys().flat_map(|rank| self.edges(*rank, proven)).collect();
        let mut graph: DiGraphMap<u32, ()> = DiGraphMap::new();
        for edge in &edges {
            graph.extend(edge.needs.iter().map(|other| (edge.rank, *other)));
        }
        let circle = shortest_circle(&graph)?;
        // Everybody who waits in the same operations for somebody of the circle is part of the story.
        let on_circle = |edge: &&Edge| {
            circle.contains(&edge.rank) && edge.needs.iter().any(|other| circle.contains(other))
        };
        let waits: BTreeSet<(u64, Option<u64>)> =
            edges.iter().filter(on_circle).map(|edge| (edge.comm_id, seq(edge.kind))).collect();
        let told = |edge: &Edge| {
            circle.contains(&edge.rank)
                || waits.contains(&(edge.comm_id, seq(edge.kind))) && seq(edge.kind).is_some()
        };
        let edges = edges.into_iter().filter(told).collect();
        Some(Deadlock { edges, finished: BTreeSet::new() })
    }

    fn edges(&self, rank: u32, proven: &Stuck) -> Vec<Edge> {
        let waits = self.views[rank as usize].waits.iter();
        waits
            .filter_map(|view| {
                let (comm_id, kind) = (view.wait.comm_id, view.wait.kind);
                let needs = match self.needs(rank, comm_id, kind) {
                    Needs::All(needs) | Needs::Any(needs) => needs,
                    Needs::Unknown => return None,
                };
                let needs = needs.into_iter().filter(|other| proven.ranks.contains_key(other)).collect();
                Some(Edge { rank, comm_id, kind, token: view.token, needs })
            })
            .collect()
    }

    fn is_doomed(&self, rank: u32, stuck: &BTreeMap<u32, Evidence>) -> bool {
        let is_hopeless =
            |other: &u32, comm_id, kind| stuck.contains_key(other) || self.is_out(*other, comm_id, kind);
        let never_ends = |(comm_id, kind)| match self.needs(rank, comm_id, kind) {
            Needs::All(needs) => needs.iter().any(|other| is_hopeless(other, comm_id, kind)),
            Needs::Any(needs) => needs.iter().all(|other| is_hopeless(other, comm_id, kind)),
            Needs::Unknown => false,
        };
        let view = &self.views[rank as usize];
        let mut waits = view.waits.iter().map(|view| (view.wait.comm_id, view.wait.kind));
        // An operation in flight could end, and the code that runs then could post. Asked last: it takes a look at
        // every other rank of each group, and while many ranks begin, none of them is doomed.
        waits.all(never_ends) && self.pending(view).into_iter().all(never_ends)
    }

    /// The collectives and messages of a rank that have not ended, and whose end somebody would notice.
    fn pending(&self, view: &RankView) -> Vec<(u64, WaitKind)> {
        let mut pending = Vec::new();
        for lane in view.lanes.iter().filter(|lane| !lane.closed) {
            if let Some(seq) = lane.awaited() {
                pending.push((lane.comm_id, WaitKind::Collective { seq }));
            }
            let me = lane.comm_rank;
            for other in (0..lane.size).filter(|other| *other != me) {
                let out = self.groups.between(lane.comm_id, me, other).unwrap_or_default();
                let back = self.groups.between(lane.comm_id, other, me).unwrap_or_default();
                if out.sends > 0 {
                    pending.push((lane.comm_id, WaitKind::Send { to: other }));
                }
                if back.receives > 0 {
                    pending.push((lane.comm_id, WaitKind::Recv { from: Some(other) }));
                }
                if back.any_receives > 0 && other == (me + 1) % lane.size {
                    pending.push((lane.comm_id, WaitKind::Recv { from: None }));
                }
            }
        }
        pending
    }

    fn needs(&self, rank: u32, comm_id: u64, kind: WaitKind) -> Needs {
        let Some(me) = self.lane(rank, comm_id) else { return Needs::Unknown };
        let members = self.members(comm_id, me);
        match kind {
            WaitKind::Collective { seq } => {
                let Some(members) = members else { return Needs::Unknown };
                let has_not_posted = |other: &u32| {
                    *other != rank && self.lane(*other, comm_id).is_some_and(|lane| lane.posted <= seq)
                };
                Needs::All(members.iter().copied().filter(has_not_posted).collect())
            }
            WaitKind::Creation => {
                let Some(members) = members else { return Needs::Unknown };
                Needs::All(
                    members.iter().copied().filter(|other| self.is_yet_to_come(*other, comm_id)).collect(),
                )
            }
            WaitKind::Send { to } => {
                let between = self.groups.between(comm_id, me.comm_rank, to);
                let takes_it = |between: MessagesBetween| between.receives > 0 || between.any_receives > 0;
                match (between, members.as_ref().and_then(|members| members.get(to as usize))) {
                    (Some(between), Some(other)) if !takes_it(between) => Needs::All([*other].into()),
                    _ => Needs::Unknown,
                }
            }
            WaitKind::Recv { from } => {
                let Some(members) = members else { return Needs::Unknown };
                let nothing_comes = |between: MessagesBetween| between.sends == 0 && !between.in_flight;
                let others = (0_u32..).zip(members.iter().copied()).filter(|(_, other)| *other != rank);
                let mut sources = BTreeSet::new();
                for (source, other) in others.filter(|(source, _)| from.is_none_or(|from| from == *source)) {
                    match self.groups.between(comm_id, source, me.comm_rank) {
                        Some(between) if nothing_comes(between) => drop(sources.insert(other)),
                        _ => return Needs::Unknown,
                    }
                }
                if from.is_some() { Needs::All(sources) } else { Needs::Any(sources) }
            }
        }
    }

    /// Known to the agent, or by size: the world's.
    fn members(&self, comm_id: u64, lane: &LaneView) -> Option<Vec<u32>> {
        match self.groups.members(comm_id) {
            Some(members) if members.len() == lane.size as usize => Some(members.to_vec()),
            Some(_) => None,
            None => (lane.size as usize == self.views.len()).then(|| (0..lane.size).collect()),
        }
    }

    /// The end of a communicator that `rank` has, or had; `None` when that is not certain.
    fn lane(&self, rank: u32, comm_id: u64) -> Option<&LaneView> {
        let lanes = &self.views.get(rank as usize)?.lanes;
        let mut ends = lanes.iter().filter(|lane| lane.comm_id == comm_id);
        let open = ends.clone().find(|lane| !lane.closed);
        // A group can be destroyed and made again under the same name.
        open.or_else(|| ends.next().filter(|_| ends.next().is_none()))
    }

    fn is_yet_to_come(&self, rank: u32, comm_id: u64) -> bool {
        let Some(view) = self.views.get(rank as usize) else { return false };
        let is_in = view.lanes.iter().any(|lane| lane.comm_id == comm_id && !lane.closed);
        // More than this are not on the board.
        !is_in && view.lanes.iter().filter(|lane| !lane.closed).count() < LANES
    }

    fn is_ended(&self, rank: u32) -> bool {
        self.ended.get(rank as usize).copied().unwrap_or(false)
    }

    /// Whether `rank` will never do its part in what others of this communicator wait for. A rank that has destroyed a
    /// group may come to create the next one of that name.
    fn is_out(&self, rank: u32, comm_id: u64, kind: WaitKind) -> bool {
        let has_left = || self.lane(rank, comm_id).is_some_and(|lane| lane.closed);
        self.is_ended(rank) || kind != WaitKind::Creation && has_left()
    }
}

/// Whether each thread that could post waits in the engine.
fn is_all_waiting(view: &RankView) -> bool {
    let python = || view.waits.iter().filter(|wait| wait.wait.python_threads > 0);
    // The last to begin knew all others: only a thread that is running can start another one.
    let last = python().max_by_key(|wait| wait.since_ns);
    last.is_some_and(|last| python().count() == last.wait.python_threads as usize)
}

fn evidence(view: &RankView) -> Evidence {
    Evidence {
        tokens: view.waits.iter().map(|WaitView { token, .. }| *token).collect(),
        lanes: view.lanes.iter().map(|lane| (lane.comm_id, lane.posted, lane.completed)).collect(),
    }
}

/// Collectives in flight, and threads that wait for something else.
fn observed(view: &RankView) -> impl Iterator<Item = (u64, WaitKind, u64)> {
    let lanes = view.lanes.iter().filter(|lane| !lane.closed);
    let collectives =
        lanes.filter_map(|lane| Some((lane.comm_id, WaitKind::Collective { seq: lane.in_flight()? }, 0)));
    let others = view.waits.iter().filter(|view| seq(view.wait.kind).is_none());
    collectives.chain(others.map(|view| (view.wait.comm_id, view.wait.kind, view.token)))
}

fn seq(kind: WaitKind) -> Option<u64> {
    match kind {
        WaitKind::Collective { seq } => Some(seq),
        _ => None,
    }
}

/// The first edge of each strongly connected component is closed by the shortest way back.
fn shortest_circle(graph: &DiGraphMap<u32, ()>) -> Option<BTreeSet<u32>> {
    let components = tarjan_scc(graph);
    let circles = components.iter().filter_map(|component| {
        let first = *component.iter().min()?;
        let ways_back = graph.neighbors(first).filter_map(|next| {
            let (_, path) = astar(graph, next, |node| node == first, |_| 1, |_| 0)?;
            Some(path)
        });
        ways_back.min_by_key(Vec::len)
    });
    circles.min_by_key(Vec::len).map(|circle| circle.into_iter().collect())
}
