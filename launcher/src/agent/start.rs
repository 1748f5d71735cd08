//! The way from a job to its agent: what the agent needs is made here, and announced.

use std::ffi::OsString;
use std::io;
use std::time::Instant;

use rustix::process::{
    Pid, Resource, Rlimit, Signal, getpid, getppid, getrlimit, set_child_subreaper,
    set_parent_process_death_signal, setrlimit, setsid,
};
use serde_json::json;
use tokio::sync::mpsc;
use tpurun_protocol::board::Board;

use super::all_ranks::AllRanks;
use super::console::Console;
use super::judge::Judge;
use super::nodes::{self, Others};
use super::origin::Origin;
use super::phase::WorldPhase;
use super::recorder::Recorder;
use super::starter::Senders;
use super::starter::Starter;
use super::timings::Watching;
use super::world::World;
use super::{Agent, Asked, FRONT_DIED, Receivers};
use crate::base::signals::Signals;
use crate::control::control_server::{ControlEvent, ControlServer};
use crate::control::identities::Identities;
use crate::job::Job;
use crate::job::program::Program;
use crate::judge::report;
use crate::judge::verdict;
use crate::nodes::Nodes;
use crate::observe::run_dir::{self, RunDir};
use crate::observe::timings::Step;
use crate::output::labels::Labels;
use crate::output::writer::StandardStreams;
use crate::output::{Output, OutputConfig, Victim, VictimLookup};
use crate::processes::cgroup;
use crate::ranks::Chunk;
use crate::ranks::fork_server::ServerEvent;

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
        announce(&mut agent.world, agent.others.as_ref().map(|others| &others.nodes));
        agent.starter.timings.reached(Step::AgentReady);
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
        let output = new_output(&job, &run_dir);
        let screen = StandardStreams::new().map_err(refused("the output"))?;
        let (tx, chunks, control, server) = channels(&job);
        let identities = Identities::new(nodes.as_ref().map(|nodes| nodes.credentials().clone()));
        let events = nodes.as_mut().map_or_else(|| mpsc::channel(1).1, Nodes::take_events);
        let now = Instant::now();
        let spread = nodes.as_ref().map(nodes::spread).unwrap_or_default();
        let agent = Agent {
            starter: Starter::new(origin.front, origin.warm.clone(), Watching::new(&job, &origin), tx),
            judge: Judge::new(&job, &run_dir),
            recorder: Recorder::default(),
            next_watch: now,
            oom_kills_before: cgroup::oom_kills(),
            world: World {
                host: nodes.as_ref().map_or_else(nodes::own_name, |nodes| nodes.host(nodes.node).to_owned()),
                front: origin.front,
                run_dir,
                labels: Labels::new(&job.programs),
                console: Console::new(output, screen, job.ranks),
                board,
                board_fd,
                control: ControlServer::new(job.ranks, identities, spread),
                roster: AllRanks::unborn(&job),
                phase: WorldPhase::Starting,
                restarts: 0,
                started: now,
                job,
            },
            others: nodes.map(Others::new),
        };
        Ok((agent, Receivers { chunks, control, server, nodes: events, signals }))
    }
}

/// The line that says what begins.
fn announce(world: &mut World, nodes: Option<&Nodes>) {
    let Job { cores, threads, .. } = world.job;
    let ranks = world.job.here.len() as u32;
    let plural = |count: usize, noun: &str| format!("{count} {noun}{}", if count == 1 { "" } else { "s" });
    let threads = match threads {
        Some(threads) => format!("{} each on {}", plural(threads, "thread"), plural(cores, "core")),
        None => "threads as OMP_NUM_THREADS says".into(),
    };
    let run = world.shown_run();
    let programs = shown_programs(&world.job) + &shown_hosts(world, nodes);
    world.say(&format!("{}{programs}, {threads}, run {run}", plural(ranks as usize, "rank")));
    if let Some(remark) = world.run_dir.take_remark() {
        world.say(&remark);
    }
    let programs = world.job.programs.to_json();
    let started = json!({"ranks": ranks, "programs": programs, "agent": std::process::id()});
    world.run_dir.event("started", started);
}

/// ` of 8, node 1 of 2 (host n1)` where there are others, ` on 2 pretended hosts` where they are not real.
fn shown_hosts(world: &World, nodes: Option<&Nodes>) -> String {
    let hosts = world.job.hosts.count();
    match nodes {
        Some(nodes) => {
            let (all, host) = (world.job.ranks, &world.host);
            format!(" of {all}, node {} of {} (host {host})", nodes.node, nodes.count())
        }
        None if hosts > 1 => format!(" on {hosts} pretended hosts"),
        None => String::new(),
    }
}

/// ` (eval 0, train 1-7)` when there are several.
fn shown_programs(job: &Job) -> String {
    let programs = &job.programs;
    let shown = |program: &Program| format!("{} {}", program.name, program.shown_ranks());
    let all: Vec<String> = programs.iter().take(MAX_SHOWN_PROGRAMS).map(shown).collect();
    let more = if programs.iter().nth(MAX_SHOWN_PROGRAMS).is_some() { ", .." } else { "" };
    if programs.are_several() { format!(" ({}{more})", all.join(", ")) } else { String::new() }
}

/// The ways from the ranks, the sockets of the ranks and the fork server to the loop.
type Channels = (Senders, mpsc::Receiver<Chunk>, mpsc::Receiver<ControlEvent>, mpsc::Receiver<ServerEvent>);

fn channels(job: &Job) -> Channels {
    let (chunks_tx, chunks) = mpsc::channel(QUEUED_CHUNKS);
    let (control_tx, control) = mpsc::channel(QUEUED_CHUNKS);
    let (server_tx, server) = mpsc::channel(queued_answers(job));
    (Senders { chunks: chunks_tx, control: control_tx, server: server_tx }, chunks, control, server)
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

const FDS_PER_RANK: u64 = 3;
/// Open log files, shared segments on their way, and the agent's own.
const OWN_FDS: u64 = 128;
pub(super) const QUEUED_CHUNKS: usize = 64;
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
