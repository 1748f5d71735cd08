//! The text on stdout and stderr, be they a terminal or pipes: prefixes, colours, the bar that is redrawn.
//!
//! Knows where the cursor is, so that nothing is ever appended to somebody else's unfinished line. The bytes
//! stay here, in order, until they are drained.

use std::fmt::Write as _;
use std::io;
use std::time::{Duration, Instant};

use super::Stream;
use crate::base::rank_set::RankSet;
use crate::output::labels::Labels;

/// A bar is redrawn at most this often.
const REDRAW_INTERVAL: Duration = Duration::from_millis(100);

/// Longer lists of ranks are cut, so that one line's prefix can not fill the screen.
const MAX_LABEL_CHARS: usize = 20;

const RANK_COLORS: [u8; 6] = [36, 33, 32, 35, 34, 31];

/// Moves the cursor to the start of the line, and clears the line.
const ERASE_LINE: &[u8] = b"\r\x1b[2K";

/// While a bar is drawn the terminal must not wrap it: a wrapped bar could not be redrawn in place.
const WRAP_OFF: &[u8] = b"\x1b[?7l";
const WRAP_ON: &[u8] = b"\x1b[?7h";

#[derive(Debug)]
pub(super) struct Screen {
    prefix: Prefix,
    labels: Labels,
    color: bool,
    cursor: Cursor,
    next_draw: Option<Instant>,
    pending: Vec<(Stream, Vec<u8>)>,
}

/// The way in which a line says which ranks wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prefix {
    None,
    /// Labels are aligned to the right in this many columns.
    Ranks {
        width: usize,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cursor {
    LineStart,
    /// The cursor is behind the unfinished line of a rank.
    Behind(u32, Stream),
    OnBar(Stream),
}

impl Screen {
    pub(super) fn new(prefix: Prefix, labels: Labels, color: bool) -> Self {
        Self { prefix, labels, color, cursor: Cursor::LineStart, next_draw: None, pending: Vec::new() }
    }

    /// Writes one line that all these ranks wrote.
    pub(super) fn line(&mut self, stream: Stream, ranks: &[u32], parts: &[&[u8]]) {
        self.leave_line();
        self.prefix(stream, ranks);
        for part in parts {
            self.put(stream, part);
        }
        self.put(stream, b"\n");
    }

    /// Shows the start, or more, of a line that is not complete yet.
    pub(super) fn partial(&mut self, rank: u32, stream: Stream, text: &[u8]) {
        if self.cursor != Cursor::Behind(rank, stream) {
            self.leave_line();
            self.prefix(stream, &[rank]);
        }
        self.put(stream, text);
        self.cursor = Cursor::Behind(rank, stream);
    }

    /// Ends a line whose start was shown; its rest gets a line of its own if others wrote in between.
    pub(super) fn complete(&mut self, rank: u32, stream: Stream, parts: &[&[u8]]) {
        let is_empty = parts.iter().all(|part| part.is_empty());
        if self.cursor == Cursor::Behind(rank, stream) {
            for part in parts {
                self.put(stream, part);
            }
            self.put(stream, b"\n");
            self.cursor = Cursor::LineStart;
        } else if !is_empty {
            self.line(stream, &[rank], parts);
        }
    }

    /// Passes bytes on as they are.
    pub(super) fn raw(&mut self, stream: Stream, bytes: &[u8]) {
        self.put(stream, bytes);
    }

    /// When a bar that changed may be drawn again; at once if none was drawn yet.
    pub(super) fn next_draw(&self) -> Option<Instant> {
        self.next_draw
    }

    /// Draws the state of a bar over the previous one.
    pub(super) fn draw_bar(&mut self, rank: u32, stream: Stream, state: &[u8], now: Instant) {
        self.leave_line();
        self.put(stream, WRAP_OFF);
        self.prefix(stream, &[rank]);
        self.put(stream, state);
        self.put(stream, WRAP_ON);
        self.cursor = Cursor::OnBar(stream);
        self.next_draw = Some(now + REDRAW_INTERVAL);
    }

    /// Whether a bar is on the screen.
    pub(super) fn shows_bar(&self) -> bool {
        matches!(self.cursor, Cursor::OnBar(_))
    }

    /// Whether somebody may be typing behind an unfinished line.
    pub(super) fn is_behind_prompt(&self) -> bool {
        matches!(self.cursor, Cursor::Behind(..))
    }

    /// Takes the bar off the screen.
    pub(super) fn erase_bar(&mut self) {
        if self.shows_bar() {
            self.leave_line();
        }
    }

    /// Writes lines that no rank wrote.
    pub(super) fn note(&mut self, text: &str) {
        self.leave_line();
        self.put(Stream::Err, text.as_bytes());
        self.put(Stream::Err, b"\n");
    }

    /// Writes what is pending, in order.
    pub(super) fn drain(&mut self, out: &mut dyn io::Write, err: &mut dyn io::Write) -> io::Result<()> {
        let mut result = Ok(());
        for (stream, bytes) in self.pending.drain(..) {
            let written = match stream {
                Stream::Out => out.write_all(&bytes).and_then(|()| out.flush()),
                Stream::Err => err.write_all(&bytes).and_then(|()| err.flush()),
            };
            result = result.and(written);
        }
        result
    }

    fn leave_line(&mut self) {
        match self.cursor {
            Cursor::LineStart => {}
            Cursor::Behind(_, stream) => self.put(stream, b"\n"),
            Cursor::OnBar(stream) => self.put(stream, ERASE_LINE),
        }
        self.cursor = Cursor::LineStart;
    }

    fn prefix(&mut self, stream: Stream, ranks: &[u32]) {
        let Prefix::Ranks { width } = self.prefix else { return };
        let label = match self.labels.short(ranks) {
            Some(program) => format!("{program} {}", label(ranks)),
            None => label(ranks),
        };
        let text = match ranks {
            // The reset ends whatever colour an earlier line of another rank left behind.
            &[rank] if self.color => {
                let color = RANK_COLORS[rank as usize % RANK_COLORS.len()];
                format!("\x1b[0;{color}m{label:>width$}|\x1b[0m ")
            }
            _ if self.color => format!("\x1b[0;1m{label:>width$}|\x1b[0m "),
            _ => format!("{label:>width$}| "),
        };
        self.put(stream, text.as_bytes());
    }

    fn put(&mut self, stream: Stream, bytes: &[u8]) {
        match self.pending.last_mut() {
            Some((last, pending)) if *last == stream => pending.extend_from_slice(bytes),
            _ => self.pending.push((stream, bytes.to_vec())),
        }
    }
}

/// `3`, `0-63`, `0-1,3-63`; where that is long, the first ones and how many more: `0,2,4,6,8,10,12,+25`.
fn label(ranks: &[u32]) -> String {
    let full = ranks.iter().copied().collect::<RankSet>().to_string();
    if full.len() <= MAX_LABEL_CHARS {
        return full;
    }
    let Some(end) = full[..=MAX_LABEL_CHARS - 4].rfind(',') else { return full };
    let mut label = full[..end].to_string();
    let named: usize = label.split(',').map(count_of).sum();
    write!(label, ",+{}", ranks.len() - named).expect("writing to a string");
    label
}

fn count_of(range: &str) -> usize {
    match range.split_once('-') {
        None => 1,
        Some((first, last)) => {
            let parse = |text: &str| text.parse::<usize>().expect("a label is made of numbers");
            parse(last) - parse(first) + 1
        }
    }
}
