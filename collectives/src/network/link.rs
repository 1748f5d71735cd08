//! A worse link between hosts than there is: what it does to datagrams, for who wants to know how a program fares on
//! it before it is there.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// What happens to datagrams on their way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Link {
    /// Of every datagram.
    pub delay: Duration,
    /// Up to so much more, so that some overtake others.
    pub jitter: Duration,
    /// Of a million, so many are lost.
    pub loss: u32,
    /// Of a million, so many come twice.
    pub duplicate: u32,
    /// Bytes a second that one process may send; 0 is as many as there are. What would wait for longer than 100 ms is
    /// lost, as in a router.
    pub rate: u64,
}

const MILLION: u32 = 1_000_000;
/// So long a datagram may wait for a slow link.
const QUEUE: Duration = Duration::from_millis(100);

/// A link that is none.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("expected words such as delay=2ms,jitter=500us,loss=1%,duplicate=0.1%,rate=100Mbit, given {0}")]
pub struct NoLink(String);

impl FromStr for Link {
    type Err = NoLink;

    fn from_str(text: &str) -> Result<Self, NoLink> {
        let mut link = Self::default();
        let mut read = |word: &str| {
            let (name, value) = word.split_once('=')?;
            match name {
                "delay" => link.delay = time(value)?,
                "jitter" => link.jitter = time(value)?,
                "loss" => link.loss = share(value)?,
                "duplicate" => link.duplicate = share(value)?,
                "rate" => link.rate = rate(value)?,
                _ => return None,
            }
            Some(())
        };
        text.split(',').try_for_each(&mut read).ok_or_else(|| NoLink(text.to_owned()))?;
        Ok(link)
    }
}

/// As [`FromStr`] reads it.
impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |parts: u32| f64::from(parts) * 100.0 / f64::from(MILLION);
        write!(f, "delay={}us,jitter={}us", self.delay.as_micros(), self.jitter.as_micros())?;
        write!(f, ",loss={}%,duplicate={}%", percent(self.loss), percent(self.duplicate))?;
        if self.rate > 0 { write!(f, ",rate={}bit", self.rate * 8) } else { Ok(()) }
    }
}

fn number(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic() || letter == '%');
    let (_, factor) = units.iter().find(|(unit, _)| *unit == &text[digits.len()..])?;
    let value = digits.parse::<f64>().ok()? * factor;
    (value.is_finite() && value >= 0.0).then_some(value)
}

/// Up to a minute.
fn time(text: &str) -> Option<Duration> {
    let micros = number(text, &[("us", 1.0), ("ms", 1e3), ("s", 1e6)])?;
    (micros <= 6e7).then(|| Duration::from_micros(micros.round() as u64))
}

fn share(text: &str) -> Option<u32> {
    let parts = number(text, &[("%", f64::from(MILLION) / 100.0)])?;
    (parts <= f64::from(MILLION)).then(|| parts.round() as u32)
}

/// Bytes a second.
fn rate(text: &str) -> Option<u64> {
    let bits = number(text, &[("bit", 1.0), ("kbit", 1e3), ("Mbit", 1e6), ("Gbit", 1e9)])?;
    // Less would not carry what a connection needs to live.
    (8e3..=1e13).contains(&bits).then_some((bits / 8.0) as u64)
}

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
pub(super) struct Flight<T> {
    link: Link,
    pub(super) chance: Chance,
    /// When they arrive; in the order in which they were sent where that is the same.
    flying: BTreeMap<(Instant, u64), T>,
    sent: u64,
    /// When a slow link has sent what it was given.
    is_free_at: Option<Instant>,
}

impl<T: Clone> Flight<T> {
    pub(super) fn new(link: Link, seed: u64) -> Self {
        Self { link, chance: Chance(seed), flying: BTreeMap::new(), sent: 0, is_free_at: None }
    }

    #[cfg(test)]
    pub(super) fn become_like(&mut self, link: Link) {
        self.link = link;
    }

    /// How many have been sent and not lost.
    #[cfg(test)]
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    /// Sends one of so many bytes.
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

    /// When the next one arrives.
    pub(super) fn next(&self) -> Option<Instant> {
        self.flying.first_key_value().map(|((at, _), _)| *at)
    }

    /// When the last one arrives.
    pub(super) fn last(&self) -> Option<Instant> {
        self.flying.last_key_value().map(|((at, _), _)| *at)
    }

    /// One that has arrived.
    pub(super) fn arrived(&mut self, now: Instant) -> Option<T> {
        let first = self.flying.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn links_are_read() {
        let link: Link = "delay=2ms,jitter=500us,loss=1%,duplicate=0.1%,rate=100Mbit".parse().unwrap();
        let expected = Link {
            delay: Duration::from_millis(2),
            jitter: Duration::from_micros(500),
            loss: 10_000,
            duplicate: 1000,
            rate: 12_500_000,
        };
        assert_eq!(link, expected);
        for text in
            ["", "delay", "delay=2", "delay=-1ms", "loss=101%", "loss=1", "rate=1bit", "delay=1h", "x=1%"]
        {
            let error = text.parse::<Link>().unwrap_err().to_string();
            assert!(error.ends_with(&format!("given {text}")), "{error}");
        }
    }

    #[test]
    fn a_slow_link_takes_its_time_and_drops_what_is_too_much() {
        let now = Instant::now();
        let mut flight = Flight::new("rate=8Mbit".parse().unwrap(), 1);
        for number in 0..1000 {
            flight.send(now, 1000, number);
        }
        // A datagram takes a millisecond, and 100 ms is what one may wait for.
        assert_eq!(flight.sent(), 101);
        assert_eq!(flight.next(), Some(now + Duration::from_millis(1)));
        assert_eq!(flight.arrived(now + Duration::from_micros(999)), None);
        assert_eq!(flight.arrived(now + Duration::from_millis(1)), Some(0));
    }

    #[test]
    fn as_many_are_lost_and_doubled_as_is_said() {
        let (now, link) = (Instant::now(), "loss=10%,duplicate=50%".parse().unwrap());
        let mut flight = Flight::new(link, 1);
        (0..10_000).for_each(|number| flight.send(now, 1, number));
        // 9000 come, half of them twice; five standard deviations.
        assert!((13_150..=13_850).contains(&flight.sent()), "{}", flight.sent());
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_is_written_is_read(delay in 0..60_000_000_u64, jitter in 0..1000_u64, loss in 0..=100_u32,
                                   duplicate in 0..=100_u32, rate in 1000..1_000_000_000_u64) {
            let (delay, jitter) = (Duration::from_micros(delay), Duration::from_micros(jitter));
            let link = Link { delay, jitter, loss: loss * 10_000, duplicate: duplicate * 10_000, rate };
            prop_assert_eq!(link.to_string().parse::<Link>(), Ok(link));
        }

        #[test]
        fn any_text_is_read_or_refused(text in "[a-z=0-9.%,]{0,30}") {
            let _ = text.parse::<Link>();
        }
    }
}
