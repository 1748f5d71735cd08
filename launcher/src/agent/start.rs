//! The way from a job to running ranks: the agent makes what they share while the fork server imports, then they start.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsString;
use std::io;
use std::net::TcpListener;
use std::time::Instant;

use rustix::process::{
    Pid, Resource, Rlimit, Signal, getpid, getppid, getrlimit, set_child_subreaper,
    set_parent_process_death_signal, setrlimit, setsid,
};
use serde_json::json;
use tokio::sync::mpsc;
use tpurun_protocol::board::{self, Board, Mark};

use super::helpers::Helper;
use super::nodes::{self, Others};
use super::recorder::Recorder;
use super::timings::Watching;
use super::{Agent, Asked, FRONT_DIED, Phase, Receivers, Senders};
use crate::cgroup::{self, JobCgroup};
use crate::control_server::ControlServer;
use crate::environment::{self, Variables};
use crate::foreign::Sleepers;
use crate::fork_server::ForkServer;
use crate::front::Origin;
use crate::identities::Identities;
use crate::job::Job;
use crate::labels::Labels;
use crate::losses::Losses;
use crate::nodes::Nodes;
use crate::output::{Output, OutputConfig, Victim, VictimLookup};
use crate::processes;
use crate::program::{Program, Start};
use crate::ranks::{self, Rank, RankEnds};
use crate::report;
use crate::run_dir::{self, RunDir};
use crate::screen::Screen;
use crate::signals::Signals;
use crate::suspects::Suspects;
use crate::timings::Step;
use crate::verdict;
use crate::watch::Watch;

/// Ranks that are started one after another, while the agent answers what else comes.
#[derive(Default)]
pub(super) struct ToStart {
    ranks: VecDeque<u32>,
    /// The variables by which all of them find the store.
    store: Variables,
}

/// Runs the job for the front, which waits for us, and returns its exit code.
///
/// # Errors
/// One line, when the job can not even begin.
pub(crate) fn run(job: Job, origin: Origin) -> Result<i32, String> {
    // Away from the terminal: Ctrl-C reaches the front alone, which passes it on once.
    let _ = setsid();
    let prepared = set_parent_process_death_signal(Some(FRONT_DIED))
        .and_then(|()| set_child_subreaper(Some(getpid())))
        .map_err(|errno| format!("cannot supervise processes: {errno}"));
    prepared?;
    if getppid().and_then(|pid| Some(pid == Pid::from_raw(origin.front)?)) != Some(true) {
        return Err("expected to be started by tpurun itself".into());
    }
    allow_descriptors(job.here.len() as u32)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot start the event loop: {error}"))?;
    runtime.block_on(async {
        let mut job = job;
        let nodes = nodes::meet(&mut job).await?;
        let (mut agent, mut rx) = Agent::new(job, origin, nodes)?;
        agent.announce();
        agent.timings.reached(Step::AgentReady);
        agent.start().await;
        agent.supervise(&mut rx).await;
        Ok(agent.finish(&mut rx).await)
    })
}

impl Agent {
    fn new(job: Job, origin: Origin, mut nodes: Option<Nodes>) -> Result<(Agent, Receivers), String> {
        let refused = |what: &'static str| move |error: io::Error| format!("cannot make {what}: {error}");
        let signals = Signals::new(meanings()).map_err(refused("a signal handler"))?;
        let run_dir = nodes::run_dir(&job, nodes.as_ref())?;
        let (board, board_fd) = Board::create(job.ranks).map_err(refused("the board"))?;
        let labels = Labels::new(&job.programs);
        let output = new_output(&job, &run_dir);
        let screen = Screen::new().map_err(refused("the output"))?;
        let (chunks_tx, chunks) = mpsc::channel(QUEUED_CHUNKS);
        let (control_tx, control) = mpsc::channel(QUEUED_CHUNKS);
        let (server_tx, server) = mpsc::channel(queued_answers(&job));
        let identities = Identities::new(nodes.as_ref().map(|nodes| nodes.credentials().clone()));
        let events = nodes.as_mut().map_or_else(|| mpsc::channel(1).1, Nodes::take_events);
        let now = Instant::now();
        let spread = nodes.as_ref().map(nodes::spread).unwrap_or_default();
        let suspects = Suspects::new(run_dir.stacks_dir(), run_dir.stacks_file(), job.hosts.clone());
        let sleepers = Sleepers::new(run_dir.path().to_owned(), run_dir.stacks_dir(), run_dir.stacks_file());
        let agent = Agent {
            front: origin.front,
            run_dir,
            board,
            board_fd,
            cgroup: JobCgroup::create(origin.front),
            labels,
            output,
            screen,
            control: ControlServer::new(job.ranks, identities, spread),
            server: None,
            helpers: Vec::new(),
            ranks: unborn(&job),
            to_start: ToStart::default(),
            open_streams: vec![0; job.ranks as usize],
            phase: Phase::Starting,
            failures: Vec::new(),
            left: Vec::new(),
            recorder: Recorder::default(),
            losses: Losses::default(),
            forgiven: None,
            restarts: 0,
            watch: Watch::default(),
            suspects,
            sleepers,
            stacks: Vec::new(),
            next_watch: now,
            due: Vec::new(),
            suspicion: Default::default(),
            heard: Default::default(),
            lingering: Default::default(),
            suspected_lingering: Default::default(),
            timings: Watching::new(&job, &origin),
            warm: origin.warm,
            host: nodes.as_ref().map_or_else(nodes::own_name, |nodes| nodes.host(nodes.node).to_owned()),
            others: nodes.map(Others::new),
            views_elsewhere: HashMap::new(),
            started: now,
            oom_kills_before: cgroup::oom_kills(),
            tx: Senders { chunks: chunks_tx, control: control_tx, server: server_tx },
            job,
        };
        Ok((agent, Receivers { chunks, control, server, nodes: events, signals }))
    }

    /// Sets the ranks, or the server that will fork them, going.
    pub(super) async fn start(&mut self) {
        self.publish();
        if !self.job.wants_server {
            return self.spawn_ranks();
        }
        match &self.server {
            Some(server) if server.is_ready => return self.start_store().await,
            // The server says when it is ready.
            Some(_) => return,
            None => {}
        }
        let variables = self.common_variables();
        let (job, events) = (&self.job, self.tx.server.clone());
        if let Some(socket) = &self.warm {
            match ForkServer::start_warm(job, &variables, socket, events) {
                // The warm server says when there is a fork server.
                Ok(server) => self.server = Some(server),
                Err(error) => self.start_cold(&error.to_string()).await,
            }
            return;
        }
        let start = || ForkServer::start(job, &variables, events);
        let started = match &mut self.cgroup {
            Some(cgroup) => cgroup.enclose(start),
            None => start(),
        };
        match started {
            Ok(server) => {
                self.note_server(server.pid, false);
                self.server = Some(server);
            }
            Err(error) => {
                self.say(&format!("no fork server ({error}): starting an interpreter for each rank"));
                self.fall_back();
            }
        }
    }

    fn note_server(&mut self, pid: i32, is_warm: bool) {
        self.run_dir.event("fork server started", json!({"pid": pid, "warm": is_warm}));
        self.note_helper(Helper::fork_server(pid));
    }

    /// A warm server has forked the job's fork server, which is no child of this process.
    pub(super) fn on_forked(&mut self, pid: i32) {
        let Some(server) = &mut self.server else { return };
        server.pid = pid;
        processes::adopt(pid);
        if let Some(cgroup) = &mut self.cgroup {
            cgroup.admit(pid);
        }
        self.note_server(pid, true);
    }

    /// Starts without the warm server, which the next world does not ask either.
    pub(super) async fn start_cold(&mut self, reason: &str) {
        self.say(&format!("no warm fork server ({reason}): this start is a cold one"));
        (self.warm, self.server) = (None, None);
        if matches!(self.phase, Phase::Starting) {
            Box::pin(self.start()).await;
        }
    }

    fn announce(&mut self) {
        let Job { cores, threads, .. } = self.job;
        let ranks = self.job.here.len() as u32;
        let plural =
            |count: usize, noun: &str| format!("{count} {noun}{}", if count == 1 { "" } else { "s" });
        let threads = match threads {
            Some(threads) => format!("{} each on {}", plural(threads, "thread"), plural(cores, "core")),
            None => "threads as OMP_NUM_THREADS says".into(),
        };
        let run = self.run_dir.shown().display().to_string();
        let programs = self.shown_programs() + &self.shown_hosts();
        self.say(&format!("{}{programs}, {threads}, run {run}", plural(ranks as usize, "rank")));
        if let Some(remark) = self.run_dir.take_remark() {
            self.say(&remark);
        }
        let programs = self.job.programs.to_json();
        let started = json!({"ranks": ranks, "programs": programs, "agent": std::process::id()});
        self.run_dir.event("started", started);
    }

    /// ` of 8, node 1 of 2 (host n1)` where there are others, ` on 2 pretended hosts` where they are not real.
    fn shown_hosts(&self) -> String {
        match &self.others {
            Some(others) => {
                let (nodes, all) = (others.nodes(), self.job.ranks);
                format!(" of {all}, node {} of {} (host {})", nodes.node, nodes.count(), self.host)
            }
            None if self.job.hosts.count() > 1 => format!(" on {} pretended hosts", self.job.hosts.count()),
            None => String::new(),
        }
    }

    /// ` (eval 0, train 1-7)` when there are several.
    fn shown_programs(&self) -> String {
        let programs = &self.job.programs;
        let shown = |program: &Program| format!("{} {}", program.name, program.shown_ranks());
        let all: Vec<String> = programs.iter().take(MAX_SHOWN_PROGRAMS).map(shown).collect();
        let more = if programs.iter().nth(MAX_SHOWN_PROGRAMS).is_some() { ", .." } else { "" };
        if programs.are_several() { format!(" ({}{more})", all.join(", ")) } else { String::new() }
    }

    /// The fork server is ready: now the store, which must not depend on any rank.
    pub(super) async fn start_store(&mut self) {
        if !matches!(self.phase, Phase::Starting) {
            return;
        }
        let Some(server) = &self.server else { return };
        if let Some(port) = self.store_elsewhere() {
            return self.on_store(Some(port), "").await;
        }
        // When the server is gone, its end is reported, too.
        let _ = server.start_store(&self.job.master_addr, self.job.master_port).await;
    }

    pub(super) async fn on_store(&mut self, port: Option<u16>, reason: &str) {
        if !matches!(self.phase, Phase::Starting) {
            return;
        }
        let Some(port) = port else {
            return self.on_not_started(self.job.here.start, &format!("the rendezvous store: {reason}"));
        };
        self.timings.reached(Step::StoreReady);
        self.phase = Phase::Running;
        self.lead_to_store(port);
        let store = environment::of_store(port, true);
        let (forked, spawned): (Vec<u32>, Vec<u32>) =
            self.job.here.clone().partition(|rank| self.is_forked(*rank));
        self.start_in_turn(forked.into_iter().chain(spawned), store);
    }

    /// Queues ranks, which are from now on about to run.
    fn start_in_turn(&mut self, ranks: impl Iterator<Item = u32>, store: Variables) {
        self.to_start = ToStart { ranks: ranks.collect(), store };
        for rank in &self.to_start.ranks {
            self.ranks[*rank as usize] = Rank::Requested;
        }
    }

    /// Ranks that have not been started never will be.
    pub(super) fn forget_to_start(&mut self) {
        for rank in std::mem::take(&mut self.to_start).ranks {
            self.ranks[rank as usize] = Rank::Unborn;
        }
    }

    /// Whether a rank is next. A request to the fork server cannot be taken back, so it is not asked for many ranks.
    pub(super) fn may_start(&self) -> bool {
        let waiting = self.to_start.ranks.len();
        let asked_for = || self.ranks.iter().filter(|rank| **rank == Rank::Requested).count() - waiting;
        waiting > 0 && asked_for() < ASKED_AT_ONCE
    }

    /// Starts the next rank, or a few that are no children of the fork server.
    pub(super) async fn start_some(&mut self) {
        let store = self.to_start.store.clone();
        let Some(&next) = self.to_start.ranks.front() else { return };
        let result = match self.is_forked(next) {
            true => {
                self.to_start.ranks.pop_front();
                self.fork_rank(next, &store).await.map_err(|error| (next, error))
            }
            false => {
                let few = self.to_start.ranks.len().min(SPAWNED_AT_ONCE);
                let ranks = self.to_start.ranks.drain(..few).collect();
                self.spawn_with_store(ranks, store)
            }
        };
        if let Err((rank, error)) = result {
            self.ranks[rank as usize] = Rank::Unborn;
            self.on_not_started(rank, &explain(&error));
        }
    }

    /// Whether a rank is a child of the fork server, or will be.
    pub(super) fn is_forked(&self, rank: u32) -> bool {
        let forks = self.server.as_ref().is_some_and(|server| server.forks);
        forks && self.job.programs.of(rank).start == Start::ForkServer
    }

    async fn fork_rank(&mut self, rank: u32, store: &Variables) -> io::Result<()> {
        let ends = self.open_ends(rank)?;
        let threads = environment::of_threads(&self.job);
        let common = self.common_variables().into_iter().chain(store.iter().cloned());
        let variables: Variables = common.chain(threads).chain(self.rank_variables(rank)).collect();
        let server = self.server.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        server.start_rank(self.job.programs.of(rank), rank, &variables, ends, &self.board_fd).await
    }

    /// A server that can not fork can still hold the store, if torch is there.
    pub(super) async fn on_refusal(&mut self, is_quiet: bool) {
        match &mut self.server {
            Some(server) if self.job.programs.are_several() && !is_quiet => {
                (server.forks, server.is_ready) = (false, true);
                self.start_store().await;
            }
            _ => self.fall_back(),
        }
    }

    /// Without a fork server the ranks are processes of their own.
    pub(super) fn fall_back(&mut self) {
        self.server = None;
        self.job.wants_server = false;
        if matches!(self.phase, Phase::Starting) {
            self.spawn_ranks();
        }
    }

    pub(super) fn spawn_ranks(&mut self) {
        self.phase = Phase::Running;
        let store = match (self.store_elsewhere(), self.job.master_port) {
            (Some(port), _) => Ok(port),
            (None, 0) => free_port(),
            (None, port) => Ok(port),
        };
        let store = match store {
            Ok(port) => {
                self.lead_to_store(port);
                environment::of_store(port, false)
            }
            Err(error) => {
                return self.on_not_started(self.job.here.start, &format!("no free port: {error}"));
            }
        };
        self.start_in_turn(self.job.here.clone(), store);
    }

    /// The port that leads to the store of node 0, from another one.
    fn store_elsewhere(&self) -> Option<u16> {
        self.others.as_ref().and_then(|others| others.nodes().store_port())
    }

    /// Other nodes may come to the store, which is at this port.
    fn lead_to_store(&self, port: u16) {
        if let Some(others) = &self.others {
            others.nodes().store_is_at(port);
        }
    }

    fn spawn_with_store(&mut self, ranks: Vec<u32>, store: Variables) -> Result<(), (u32, io::Error)> {
        let board = environment::of_board(std::os::fd::AsRawFd::as_raw_fd(&self.board_fd));
        let common: Variables = self.common_variables().into_iter().chain(store).chain(board).collect();
        let mut cgroup = self.cgroup.take();
        let mut waiting = ranks.into_iter();
        let mut spawn_all =
            || waiting.try_for_each(|rank| self.spawn_rank(rank, &common).map_err(|error| (rank, error)));
        let spawned = match &mut cgroup {
            Some(cgroup) => cgroup.enclose(spawn_all),
            None => spawn_all(),
        };
        self.cgroup = cgroup;
        // Ranks that still wait after a failure are not started.
        waiting.for_each(|rank| self.ranks[rank as usize] = Rank::Unborn);
        spawned
    }

    fn spawn_rank(&mut self, rank: u32, common: &Variables) -> io::Result<()> {
        let ends = self.open_ends(rank)?;
        let variables: Variables = common.iter().cloned().chain(self.rank_variables(rank)).collect();
        self.timings.started(rank, Some(board::now_ns()));
        let pid = ranks::spawn(&self.job, rank, ends, &variables, &self.board_fd)?;
        self.on_started(rank, pid);
        Ok(())
    }

    fn open_ends(&mut self, rank: u32) -> io::Result<RankEnds> {
        let control = self.control.open(rank, self.tx.control.clone())?;
        let (stdin, stdout, stderr) =
            ranks::open_streams(rank, rank == self.job.stdin_rank, &self.tx.chunks)?;
        self.open_streams[rank as usize] = 2;
        Ok(RankEnds { stdin, stdout, stderr, control })
    }

    fn common_variables(&self) -> Variables {
        // The same on all nodes.
        let shared = self.others.as_ref().map(|others| others.nodes().id.clone());
        let run_id = shared.unwrap_or_else(|| self.run_dir.id());
        let of_job = environment::of_job(&self.job, &run_id, self.restarts);
        of_job.into_iter().chain(environment::of_run(self.run_dir.path())).collect()
    }

    /// No other job has it, on whatever host.
    fn job_id(&self) -> String {
        let shared = self.others.as_ref().map(|others| others.nodes().id.clone());
        shared.unwrap_or_else(|| format!("{}:{}", self.host, self.run_dir.path().display()))
    }

    fn rank_variables(&self, rank: u32) -> Variables {
        let marks = self.board.offset_of_mark(rank, Mark::ScriptEntered);
        let of_rank = environment::of_rank(&self.job, rank, &self.run_dir.error_file(rank));
        let place = environment::of_place(&self.job, rank, &self.job_id());
        of_rank.into_iter().chain(environment::of_marks(marks)).chain(place).collect()
    }
}

/// The ranks before any of them is started.
pub(super) fn unborn(job: &Job) -> Vec<Rank> {
    let here = |rank| if job.here.contains(&rank) { Rank::Unborn } else { Rank::Elsewhere };
    (0..job.ranks).map(here).collect()
}

/// Makes the output of one world, which shows and logs what its ranks write.
pub(super) fn new_output(job: &Job, run_dir: &RunDir) -> Output {
    let is_terminal = io::IsTerminal::is_terminal(&io::stdout());
    Output::new(OutputConfig {
        ranks: job.ranks,
        labels: Labels::new(&job.programs),
        prefix: job.labels,
        // The output of ranks elsewhere is not waited for.
        only: job.here.clone().filter(|rank| job.only.contains(*rank)).collect(),
        reader: job.stdin_rank,
        fold: job.labels,
        victims: (!job.shows_victims).then(|| victims(run_dir)),
        log_dir: Some(run_dir.path().to_owned()),
        color: is_terminal && may_color(std::env::var_os("NO_COLOR")),
        terminal: is_terminal,
    })
}

/// Whether output may have colours; an empty `NO_COLOR` counts as not set (<https://no-color.org>).
fn may_color(no_color: Option<OsString>) -> bool {
    no_color.is_none_or(|value| value.is_empty())
}

/// Finds victims by their error files, which they write before they print anything.
fn victims(run_dir: &RunDir) -> VictimLookup {
    let run = run_dir.path().to_owned();
    VictimLookup::new(move |rank| {
        let error = run_dir::error_in(&run, rank)?;
        let is_interrupt = error.kind == "KeyboardInterrupt";
        let is_known = is_interrupt || verdict::is_victim(rank, &error);
        is_known.then(|| Victim {
            is_interrupt,
            summary: report::of_victim(&error),
            traceback: error.traceback,
        })
    })
}

fn meanings() -> impl Iterator<Item = (Signal, Asked)> {
    let stops =
        [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT].map(|signal| (signal, Asked::Stop(signal)));
    let passed = [Signal::USR1, Signal::USR2].map(|signal| (signal, Asked::PassOn(signal)));
    let own = [(Signal::CHILD, Asked::Reap), (FRONT_DIED, Asked::FrontDied)];
    stops.into_iter().chain(passed).chain(own)
}

/// Raises the soft limit, which is often far below the hard one: each rank takes two pipes and a socket, and there are
/// the log files.
fn allow_descriptors(ranks: u32) -> Result<(), String> {
    let needed = FDS_PER_RANK * u64::from(ranks) + OWN_FDS;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if limit.maximum.is_none_or(|maximum| maximum >= needed) && setrlimit(Resource::Nofile, raised).is_ok() {
        return Ok(());
    }
    let given = limit.maximum.or(limit.current).unwrap_or_default();
    Err(format!(
        "expected at least {needed} file descriptors for {ranks} ranks, given {given} (see ulimit -n)"
    ))
}

/// Answers that may queue: while the agent writes a request to the server, it does not read the server's answers.
pub(super) fn queued_answers(job: &Job) -> usize {
    4 * job.ranks as usize + QUEUED_CHUNKS
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
const FDS_PER_RANK: u64 = 3;
/// Open log files, shared segments on their way, and the agent's own.
const OWN_FDS: u64 = 128;
pub(super) const QUEUED_CHUNKS: usize = 64;
/// Ranks that the fork server is asked for before it has started them: enough that it never waits for the agent, and
/// forked in a fraction of a second, which the end of a job has to wait for.
const ASKED_AT_ONCE: usize = 16;
/// Ranks that are spawned before the agent looks at anything else: 10 ms of work; each turn enters the control group.
const SPAWNED_AT_ONCE: usize = 8;
const MAX_SHOWN_PROGRAMS: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_no_color_is_not_set() {
        let given = [None, Some(""), Some("1"), Some("0")].map(|value| value.map(OsString::from));
        assert_eq!(given.map(may_color), [true, true, false, false]);
    }
}
