//! The state of a node's ranks, as it tells other nodes. Clocks of hosts differ: times are told as ages.

use tpurun_protocol::board::{LaneView, OpView, RankView, Wait, WaitKind, WaitView};
use tpurun_protocol::supervise::MessagesBetween;

pub(crate) use archived::{
    GroupSays, LaneSays, LookAnswer, MessagesSays, OpSays, RankSays, WaitSays, WaitsFor,
};

mod archived {
    // The derive macros write items of their own, which no comment can reach.
    #![allow(missing_docs, unreachable_pub)]

    use rkyv::{Archive, Deserialize, Serialize};

    /// The answer of a node in one look at all ranks.
    #[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
    pub(crate) struct LookAnswer {
        /// Ranks that are not as they were at the last look.
        pub(crate) ranks: Vec<RankSays>,
        /// Communicators that were not known at the last look, or have changed since.
        pub(crate) groups: Vec<GroupSays>,
        /// Messages between two ranks of which at least one is here; a pair that is not listed has none.
        pub(crate) messages: Vec<MessagesSays>,
    }

    /// The ranks of a communicator by their rank in the world.
    #[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
    pub(crate) struct GroupSays {
        pub(crate) comm_id: u64,
        pub(crate) members: Vec<u32>,
        pub(crate) has_failed: bool,
    }

    /// The messages between two ranks of a communicator, as far as this host knows.
    #[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
    pub(crate) struct MessagesSays {
        pub(crate) comm_id: u64,
        pub(crate) from: u32,
        pub(crate) to: u32,
        pub(crate) sends: u32,
        pub(crate) receives: u32,
        pub(crate) any_receives: u32,
        pub(crate) in_flight: bool,
    }

    #[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
    pub(crate) struct RankSays {
        /// The number in the world.
        pub(crate) rank: u32,
        pub(crate) pid: u32,
        pub(crate) waits: Vec<WaitSays>,
        pub(crate) lanes: Vec<LaneSays>,
    }

    #[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
    pub(crate) struct WaitSays {
        pub(crate) token: u64,
        pub(crate) for_ns: u64,
        pub(crate) comm_id: u64,
        pub(crate) what: WaitsFor,
        pub(crate) python_threads: u32,
    }

    #[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum WaitsFor {
        Collective { seq: u64 },
        Send { to: u32 },
        Recv { from: u32 },
        AnyRecv,
        Creation,
    }

    #[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
    pub(crate) struct LaneSays {
        pub(crate) comm_id: u64,
        pub(crate) name: String,
        pub(crate) size: u32,
        pub(crate) comm_rank: u32,
        pub(crate) closed: bool,
        pub(crate) posted: u64,
        pub(crate) completed: u64,
        pub(crate) attended: u64,
        pub(crate) blocked_for_ns: Option<u64>,
        pub(crate) op: Option<OpSays>,
    }

    /// An operation as a report describes it.
    #[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
    pub(crate) struct OpSays {
        pub(crate) seq: u64,
        pub(crate) collective: u8,
        pub(crate) dtype: u8,
        pub(crate) reduce_op: u8,
        pub(crate) root: i32,
        pub(crate) tag: i32,
        pub(crate) count: u64,
        pub(crate) shape: Vec<i64>,
        pub(crate) site: String,
    }
}

impl RankSays {
    pub(crate) fn new(rank: u32, view: &RankView, now_ns: u64) -> RankSays {
        let waits = view.waits.iter().map(|wait| WaitSays {
            token: wait.token,
            for_ns: now_ns.saturating_sub(wait.since_ns),
            comm_id: wait.wait.comm_id,
            what: WaitsFor::new(wait.wait.kind),
            python_threads: wait.wait.python_threads,
        });
        let lanes = view.lanes.iter().map(|lane| LaneSays {
            comm_id: lane.comm_id,
            name: lane.name.clone(),
            size: lane.size,
            comm_rank: lane.comm_rank,
            closed: lane.closed,
            posted: lane.posted,
            completed: lane.completed,
            attended: lane.attended,
            blocked_for_ns: lane.blocked_since_ns.map(|since_ns| now_ns.saturating_sub(since_ns)),
            op: lane.op.as_ref().map(OpSays::new),
        });
        RankSays { rank, pid: view.pid, waits: waits.collect(), lanes: lanes.collect() }
    }

    /// Makes the view as if the rank were on the board here; `None` when that is impossible.
    pub(crate) fn view(self, now_ns: u64) -> Option<RankView> {
        let since = |for_ns: u64| now_ns.saturating_sub(for_ns).max(1);
        let waits = self.waits.into_iter().map(|wait| WaitView {
            token: wait.token,
            since_ns: since(wait.for_ns),
            wait: Wait { comm_id: wait.comm_id, kind: wait.what.kind(), python_threads: wait.python_threads },
        });
        let lane = |lane: LaneSays| {
            (lane.comm_rank < lane.size).then(|| LaneView {
                comm_id: lane.comm_id,
                name: lane.name.replace(char::is_control, "?"),
                size: lane.size,
                comm_rank: lane.comm_rank,
                closed: lane.closed,
                posted: lane.posted,
                completed: lane.completed,
                attended: lane.attended,
                blocked_since_ns: lane.blocked_for_ns.map(since),
                op: lane.op.map(OpSays::view),
            })
        };
        let lanes = self.lanes.into_iter().map(lane).collect::<Option<_>>()?;
        Some(RankView { pid: self.pid, waits: waits.collect(), lanes })
    }
}

impl WaitsFor {
    fn new(kind: WaitKind) -> WaitsFor {
        match kind {
            WaitKind::Collective { seq } => WaitsFor::Collective { seq },
            WaitKind::Send { to } => WaitsFor::Send { to },
            WaitKind::Recv { from: Some(from) } => WaitsFor::Recv { from },
            WaitKind::Recv { from: None } => WaitsFor::AnyRecv,
            WaitKind::Creation => WaitsFor::Creation,
        }
    }

    fn kind(self) -> WaitKind {
        match self {
            WaitsFor::Collective { seq } => WaitKind::Collective { seq },
            WaitsFor::Send { to } => WaitKind::Send { to },
            WaitsFor::Recv { from } => WaitKind::Recv { from: Some(from) },
            WaitsFor::AnyRecv => WaitKind::Recv { from: None },
            WaitsFor::Creation => WaitKind::Creation,
        }
    }
}

impl OpSays {
    fn new(op: &OpView) -> OpSays {
        OpSays {
            seq: op.seq,
            collective: op.collective,
            dtype: op.dtype,
            reduce_op: op.reduce_op,
            root: op.root,
            tag: op.tag,
            count: op.count,
            shape: op.shape.clone(),
            site: op.site.clone(),
        }
    }

    fn view(self) -> OpView {
        OpView {
            seq: self.seq,
            collective: self.collective,
            dtype: self.dtype,
            reduce_op: self.reduce_op,
            root: self.root,
            tag: self.tag,
            count: self.count,
            shape: self.shape,
            site: self.site.replace(char::is_control, "?"),
            ..OpView::default()
        }
    }
}

impl MessagesSays {
    pub(crate) fn new(comm_id: u64, from: u32, to: u32, between: MessagesBetween) -> MessagesSays {
        let MessagesBetween { sends, receives, any_receives, in_flight } = between;
        MessagesSays { comm_id, from, to, sends, receives, any_receives, in_flight }
    }

    pub(crate) fn between(&self) -> MessagesBetween {
        let MessagesSays { sends, receives, any_receives, in_flight, .. } = *self;
        MessagesBetween { sends, receives, any_receives, in_flight }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane() -> LaneView {
        let op = OpView { seq: 3, site: "train.py:7".into(), shape: vec![2, 4], ..OpView::default() };
        LaneView {
            comm_id: 9,
            name: "dp".into(),
            size: 4,
            comm_rank: 3,
            closed: false,
            posted: 5,
            completed: 3,
            attended: 4,
            blocked_since_ns: Some(100),
            op: Some(op),
        }
    }

    #[test]
    fn another_clock_tells_the_same() {
        let kinds = [
            WaitKind::Collective { seq: 3 },
            WaitKind::Send { to: 1 },
            WaitKind::Recv { from: Some(2) },
            WaitKind::Recv { from: None },
            WaitKind::Creation,
        ];
        let wait =
            |kind| WaitView { token: 8, since_ns: 150, wait: Wait { comm_id: 9, kind, python_threads: 2 } };
        let view = RankView { pid: 7, waits: kinds.map(wait).to_vec(), lanes: vec![lane()] };
        let mut there = RankSays::new(5, &view, 200).view(1200).unwrap();
        assert_eq!((there.lanes[0].blocked_since_ns, there.waits[0].since_ns), (Some(1100), 1150));
        there.lanes[0].blocked_since_ns = Some(100);
        there.waits.iter_mut().for_each(|wait| wait.since_ns = 150);
        assert_eq!(there, view);
    }

    #[test]
    fn what_no_board_has_is_refused() {
        let mut says = RankSays::new(0, &RankView { pid: 7, waits: vec![], lanes: vec![lane()] }, 0);
        says.lanes[0].name = "a\nb".into();
        assert_eq!(says.clone().view(0).unwrap().lanes[0].name, "a?b");
        says.lanes[0].comm_rank = 4;
        assert_eq!(says.view(0), None);
    }
}
