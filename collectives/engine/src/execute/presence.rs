//! This rank in one communicator, as the board shows it. Without a board all of it does nothing.

use std::sync::Arc;

use tpurun_memory::failure::Failure;
use tpurun_protocol::board::{
    Board, BoardLane, OpRecord, Outcome, RankWriter, Recording, Wait, WaitEntry, WaitKind,
};
use tpurun_protocol::membership::Membership;
use tpurun_protocol::op::{Op, OpKind};
use tpurun_protocol::strategy::Strategy;

/// The lane of a communicator, and the waits of this rank's threads in it.
#[derive(Debug)]
pub(crate) struct Presence {
    board: Option<(BoardLane, RankWriter)>,
    comm_id: u64,
}

impl Presence {
    pub(crate) fn new(board: Option<&Board>, members: &Membership) -> Self {
        let comm_id = members.id();
        let world_rank = members.world_ranks[members.rank as usize];
        let writer = board.filter(|board| world_rank < board.world()).map(|board| board.rank(world_rank));
        let claim = |writer: RankWriter| {
            Some((writer.claim_lane(comm_id, &members.name, members.size(), members.rank)?, writer))
        };
        Self { board: writer.and_then(claim), comm_id }
    }

    /// The program has posted an operation.
    pub(crate) fn posted(&self, seq: u64, op: &Op) -> Option<Recording> {
        let (lane, _) = self.board.as_ref()?;
        Some(lane.posted(&record(seq, op)))
    }

    pub(crate) fn agreed(&self, recording: Option<Recording>, strategy: Option<Strategy>) {
        if let Some((lane, recording)) = self.lane().zip(recording) {
            lane.agreed(recording, strategy);
        }
    }

    pub(crate) fn matched(&self, recording: Option<Recording>) {
        if let Some((lane, recording)) = self.lane().zip(recording) {
            lane.matched(recording);
        }
    }

    pub(crate) fn first_byte(&self, recording: Option<Recording>) {
        if let Some((lane, recording)) = self.lane().zip(recording) {
            lane.first_byte(recording);
        }
    }

    pub(crate) fn ended<T>(&self, recording: Option<Recording>, outcome: &Result<T, Failure>) {
        if let Some((lane, recording)) = self.lane().zip(recording) {
            lane.ended(recording, if outcome.is_ok() { Outcome::Done } else { Outcome::Failed });
        }
    }

    /// Collective number `seq` has succeeded. One that failed is the last one for good: it is the evidence of
    /// who waited for whom.
    pub(crate) fn completed(&self, seq: u64) {
        if let Some(lane) = self.lane() {
            lane.completed(seq);
        }
    }

    /// Somebody sees to collective number `seq` and those before it.
    pub(crate) fn attended(&self, seq: u64) {
        if let Some(lane) = self.lane() {
            lane.attended(seq);
        }
    }

    /// Says that everything in flight waits for others until the answer is dropped, and so does the calling
    /// thread, if it is one of `caller` Python threads.
    pub(crate) fn blocked(self: &Arc<Self>, kind: WaitKind, caller: Option<u32>) -> Blocked {
        if let Some(lane) = self.lane() {
            lane.blocked();
        }
        let waiting = caller.and_then(|threads| self.waiting(kind, threads));
        Blocked { presence: self.clone(), _waiting: waiting }
    }

    /// The calling thread sleeps until what it waits for has happened; over when the answer is dropped.
    pub(crate) fn waiting(&self, kind: WaitKind, python_threads: u32) -> Option<WaitEntry> {
        let (_, writer) = self.board.as_ref()?;
        Some(writer.waiting(Wait { comm_id: self.comm_id, kind, python_threads }))
    }

    /// This rank takes no part any more.
    pub(crate) fn close(&self) {
        if let Some(lane) = self.lane() {
            lane.close();
        }
    }

    fn lane(&self) -> Option<&BoardLane> {
        self.board.as_ref().map(|(lane, _)| lane)
    }
}

/// Something that waits for others.
#[derive(Debug)]
pub(crate) struct Blocked {
    presence: Arc<Presence>,
    _waiting: Option<WaitEntry>,
}

impl Drop for Blocked {
    fn drop(&mut self) {
        if let Some(lane) = self.presence.lane() {
            lane.unblocked();
        }
    }
}

fn record(seq: u64, op: &Op) -> OpRecord<'_> {
    OpRecord {
        seq,
        collective: op.kind as u8,
        dtype: op.dtype as u8,
        reduce_op: if op.kind.reduces() { op.reduce_op as u8 } else { u8::MAX },
        root: op.root.map_or(-1, |root| root as i32),
        tag: op.tag,
        count: if op.kind == OpKind::Barrier { 0 } else { op.count() },
        input_bytes: op.inputs.total() as u64,
        shape: op.shape.dims(),
        site: &op.site,
    }
}
