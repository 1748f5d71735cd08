//! Finds the operations of different ranks that are one: all of a collective, and a send with its receive.

use std::collections::HashMap;

use crate::observe::flight::{Flight, LaneFlight, Record};

/// The number of the arrow through each operation.
#[derive(Debug, Default)]
pub(super) struct Flows {
    /// By rank, communicator and number of the message in its lane.
    messages: HashMap<(u32, usize, u64), u64>,
}

/// Messages of one direction and tag between two ranks of a communicator: these do not overtake each other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Channel {
    communicator: usize,
    from: u32,
    to: u32,
    tag: i32,
}

impl Flows {
    pub(super) fn of(flight: &Flight) -> Flows {
        let mut channels: HashMap<Channel, [Vec<(u32, u64)>; 2]> = HashMap::new();
        let lanes = flight.ranks.iter().flat_map(|rank| rank.lanes.iter().map(|lane| (rank.rank, lane)));
        for (rank, lane) in lanes.filter(|(_, lane)| are_countable(lane)) {
            for record in lane.records.iter().filter(|record| record.is_message) {
                let Some(peer) = record.root else { continue };
                let is_receive = record.operation == "recv";
                let (from, to) = if is_receive { (peer, lane.comm_rank) } else { (lane.comm_rank, peer) };
                let channel = Channel { communicator: lane.communicator, from, to, tag: record.tag };
                let ends = channels.entry(channel).or_default();
                ends[usize::from(is_receive)].push((rank, record.number));
            }
        }
        let mut channels: Vec<_> = channels.into_iter().collect();
        channels.sort_by_key(|(channel, _)| *channel);
        let mut flows = Flows::default();
        let pairs = channels.iter().flat_map(|(channel, [sends, receives])| {
            sends.iter().zip(receives).map(|(send, receive)| (channel.communicator, *send, *receive))
        });
        for (id, (communicator, send, receive)) in (MESSAGES..).zip(pairs) {
            for (rank, number) in [send, receive] {
                flows.messages.insert((rank, communicator, number), id);
            }
        }
        flows
    }

    pub(super) fn id(&self, rank: u32, lane: &LaneFlight, record: &Record) -> Option<u64> {
        match record.is_message {
            true => self.messages.get(&(rank, lane.communicator, record.number)).copied(),
            false => Some((lane.communicator as u64 + 1) << COMMUNICATOR_SHIFT | record.seq & SEQ_MASK),
        }
    }
}

/// Whether every message since the beginning is known and names its other rank: else nobody can tell which
/// send a receive got.
fn are_countable(lane: &LaneFlight) -> bool {
    let is_whole = lane.records.first().is_some_and(|record| record.number == 0);
    is_whole && lane.records.iter().all(|record| !record.is_message || record.root.is_some())
}

const COMMUNICATOR_SHIFT: u32 = 40;
const SEQ_MASK: u64 = (1 << COMMUNICATOR_SHIFT) - 1;
const MESSAGES: u64 = 1 << 63;
