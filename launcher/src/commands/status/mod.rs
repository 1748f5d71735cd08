//! `tpurun status`: what the ranks of a job are doing now; of one that has ended, what they did when it failed.

mod rows;
mod table;
#[cfg(test)]
mod tests;

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::command_line::definition::StatusOptions;
use crate::job::values::parse_duration;
use crate::judge::foreign;
use crate::judge::report;
use crate::observe::flight::capture;
use crate::observe::flight::dump;
use crate::observe::flight::live::{self, Live};
use crate::observe::flight::notice::{self, NodeRanks, Run};
use crate::observe::flight::processes::{self, Story};
use crate::observe::flight::{Communicator, Flight, JobFacts};
use crate::observe::run_dir;
use rows::{Grouping, Row, rows};

/// Shows the job that the options name.
///
/// # Errors
/// One line: no such job, not ours, on another host.
pub(crate) fn run(options: &StatusOptions) -> Result<ExitCode, String> {
    let every = options.watch.as_deref().map(|text| parse_duration("--watch", text)).transpose()?;
    let (run, others) = notice::find(options.job.as_deref(), &run_dir::automatic_root())?;
    if !others.is_empty() {
        eprintln!("tpurun: also running: {}", others.join(", "));
    }
    run.check_host()?;
    let mut screen = Screen::new(options, every.is_some());
    let shown = match every {
        _ if !run.is_running() => show_ended(&run, &mut screen),
        None => match Live::open(&run) {
            Ok(live) => screen.show(&Picture::of_running(&run, live.take_measured())).map(drop),
            Err(_) if !run.is_running() => show_ended(&run, &mut screen),
            Err(error) => Err(error),
        },
        Some(every) => watch(&run, every, &mut screen),
    };
    shown.map(|()| ExitCode::SUCCESS)
}

/// Until the job ends or nobody reads any more.
fn watch(run: &Run, every: Duration, screen: &mut Screen<'_>) -> Result<(), String> {
    let live = Live::open(run)?;
    let mut before = live.take();
    let mut pause = every.min(FIRST_SAMPLE);
    while !live.ends_within(pause) {
        pause = every;
        let (now, all) = live.take_since(&before);
        before = now;
        if screen.show(&Picture::of_running(run, all))? == Reader::Left {
            return Ok(());
        }
    }
    show_ended(run, screen)
}

fn show_ended(run: &Run, screen: &mut Screen<'_>) -> Result<(), String> {
    let story = processes::story(&run.dir, run.notice.job.ranks);
    let dump = dump::read(&run.flight_dir())?;
    screen.show(&Picture::of_ended(run, story, dump)).map(drop)
}

/// The state that is shown at one moment. The keys of its JSON are described in docs/flight-recorder.md.
#[derive(Debug, Serialize)]
struct Picture<'a> {
    format: u32,
    job: &'a JobFacts,
    #[serde(skip)]
    hosts: usize,
    is_running: bool,
    /// The exit code of the job; null while it runs, and when its agent was killed.
    exit: Option<i64>,
    ran_ms: u64,
    /// Those of other nodes that do not say what their ranks do.
    silent: Vec<NodeRanks>,
    /// Where the rest of this comes from: `asked` is now, else the dump.
    reason: String,
    taken_unix_ns: u64,
    communicators: Vec<Communicator>,
    /// Groups that other backends serve.
    foreign: Vec<foreign::Group>,
    classes: Vec<Row>,
    ranks: Vec<RankRow>,
}

/// One rank.
#[derive(Debug, Serialize)]
struct RankRow {
    rank: u32,
    pid: Option<i32>,
    #[serde(flatten)]
    row: Row,
}

impl<'a> Picture<'a> {
    fn of_running(run: &'a Run, (flight, silent): (Flight, Vec<NodeRanks>)) -> Picture<'a> {
        let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
        let ran_ms = now_ms.saturating_sub(run.notice.job.started_unix_ms);
        Picture { is_running: true, ran_ms, silent, ..Picture::new(run, flight) }
    }

    fn of_ended(run: &'a Run, story: Story, dump: Option<Flight>) -> Picture<'a> {
        let (exit, ran_ms) = (story.exit, story.ran_ms);
        let flight = dump.unwrap_or_else(|| capture::of_stories(&run.notice.job, story.ranks));
        Picture { exit, ran_ms, ..Picture::new(run, flight) }
    }

    fn new(run: &'a Run, flight: Flight) -> Picture<'a> {
        let ranks = rows(&flight, Grouping::Rank).into_iter().zip(&flight.ranks);
        Picture {
            format: flight.format,
            job: &run.notice.job,
            hosts: run.notice.others.len().max(1),
            is_running: false,
            exit: None,
            ran_ms: 0,
            silent: vec![],
            reason: flight.reason.to_string(),
            taken_unix_ns: flight.taken_unix_ns,
            foreign: foreign::groups(&run.dir, run.notice.job.ranks),
            classes: rows(&flight, Grouping::Class),
            ranks: ranks.map(|(row, rank)| RankRow { rank: rank.rank, pid: rank.pid, row }).collect(),
            communicators: flight.communicators,
        }
    }

    /// The line above the table.
    fn headline(&self) -> String {
        let ran_for = report::clock(Duration::from_millis(self.ran_ms));
        let what = match (self.is_running, self.exit) {
            (true, _) => format!("running for {ran_for}"),
            (false, Some(code)) => format!("ended after {ran_for} with exit {code}"),
            (false, None) => format!("ended after {ran_for} without saying how: its agent was killed"),
        };
        let JobFacts { run, ranks, host, command, .. } = self.job;
        let plural = if *ranks == 1 { "" } else { "s" };
        let place = if self.hosts > 1 { format!("{} hosts", self.hosts) } else { host.clone() };
        report::clip(&format!("{run}  {what}  {ranks} rank{plural} on {place}: {}", command.join(" ")))
    }

    /// The moment that the table is of, where that is not now.
    fn note(&self) -> Option<String> {
        let after_ms = (self.taken_unix_ns / 1_000_000).saturating_sub(self.job.started_unix_ms);
        let after = report::clock(Duration::from_millis(after_ms));
        match self.reason.as_str() {
            _ if !self.silent.is_empty() => {
                let silent = live::names(&self.silent);
                Some(format!("No word from {silent}: what is shown of these is old, or nothing."))
            }
            _ if self.is_running => None,
            capture::NO_DUMP => Some("No dump: one is written when a job fails or is stopped.".into()),
            reason => Some(format!("The last dump, {after} after the start ({}):", report::clip(reason))),
        }
    }

    fn text(&self, grouping: Grouping) -> String {
        let rows: Vec<Row> = match grouping {
            Grouping::Class => self.classes.clone(),
            Grouping::Rank => self.ranks.iter().map(|rank| rank.row.clone()).collect(),
        };
        let note = self.note().map(|note| format!("{note}\n")).unwrap_or_default();
        let foreign = foreign::line(&self.foreign).map(|line| format!("\n{line}\n")).unwrap_or_default();
        format!("{}\n{note}\n{}{foreign}", self.headline(), table::render(&rows))
    }
}

/// Where pictures go.
struct Screen<'a> {
    options: &'a StatusOptions,
    style: Style,
    is_first: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Style {
    /// Each picture takes the place of the one before.
    Redraw,
    /// Each comes after the one before.
    Append,
}

impl<'a> Screen<'a> {
    fn new(options: &'a StatusOptions, is_watch: bool) -> Screen<'a> {
        let is_redrawn = is_watch && !options.json && io::stdout().is_terminal();
        Screen { options, style: if is_redrawn { Style::Redraw } else { Style::Append }, is_first: true }
    }

    fn show(&mut self, picture: &Picture<'_>) -> Result<Reader, String> {
        let grouping = if self.options.ranks { Grouping::Rank } else { Grouping::Class };
        let text = match self.options.json {
            true => serde_json::to_string(picture).map_err(|error| error.to_string())? + "\n",
            false => picture.text(grouping),
        };
        let text = match self.style {
            Style::Redraw => redrawn(&text),
            Style::Append if self.is_first || self.options.json => text,
            Style::Append => format!("\n{text}"),
        };
        self.is_first = false;
        let mut out = io::stdout();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            // A reader that leaves early is no bug of ours.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(Reader::Left),
            written => written.map(|()| Reader::Stays).map_err(|error| error.to_string()),
        }
    }
}

/// Whoever reads what we write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reader {
    Stays,
    Left,
}

/// From the top of the terminal; lines are cut at its width, or they would take two.
fn redrawn(text: &str) -> String {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok();
    let columns = size.map_or(usize::MAX, |size| usize::from(size.ws_col).max(1));
    let lines = text.lines().map(|line| line.chars().take(columns).collect::<String>() + "\x1b[K\n");
    format!("\x1b[H{}\x1b[J", lines.collect::<String>())
}

const FIRST_SAMPLE: Duration = Duration::from_millis(200);
