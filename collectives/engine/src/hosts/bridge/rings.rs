//! The rings between a rank here and one elsewhere.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::frames::Wrong;
use super::parcel::Outbox;
use tpurun_memory::failure::FailureKind;
use tpurun_memory::sync::{Ordering, RingError};
use tpurun_protocol::frame::{FrameHeader, FrameKind, MOST_BYTES};
use tpurun_protocol::layout::CHANNELS;
use tpurun_protocol::segment::{Segment, Verdict};

/// The rings of one host that other hosts have the other ends of.
#[derive(Debug)]
pub(super) struct CarriedRings {
    segment: Arc<Segment>,
    /// CarriedRings that something has gone through, by channel, sender and receiver.
    carried: BTreeMap<(u32, u32, u32), Carried>,
    /// How often something had happened on rings at the last look.
    moves: u32,
}

/// Bytes of a ring in all. Each host has a copy of the ring, as large as the other: what the sender's copy holds
/// fits the receiver's, and is freed when the receiver has taken it.
#[derive(Clone, Copy, Debug, Default)]
struct Carried {
    /// To or from the other host.
    moved: u64,
    /// By the receiver, as far as the sender's host has been told.
    taken: u64,
}

impl CarriedRings {
    pub(super) const fn new(segment: Arc<Segment>) -> Self {
        Self { segment, carried: BTreeMap::new(), moves: 0 }
    }

    /// Sends what has happened on rings since the last look.
    pub(super) fn carry(&mut self, out: &mut Outbox) {
        let segment = self.segment.clone();
        // Acquire: then what has moved is seen below.
        let moves = segment.rings().moves().load(Ordering::Acquire);
        if std::mem::replace(&mut self.moves, moves) == moves {
            return;
        }
        for channel in 0..CHANNELS {
            for here in segment.ranks_here().iter().copied() {
                for there in segment.ranks().filter(|rank| !segment.is_here(*rank)) {
                    let carried = self
                        .carry_out(channel, here, there, out)
                        .and_then(|()| self.tell_taken(channel, there, here, out));
                    if let Err(error) = carried {
                        let text =
                            format!("{} wrote what can not be: {error}", segment.roster().describe(&[here]));
                        segment
                            .failure_word()
                            .fail_here(&Verdict::new(FailureKind::Internal, text).blaming([here]));
                        return;
                    }
                }
            }
        }
    }

    /// Sends the bytes that `from` has put into its ring since the last look.
    fn carry_out(&mut self, channel: u32, from: u32, to: u32, out: &mut Outbox) -> Result<(), RingError> {
        let segment = &self.segment;
        let filled = segment.rings().ring(channel, from, to).readable()?;
        let Carried { moved, taken } = self.carried.get(&(channel, from, to)).copied().unwrap_or_default();
        let mut fresh = filled.after((moved - taken) as u32);
        if fresh.bytes == 0 {
            return Ok(());
        }
        let data = segment.layout().ring_data(channel, from, to);
        let frames = &mut out[segment.hosts().of(to) as usize];
        self.carried.entry((channel, from, to)).or_default().moved += u64::from(fresh.bytes);
        while fresh.bytes > 0 {
            let bytes = fresh.bytes.min(MOST_BYTES as u32);
            let header = FrameHeader { kind: FrameKind::Ring, rank: from, round: channel, offset: to, bytes };
            frames.push_with(&header, |payload| segment.rings().read_run(data, fresh, payload));
            fresh = fresh.after(bytes);
        }
        Ok(())
    }

    /// Tells how much `to` has taken out of the ring since the last look.
    fn tell_taken(&mut self, channel: u32, from: u32, to: u32, out: &mut Outbox) -> Result<(), RingError> {
        let Some(carried) = self.carried.get_mut(&(channel, from, to)) else { return Ok(()) };
        let left = self.segment.rings().ring(channel, from, to).readable()?.bytes;
        let taken = carried.moved - u64::from(left).min(carried.moved);
        if taken > carried.taken {
            carried.taken = taken;
            let frames = &mut out[self.segment.hosts().of(from) as usize];
            let header =
                FrameHeader { kind: FrameKind::Taken, rank: to, round: channel, offset: from, bytes: 8 };
            frames.push(&header, &taken.to_le_bytes());
        }
        Ok(())
    }

    /// Bytes for a ring to a rank here.
    pub(super) fn fill(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), Wrong> {
        let (channel, from, to) = (header.round, header.rank, header.offset);
        self.check(channel, to)?;
        let segment = &self.segment;
        let ring = segment.rings().ring(channel, from, to);
        let room = ring.writable().map_err(|_| Wrong("bytes for a ring that can not be used"))?;
        if (room.bytes as usize) < payload.len() {
            return Err(Wrong("more bytes for a ring than fit"));
        }
        segment.rings().write_run(segment.layout().ring_data(channel, from, to), room, payload);
        ring.publish(payload.len() as u32);
        self.carried.entry((channel, from, to)).or_default().moved += payload.len() as u64;
        segment.doorbell(to).ring();
        Ok(())
    }

    /// Room in a ring of a rank here.
    pub(super) fn free(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), Wrong> {
        let (channel, from, to) = (header.round, header.offset, header.rank);
        self.check(channel, from)?;
        let taken = payload.try_into().map(u64::from_le_bytes).map_err(|_| Wrong("no count of bytes"))?;
        let carried = self.carried.entry((channel, from, to)).or_default();
        if taken < carried.taken || taken > carried.moved {
            return Err(Wrong("a count of bytes that were not sent"));
        }
        self.segment.rings().ring(channel, from, to).consume((taken - carried.taken) as u32);
        carried.taken = taken;
        self.segment.doorbell(from).ring();
        Ok(())
    }

    fn check(&self, channel: u32, here: u32) -> Result<(), Wrong> {
        let is_ring = channel < CHANNELS && here < self.segment.size() && self.segment.is_here(here);
        if is_ring { Ok(()) } else { Err(Wrong("a ring that is none")) }
    }
}
