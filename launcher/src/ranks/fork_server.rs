//! The agent's end of the fork server: one JSON object per line over a stream socket, descriptors beside it.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::io::FdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Resource, getrlimit};
use serde_json::{Map, Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

use crate::job::Job;
use crate::job::environment::{PRIVATE, SERVER_THREADS, Variables};
use crate::job::program::{Program, Programs, Start};
use crate::job::target::{Target, calls_main};
use crate::ranks::RankEnds;
pub(crate) use crate::ranks::server_events::ServerEvent;
use crate::ranks::server_events::take_events;
use crate::ranks::warm::{self, Answer, NoAnswer, ServerPatience};

/// The scripts of programs that are forked, from where they lie.
fn scripts(programs: &Programs) -> Vec<PathBuf> {
    let forked = programs.iter().filter(|program| program.start == Start::ForkServer);
    let script = |program: &Program| match &program.target {
        Target::Script { path, .. } => Some(program.cwd.clone().unwrap_or_default().join(path)),
        _ => None,
    };
    forked.filter_map(script).collect()
}

/// A running fork server.
#[derive(Debug)]
pub(crate) struct ForkServer {
    socket: OwnedWriteHalf,
    pub(crate) pid: i32,
    /// Else it only holds the store.
    pub(crate) forks: bool,
    /// Has imported what it should, and reads what it is told.
    pub(crate) is_ready: bool,
}

impl ForkServer {
    /// Starts it; it begins to import at once.
    pub(crate) fn start(
        job: &Job,
        variables: &Variables,
        events: mpsc::Sender<ServerEvent>,
    ) -> io::Result<ForkServer> {
        let (ours, theirs) = StdUnixStream::pair()?;
        let agent = rustix::process::getpid().as_raw_nonzero().get();
        let forks = job.programs.are_any_forked();
        let options = json!({
            "fd": theirs.as_raw_fd(), "agent": agent, "forks": forks, "preload": job.preload,
            "targets": scripts(&job.programs),
        });
        let python = job.python.as_deref().expect("only Python programs are forked");
        let mut command = Command::new(python);
        command
            .args(["-c", &calls_main("tpurun.fork_server"), &options.to_string()])
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .envs(SERVER_THREADS)
            .process_group(0)
            .stdin(Stdio::null())
            // The output of an import is said once, where it does not mix with what the ranks compute.
            .stdout(io::stderr().as_fd().try_clone_to_owned()?);
        for name in PRIVATE {
            command.env_remove(name);
        }
        rustix::io::fcntl_setfd(&theirs, FdFlags::empty())?;
        let pid = command.spawn()?.id() as i32;
        ours.set_nonblocking(true)?;
        let (read_half, socket) = UnixStream::from_std(ours)?.into_split();
        tokio::spawn(read_events(read_half, events));
        Ok(ForkServer { socket, pid, forks, is_ready: false })
    }

    /// Asks the warm server at `socket` for one, which answers with [`ServerEvent::Forked`] or
    /// [`ServerEvent::NotForked`]; until then its number is 0.
    pub(crate) fn start_warm(
        job: &Job,
        variables: &Variables,
        socket: &Path,
        events: mpsc::Sender<ServerEvent>,
    ) -> io::Result<ForkServer> {
        let (ours, theirs) = StdUnixStream::pair()?;
        let (warm, patience) = warm::connect(socket)?;
        let cwd = std::env::current_dir()?;
        let limit = getrlimit(Resource::Nofile);
        // A limit that is none is the most that there can be.
        let files = [limit.current, limit.maximum].map(|files| files.map_or(-1, |files| files as i64));
        let targets: Vec<PathBuf> = scripts(&job.programs).iter().map(|path| cwd.join(path)).collect();
        let request = json!({
            "op": "job", "fds": 2, "env": server_environment(variables), "cwd": cwd, "open_files": files,
            "targets": targets,
        });
        let output = io::stderr().as_fd().try_clone_to_owned()?;
        for stream in [&ours, &warm] {
            stream.set_nonblocking(true)?;
        }
        let warm = UnixStream::from_std(warm)?;
        let (read_half, socket) = UnixStream::from_std(ours)?.into_split();
        tokio::spawn(async move {
            match ask(warm, patience, &request, [output, theirs.into()]).await {
                Ok(pid) => {
                    let _ = events.send(ServerEvent::Forked { pid }).await;
                    read_events(read_half, events).await;
                }
                Err(reason) => drop(events.send(ServerEvent::NotForked { reason }).await),
            }
        });
        Ok(ForkServer { socket, pid: 0, forks: true, is_ready: false })
    }

    /// Asks for the rendezvous store; answered by [`ServerEvent::Store`].
    pub(crate) async fn start_store(&self, host: &str, port: u16) -> io::Result<()> {
        self.request(&json!({"op": "store", "host": host, "port": port}), &[]).await
    }

    /// Asks it to end the store, the ranks and whatever these have started; answered by
    /// [`ServerEvent::Cleared`].
    pub(crate) async fn clear(&self) -> io::Result<()> {
        self.request(&json!({"op": "clear"}), &[]).await
    }

    /// Asks for one rank; answered by [`ServerEvent::Started`] or [`ServerEvent::Failed`].
    pub(crate) async fn start_rank(
        &self,
        program: &Program,
        rank: u32,
        variables: &Variables,
        ends: RankEnds,
        board: &OwnedFd,
    ) -> io::Result<()> {
        let (target, args, module) = match &program.target {
            Target::Script { path, args } => (path.as_str(), args, false),
            Target::Module { name, args } => (name.as_str(), args, true),
            Target::Executable { .. } => unreachable!("only Python programs are forked"),
        };
        let env: Map<String, Value> =
            variables.iter().map(|(name, value)| (name.clone(), value.clone().into())).collect();
        let request = json!({
            "op": "rank", "rank": rank, "env": env, "fds": 5,
            "program": {"target": target, "args": args, "module": module, "cwd": program.cwd},
        });
        let [stdin, stdout, stderr] = [ends.stdin.as_fd(), ends.stdout.as_fd(), ends.stderr.as_fd()];
        self.request(&request, &[stdin, stdout, stderr, ends.control.as_fd(), board.as_fd()]).await
    }

    async fn request(&self, request: &Value, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        send_line(self.socket.as_ref(), request, fds).await
    }
}

/// The environment of a server, where it is not inherited.
fn server_environment(variables: &Variables) -> Map<String, Value> {
    let threads = SERVER_THREADS.map(|(name, value)| (name.to_owned(), value.to_owned()));
    // Where one is not UTF-8, no warm server was found.
    let own = std::env::vars().filter(|(name, _)| !PRIVATE.contains(&&**name));
    let all = own.chain(variables.iter().cloned()).chain(threads);
    all.map(|(name, value)| (name, value.into())).collect()
}

/// Asks a warm server, and waits as long as it works; the number of the fork.
async fn ask(
    stream: UnixStream,
    mut patience: ServerPatience,
    request: &Value,
    fds: [OwnedFd; 2],
) -> Result<i32, String> {
    let [output, socket] = fds.each_ref().map(AsFd::as_fd);
    let answer = async {
        send_line(&stream, request, &[output, socket]).await.map_err(|_| NoAnswer::Ended)?;
        let mut line = Vec::new();
        BufReader::new(stream).read_until(b'\n', &mut line).await.map_err(|_| NoAnswer::Ended)?;
        if line.is_empty() { Err(NoAnswer::Ended) } else { NoAnswer::read(&line) }
    };
    let mut answer = std::pin::pin!(answer);
    let answer = loop {
        tokio::select! {
            answer = &mut answer => break answer,
            () = tokio::time::sleep(warm::LOOK_EVERY) => {
                if let Err(silence) = patience.look() {
                    break Err(silence);
                }
            }
        }
    };
    match answer {
        Ok(Answer::Forked { pid }) => Ok(pid),
        Ok(Answer::Refused { reason }) => Err(reason),
        Ok(_) => Err(format!("the one with pid {} {}", patience.pid, NoAnswer::Nonsense)),
        Err(silence) => Err(format!("the one with pid {} {silence}", patience.pid)),
    }
}

/// The descriptors go with the first bytes; the rest of a long line follows without.
async fn send_line(stream: &UnixStream, request: &Value, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let line = format!("{request}\n");
    let mut sent = 0;
    while sent < line.len() {
        let fds = if sent == 0 { fds } else { &[] };
        let rest = &line.as_bytes()[sent..];
        stream.writable().await?;
        match stream.try_io(Interest::WRITABLE, || Ok(send(stream.as_fd(), rest, fds)?)) {
            Ok(bytes) => sent += bytes,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(5))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        let fits = ancillary.push(SendAncillaryMessage::ScmRights(fds));
        assert!(fits, "the buffer has room for five descriptors");
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::io::retry_on_intr(|| sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags))
}

async fn read_events(mut socket: OwnedReadHalf, events: mpsc::Sender<ServerEvent>) {
    let mut pending = Vec::new();
    while socket.read_buf(&mut pending).await.is_ok_and(|bytes| bytes > 0) {
        for event in take_events(&mut pending) {
            if events.send(event).await.is_err() {
                return;
            }
        }
    }
    let _ = events.send(ServerEvent::Closed).await;
}
