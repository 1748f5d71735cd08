//! A network in memory, for tests: every run of it is a function of its seed.
//!
//! Each link and channel is a queue of bounded depth. Segments in different queues arrive in any relative
//! order; links can be cut and ranks dropped.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use super::{Sending, Transport};
use crate::execute::execution::Delivery;
use tpurun_protocol::wire::{HEADER_BYTES, Header};

/// The links between some ranks.
#[derive(Clone, Debug)]
pub struct MemoryNetwork(Rc<RefCell<State>>);

#[derive(Debug)]
struct State {
    random: Random,
    depth: usize,
    /// Encoded segments under way, by receiver, sender and channel.
    queues: BTreeMap<(u32, u32, u32), VecDeque<Vec<u8>>>,
    cut: BTreeSet<(u32, u32)>,
    dropped: BTreeSet<u32>,
}

impl MemoryNetwork {
    /// A network whose queues hold `depth` segments.
    ///
    /// # Panics
    /// When they hold none.
    pub fn new(seed: u64, depth: usize) -> Self {
        assert!(depth > 0, "a queue without room");
        let queues = BTreeMap::new();
        let (cut, dropped) = (BTreeSet::new(), BTreeSet::new());
        Self(Rc::new(RefCell::new(State { random: Random(seed), depth, queues, cut, dropped })))
    }

    /// The end of one rank.
    pub fn endpoint(&self, rank: u32) -> Endpoint {
        Endpoint { network: self.clone(), rank }
    }

    /// Lets nothing more arrive from `from` at `to`; what is sent stays under way.
    pub fn cut(&self, from: u32, to: u32) {
        self.0.borrow_mut().cut.insert((from, to));
    }

    /// Lets what is under way arrive again.
    pub fn heal(&self, from: u32, to: u32) {
        self.0.borrow_mut().cut.remove(&(from, to));
    }

    /// Takes a rank away, with all that is under way to it; what it has sent still arrives.
    pub fn drop_rank(&self, rank: u32) {
        let mut state = self.0.borrow_mut();
        state.dropped.insert(rank);
        state.queues.retain(|&(to, ..), _| to != rank);
    }

    /// A number below `bound`, for tests that need more of the same seed.
    pub fn random(&self, bound: usize) -> usize {
        self.0.borrow_mut().random.below(bound)
    }

    /// How many segments are under way.
    pub fn under_way(&self) -> usize {
        self.0.borrow().queues.values().map(VecDeque::len).sum()
    }

    /// Puts bytes on a link as they are, whatever they are.
    pub fn inject(&self, from: u32, to: u32, channel: u32, segment: Vec<u8>) {
        self.0.borrow_mut().queues.entry((to, from, channel)).or_default().push_back(segment);
    }
}

/// One rank's end of a [`MemoryNetwork`].
#[derive(Clone, Debug)]
pub struct Endpoint {
    network: MemoryNetwork,
    rank: u32,
}

impl Transport for Endpoint {
    fn try_send(&mut self, to: u32, header: &Header, payload: &[u8]) -> Sending {
        let mut state = self.network.0.borrow_mut();
        if state.dropped.contains(&to) || state.dropped.contains(&self.rank) {
            return Sending::Lost;
        }
        let depth = state.depth;
        let queue = state.queues.entry((to, self.rank, header.channel)).or_default();
        if queue.len() >= depth {
            return Sending::Full;
        }
        queue.push_back([&header.encode(), payload].concat());
        Sending::Sent
    }

    fn try_receive(&mut self, deliver: &mut dyn FnMut(u32, &Header, &[u8]) -> Delivery) -> bool {
        let mut state = self.network.0.borrow_mut();
        let ours = (self.rank, 0, 0)..=(self.rank, u32::MAX, u32::MAX);
        let mut waiting: Vec<_> = state.queues.range(ours).map(|(&key, _)| key).collect();
        waiting.retain(|&(to, from, _)| !state.cut.contains(&(from, to)));
        while !waiting.is_empty() {
            let choice = state.random.below(waiting.len());
            let key = waiting.swap_remove(choice);
            let Some(segment) = state.queues.get_mut(&key).and_then(VecDeque::pop_front) else { continue };
            // A segment whose header is none is lost, as on a link that checks what it carries.
            let Ok(header) = Header::decode(&segment) else { continue };
            if deliver(key.1, &header, &segment[HEADER_BYTES..]) == Delivery::Taken {
                return true;
            }
            state.queues.entry(key).or_default().push_front(segment);
        }
        false
    }
}

/// A small generator, so that a seed means the same everywhere and always.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tpurun_protocol::wire::Form;

    fn header(channel: u32, seq: u64) -> Header {
        Header { form: Form::Whole, epoch: 0, channel, seq, chunk: 0, part: 0, offset: 0, bytes: 1 }
    }

    fn received(endpoint: &mut Endpoint) -> Option<(u32, u32, u64)> {
        let mut taken = None;
        endpoint.try_receive(&mut |from, header, _| {
            taken = Some((from, header.channel, header.seq));
            Delivery::Taken
        });
        taken
    }

    #[test]
    fn queues_are_bounded_ordered_and_independent() {
        let network = MemoryNetwork::new(1, 2);
        let (mut a, mut b) = (network.endpoint(0), network.endpoint(1));
        assert_eq!(a.try_send(1, &header(0, 1), &[0]), Sending::Sent);
        assert_eq!(a.try_send(1, &header(0, 2), &[0]), Sending::Sent);
        assert_eq!(a.try_send(1, &header(0, 3), &[0]), Sending::Full);
        assert_eq!(a.try_send(1, &header(1, 4), &[0]), Sending::Sent);
        assert!(!b.try_receive(&mut |_, _, _| Delivery::Later));
        let mut all: Vec<_> = std::iter::from_fn(|| received(&mut b)).collect();
        assert_eq!(network.under_way(), 0);
        all.sort_by_key(|&(_, channel, _)| channel);
        assert_eq!(all, [(0, 0, 1), (0, 0, 2), (0, 1, 4)]);
    }

    #[test]
    fn cut_links_hold_and_dropped_ranks_lose() {
        let network = MemoryNetwork::new(2, 1);
        let (mut a, mut b) = (network.endpoint(0), network.endpoint(1));
        network.cut(0, 1);
        assert_eq!(a.try_send(1, &header(0, 1), &[0]), Sending::Sent);
        assert_eq!(received(&mut b), None);
        network.heal(0, 1);
        assert_eq!(received(&mut b), Some((0, 0, 1)));
        assert_eq!(b.try_send(0, &header(0, 2), &[0]), Sending::Sent);
        network.drop_rank(1);
        assert_eq!(a.try_send(1, &header(0, 3), &[0]), Sending::Lost);
        assert_eq!(received(&mut a), Some((1, 0, 2)));
    }

    #[test]
    fn a_seed_replays() {
        let order = |seed| {
            let network = MemoryNetwork::new(seed, 1);
            for from in 1..20 {
                network.endpoint(from).try_send(0, &header(0, 0), &[0]);
            }
            let mut end = network.endpoint(0);
            std::iter::from_fn(|| received(&mut end)).map(|(from, ..)| from).collect::<Vec<_>>()
        };
        assert_eq!(order(7), order(7));
        assert_ne!(order(7), order(8));
    }
}
