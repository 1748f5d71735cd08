//! Finds the ranks that keep others waiting: read off the board, without a guess at the reason.

use std::collections::BTreeMap;

use tpurun_protocol::board::{LaneView, RankView, WaitKind};

use crate::base::rank_set::RankSet;
use crate::observe::op_text;

/// Ranks that are blocked in one operation, and those that have not come to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Absence {
    pub(crate) key: Key,
    pub(crate) group: String,
    /// `all_reduce#11`
    pub(crate) operation: String,
    /// CLOCK_MONOTONIC of the one that has waited longest.
    pub(crate) since_ns: u64,
    pub(crate) waiting: RankSet,
    pub(crate) absent: Vec<u32>,
}

/// Tells one operation from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) comm_id: u64,
    awaited: Awaited,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Awaited {
    /// All ranks, in this collective.
    Collective(u64),
    /// All ranks, to make the communicator.
    Creation,
    /// This rank of the communicator, to take a message from this one or to send it one.
    Send {
        to: u32,
        by: u32,
    },
    Recv {
        from: u32,
        by: u32,
    },
}

/// A rank that can not go on.
struct Waiter<'a> {
    rank: u32,
    since_ns: u64,
    lane: &'a LaneView,
}

/// Operations that ranks have been blocked in for at least `for_ns` because of others. Most waiters first.
pub(crate) fn absences(views: &[RankView], now_ns: u64, for_ns: u64) -> Vec<Absence> {
    let mut blocked: BTreeMap<Key, Vec<Waiter<'_>>> = BTreeMap::new();
    for (rank, view) in (0_u32..).zip(views) {
        for (key, waiter) in waits(rank, view) {
            if now_ns.saturating_sub(waiter.since_ns) >= for_ns {
                blocked.entry(key).or_default().push(waiter);
            }
        }
    }
    let mut found: Vec<Absence> =
        blocked.into_iter().map(|(key, waiters)| absence(views, key, &waiters)).collect();
    found.retain(|absence| !absence.absent.is_empty());
    found.sort_by_key(|absence| std::cmp::Reverse(absence.waiting.len()));
    found
}

/// Whether a thread of this rank waits in the engine.
pub(crate) fn is_in_engine(view: &RankView) -> bool {
    !view.waits.is_empty()
}

/// The waits of a rank: collectives as its communicators tell, asynchronous ones too; the rest as its threads tell.
fn waits(rank: u32, view: &RankView) -> Vec<(Key, Waiter<'_>)> {
    let key = |lane: &LaneView, awaited| Key { comm_id: lane.comm_id, awaited };
    let collectives = view.lanes.iter().filter_map(|lane| {
        let (since_ns, seq) = (lane.blocked_since_ns?, lane.in_flight()?);
        Some((key(lane, Awaited::Collective(seq)), Waiter { rank, since_ns, lane }))
    });
    let others = view.waits.iter().filter_map(|wait| {
        let lane = open_lane(view, wait.wait.comm_id)?;
        let by = lane.comm_rank;
        let awaited = match wait.wait.kind {
            WaitKind::Creation => Awaited::Creation,
            WaitKind::Send { to } => Awaited::Send { to, by },
            WaitKind::Recv { from: Some(from) } => Awaited::Recv { from, by },
            WaitKind::Collective { .. } | WaitKind::Recv { from: None } => return None,
        };
        Some((key(lane, awaited), Waiter { rank, since_ns: wait.since_ns, lane }))
    });
    collectives.chain(others).collect()
}

fn absence(views: &[RankView], key: Key, waiters: &[Waiter<'_>]) -> Absence {
    let first = waiters.iter().min_by_key(|waiter| waiter.since_ns).expect("somebody waits");
    let is_absent = |view: &RankView| {
        let own = lane(view, key.comm_id);
        match key.awaited {
            Awaited::Creation => own.is_none() && is_of_all(first.lane, views),
            Awaited::Collective(seq) => own.map_or(is_of_all(first.lane, views), |own| own.posted <= seq),
            Awaited::Send { to: peer, .. } | Awaited::Recv { from: peer, .. } => {
                own.is_some_and(|own| own.comm_rank == peer)
            }
        }
    };
    let ranks = (0_u32..).zip(views);
    let absent: Vec<u32> = ranks.filter(|(_, view)| is_absent(view)).map(|(rank, _)| rank).collect();
    Absence {
        key,
        group: first.lane.name.clone(),
        operation: operation(key.awaited, first.lane, &absent),
        since_ns: first.since_ns,
        waiting: waiters.iter().map(|waiter| waiter.rank).collect(),
        absent,
    }
}

/// Whether all ranks belong to the communicator; only of the world is that known.
fn is_of_all(lane: &LaneView, views: &[RankView]) -> bool {
    lane.size as usize == views.len()
}

fn operation(awaited: Awaited, lane: &LaneView, absent: &[u32]) -> String {
    let peer = || absent.first().copied().unwrap_or_default();
    match awaited {
        Awaited::Creation => format!("the creation of group {}", lane.name),
        Awaited::Send { .. } => format!("send to {}", peer()),
        Awaited::Recv { .. } => format!("recv from {}", peer()),
        Awaited::Collective(seq) => match &lane.op {
            Some(op) if op.seq == seq && !op.is_message() => op_text::short(op),
            _ => format!("collective #{seq}"),
        },
    }
}

/// Returns the lane of a communicator; of two with the same members one after the other, the one in use.
fn lane(view: &RankView, comm_id: u64) -> Option<&LaneView> {
    open_lane(view, comm_id).or_else(|| view.lanes.iter().find(|lane| lane.comm_id == comm_id))
}

fn open_lane(view: &RankView, comm_id: u64) -> Option<&LaneView> {
    view.lanes.iter().find(|lane| lane.comm_id == comm_id && !lane.closed)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use tpurun_protocol::board::{OpView, Wait, WaitView};

    pub(crate) const SECOND: u64 = 1_000_000_000;

    /// A world whose ranks have posted this many collectives; those with more than the least are blocked in
    /// the first that others have not posted.
    pub(crate) fn world(posted: &[u64]) -> Vec<RankView> {
        let least = posted.iter().copied().min().unwrap_or_default();
        let view = |(rank, posted): (u32, &u64)| {
            let op = OpView { seq: least, site: "train.py:5".into(), ..OpView::default() };
            let lane = LaneView {
                comm_id: 1,
                name: "dp0".into(),
                size: 0,
                comm_rank: rank,
                closed: false,
                posted: *posted,
                completed: least,
                attended: *posted,
                blocked_since_ns: (*posted > least).then_some(SECOND),
                op: (*posted > least).then_some(op),
            };
            RankView { pid: 1, lanes: vec![lane], waits: Vec::new() }
        };
        let mut views: Vec<RankView> = (0_u32..).zip(posted).map(view).collect();
        views.iter_mut().for_each(|view| view.lanes[0].size = posted.len() as u32);
        views
    }

    fn found(views: &[RankView]) -> Vec<(String, String, Vec<u32>)> {
        let all = absences(views, 2 * SECOND, SECOND);
        all.into_iter().map(|one| (one.operation, one.waiting.to_string(), one.absent)).collect()
    }

    fn waiting(view: &mut RankView, kind: WaitKind) {
        let wait = Wait { comm_id: 1, kind, python_threads: 1 };
        view.waits.push(WaitView { token: 2, since_ns: SECOND, wait });
    }

    #[test]
    fn who_has_not_posted_is_absent() {
        let views = world(&[12, 12, 11, 13]);
        assert_eq!(found(&views), [("all_reduce#11".into(), "0-1,3".into(), vec![2])]);
        assert!(absences(&views, 2 * SECOND - 1, SECOND).is_empty());
        assert!(found(&world(&[12, 12])).is_empty());
    }

    #[test]
    fn who_has_posted_without_waiting_is_not() {
        let mut views = world(&[12, 12, 11]);
        views[1].lanes[0].blocked_since_ns = None;
        assert_eq!(found(&views), [("all_reduce#11".into(), "0".into(), vec![2])]);
        views[0].lanes[0].op = None;
        assert_eq!(found(&views)[0].0, "collective #11");
    }

    #[test]
    fn who_has_not_joined_is_absent_from_the_world_only() {
        let mut views = world(&[1, 1, 0, 0]);
        views[3].lanes.clear();
        assert_eq!(found(&views)[0].2, [2, 3]);
        views[0].lanes[0].size = 3;
        views[1].lanes[0].size = 3;
        assert_eq!(found(&views)[0].2, [2]);
    }

    #[test]
    fn creation_waits_for_who_has_not_joined() {
        let mut views = world(&[0, 0, 0]);
        waiting(&mut views[0], WaitKind::Creation);
        assert!(found(&views).is_empty());
        views[2].lanes.clear();
        assert_eq!(found(&views), [("the creation of group dp0".into(), "0".into(), vec![2])]);
    }

    #[test]
    fn a_message_waits_for_its_peer() {
        let mut views = world(&[3, 3, 3]);
        waiting(&mut views[0], WaitKind::Recv { from: Some(2) });
        waiting(&mut views[1], WaitKind::Recv { from: None });
        assert_eq!(found(&views), [("recv from 2".into(), "0".into(), vec![2])]);
        assert!(is_in_engine(&views[0]) && !is_in_engine(&views[2]));
        waiting(&mut views[1], WaitKind::Send { to: 99 });
        assert_eq!(found(&views).len(), 1);
    }
}
