//! Starts the ranks, and the fork server and the store that they need, one after another.
//!
//! All that the ranks share is made while the fork server imports, then they start. Every step answers at once; the
//! fork server says later how it went, which the loop tells in turn.

use std::collections::VecDeque;
use std::io;
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use serde_json::json;
use tokio::sync::mpsc;
use tpurun_protocol::board::{self, Mark};

use super::helpers::{Helper, Helpers};
use super::phase::WorldPhase;
use super::timings::Watching;
use super::world::World;
use crate::control::control_server::ControlEvent;
use crate::job::environment::{self, Variables};
use crate::job::program::Start;
use crate::nodes::Nodes;
use crate::observe::timings::Step;
use crate::processes::cgroup::JobCgroup;
use crate::processes::{self, Process};
use crate::ranks::fork_server::{ForkServer, ServerEvent};
use crate::ranks::{self, Chunk, Rank, RankEnds};

/// The sending ends of what the tasks tell the loop.
pub(super) struct Senders {
    pub(super) chunks: mpsc::Sender<Chunk>,
    pub(super) control: mpsc::Sender<ControlEvent>,
    pub(super) server: mpsc::Sender<ServerEvent>,
}

/// The processes that start ranks, and the ranks that wait for it.
pub(super) struct Starter {
    pub(super) server: Option<ForkServer>,
    /// The socket of the warm server, which is asked for a fork server.
    warm: Option<PathBuf>,
    pub(super) cgroup: Option<JobCgroup>,
    /// Processes beside the ranks that these need.
    pub(super) helpers: Helpers,
    to_start: ToStart,
    /// The moments of the start.
    pub(super) timings: Watching,
    pub(super) tx: Senders,
}

/// Ranks that are started one after another, while the agent answers what else comes.
#[derive(Default)]
struct ToStart {
    ranks: VecDeque<u32>,
    /// The variables by which all of them find the store.
    store: Variables,
}

/// A rank that cannot be started, and why.
#[derive(Debug)]
pub(super) struct NotStarted {
    pub(super) rank: u32,
    pub(super) reason: String,
}

type Outcome = Result<(), NotStarted>;

impl Starter {
    pub(super) fn new(front: i32, warm: Option<PathBuf>, timings: Watching, tx: Senders) -> Starter {
        Starter {
            server: None,
            warm,
            cgroup: JobCgroup::create(front),
            helpers: Helpers::default(),
            to_start: ToStart::default(),
            timings,
            tx,
        }
    }

    /// The process of the fork server.
    pub(super) fn server_pid(&self) -> Option<i32> {
        self.server.as_ref().map(|server| server.pid)
    }

    /// Sets the ranks, or the server that will fork them, going.
    pub(super) async fn start(&mut self, world: &mut World, nodes: Option<&Nodes>) -> Outcome {
        if !world.job.wants_server {
            return self.spawn_ranks(world, nodes);
        }
        match &self.server {
            Some(server) if server.is_ready => return self.start_store(world, nodes).await,
            // The server says when it is ready.
            Some(_) => return Ok(()),
            None => {}
        }
        let variables = common_variables(world, nodes);
        let events = self.tx.server.clone();
        if let Some(socket) = &self.warm {
            match ForkServer::start_warm(&world.job, &variables, socket, events) {
                // The warm server says when there is a fork server.
                Ok(server) => self.server = Some(server),
                Err(error) => return self.start_cold(world, nodes, &error.to_string()).await,
            }
            return Ok(());
        }
        let start = || ForkServer::start(&world.job, &variables, events);
        let started = match &mut self.cgroup {
            Some(cgroup) => cgroup.enclose(start),
            None => start(),
        };
        match started {
            Ok(server) => {
                self.note_server(world, server.pid, false);
                self.server = Some(server);
                Ok(())
            }
            Err(error) => {
                world.say(&format!("no fork server ({error}): starting an interpreter for each rank"));
                self.fall_back(world, nodes)
            }
        }
    }

    fn note_server(&mut self, world: &mut World, pid: i32, is_warm: bool) {
        world.run_dir.event("fork server started", json!({"pid": pid, "warm": is_warm}));
        self.helpers.note(Helper::fork_server(pid));
    }

    /// A warm server has forked the job's fork server, which is no child of this process.
    pub(super) fn on_forked(&mut self, world: &mut World, pid: i32) {
        let Some(server) = &mut self.server else { return };
        server.pid = pid;
        processes::adopt(pid);
        if let Some(cgroup) = &mut self.cgroup {
            cgroup.admit(pid);
        }
        self.note_server(world, pid, true);
    }

    /// Starts without the warm server, which the next world does not ask either.
    pub(super) async fn start_cold(
        &mut self,
        world: &mut World,
        nodes: Option<&Nodes>,
        reason: &str,
    ) -> Outcome {
        world.say(&format!("no warm fork server ({reason}): this start is a cold one"));
        (self.warm, self.server) = (None, None);
        if !world.phase.is_starting() {
            return Ok(());
        }
        Box::pin(self.start(world, nodes)).await
    }

    /// The fork server is ready, and has told when it and torch were there.
    pub(super) async fn on_ready(
        &mut self,
        world: &mut World,
        nodes: Option<&Nodes>,
        python_ns: Option<u64>,
        torch_ns: Option<u64>,
    ) -> Outcome {
        self.timings.reached_at(Step::PythonStarted, python_ns);
        self.timings.reached_at(Step::TorchImported, torch_ns);
        self.timings.reached(Step::ServerReady);
        self.server.iter_mut().for_each(|server| server.is_ready = true);
        self.start_store(world, nodes).await
    }

    /// The fork server is ready: now the store, which must not depend on any rank.
    async fn start_store(&mut self, world: &mut World, nodes: Option<&Nodes>) -> Outcome {
        if !world.phase.is_starting() {
            return Ok(());
        }
        let Some(server) = &self.server else { return Ok(()) };
        if let Some(port) = nodes.and_then(Nodes::store_port) {
            self.on_store(world, nodes, port);
            return Ok(());
        }
        // When the server is gone, its end is reported, too.
        let _ = server.start_store(&world.job.master_addr, world.job.master_port).await;
        Ok(())
    }

    /// The store is at this port: the ranks can start.
    pub(super) fn on_store(&mut self, world: &mut World, nodes: Option<&Nodes>, port: u16) {
        self.timings.reached(Step::StoreReady);
        world.phase = WorldPhase::Running;
        lead_to_store(nodes, port);
        let store = environment::of_store(port, true);
        let (forked, spawned): (Vec<u32>, Vec<u32>) =
            world.job.here.clone().partition(|rank| self.is_forked(world, *rank));
        self.start_in_turn(world, forked.into_iter().chain(spawned), store);
    }

    /// Queues ranks, which are from now on about to run.
    fn start_in_turn(&mut self, world: &mut World, ranks: impl Iterator<Item = u32>, store: Variables) {
        self.to_start = ToStart { ranks: ranks.collect(), store };
        for rank in &self.to_start.ranks {
            world.roster.set(*rank, Rank::Requested);
        }
    }

    /// Ranks that have not been started never will be.
    pub(super) fn forget_to_start(&mut self, world: &mut World) {
        for rank in std::mem::take(&mut self.to_start).ranks {
            world.roster.set(rank, Rank::Unborn);
        }
    }

    /// Whether a rank is next. A request to the fork server cannot be taken back, so it is not asked for many ranks.
    pub(super) fn may_start(&self, world: &World) -> bool {
        let waiting = self.to_start.ranks.len();
        let asked_for =
            || world.roster.ranks.iter().filter(|rank| **rank == Rank::Requested).count() - waiting;
        waiting > 0 && asked_for() < ASKED_AT_ONCE
    }

    /// Starts the next rank, or a few that are no children of the fork server.
    pub(super) async fn start_some(&mut self, world: &mut World, nodes: Option<&Nodes>) -> Outcome {
        let store = self.to_start.store.clone();
        let Some(&next) = self.to_start.ranks.front() else { return Ok(()) };
        let result = match self.is_forked(world, next) {
            true => {
                self.to_start.ranks.pop_front();
                self.fork_rank(world, nodes, next, &store).await.map_err(|error| (next, error))
            }
            false => {
                let few = self.to_start.ranks.len().min(SPAWNED_AT_ONCE);
                let ranks = self.to_start.ranks.drain(..few).collect();
                let board = environment::of_board(world.board_fd.as_raw_fd());
                let common = common_variables(world, nodes).into_iter().chain(store).chain(board);
                self.spawn_few(world, nodes, ranks, &common.collect())
            }
        };
        result.map_err(|(rank, error)| {
            world.roster.set(rank, Rank::Unborn);
            NotStarted { rank, reason: explain(&error) }
        })
    }

    /// Whether a rank is a child of the fork server, or will be.
    pub(super) fn is_forked(&self, world: &World, rank: u32) -> bool {
        let forks = self.server.as_ref().is_some_and(|server| server.forks);
        forks && world.job.programs.of(rank).start == Start::ForkServer
    }

    async fn fork_rank(
        &mut self,
        world: &mut World,
        nodes: Option<&Nodes>,
        rank: u32,
        store: &Variables,
    ) -> io::Result<()> {
        let ends = self.open_ends(world, rank)?;
        let threads = environment::of_threads(&world.job);
        let common = common_variables(world, nodes).into_iter().chain(store.iter().cloned());
        let variables: Variables = common.chain(threads).chain(rank_variables(world, nodes, rank)).collect();
        let server = self.server.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        server.start_rank(world.job.programs.of(rank), rank, &variables, ends, &world.board_fd).await
    }

    /// A server that can not fork can still hold the store, if torch is there. The reason is none where nobody needs
    /// it.
    pub(super) async fn on_refusal(
        &mut self,
        world: &mut World,
        nodes: Option<&Nodes>,
        reason: Option<&str>,
    ) -> Outcome {
        if let Some(reason) = reason {
            world.say(&format!("no fork server ({reason}): starting an interpreter for each rank"));
        }
        match &mut self.server {
            Some(server) if world.job.programs.are_several() && reason.is_some() => {
                (server.forks, server.is_ready) = (false, true);
                self.start_store(world, nodes).await
            }
            _ => self.fall_back(world, nodes),
        }
    }

    /// Without a fork server the ranks are processes of their own.
    pub(super) fn fall_back(&mut self, world: &mut World, nodes: Option<&Nodes>) -> Outcome {
        self.server = None;
        world.job.wants_server = false;
        if world.phase.is_starting() { self.spawn_ranks(world, nodes) } else { Ok(()) }
    }

    fn spawn_ranks(&mut self, world: &mut World, nodes: Option<&Nodes>) -> Outcome {
        world.phase = WorldPhase::Running;
        let port = match (nodes.and_then(Nodes::store_port), world.job.master_port) {
            (Some(port), _) => Ok(port),
            (None, 0) => free_port(),
            (None, port) => Ok(port),
        };
        let rank = world.job.here.start;
        let port = port.map_err(|error| NotStarted { rank, reason: format!("no free port: {error}") })?;
        lead_to_store(nodes, port);
        let here = world.job.here.clone();
        self.start_in_turn(world, here, environment::of_store(port, false));
        Ok(())
    }

    /// Spawns these ranks, which have `common` variables.
    fn spawn_few(
        &mut self,
        world: &mut World,
        nodes: Option<&Nodes>,
        ranks: Vec<u32>,
        common: &Variables,
    ) -> Result<(), (u32, io::Error)> {
        let mut cgroup = self.cgroup.take();
        let mut waiting = ranks.into_iter();
        let mut spawn_all = || {
            waiting.try_for_each(|rank| {
                self.spawn_rank(world, nodes, rank, common).map_err(|error| (rank, error))
            })
        };
        let spawned = match &mut cgroup {
            Some(cgroup) => cgroup.enclose(spawn_all),
            None => spawn_all(),
        };
        self.cgroup = cgroup;
        // Ranks that still wait after a failure are not started.
        waiting.for_each(|rank| world.roster.set(rank, Rank::Unborn));
        spawned
    }

    fn spawn_rank(
        &mut self,
        world: &mut World,
        nodes: Option<&Nodes>,
        rank: u32,
        common: &Variables,
    ) -> io::Result<()> {
        let ends = self.open_ends(world, rank)?;
        let own = rank_variables(world, nodes, rank);
        let variables: Variables = common.iter().cloned().chain(own).collect();
        self.timings.started(rank, Some(board::now_ns()));
        let pid = ranks::spawn(&world.job, rank, ends, &variables, &world.board_fd)?;
        world.on_started(rank, pid);
        Ok(())
    }

    fn open_ends(&mut self, world: &mut World, rank: u32) -> io::Result<RankEnds> {
        let control = world.control.open(rank, self.tx.control.clone())?;
        let (stdin, stdout, stderr) =
            ranks::open_streams(rank, rank == world.job.stdin_rank, &self.tx.chunks)?;
        world.console.opened(rank);
        Ok(RankEnds { stdin, stdout, stderr, control })
    }

    /// Ranks whose fork server has died die with it; as children of another process when that was a warm one's fork.
    pub(super) fn orphans(&self, world: &World) -> Vec<u32> {
        if self.server.is_some() || self.warm.is_none() {
            return Vec::new();
        }
        let is_gone = |pid| Process::read(pid).is_none_or(|process| process.is_zombie());
        let is_orphan = |(pid, rank): &(i32, u32)| {
            world.job.programs.of(*rank).start == Start::ForkServer && is_gone(*pid)
        };
        world.roster.running().into_iter().filter(is_orphan).map(|(_, rank)| rank).collect()
    }
}

fn common_variables(world: &World, nodes: Option<&Nodes>) -> Variables {
    // The number of the run is the same on all nodes.
    let run_id = nodes.map_or_else(|| world.run_dir.id(), |nodes| nodes.id.clone());
    let of_job = environment::of_job(&world.job, &run_id, world.restarts);
    of_job.into_iter().chain(environment::of_run(world.run_dir.path())).collect()
}

/// A name that no other job has, on whatever host.
fn job_id(world: &World, nodes: Option<&Nodes>) -> String {
    let own = || format!("{}:{}", world.host, world.run_dir.path().display());
    nodes.map_or_else(own, |nodes| nodes.id.clone())
}

fn rank_variables(world: &World, nodes: Option<&Nodes>, rank: u32) -> Variables {
    let marks = world.board.offset_of_mark(rank, Mark::ScriptEntered);
    let of_rank = environment::of_rank(&world.job, rank, &world.run_dir.error_file(rank));
    let place = environment::of_place(&world.job, rank, &job_id(world, nodes));
    of_rank.into_iter().chain(environment::of_marks(marks)).chain(place).collect()
}

/// Other nodes may come to the store, which is at this port.
fn lead_to_store(nodes: Option<&Nodes>, port: u16) {
    if let Some(nodes) = nodes {
        nodes.store_is_at(port);
    }
}

fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Names an error, with advice for the two limits that many ranks run into.
fn explain(error: &io::Error) -> String {
    let hint = match error.kind() {
        io::ErrorKind::WouldBlock => " (too many processes: see ulimit -u and the pids cgroup)",
        _ if error.raw_os_error() == Some(EMFILE) => " (too few file descriptors: see ulimit -n)",
        _ => "",
    };
    format!("{error}{hint}")
}

const EMFILE: i32 = rustix::io::Errno::MFILE.raw_os_error();
/// Ranks that the fork server is asked for before it has started them: enough that it never waits for the agent, and
/// forked in a fraction of a second, which the end of a job has to wait for.
const ASKED_AT_ONCE: usize = 16;
/// Ranks that are spawned before the agent looks at anything else: 10 ms of work; each turn enters the control group.
const SPAWNED_AT_ONCE: usize = 8;
