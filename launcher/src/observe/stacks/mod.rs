//! Asks ranks where they are in their programs, all threads of them, and reads what they answer.
//!
//! A rank answers from a signal handler (`python/tpurun/stacks.py`) into a file of the run directory. Only a
//! process that handles the signal is sent it, and only while the file is still the one behind its
//! descriptor: a program that rank executed later would die of it, or write elsewhere.

mod classes;
mod parse;

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tpurun_protocol::control::{STACK_SIGNAL, STACK_SIGNAL_VAR, realtime_signal};

use crate::job::values::parse_stack_signal;
use crate::processes::{Process, handles_signal};

pub(crate) use classes::{StackClass, classes, full_text, lines};
pub(crate) use parse::{Dump, StackFrame, StacksHeader, Thread};

/// How the ranks of a run are asked.
#[derive(Clone, Debug)]
pub(crate) struct Asker {
    /// Where they write.
    dir: PathBuf,
    /// None when nobody wants to be asked.
    signal: Option<Signal>,
}

/// The answer of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankStack {
    pub(crate) rank: u32,
    pub(crate) header: Option<StacksHeader>,
    /// None when it could not be asked or did not answer in time.
    pub(crate) dump: Option<Dump>,
}

/// Ranks that have been asked and may not have answered yet.
#[derive(Debug)]
pub(crate) struct Inquiry {
    until: Instant,
    ranks: Vec<Asked>,
}

#[derive(Debug)]
struct Asked {
    rank: u32,
    /// None when it was not asked.
    question: Option<Question>,
}

/// To a process, which answers in its file.
#[derive(Debug)]
struct Question {
    process: OwnedFd,
    signal: Signal,
    answers: AnswerFile,
    /// Once more: the first answer was cut short where the program made a frame just then.
    is_repeated: bool,
    is_answered: bool,
}

#[derive(Debug)]
struct AnswerFile {
    file: File,
    header: StacksHeader,
    /// Where the answer begins.
    start: u64,
}

impl RankStack {
    /// The main thread's.
    pub(crate) fn main(&self) -> Option<&Thread> {
        self.dump.as_ref().and_then(|dump| dump.main(self.header.as_ref()))
    }

    /// Innermost first.
    pub(crate) fn main_frames(&self) -> &[StackFrame] {
        self.main().map_or(&[], |thread| &thread.frames)
    }

    /// Where its main thread is in the user's program; empty when the rank has not answered.
    pub(crate) fn place(&self) -> String {
        let torch = self.header.as_ref().map_or("", |header| &header.torch);
        classes::place(self.main_frames(), torch)
    }

    pub(crate) fn threads(&self) -> &[Thread] {
        self.dump.as_ref().map_or(&[], |dump| &dump.threads)
    }

    /// Whether the main thread holds the interpreter's lock; None when it has not said so itself.
    pub(crate) fn holds_gil(&self) -> Option<bool> {
        let is_mains = self.main().is_some_and(|main| main.is_current);
        self.dump.as_ref().filter(|_| is_mains).and_then(|dump| dump.holds_gil)
    }
}

impl Asker {
    /// For the ranks of the run whose stacks lie in `dir`.
    pub(crate) fn new(dir: PathBuf) -> Asker {
        // A bad text has been refused before there was a run.
        let text = std::env::var(STACK_SIGNAL_VAR).unwrap_or_default();
        Asker { dir, signal: parse_stack_signal(&text).unwrap_or_else(|_| realtime_signal(STACK_SIGNAL)) }
    }

    /// Sends the signal to those of the ranks, given with their processes, that can answer.
    pub(crate) fn ask(&self, ranks: &[(u32, i32)], now: Instant) -> Inquiry {
        let asked =
            ranks.iter().map(|(rank, pid)| Asked { rank: *rank, question: self.ask_one(*rank, *pid) });
        Inquiry { until: now + PATIENCE, ranks: asked.collect() }
    }

    /// Asks, and waits for all answers, a short while at most.
    pub(crate) fn ask_and_wait(&self, ranks: &[(u32, i32)]) -> Vec<RankStack> {
        let mut inquiry = self.ask(ranks, Instant::now());
        while !inquiry.is_over(Instant::now()) {
            std::thread::sleep(POLL);
        }
        inquiry.answers()
    }

    fn ask_one(&self, rank: u32, pid: i32) -> Option<Question> {
        let signal = self.signal?;
        // From here on nobody else can be meant by this number.
        let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        let answers = open_answers(&self.dir, rank, pid)?;
        let is_same = {
            let behind = fs::metadata(format!("/proc/{pid}/fd/{}", answers.header.fd)).ok()?;
            let ours = answers.file.metadata().ok()?;
            (behind.dev(), behind.ino()) == (ours.dev(), ours.ino())
        };
        // One that is stopped would answer when it goes on.
        let can_answer =
            matches!(Process::read(pid)?.state, 'R' | 'S' | 'D') && handles_signal(pid, signal.as_raw());
        if !is_same || !can_answer {
            return None;
        }
        pidfd_send_signal(&process, signal).ok()?;
        Some(Question { process, signal, answers, is_repeated: false, is_answered: false })
    }
}

impl Inquiry {
    /// Whether all have answered, or have had the time to.
    pub(crate) fn is_over(&mut self, now: Instant) -> bool {
        let mut is_over = true;
        for question in self.ranks.iter_mut().filter_map(|asked| asked.question.as_mut()) {
            is_over &= question.is_answered();
        }
        is_over || now >= self.until
    }

    /// The answers so far.
    pub(crate) fn answers(self) -> Vec<RankStack> {
        self.ranks
            .into_iter()
            .map(|Asked { rank, question }| {
                let answers = question.map(|question| question.answers);
                let header = answers.as_ref().map(|answers| answers.header.clone());
                let bytes = answers.and_then(|answers| answers.read()).filter(|bytes| !bytes.is_empty());
                RankStack { rank, header, dump: bytes.map(|bytes| parse::dump(&bytes)) }
            })
            .collect()
    }
}

impl Question {
    /// Whether all that there will be is written.
    fn is_answered(&mut self) -> bool {
        if self.is_answered {
            return true;
        }
        let Some(answer) = self.answers.read().filter(|answer| answer.ends_with(END)) else { return false };
        self.is_answered = self.is_repeated || !parse::dump(&answer).is_cut;
        if !self.is_answered {
            self.is_repeated = true;
            self.answers.start += answer.len() as u64;
            self.is_answered = pidfd_send_signal(&self.process, self.signal).is_err();
        }
        self.is_answered
    }
}

impl AnswerFile {
    fn read(&self) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        (&self.file).seek(SeekFrom::Start(self.start)).ok()?;
        (&self.file).take(MAX_ANSWER_BYTES).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }
}

/// The file of a rank whose process has said that it answers there.
fn open_answers(dir: &Path, rank: u32, pid: i32) -> Option<AnswerFile> {
    let path = dir.join(file_name(rank));
    // Not a pipe that somebody has put there: opening it would wait.
    fs::symlink_metadata(&path).ok().filter(fs::Metadata::is_file)?;
    let file = File::open(path).ok()?;
    let bytes = file.metadata().ok()?.len();
    let header = read_header(&file, pid)?;
    Some(AnswerFile { file, header, start: bytes })
}

/// A rank writes it before anything else, after what earlier processes of the same rank have written.
fn read_header(file: &File, pid: i32) -> Option<StacksHeader> {
    let mut bytes = Vec::new();
    file.take(MAX_HEADER_BYTES).read_to_end(&mut bytes).ok()?;
    parse::header(&String::from_utf8_lossy(&bytes), pid)
}

/// In the folder of stacks.
pub(crate) fn file_name(rank: u32) -> String {
    format!("rank-{rank:04}.txt")
}

/// How long answers are waited for: a rank answers when it next gets a CPU.
const PATIENCE: Duration = Duration::from_millis(300);
const POLL: Duration = Duration::from_millis(5);
const END: &[u8] = b"tpurun: end\n";
const MAX_ANSWER_BYTES: u64 = 256 << 10;
const MAX_HEADER_BYTES: u64 = 4 << 20;
