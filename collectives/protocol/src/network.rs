//! Settings of the network between hosts: an emulated link, the number of connections, and what carries large pieces.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Most connections between two processes.
pub const MOST_CONNECTIONS: usize = 16;

/// The transport of the pieces of large rounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bulk {
    /// TLS over TCP: the system does most of what QUIC does in this process.
    Tcp,
    /// QUIC, which carries everything else, too.
    Quic,
}

impl FromStr for Bulk {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Tcp, Self::Quic];
        let named = all.into_iter().find(|bulk| bulk.to_string() == text);
        named.ok_or_else(|| format!("expected tcp or quic, given {text:?}"))
    }
}

/// The form is the one that [`FromStr`] reads.
impl fmt::Display for Bulk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Quic => "quic",
        })
    }
}

/// Reads the number of connections between each two processes.
///
/// # Errors
/// The error says what was expected and what was given.
pub fn parse_connections(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| (1..=MOST_CONNECTIONS).contains(count));
    count.ok_or_else(|| format!("expected a number from 1 to {MOST_CONNECTIONS}, given {text:?}"))
}

/// An emulated link between hosts, worse than the real one: the things that happen to datagrams on their way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Link {
    /// The delay of every datagram.
    pub delay: Duration,
    /// The most that chance adds to the delay, so that some datagrams overtake others.
    pub jitter: Duration,
    /// Datagrams that are lost, of a million.
    pub loss: u32,
    /// Datagrams that come twice, of a million.
    pub duplicate: u32,
    /// Bytes a second that one process may send; 0 is no bound. A datagram that would wait
    /// for longer than 100 ms is lost, as in a router.
    pub rate: u64,
}

/// The unit of the rates of loss and of doubles.
pub const MILLION: u32 = 1_000_000;

/// A text that describes no link.
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

/// The form is the one that [`FromStr`] reads.
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

/// Reads a time of up to a minute.
fn time(text: &str) -> Option<Duration> {
    let micros = number(text, &[("us", 1.0), ("ms", 1e3), ("s", 1e6)])?;
    (micros <= 6e7).then(|| Duration::from_micros(micros.round() as u64))
}

fn share(text: &str) -> Option<u32> {
    let parts = number(text, &[("%", f64::from(MILLION) / 100.0)])?;
    (parts <= f64::from(MILLION)).then(|| parts.round() as u32)
}

/// Reads bits a second, as bytes a second.
fn rate(text: &str) -> Option<u64> {
    let bits = number(text, &[("bit", 1.0), ("kbit", 1e3), ("Mbit", 1e6), ("Gbit", 1e9)])?;
    // A lower rate would not carry what a connection needs to live.
    (8e3..=1e13).contains(&bits).then_some((bits / 8.0) as u64)
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
