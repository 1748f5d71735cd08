//! Fork servers that outlive the command which started them (`--warm`), so that the next job finds torch
//! imported. `python/tpurun/warm_server.py` is one.
//!
//! The front looks for the server of its job with [`find`], which starts one where there is none; the agent then
//! asks it for a fork ([`connect`], `fork_server.rs`). If anything is wrong with a server, the job starts without it.

mod circumstances;
mod commands;

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FlockOperation;
use rustix::io::FdFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::base::private::{self, AllowedOwner};
use crate::job::Job;
use crate::job::environment::{self, PRIVATE, SERVER_THREADS};
use crate::job::target::calls_main;
use crate::job::values::parse_duration;
use crate::processes::proc_stat::Stat;

pub(crate) use commands::run;

/// The answers of a server, a line each.
#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub(crate) enum Answer {
    /// It is what a new one would be.
    Fresh,
    /// It is not, and no job gets it any more.
    Stale {
        reason: String,
    },
    /// This process is the fork server of the job.
    Forked {
        pid: i32,
    },
    /// There is none for this job.
    Refused {
        reason: String,
    },
    Status(commands::Status),
    /// No job gets it any more; so many have it still.
    Stopped {
        jobs: u32,
    },
}

/// The socket of a server that is what a new one for this job would be; started now where there was none. Says so when
/// there can be none.
pub(crate) fn find(job: &Job) -> Option<PathBuf> {
    if !job.is_warm || !job.programs.are_any_forked() {
        return None;
    }
    let found = WarmServer::of(job).and_then(|server| server.fresh(job));
    found.inspect_err(|reason| say(&format!("no warm fork server ({reason}): this start is a cold one"))).ok()
}

/// Where the server of jobs like this one listens.
struct WarmServer {
    socket: PathBuf,
    /// The circumstances that all of its jobs have in common.
    circumstances: String,
}

impl WarmServer {
    fn of(job: &Job) -> Result<WarmServer, String> {
        let circumstances = circumstances::of(job)?;
        let socket = folder()?.join(format!("{:016x}{SOCKET}", circumstances::hash(&circumstances)));
        Ok(WarmServer { socket, circumstances })
    }

    fn fresh(self, job: &Job) -> Result<PathBuf, String> {
        let first = match self.check() {
            Ok(()) => return Ok(self.socket),
            Err(reason) => reason,
        };
        if let Some(reason) = first {
            say(&format!("warm: {reason}: starting another fork server"));
        }
        self.start(job)?;
        self.check().map_err(|reason| reason.unwrap_or_else(|| "it ended".into()))?;
        Ok(self.socket)
    }

    /// Why there is no server that would do, when there is anything to say.
    fn check(&self) -> Result<(), Option<String>> {
        let mut connection = ServerConnection::begin(&self.socket).map_err(|_| None)?;
        match connection.ask(&json!({"op": "check", "circumstances": self.circumstances})) {
            Ok(Answer::Fresh) => Ok(()),
            Ok(Answer::Stale { reason }) => Err(Some(reason)),
            Ok(other) => Err(Some(unexpected(&other))),
            Err(NoAnswer::Ended) => Err(None),
            Err(why) => Err(Some(format!("the one with pid {} {why}", connection.patience.pid))),
        }
    }

    fn start(&self, job: &Job) -> Result<(), String> {
        let _lock = self.lock()?;
        // Somebody may have been faster.
        if self.check().is_ok() {
            return Ok(());
        }
        let refused = |error: io::Error| format!("{}: {error}", self.socket.display());
        match fs::remove_file(&self.socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(refused(error)),
            _ => {}
        }
        let listener = UnixListener::bind(&self.socket).map_err(refused)?;
        fs::set_permissions(&self.socket, fs::Permissions::from_mode(0o600)).map_err(refused)?;
        launch(job, &self.socket, &self.circumstances, &listener)?;
        let pid = ServerConnection::begin(&self.socket).map_err(refused)?.patience.pid;
        let idle = idle_limit()?.as_secs_f64() / 60.0;
        say(&format!(
            "warm: fork server {pid} stays for the next job: ends after {idle} idle minutes, or with `tpurun warm --stop`"
        ));
        Ok(())
    }

    /// One command at a time starts a server.
    fn lock(&self) -> Result<File, String> {
        let path = self.socket.with_extension("lock");
        let file = private::shared(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let until = Instant::now() + START_LIMIT;
        while rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            if Instant::now() >= until {
                return Err("another tpurun has been starting it for long".into());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(file)
    }
}

/// Starts the interpreter, and waits until it listens.
fn launch(job: &Job, socket: &Path, circumstances: &str, listener: &UnixListener) -> Result<(), String> {
    let refused = |error: io::Error| format!("cannot start it: {error}");
    let (told, tells) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| refused(errno.into()))?;
    let options = json!({
        "listener": listener.as_raw_fd(), "told": tells.as_raw_fd(), "path": socket, "circumstances": circumstances,
        "preload": job.preload, "idle_s": idle_limit()?.as_secs(),
    });
    let python = job.python.as_deref().expect("only Python programs are forked");
    let mut command = Command::new(python);
    command
        .args(["-c", &calls_main("tpurun.warm_server"), &options.to_string()])
        .envs(environment::of_preload(job))
        .envs(SERVER_THREADS)
        .stdin(Stdio::null())
        .stdout(io::stderr().as_fd().try_clone_to_owned().map_err(refused)?);
    for name in PRIVATE {
        command.env_remove(name);
    }
    for fd in [listener.as_fd(), tells.as_fd()] {
        rustix::io::fcntl_setfd(fd, FdFlags::empty()).map_err(|errno| refused(errno.into()))?;
    }
    let mut child = command.spawn().map_err(refused)?;
    drop(tells);
    // It leaves at once, and what it has forked is nobody's child.
    let limit = Timespec { tv_sec: START_LIMIT.as_secs() as i64, tv_nsec: 0 };
    match poll(&mut [PollFd::new(&told, PollFlags::IN)], Some(&limit)) {
        Ok(1..) => drop(child.wait()),
        _ => {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("it did not listen within {} s", START_LIMIT.as_secs()));
        }
    }
    Ok(())
}

/// A conversation with a server.
struct ServerConnection {
    stream: BufReader<UnixStream>,
    patience: ServerPatience,
}

impl ServerConnection {
    fn begin(socket: &Path) -> io::Result<ServerConnection> {
        let (stream, patience) = connect(socket)?;
        stream.set_read_timeout(Some(LOOK_EVERY))?;
        stream.set_write_timeout(Some(SILENCE))?;
        Ok(ServerConnection { stream: BufReader::new(stream), patience })
    }

    fn ask(&mut self, request: &Value) -> Result<Answer, NoAnswer> {
        let line = format!("{request}\n");
        self.stream.get_mut().write_all(line.as_bytes()).map_err(NoAnswer::of)?;
        let mut line = Vec::new();
        loop {
            match self.stream.read_until(b'\n', &mut line) {
                Ok(_) if line.ends_with(b"\n") => return NoAnswer::read(&line),
                Ok(_) => return Err(NoAnswer::Ended),
                Err(error) if is_early(&error) => self.patience.look()?,
                Err(error) => return Err(NoAnswer::of(error)),
            }
        }
    }
}

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum NoAnswer {
    Ended,
    Stopped,
    Hangs,
    Nonsense,
}

impl NoAnswer {
    fn of(error: io::Error) -> NoAnswer {
        if is_early(&error) { NoAnswer::Hangs } else { NoAnswer::Ended }
    }

    /// The answer in this line.
    pub(crate) fn read(line: &[u8]) -> Result<Answer, NoAnswer> {
        serde_json::from_slice(line).map_err(|_| NoAnswer::Nonsense)
    }
}

impl std::fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            NoAnswer::Ended => "has ended",
            NoAnswer::Stopped => "is stopped",
            NoAnswer::Hangs => "does not answer",
            NoAnswer::Nonsense => "is of another version",
        })
    }
}

fn is_early(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

/// Waits for a server as long as it works, which may be an import of many seconds.
#[derive(Debug)]
pub(crate) struct ServerPatience {
    pub(crate) pid: i32,
    worked: Duration,
    since: Instant,
}

impl ServerPatience {
    fn new(pid: i32) -> ServerPatience {
        ServerPatience { pid, worked: Duration::ZERO, since: Instant::now() }
    }

    /// To be asked every [`LOOK_EVERY`].
    ///
    /// # Errors
    /// Why there is no more reason to wait.
    pub(crate) fn look(&mut self) -> Result<(), NoAnswer> {
        let line = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        let stat = Stat::parse(&line).ok_or(NoAnswer::Ended)?;
        match stat.state {
            'T' | 't' => return Err(NoAnswer::Stopped),
            'Z' | 'X' => return Err(NoAnswer::Ended),
            _ => {}
        }
        if stat.cpu > self.worked {
            (self.worked, self.since) = (stat.cpu, Instant::now());
        }
        if self.since.elapsed() < SILENCE { Ok(()) } else { Err(NoAnswer::Hangs) }
    }
}

/// Connects to a server of this user.
pub(crate) fn connect(socket: &Path) -> io::Result<(UnixStream, ServerPatience)> {
    let stream = UnixStream::connect(socket)?;
    let peer = rustix::net::sockopt::socket_peercred(&stream)?;
    if peer.uid != rustix::process::geteuid() {
        return Err(io::Error::other(format!("expected a server of this user, given one of {:?}", peer.uid)));
    }
    Ok((stream, ServerPatience::new(peer.pid.as_raw_nonzero().get())))
}

/// Only this user sees what is in it.
fn folder() -> Result<PathBuf, String> {
    let user = rustix::process::geteuid().as_raw();
    let path = match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| Path::new(dir).is_absolute()) {
        Some(dir) => Path::new(&dir).join("tpurun-warm"),
        None => std::env::temp_dir().join(format!("tpurun-warm-{user}")),
    };
    let refused = |error: io::Error| format!("{}: {error}", path.display());
    private::directory(&path, AllowedOwner::User).map_err(refused)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).map_err(refused)?;
    Ok(path)
}

fn idle_limit() -> Result<Duration, String> {
    std::env::var(IDLE).ok().map_or(Ok(IDLE_LIMIT), |text| parse_duration(IDLE, &text))
}

fn unexpected(answer: &Answer) -> String {
    format!("expected another answer than {answer:?}")
}

fn say(text: &str) {
    // Where nobody reads it, nobody needs it.
    let _ = writeln!(io::stderr(), "tpurun: {text}");
}

const SOCKET: &str = ".socket";
/// How long a server stays without jobs.
const IDLE: &str = "TPURUN_WARM_IDLE";
/// A person who comes back sooner waits for nothing; one who does not pays for 200 MB of memory.
const IDLE_LIMIT: Duration = Duration::from_secs(600);
/// Until an interpreter that was just started listens: a fraction of a second, unless the machine is busy.
const START_LIMIT: Duration = Duration::from_secs(10);
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long a server that is to answer may do nothing at all.
const SILENCE: Duration = Duration::from_secs(5);
