//! An emulated link between hosts, worse than the real one, and what it does to datagrams. It shows how a program
//! fares on such a link before the link is there.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tpurun_protocol::network::{Link, MILLION};

/// The longest time that a datagram may wait for a slow link.
const QUEUE: Duration = Duration::from_millis(100);

/// Numbers that a seed determines: SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
/// OOPSLA 2014).
pub(super) struct Chance(pub(super) u64);

impl Chance {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Datagrams on their way over a link.
pub(super) struct InFlight<T> {
    link: Link,
    pub(super) chance: Chance,
    /// Datagrams by the time when they arrive. Those of the same time stand in the order in which they were sent.
    flying: BTreeMap<(Instant, u64), T>,
    sent: u64,
    /// The time when a slow link has sent everything it was given.
    is_free_at: Option<Instant>,
}

impl<T: Clone> InFlight<T> {
    pub(super) fn new(link: Link, seed: u64) -> Self {
        Self { link, chance: Chance(seed), flying: BTreeMap::new(), sent: 0, is_free_at: None }
    }

    #[cfg(test)]
    pub(super) fn become_like(&mut self, link: Link) {
        self.link = link;
    }

    /// Datagrams that have been sent and not lost.
    #[cfg(test)]
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    /// Sends a datagram of so many bytes.
    pub(super) fn send(&mut self, now: Instant, bytes: usize, datagram: T) {
        let Link { delay, jitter, loss, duplicate, rate } = self.link;
        let mut happens = |parts: u32| parts > 0 && self.chance.below(MILLION.into()) < parts.into();
        let (is_lost, comes_twice) = (happens(loss), happens(duplicate));
        let mut leaves = now;
        if rate > 0 {
            let begins = self.is_free_at.map_or(now, |free| free.max(now));
            if begins - now > QUEUE {
                return;
            }
            leaves = begins + Duration::from_secs_f64(bytes as f64 / rate as f64);
            self.is_free_at = Some(leaves);
        }
        if is_lost {
            return;
        }
        for _ in 0..if comes_twice { 2 } else { 1 } {
            let more = self.chance.below(jitter.as_nanos() as u64 + 1);
            self.sent += 1;
            self.flying.insert((leaves + delay + Duration::from_nanos(more), self.sent), datagram.clone());
        }
    }

    /// The time when the next datagram arrives.
    pub(super) fn next(&self) -> Option<Instant> {
        self.flying.first_key_value().map(|((at, _), _)| *at)
    }

    /// The time when the last datagram arrives.
    pub(super) fn last(&self) -> Option<Instant> {
        self.flying.last_key_value().map(|((at, _), _)| *at)
    }

    /// A datagram that has arrived.
    pub(super) fn arrived(&mut self, now: Instant) -> Option<T> {
        let first = self.flying.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_link_takes_its_time_and_drops_what_is_too_much() {
        let now = Instant::now();
        let mut flight = InFlight::new("rate=8Mbit".parse().unwrap(), 1);
        for number in 0..1000 {
            flight.send(now, 1000, number);
        }
        // A datagram takes a millisecond, and may wait for 100 ms.
        assert_eq!(flight.sent(), 101);
        assert_eq!(flight.next(), Some(now + Duration::from_millis(1)));
        assert_eq!(flight.arrived(now + Duration::from_micros(999)), None);
        assert_eq!(flight.arrived(now + Duration::from_millis(1)), Some(0));
    }

    #[test]
    fn as_many_are_lost_and_doubled_as_is_said() {
        let (now, link) = (Instant::now(), "loss=10%,duplicate=50%".parse().unwrap());
        let mut flight = InFlight::new(link, 1);
        (0..10_000).for_each(|number| flight.send(now, 1, number));
        // 9000 datagrams come, half of them twice; the bounds are five standard deviations.
        assert!((13_150..=13_850).contains(&flight.sent()), "{}", flight.sent());
    }
}
