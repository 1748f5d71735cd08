//! Turns the bytes that ranks write into what a person can read: whole lines, each saying whose it is.
//!
//! A pure state machine: bytes and the time go in, bytes for stdout and stderr come out, and
//! [`Output::poll_deadline`] says when time alone will change something. The one exception is the log files,
//! which are written as the bytes arrive. Below this file, `lines` cuts, `fold` joins, `screen` draws.
//!
//! This room knows lines and ranks, and nothing of processes.

pub(crate) mod labels;
pub(crate) mod writer;

mod fold;
mod lines;
mod log_files;
mod screen;
mod victims;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fold::Folder;
use lines::{Line, LineBuffer, LineEnd, PIECE_MARK};
use log_files::LogFiles;
use screen::{Prefix, Screen};
use victims::{Taken, Victims};
pub(crate) use victims::{Victim, VictimLookup};

use crate::base::rank_set::RankSet;
use crate::output::labels::Labels;

/// An unfinished line is taken for a prompt after this much silence.
const PROMPT_DELAY: Duration = Duration::from_millis(200);

/// How much of its last line is remembered of each rank.
const MAX_LAST_LINE_BYTES: usize = 1024;

/// One of the two streams that a rank writes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Stream {
    /// Its standard output.
    Out,
    /// Its standard error.
    Err,
}

/// The choice of the ranks' output that is shown, and how.
#[derive(Debug, Clone)]
pub(crate) struct OutputConfig {
    /// How many ranks write. A single rank's bytes pass through as they are.
    pub(crate) ranks: u32,
    /// The names of their programs, if there are several.
    pub(crate) labels: Labels,
    /// Start each line with the ranks that wrote it.
    pub(crate) prefix: bool,
    /// The ranks that are shown. All of them are logged.
    pub(crate) only: RankSet,
    /// The rank that a person can answer.
    pub(crate) reader: u32,
    /// Show identical lines of several ranks once. Needs `prefix`, which says whose they were.
    pub(crate) fold: bool,
    /// The victims of another rank; where this is known, a victim's traceback is one line. Needs `prefix`.
    pub(crate) victims: Option<VictimLookup>,
    /// Where `rank-0007.log` and its siblings go.
    pub(crate) log_dir: Option<PathBuf>,
    /// Colour the prefixes.
    pub(crate) color: bool,
    /// A person watches on a terminal: progress bars move in place and prompts show before their line ends.
    pub(crate) terminal: bool,
}

/// The output of all ranks of one host on its way to the screen and the log files.
#[derive(Debug)]
pub(crate) struct Output {
    sources: Vec<Source>,
    only: RankSet,
    reader: u32,
    is_terminal: bool,
    passes_through: bool,
    folder: Option<Folder>,
    victims: Option<Victims>,
    screen: Screen,
    logs: Option<LogFiles>,
    /// Streams whose unfinished line is a progress bar. The first one is on the screen.
    bars: BTreeSet<(u32, Stream)>,
    bar_changed: bool,
}

/// The output that one rank has written so far.
#[derive(Debug, Default)]
struct Source {
    lines: [LineBuffer; 2],
    last_bytes_at: [Option<Instant>; 2],
    /// By stream: the last line that has text.
    last_lines: [String; 2],
    last_stream: Option<Stream>,
    is_finished: bool,
}

impl Output {
    /// Starts with an empty screen.
    pub(crate) fn new(config: OutputConfig) -> Self {
        let passes_through = config.ranks == 1;
        let prefix = match config.prefix && !passes_through {
            true => Prefix::Ranks { width: config.labels.width() + label_width(config.ranks, config.fold) },
            false => Prefix::None,
        };
        let shown = (0..config.ranks).filter(|&rank| config.only.contains(rank)).count();
        let can_fold = config.fold && prefix != Prefix::None && shown > 1;
        Self {
            sources: (0..config.ranks).map(|_| Source::default()).collect(),
            only: config.only,
            reader: config.reader,
            is_terminal: config.terminal,
            passes_through,
            folder: can_fold.then(|| Folder::new(config.ranks, shown)),
            victims: config.victims.filter(|_| prefix != Prefix::None).map(Victims::new),
            screen: Screen::new(prefix, config.labels.clone(), config.color),
            logs: config.log_dir.map(|dir| LogFiles::new(dir, config.labels)),
            bars: BTreeSet::new(),
            bar_changed: false,
        }
    }

    /// Takes in what a rank wrote. Drain afterwards: what is shown stays in memory until then.
    pub(crate) fn feed(&mut self, rank: u32, stream: Stream, bytes: &[u8], now: Instant) {
        if let Some(logs) = &mut self.logs {
            logs.write(rank, bytes);
        }
        let is_shown = self.only.contains(rank);
        if is_shown && self.passes_through {
            self.screen.raw(stream, bytes);
        }
        self.with_lines(rank, stream, now, |lines, on_line| lines.push(bytes, on_line));
        self.sources[rank as usize].last_bytes_at[stream as usize] = Some(now);
        if is_shown && self.is_terminal && !self.passes_through {
            self.note_bar(rank, stream);
        }
        self.settle(now);
    }

    /// When [`Output::tick`] has something to do, if nothing is fed before.
    pub(crate) fn poll_deadline(&self) -> Option<Instant> {
        let fold = self.folder.as_ref().and_then(Folder::poll_deadline);
        let bar = if self.wants_draw() { self.screen.next_draw() } else { None };
        let prompts = STREAMS.into_iter().filter_map(|stream| self.prompt_deadline(stream));
        let victims = self.victims.as_ref().and_then(Victims::poll_deadline);
        fold.into_iter().chain(victims).chain(bar).chain(prompts).min()
    }

    /// Shows what has waited long enough.
    pub(crate) fn tick(&mut self, now: Instant) {
        self.settle(now);
        for stream in STREAMS {
            if self.prompt_deadline(stream).is_some_and(|at| at <= now) {
                let lines = &mut self.sources[self.reader as usize].lines[stream as usize];
                if let Some(text) = lines.unshown() {
                    self.screen.partial(self.reader, stream, text);
                    lines.mark_shown();
                }
            }
        }
    }

    /// Both streams of this rank ended: its last line is complete, with or without a newline.
    pub(crate) fn finish(&mut self, rank: u32, now: Instant) {
        if std::mem::replace(&mut self.sources[rank as usize].is_finished, true) {
            return;
        }
        for stream in STREAMS {
            self.with_lines(rank, stream, now, |lines, on_line| lines.finish(on_line));
            self.bars.remove(&(rank, stream));
        }
        let held = self.victims.as_mut().map(|victims| victims.release(rank)).unwrap_or_default();
        for text in held {
            show_line(&mut self.screen, self.folder.as_mut(), rank, Stream::Err, whole(&text), now);
        }
        if let Some(folder) = self.folder.as_mut().filter(|_| self.only.contains(rank)) {
            folder.remove_writer(rank);
        }
        if let Some(logs) = &mut self.logs {
            logs.close(rank);
        }
        self.bar_changed = true;
        self.settle(now);
        if self.sources.iter().all(|source| source.is_finished) {
            self.tell_victims(None);
        }
    }

    /// Whether the job was interrupted: then every rank may print KeyboardInterrupt, and they are told in one line.
    pub(crate) fn expect_interrupts(&mut self, are_expected: bool) {
        self.victims.iter_mut().for_each(|victims| victims.expects_interrupts = are_expected);
    }

    /// Shows the lines of victims that need not wait any longer, without a time all of them.
    fn tell_victims(&mut self, now: Option<Instant>) {
        let Some(victims) = &mut self.victims else { return };
        while let Some((summary, mut ranks)) = victims.pop(now) {
            ranks.sort_unstable();
            self.screen.line(Stream::Err, &ranks, &[summary.as_bytes()]);
        }
    }

    /// Shows a line of the launcher itself, after everything that is on the screen already.
    pub(crate) fn note(&mut self, text: &str) {
        self.screen.note(text);
        self.bar_changed = true;
    }

    /// Writes a line of the launcher into the log of every rank.
    pub(crate) fn mark_logs(&mut self, text: &str) {
        let line = format!("\n--- tpurun: {text} ---\n");
        for rank in 0..self.sources.len() as u32 {
            if let Some(logs) = &mut self.logs {
                logs.write(rank, line.as_bytes());
            }
        }
    }

    /// Writes everything that is ready, in order.
    ///
    /// # Errors
    /// The first failure to write. Text that could not be written is gone: a closed pipe stays closed.
    pub(crate) fn drain(&mut self, out: &mut dyn io::Write, err: &mut dyn io::Write) -> io::Result<()> {
        self.screen.drain(out, err)
    }

    /// The last line of this rank that has text, of either stream, shown or not.
    pub(crate) fn last_line(&self, rank: u32) -> Option<&str> {
        let source = self.sources.get(rank as usize)?;
        Some(&source.last_lines[source.last_stream? as usize])
    }

    /// The same of its standard output alone: what it said before a traceback.
    pub(crate) fn last_printed(&self, rank: u32) -> Option<&str> {
        let line = &self.sources.get(rank as usize)?.last_lines[Stream::Out as usize];
        (!line.is_empty()).then_some(line)
    }

    /// Why the log files are incomplete, if they are.
    pub(crate) fn log_error(&self) -> Option<&io::Error> {
        self.logs.as_ref().and_then(LogFiles::error)
    }

    /// Runs `change` on the line buffer of a stream and shows the lines that it completes.
    fn with_lines(
        &mut self,
        rank: u32,
        stream: Stream,
        now: Instant,
        change: impl FnOnce(&mut LineBuffer, &mut dyn FnMut(Line<'_>)),
    ) {
        let Self { sources, folder, victims, screen, .. } = self;
        let is_shown = self.only.contains(rank) && !self.passes_through;
        let Source { lines, last_lines, last_stream, .. } = &mut sources[rank as usize];
        change(&mut lines[stream as usize], &mut |line| {
            if remember(&mut last_lines[stream as usize], line.text) {
                *last_stream = Some(stream);
            }
            if !is_shown {
                return;
            }
            let is_whole = line.ending == LineEnd::Newline && line.shown_bytes == 0;
            let taken = match victims {
                Some(victims) if is_whole => victims.take(rank, stream, line.text, now),
                _ => Taken::No,
            };
            let released = match taken {
                Taken::Held => return,
                Taken::Released(lines) => lines,
                Taken::No => Vec::new(),
            };
            for text in released {
                show_line(screen, folder.as_mut(), rank, stream, whole(&text), now);
            }
            show_line(screen, folder.as_mut(), rank, stream, line, now);
        });
    }

    fn note_bar(&mut self, rank: u32, stream: Stream) {
        let id = (rank, stream);
        let has_bar = self.sources[rank as usize].lines[stream as usize].bar().is_some();
        let was_first = self.bars.first() == Some(&id);
        if has_bar {
            self.bars.insert(id);
        } else {
            self.bars.remove(&id);
        }
        self.bar_changed |= was_first || self.bars.first() == Some(&id);
    }

    /// Moves everything that is due to the screen.
    fn settle(&mut self, now: Instant) {
        self.tell_victims(Some(now));
        if let Some(folder) = &mut self.folder {
            while let Some(line) = folder.pop(now) {
                self.screen.line(line.stream, &line.ranks, &[&line.text]);
            }
        }
        let Some(&(rank, stream)) = self.bars.first() else {
            self.screen.erase_bar();
            return;
        };
        if self.wants_draw() && self.screen.next_draw().is_none_or(|at| at <= now) {
            let bar = self.sources[rank as usize].lines[stream as usize].bar();
            self.screen.draw_bar(rank, stream, bar.expect("a stream in `bars` has a bar"), now);
            self.bar_changed = false;
        }
    }

    fn wants_draw(&self) -> bool {
        let is_stale = self.bar_changed || !self.screen.shows_bar();
        !self.bars.is_empty() && is_stale && !self.screen.is_behind_prompt()
    }

    fn prompt_deadline(&self, stream: Stream) -> Option<Instant> {
        if !self.is_terminal || self.passes_through || !self.only.contains(self.reader) {
            return None;
        }
        let source = self.sources.get(self.reader as usize)?;
        source.lines[stream as usize].unshown()?;
        source.last_bytes_at[stream as usize].map(|at| at + PROMPT_DELAY)
    }
}

const STREAMS: [Stream; 2] = [Stream::Out, Stream::Err];

/// A line of which nothing was shown yet.
fn whole(text: &[u8]) -> Line<'_> {
    Line { text, shown_bytes: 0, ending: LineEnd::Newline }
}

fn show_line(
    screen: &mut Screen,
    folder: Option<&mut Folder>,
    rank: u32,
    stream: Stream,
    line: Line<'_>,
    now: Instant,
) {
    let rest = &line.text[line.shown_bytes..];
    let mark = match line.ending {
        LineEnd::Newline => &[][..],
        LineEnd::Cut => PIECE_MARK,
    };
    match folder {
        _ if line.shown_bytes > 0 => screen.complete(rank, stream, &[rest, mark]),
        // A piece is not folded: it is too long to be worth comparing.
        Some(folder) if line.ending == LineEnd::Newline => folder.push(rank, stream, rest, now),
        Some(folder) => {
            while folder.holds_line_of(rank)
                && let Some(earlier) = folder.pop_front()
            {
                screen.line(earlier.stream, &earlier.ranks, &[&earlier.text]);
            }
            screen.line(stream, &[rank], &[rest, mark]);
        }
        None => screen.line(stream, &[rank], &[rest, mark]),
    }
}

/// Whether the line has text, which then is the last one.
fn remember(last_line: &mut String, text: &[u8]) -> bool {
    let text = text.trim_ascii_end();
    if !text.is_empty() {
        last_line.clear();
        last_line.push_str(&String::from_utf8_lossy(&text[..text.len().min(MAX_LAST_LINE_BYTES)]));
    }
    !text.is_empty()
}

/// Wide enough for the label of a line that all ranks wrote.
fn label_width(ranks: u32, fold: bool) -> usize {
    let digits = ranks.saturating_sub(1).to_string().len();
    if fold { digits + "0-".len() } else { digits }
}
