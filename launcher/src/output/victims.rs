//! Holds back the traceback of a rank whose error only echoes another rank's failure, and says it in one line.
//!
//! The text of such a traceback is known before it arrives, because the rank leaves it in its error file first.
//! A line that differs from that text is shown as the rank wrote it.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Stream;

/// The error that a victim is about to print.
#[derive(Clone, Debug, Default)]
pub(crate) struct Victim {
    /// It is a KeyboardInterrupt, which nobody is to blame for where the job was interrupted.
    pub(crate) is_interrupt: bool,
    /// As Python prints it.
    pub(crate) traceback: String,
    /// The same in one line.
    pub(crate) summary: String,
}

/// Finds the error of a rank, if the rank is a victim.
#[derive(Clone)]
pub(crate) struct VictimLookup(Arc<dyn Fn(u32) -> Option<Victim>>);

impl VictimLookup {
    pub(crate) fn new(find: impl Fn(u32) -> Option<Victim> + 'static) -> VictimLookup {
        VictimLookup(Arc::new(find))
    }
}

impl fmt::Debug for VictimLookup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VictimLookup")
    }
}

/// The tracebacks that are held back.
#[derive(Debug)]
pub(super) struct Victims {
    lookup: VictimLookup,
    reading: HashMap<u32, Reading>,
    told: Vec<SharedLine>,
    /// The job was interrupted, so that every rank may end with KeyboardInterrupt.
    pub(super) expects_interrupts: bool,
}

/// The fate of a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// The line is no part of a victim's traceback.
    No,
    Held,
    /// The line is not the one that should come next in the traceback; these lines were held before it.
    Released(Vec<Vec<u8>>),
}

/// A traceback that arrives.
#[derive(Debug)]
struct Reading {
    /// The lines that are still to come.
    expected: std::vec::IntoIter<String>,
    summary: String,
    held: Vec<Vec<u8>>,
}

/// One line and the ranks that it stands for.
#[derive(Debug)]
struct SharedLine {
    summary: String,
    ranks: Vec<u32>,
    until: Instant,
}

impl Victims {
    pub(super) fn new(lookup: VictimLookup) -> Victims {
        Victims { lookup, reading: HashMap::new(), told: Vec::new(), expects_interrupts: false }
    }

    /// Takes a whole line if it belongs to a victim's traceback.
    pub(super) fn take(&mut self, rank: u32, stream: Stream, text: &[u8], now: Instant) -> Taken {
        if stream == Stream::Out {
            return Taken::No;
        }
        let line = plain(rank, text);
        let Some(reading) = self.reading.get_mut(&rank) else { return self.begin(rank, text, &line) };
        if is_underline(&line) || reading.expected.as_slice().first() == Some(&line) {
            reading.held.push(text.to_vec());
            if !is_underline(&line) {
                reading.expected.next();
            }
            if reading.expected.as_slice().is_empty() {
                let summary = std::mem::take(&mut reading.summary);
                self.reading.remove(&rank);
                self.tell(rank, summary, now);
            }
            return Taken::Held;
        }
        Taken::Released(self.release(rank))
    }

    /// The lines of a traceback that has not come to its end.
    pub(super) fn release(&mut self, rank: u32) -> Vec<Vec<u8>> {
        self.reading.remove(&rank).map(|reading| reading.held).unwrap_or_default()
    }

    pub(super) fn poll_deadline(&self) -> Option<Instant> {
        self.told.iter().map(|told| told.until).min()
    }

    /// The next line that waits for no other rank; at the end, for `None`, any.
    pub(super) fn pop(&mut self, now: Option<Instant>) -> Option<(String, Vec<u32>)> {
        let index = self.told.iter().position(|told| now.is_none_or(|now| told.until <= now))?;
        let SharedLine { summary, ranks, .. } = self.told.remove(index);
        Some((summary, ranks))
    }

    fn begin(&mut self, rank: u32, text: &[u8], line: &str) -> Taken {
        if !line.starts_with(TRACEBACK) {
            return Taken::No;
        }
        let victim = (self.lookup.0)(rank);
        let victim = victim.filter(|victim| self.expects_interrupts || !victim.is_interrupt);
        let Some(victim) = victim else { return Taken::No };
        let lines = victim.traceback.trim_end().lines().map(|line| line.trim_end().to_owned());
        let mut lines = lines.filter(|line| !is_underline(line)).collect::<Vec<_>>().into_iter();
        if lines.next().as_deref() != Some(line) {
            return Taken::No;
        }
        let reading = Reading { expected: lines, summary: victim.summary, held: vec![text.to_vec()] };
        self.reading.insert(rank, reading);
        Taken::Held
    }

    fn tell(&mut self, rank: u32, summary: String, now: Instant) {
        let until = now + WINDOW;
        match self.told.iter_mut().find(|told| told.summary == summary) {
            Some(told) => {
                told.ranks.push(rank);
                told.until = until;
            }
            None => self.told.push(SharedLine { summary, ranks: vec![rank], until }),
        }
    }
}

/// Removes the prefix that torch puts in front of each line, and spaces at the end.
fn plain(rank: u32, text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let text = text
        .strip_prefix(&format!("[rank{rank}]:"))
        .map_or(&*text, |rest| rest.strip_prefix(' ').unwrap_or(rest));
    text.trim_end().to_owned()
}

/// The marks below a line of code, which versions of Python draw differently.
fn is_underline(line: &str) -> bool {
    !line.is_empty() && line.trim_matches([' ', '~', '^']).is_empty()
}

const TRACEBACK: &str = "Traceback (most recent call last):";
/// How long a victim's line waits for another victim with the same error: ranks that share a core print in turn.
const WINDOW: Duration = Duration::from_millis(300);
