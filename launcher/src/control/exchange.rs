//! Which rank gets which shared segment: the n-th request of a rank for a key gets the n-th offer of that
//! key, so that a communicator can be destroyed and made again under the same name.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Offers and requests that have not met yet. `S` is the segment.
#[derive(Debug)]
pub(crate) struct Exchange<S> {
    keys: HashMap<String, Key<S>>,
    held: usize,
    /// Requests that wait, by rank.
    waiting: HashMap<u32, usize>,
}

#[derive(Debug)]
struct Key<S> {
    offered: u64,
    offers: BTreeMap<u64, Offer<S>>,
    /// Requests so far, by rank.
    wanted: HashMap<u32, u64>,
    waiting: Vec<Waiting>,
}

#[derive(Debug)]
struct Offer<S> {
    segment: Arc<S>,
    readers_left: u32,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    rank: u32,
    request: u64,
    number: u64,
    /// The rank that will offer it.
    from: u32,
}

/// A request that nobody will answer with a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Orphan {
    pub(crate) key: String,
    pub(crate) rank: u32,
    pub(crate) request: u64,
}

/// A segment on its way to the rank that asked for it.
#[derive(Debug)]
pub(crate) struct SegmentDelivery<S> {
    pub(crate) rank: u32,
    pub(crate) request: u64,
    pub(crate) segment: Arc<S>,
}

impl<S> Exchange<S> {
    pub(crate) fn new() -> Exchange<S> {
        Exchange { keys: HashMap::new(), held: 0, waiting: HashMap::new() }
    }

    /// Takes a segment for `readers` ranks and says who was waiting for it.
    ///
    /// # Errors
    /// When more are held than any program needs; each costs a descriptor.
    pub(crate) fn offer(
        &mut self,
        key: &str,
        readers: u32,
        segment: S,
    ) -> Result<Vec<SegmentDelivery<S>>, String> {
        if readers == 0 {
            return Ok(Vec::new());
        }
        if self.held >= MAX_HELD {
            return Err(format!("{MAX_HELD} segments are waiting for their ranks already"));
        }
        let entry = self.keys.entry(key.to_owned()).or_default();
        let number = entry.offered;
        entry.offered += 1;
        entry.offers.insert(number, Offer { segment: Arc::new(segment), readers_left: readers });
        self.held += 1;
        let (ready, waiting) = entry.waiting.iter().partition(|waiting| waiting.number == number);
        entry.waiting = waiting;
        let ready: Vec<Waiting> = ready;
        ready.iter().for_each(|waiting| self.wait_less(waiting.rank));
        let deliveries = ready.into_iter().filter_map(|waiting| self.deliver(key, waiting)).collect();
        self.forget_if_done(key);
        Ok(deliveries)
    }

    /// Takes a request and answers it when the segment is there; else a later offer does.
    ///
    /// # Errors
    /// When more are waiting than any program needs.
    pub(crate) fn want(
        &mut self,
        key: &str,
        rank: u32,
        request: u64,
        from: u32,
    ) -> Result<Option<SegmentDelivery<S>>, String> {
        let of_rank = self.waiting.get(&rank).copied().unwrap_or(0);
        if of_rank >= MAX_WAITING {
            return Err(format!("{MAX_WAITING} requests of this rank are waiting already"));
        }
        if self.keys.len() >= MAX_KEYS && !self.keys.contains_key(key) {
            return Err(format!("{MAX_KEYS} keys are in use already"));
        }
        let entry = self.keys.entry(key.to_owned()).or_default();
        let wanted = entry.wanted.entry(rank).or_default();
        let waiting = Waiting { rank, request, number: *wanted, from };
        *wanted += 1;
        if !entry.offers.contains_key(&waiting.number) {
            entry.waiting.push(waiting);
            self.waiting.insert(rank, of_rank + 1);
            return Ok(None);
        }
        let delivery = self.deliver(key, waiting);
        self.forget_if_done(key);
        Ok(delivery)
    }

    /// This rank will not receive anything any more.
    pub(crate) fn leave(&mut self, rank: u32) {
        for entry in self.keys.values_mut() {
            entry.waiting.retain(|waiting| waiting.rank != rank);
        }
        self.waiting.remove(&rank);
    }

    fn wait_less(&mut self, rank: u32) {
        if let Some(count) = self.waiting.get_mut(&rank) {
            *count = count.saturating_sub(1);
        }
    }

    /// This rank will not offer anything any more: whoever waits for that waits in vain.
    pub(crate) fn lose(&mut self, lost: u32) -> Vec<Orphan> {
        let mut orphans = Vec::new();
        for (key, entry) in &mut self.keys {
            entry.waiting.retain(|waiting| {
                if waiting.from == lost {
                    let Waiting { rank, request, .. } = *waiting;
                    orphans.push(Orphan { key: key.clone(), rank, request });
                }
                waiting.from != lost
            });
        }
        orphans.iter().for_each(|orphan| self.wait_less(orphan.rank));
        orphans
    }

    fn deliver(&mut self, key: &str, waiting: Waiting) -> Option<SegmentDelivery<S>> {
        let offers = &mut self.keys.get_mut(key)?.offers;
        let offer = offers.get_mut(&waiting.number)?;
        offer.readers_left -= 1;
        let segment = offer.segment.clone();
        if offer.readers_left == 0 {
            offers.remove(&waiting.number);
            self.held -= 1;
        }
        Some(SegmentDelivery { rank: waiting.rank, request: waiting.request, segment })
    }

    /// Everybody has had everything: counting from 0 again gives the same pairs.
    fn forget_if_done(&mut self, key: &str) {
        if self.keys.get(key).is_some_and(|entry| entry.offers.is_empty() && entry.waiting.is_empty()) {
            self.keys.remove(key);
        }
    }
}

impl<S> Default for Key<S> {
    fn default() -> Key<S> {
        Key { offered: 0, offers: BTreeMap::new(), wanted: HashMap::new(), waiting: Vec::new() }
    }
}

const MAX_HELD: usize = 4096;
const MAX_KEYS: usize = 1 << 16;
/// A bound for one rank: each of them is a thread of its that waits, or has waited.
const MAX_WAITING: usize = 1 << 14;

#[cfg(test)]
mod tests {
    use super::*;

    fn got(delivery: &SegmentDelivery<&'static str>) -> (u32, u64, &'static str) {
        (delivery.rank, delivery.request, *delivery.segment)
    }

    #[test]
    fn requests_before_and_after_the_offer_are_served() {
        let mut exchange = Exchange::new();
        assert!(exchange.want("dp", 1, 10, 0).unwrap().is_none());
        let first = exchange.offer("dp", 2, "seg").unwrap();
        assert_eq!(first.iter().map(got).collect::<Vec<_>>(), [(1, 10, "seg")]);
        assert_eq!(got(&exchange.want("dp", 2, 20, 0).unwrap().unwrap()), (2, 20, "seg"));
        assert_eq!((exchange.held, exchange.keys.len()), (0, 0));
    }

    #[test]
    fn the_second_life_of_a_communicator_gets_the_second_segment() {
        let mut exchange = Exchange::new();
        exchange.offer("dp", 2, "first").unwrap();
        assert_eq!(got(&exchange.want("dp", 1, 1, 0).unwrap().unwrap()), (1, 1, "first"));
        // Rank 1 is fast: it destroys the communicator and makes it again before rank 2 has the first.
        assert!(exchange.want("dp", 1, 2, 0).unwrap().is_none());
        let second = exchange.offer("dp", 2, "second").unwrap();
        assert_eq!(second.iter().map(got).collect::<Vec<_>>(), [(1, 2, "second")]);
        assert_eq!(got(&exchange.want("dp", 2, 1, 0).unwrap().unwrap()), (2, 1, "first"));
        assert_eq!(got(&exchange.want("dp", 2, 2, 0).unwrap().unwrap()), (2, 2, "second"));
        assert_eq!((exchange.held, exchange.keys.len()), (0, 0));
    }

    #[test]
    fn who_waits_for_a_lost_rank_is_told() {
        let mut exchange: Exchange<&str> = Exchange::new();
        for (key, rank, from) in [("a", 1, 0), ("a", 2, 0), ("b", 1, 3)] {
            assert!(exchange.want(key, rank, 7, from).unwrap().is_none());
        }
        let mut orphans = exchange.lose(0);
        orphans.sort_by_key(|orphan| orphan.rank);
        let of = |rank| Orphan { key: "a".into(), rank, request: 7 };
        assert_eq!(orphans, [of(1), of(2)]);
        assert!(exchange.lose(0).is_empty());
    }

    #[test]
    fn keys_do_not_mix() {
        let mut exchange = Exchange::new();
        exchange.offer("a", 1, "of a").unwrap();
        assert!(exchange.want("b", 1, 1, 0).unwrap().is_none());
        assert_eq!(got(&exchange.want("a", 1, 2, 0).unwrap().unwrap()), (1, 2, "of a"));
        assert_eq!(exchange.keys.len(), 1);
        exchange.leave(1);
        assert!(exchange.offer("b", 1, "of b").unwrap().is_empty());
    }

    #[test]
    fn what_nobody_fetches_is_bounded() {
        let mut exchange = Exchange::new();
        for index in 0..MAX_HELD {
            exchange.offer(&index.to_string(), 1, "x").unwrap();
        }
        assert!(exchange.offer("one more", 1, "x").unwrap_err().contains("4096"));
        assert!(exchange.offer("nobody", 0, "x").unwrap().is_empty());
    }

    #[test]
    fn requests_of_one_rank_are_bounded_over_all_keys() {
        let mut exchange: Exchange<&str> = Exchange::new();
        for index in 0..MAX_WAITING {
            exchange.want(&(index % 100).to_string(), 1, index as u64, 0).unwrap();
        }
        assert!(exchange.want("one more", 1, 0, 0).unwrap_err().contains("16384 requests of this rank"));
        assert!(exchange.want("of another rank", 2, 0, 0).unwrap().is_none());
        // Those that are answered, or are in vain, wait no more.
        exchange.offer("7", 1, "x").unwrap();
        assert!(exchange.want("one more", 1, 0, 0).unwrap().is_none());
        exchange.lose(0);
        assert_eq!(exchange.waiting[&1], 0);
        exchange.want("again", 1, 0, 3).unwrap();
        exchange.leave(1);
        assert!(!exchange.waiting.contains_key(&1));
    }

    #[test]
    fn segments_are_let_go_when_all_have_them() {
        let mut exchange = Exchange::new();
        let delivery = {
            exchange.offer("a", 2, String::from("s")).unwrap();
            exchange.want("a", 0, 1, 0).unwrap();
            exchange.want("a", 1, 1, 0).unwrap().unwrap()
        };
        assert_eq!(Arc::strong_count(&delivery.segment), 1);
    }
}
