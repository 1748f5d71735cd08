//! The agent's end of the fork server: one JSON object per line over a stream socket, descriptors beside it.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use rustix::io::FdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

use crate::environment::{PRIVATE, SERVER_THREADS, Variables};
use crate::job::Job;
use crate::program::{Program, Programs, Start};
use crate::ranks::RankEnds;
pub(crate) use crate::server_events::ServerEvent;
use crate::server_events::take_events;
use crate::target::{Target, calls_main};

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
            // What an import prints is said once, where it does not mix with what the ranks compute.
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

    /// The descriptors go with the first bytes; the rest of a long line follows without.
    async fn request(&self, request: &Value, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let line = format!("{request}\n");
        let mut sent = 0;
        while sent < line.len() {
            let fds = if sent == 0 { fds } else { &[] };
            let rest = &line.as_bytes()[sent..];
            let stream = self.socket.as_ref();
            stream.writable().await?;
            match stream.try_io(Interest::WRITABLE, || Ok(send(stream.as_fd(), rest, fds)?)) {
                Ok(bytes) => sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
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
