//! The ranks of this host: how one is started, what it is connected to, and what became of it.
//!
//! This room knows how ranks come to be. It does not know why they end.

pub(crate) mod fork_server;
pub(crate) mod server_events;
pub(crate) mod warm;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use rustix::io::FdFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::WaitStatus;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::mpsc;
use tpurun_memory::process::spawn_bound;
use tpurun_protocol::control::CONTROL_FD_VAR;

use crate::job::Job;
use crate::job::environment::{PRIVATE, Variables};
use crate::job::program::Program;
use crate::job::target::{Target, calls_main};
use crate::output::Stream;
use crate::processes::addresses::SameAddresses;

/// One rank as the agent sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rank {
    /// Not asked for yet.
    Unborn,
    /// Another node's.
    Elsewhere,
    /// Asked for, or next in the queue; its number is not known yet.
    Requested,
    /// Running as this process.
    Running(i32),
    /// Gone.
    Ended { pid: Option<i32>, ending: Ending, at: Instant },
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Exit(i32),
    Signal(i32),
}

/// The descriptors that a rank inherits.
#[derive(Debug)]
pub(crate) struct RankEnds {
    pub(crate) stdin: OwnedFd,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
    pub(crate) control: OwnedFd,
}

/// Bytes that a rank wrote; none at the end of the stream.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) rank: u32,
    pub(crate) stream: Stream,
    pub(crate) bytes: Vec<u8>,
}

impl Rank {
    pub(crate) fn pid(&self) -> Option<i32> {
        match self {
            Rank::Unborn | Rank::Elsewhere | Rank::Requested => None,
            Rank::Running(pid) => Some(*pid),
            Rank::Ended { pid, .. } => *pid,
        }
    }

    /// Running, or about to.
    pub(crate) fn is_alive(&self) -> bool {
        matches!(self, Rank::Requested | Rank::Running(_))
    }

    pub(crate) fn has_ended(&self) -> bool {
        matches!(self, Rank::Ended { .. })
    }
}

impl Ending {
    pub(crate) fn of(status: WaitStatus) -> Option<Ending> {
        status.exit_status().map(Ending::Exit).or_else(|| status.terminating_signal().map(Ending::Signal))
    }

    /// The ending that the fork server says of a child: the signal is 0 when it exited.
    pub(crate) fn told(code: i32, signal: i32) -> Ending {
        if signal == 0 { Ending::Exit(code) } else { Ending::Signal(signal) }
    }

    /// As a shell would say it.
    pub(crate) fn exit_code(self) -> i32 {
        match self {
            Ending::Exit(code) => code,
            Ending::Signal(number) => 128 + number,
        }
    }
}

/// Opens the standard streams of a rank; what it writes goes to `chunks`. Only one rank reads our stdin.
pub(crate) fn open_streams(
    rank: u32,
    reads_stdin: bool,
    chunks: &mpsc::Sender<Chunk>,
) -> io::Result<(OwnedFd, OwnedFd, OwnedFd)> {
    let stdin = match reads_stdin {
        true => io::stdin().as_fd().try_clone_to_owned().or_else(|_| null())?,
        false => null()?,
    };
    let open = |stream| -> io::Result<OwnedFd> {
        let (read_end, write_end) = pipe_with(PipeFlags::CLOEXEC)?;
        tokio::spawn(forward(rank, stream, pipe::Receiver::from_owned_fd(read_end)?, chunks.clone()));
        Ok(write_end)
    };
    Ok((stdin, open(Stream::Out)?, open(Stream::Err)?))
}

/// Starts a rank as a process of its own, which ends with the thread that calls this: the agent's main thread, which
/// lives as long as its process.
pub(crate) fn spawn(
    job: &Job,
    rank: u32,
    ends: RankEnds,
    variables: &Variables,
    board: &OwnedFd,
) -> io::Result<i32> {
    let mut command = command(job, job.programs.of(rank));
    if job.has_own_hash_seeds {
        // Unless the program has one in its own environment, which follows.
        command.env_remove("PYTHONHASHSEED");
    }
    command
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .env(CONTROL_FD_VAR, ends.control.as_raw_fd().to_string())
        .process_group(0);
    for name in PRIVATE {
        command.env_remove(name);
    }
    command.stdin(ends.stdin).stdout(ends.stdout).stderr(ends.stderr);
    // Everything else is closed on exec; the board is opened for all ranks at once by the caller.
    rustix::io::fcntl_setfd(&ends.control, FdFlags::empty())?;
    rustix::io::fcntl_setfd(board, FdFlags::empty())?;
    let same = job.has_same_addresses().then(SameAddresses::begin).transpose();
    let spawned = match &same {
        Err(error) if job.aslr == Some(false) => {
            let text = format!(
                "--aslr off: expected a host that allows it (personality), given one that says {error}"
            );
            Err(io::Error::other(text))
        }
        // Slower, and nothing else.
        _ => spawn_bound(command),
    };
    drop(same);
    rustix::io::fcntl_setfd(board, FdFlags::CLOEXEC)?;
    Ok(spawned?.id() as i32)
}

/// The words of the command that a rank of this program executes when it is a process of its own.
pub(crate) fn command_words(job: &Job, program: &Program) -> Vec<String> {
    let command = command(job, program);
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect()
}

fn command(job: &Job, program: &Program) -> Command {
    let (path, words) = match &program.target {
        Target::Executable { path, args } => (path.as_path(), args.clone()),
        python => {
            let start = ["-c".to_owned(), calls_main("tpurun.run_rank")].into_iter();
            let path = job.python.as_deref().unwrap_or(Path::new("python3"));
            (path, start.chain(python.words()).collect())
        }
    };
    let mut command = match &program.cwd {
        None => Command::new(path),
        // Else it would be looked up from there.
        Some(_) => Command::new(std::path::absolute(path).as_deref().unwrap_or(path)),
    };
    command.args(words).current_dir(program.cwd.as_deref().unwrap_or(Path::new(".")));
    command
}

fn null() -> io::Result<OwnedFd> {
    Ok(File::open("/dev/null")?.into())
}

async fn forward(rank: u32, stream: Stream, mut pipe: pipe::Receiver, chunks: mpsc::Sender<Chunk>) {
    loop {
        let mut bytes = Vec::with_capacity(CHUNK_BYTES);
        let read = pipe.read_buf(&mut bytes).await.unwrap_or(0);
        if chunks.send(Chunk { rank, stream, bytes }).await.is_err() || read == 0 {
            return;
        }
    }
}

const CHUNK_BYTES: usize = 16 << 10;
