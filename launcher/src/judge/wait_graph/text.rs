//! The text of a deadlock: classes of ranks, the operation that each waits in, and the ranks that it waits for.

use std::collections::BTreeMap;

use tpurun_protocol::board::{LaneView, OpView, RankView, WaitKind};

use super::{Deadlock, Edge};
use crate::base::rank_set::RankSet;
use crate::observe::op_text;

/// Facts about ranks and communicators that only the agent knows.
pub(crate) struct Names<'a> {
    /// The name of a rank's host.
    pub(crate) host: &'a dyn Fn(u32) -> &'a str,
    pub(crate) views: &'a [RankView],
    /// Whether a rank's process has ended, and has not only destroyed the group.
    pub(crate) ended: &'a [bool],
}

/// The text that all ranks of all communicators in the circle raise.
pub(crate) fn describe(deadlock: &Deadlock, names: &Names<'_>) -> String {
    let mut text = headline(deadlock, names);
    let waited_for = deadlock.waited_for();
    // Ranks that close the circle come first, and do not drown among those that only hang on it.
    let mut classes: BTreeMap<(bool, String), (RankSet, RankSet)> = BTreeMap::new();
    for edge in &deadlock.edges {
        let class = (!waited_for.contains(&edge.rank), names.wait(edge));
        let (ranks, needs) = classes.entry(class).or_default();
        *ranks = ranks.union_with([edge.rank]);
        *needs = needs.union_with(edge.needs.iter().copied());
    }
    let mut classes: Vec<_> = classes.into_iter().collect();
    classes.sort_by_key(|((hangs_on, _), (ranks, _))| (*hangs_on, ranks.first()));
    for ((_, wait), (ranks, needs)) in classes.iter().take(SHOWN) {
        let who = names.ranks(ranks);
        let verb = if ranks.len() == 1 { "waits" } else { "wait" };
        text += &format!("\n  {who} {verb} in {wait} for {}", plain(needs));
    }
    if classes.len() > SHOWN {
        text += &format!("\n  and {} more waits", classes.len() - SHOWN);
    }
    text
}

fn headline(deadlock: &Deadlock, names: &Names<'_>) -> String {
    if deadlock.finished.is_empty() {
        return "deadlock: ranks wait for each other in a circle, none of them can go on".into();
    }
    let finished: RankSet = deadlock.finished.iter().copied().collect();
    let has_ended = |rank: &u32| names.ended.get(*rank as usize).copied().unwrap_or(false);
    let did = if deadlock.finished.iter().all(has_ended) {
        "exited with code 0".to_owned()
    } else {
        let group = deadlock.edges.first().and_then(|edge| names.lane(edge)).map(|lane| lane.name.as_str());
        format!("destroyed group {}", group.unwrap_or("?"))
    };
    format!("deadlock: {} {did} while others wait for it", names.ranks(&finished))
}

impl Names<'_> {
    fn lane(&self, edge: &Edge) -> Option<&LaneView> {
        let lanes = &self.views.get(edge.rank as usize)?.lanes;
        lanes.iter().filter(|lane| lane.comm_id == edge.comm_id).max_by_key(|lane| !lane.closed)
    }

    /// `all_reduce#3 (f32[8], SUM) of group dp0 at train.py:5`.
    fn wait(&self, edge: &Edge) -> String {
        let lane = self.lane(edge);
        let group = lane.map_or("?", |lane| lane.name.as_str());
        let op = lane.and_then(|lane| lane.op.as_ref()).filter(|op| is_it(op, edge.kind));
        let what = match (op, edge.kind) {
            (Some(op), _) => op_text::describe(op),
            (None, WaitKind::Collective { seq }) => format!("collective #{seq}"),
            (None, WaitKind::Send { to }) => format!("send (to {to})"),
            (None, WaitKind::Recv { from: Some(from) }) => format!("recv (from {from})"),
            (None, WaitKind::Recv { from: None }) => "recv (from any)".into(),
            (None, WaitKind::Creation) => return format!("the creation of group {group}"),
        };
        let site = op.map(|op| op.site.as_str()).filter(|site| !site.is_empty());
        format!("{what} of group {group}{}", site.map(|site| format!(" at {site}")).unwrap_or_default())
    }

    /// `rank 3 (host n0, pid 4711)`, for each host; pids only while they are few.
    fn ranks(&self, ranks: &RankSet) -> String {
        let known = |rank: &u32| self.views.get(*rank as usize).map_or(0, |view| view.pid) != 0;
        let count = ranks.ranks().filter(known).count();
        if count == 0 || count > PIDS {
            return plain(ranks);
        }
        let ranks: Vec<u32> = ranks.ranks().collect();
        let on_host = |ranks: &[u32]| {
            let pid = |rank: &u32| self.views[*rank as usize].pid.to_string();
            let pids: Vec<String> = ranks.iter().filter(|rank| known(rank)).map(pid).collect();
            let noun = if pids.len() == 1 { "pid" } else { "pids" };
            let (host, ranks) = ((self.host)(ranks[0]), ranks.iter().copied().collect());
            format!("{} (host {host}, {noun} {})", plain(&ranks), pids.join(", "))
        };
        let hosts = ranks.chunk_by(|one, next| (self.host)(*one) == (self.host)(*next));
        hosts.map(on_host).collect::<Vec<_>>().join(" and ")
    }
}

fn plain(ranks: &RankSet) -> String {
    format!("{} {ranks}", if ranks.len() == 1 { "rank" } else { "ranks" })
}

fn is_it(op: &OpView, kind: WaitKind) -> bool {
    match kind {
        WaitKind::Collective { seq } => !op.is_message() && op.seq == seq,
        WaitKind::Send { to } => op.collective == SEND && op.root == to as i32,
        WaitKind::Recv { from } => op.collective == RECV && op.root == from.map_or(-1, |from| from as i32),
        WaitKind::Creation => false,
    }
}

const SEND: u8 = 9;
const RECV: u8 = 10;
/// Classes of waits in a text, and pids in a class.
const SHOWN: usize = 8;
const PIDS: usize = 4;
