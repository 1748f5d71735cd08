//! The byte rings between ranks, and the messages that are pending on them.

use tpurun_memory::sync::{AtomicU32, Chain, Ordering, PieceCount, Ring, RingRun};

use crate::layout::PLACES;
use crate::op::OpKind;

use super::base::Base;
use super::words::*;

/// The rings of a communicator.
#[derive(Clone, Copy, Debug)]
pub struct Rings<'a>(pub(super) &'a Base);

impl<'a> Rings<'a> {
    /// Counts a send or receive of this rank that is pending; `peer` is `None` for a receive from any rank.
    #[inline]
    pub fn add_pending(self, kind: OpKind, peer: Option<u32>) {
        self.ledger(kind, peer).fetch_add(1, Ordering::Release);
    }

    /// It has ended.
    #[inline]
    pub fn remove_pending(self, kind: OpKind, peer: Option<u32>) {
        self.ledger(kind, peer).fetch_sub(1, Ordering::Release);
    }

    fn ledger(self, kind: OpKind, peer: Option<u32>) -> &'a AtomicU32 {
        let me = self.0.rank();
        match (kind, peer) {
            (OpKind::Send, Some(to)) => self.pending_sends(me, to),
            (_, from) => self.pending_receives(from.unwrap_or(me), me),
        }
    }

    /// Sends of `from` to `to` that are pending.
    #[inline]
    pub fn pending_sends(self, from: u32, to: u32) -> &'a AtomicU32 {
        self.0.region.at(self.0.layout.ledger(from, to))
    }

    /// Receives of `to` from `from`; from any rank where both are the same.
    #[inline]
    pub fn pending_receives(self, from: u32, to: u32) -> &'a AtomicU32 {
        self.0.region.at(self.0.layout.ledger(from, to) + 4)
    }

    /// The chain of all ranks, as this one sees it, with `places` places and at most `most` pieces on their
    /// way. Ranks that are `near` ranks away are near.
    pub fn chain(self, places: u64, most: u64, near: u32) -> Chain<'a> {
        let progress = |rank| self.0.region.at::<PieceCount>(self.0.layout.chain_rank(rank));
        let done: &[PieceCount; PLACES] = self.0.region.at(self.0.layout.chain_places());
        let rank = self.0.rank();
        Chain {
            before: rank.checked_sub(1).map(progress),
            own: progress(rank),
            last: progress(self.0.size() - 1),
            near: [rank, self.0.size() - 1].map(|rank| rank.checked_sub(near).map(progress)),
            done,
            places,
            most,
            ranks: self.0.size(),
        }
    }

    /// The byte ring of a channel between two ranks.
    #[inline]
    pub fn ring(self, channel: u32, from: u32, to: u32) -> Ring<'a> {
        let counters = self.0.region.at(self.0.layout.ring_counters(channel, from, to));
        Ring::new(counters, self.0.layout.ring_bytes())
    }

    /// Copies bytes to the beginning of a run of the ring whose data is at `data`.
    #[inline]
    pub fn write_run(self, data: usize, run: RingRun, bytes: &[u8]) {
        let [(first, head), (second, _)] = run.first(bytes.len() as u32).pieces();
        let (head, rest) = bytes.split_at(head as usize);
        self.0.region.write(data + first as usize, head);
        self.0.region.write(data + second as usize, rest);
    }

    /// Copies the beginning of a run of the ring whose data is at `data`.
    #[inline]
    pub fn read_run(self, data: usize, run: RingRun, bytes: &mut [u8]) {
        let [(first, head), (second, _)] = run.first(bytes.len() as u32).pieces();
        let (head, rest) = bytes.split_at_mut(head as usize);
        self.0.region.read(data + first as usize, head);
        self.0.region.read(data + second as usize, rest);
    }

    /// Tells `rank` that something happened on a ring between it and this one.
    pub fn notify(self, rank: u32) {
        if self.0.is_here(rank) {
            self.0.doorbell(rank).ring();
        } else {
            // Release pairs with the bridge, which reads it before it looks at the rings.
            self.moves().fetch_add(1, Ordering::AcqRel);
            self.0.ring_bridge();
        }
    }

    /// How often something happened on a ring to or from another host.
    #[inline]
    pub fn moves(self) -> &'a AtomicU32 {
        self.0.region().at(self.0.layout().header() + H_MOVES)
    }
}
