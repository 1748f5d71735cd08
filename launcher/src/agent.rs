//! The supervisor of the ranks of this host: starts them, shows what they write, decides why the job failed,
//! and leaves no process behind. One thread, one loop; what it decides is in `verdict.rs`.

mod again;
mod deliver;
mod finish;
mod helpers;
mod lives;
mod looks;
mod nodes;
mod recorder;
mod start;
mod suspicion;
mod timings;
mod watchers;

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getppid, kill_process};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tpurun_protocol::board::{self, Board, RankView};

use crate::cgroup::JobCgroup;
use crate::control_server::{ControlEvent, ControlServer};
use crate::foreign::Sleepers;
use crate::fork_server::{ForkServer, ServerEvent};
use crate::heard::Heard;
use crate::job::Job;
use crate::kill;
use crate::labels::Labels;
use crate::losses::Losses;
use crate::nodes::NodeEvent;
use crate::output::{Output, Stream};
use crate::processes::Process;
use crate::program::Start;
use crate::rank_set::RankSet;
use crate::ranks::{Chunk, Ending, Rank};
use crate::run_dir::RunDir;
use crate::screen::Screen;
use crate::signals::Signals;
use crate::stacks::Class;
use crate::suspects::Suspects;
use crate::timings::Step;
use crate::verdict::{self, Cause, Failure, Verdict, Waiting};
use crate::watch::Watch;

use helpers::Helper;
use recorder::Recorder;
pub(crate) use start::run;

/// Everything about the one job of this process.
struct Agent {
    job: Job,
    /// The process that waits for us.
    front: i32,
    run_dir: RunDir,
    board: Board,
    /// Inherited by the ranks.
    board_fd: OwnedFd,
    cgroup: Option<JobCgroup>,
    labels: Labels,
    output: Output,
    screen: Screen,
    control: ControlServer,
    server: Option<ForkServer>,
    /// Who is asked for a fork server, by its socket.
    warm: Option<PathBuf>,
    /// Processes beside the ranks that these need.
    helpers: Vec<Helper>,
    ranks: Vec<Rank>,
    to_start: start::ToStart,
    /// Of each rank: standard streams that have not ended.
    open_streams: Vec<u8>,
    phase: Phase,
    /// In the order in which they were seen.
    failures: Vec<Failure>,
    /// Ranks that exited with code 0, first one first.
    left: Vec<u32>,
    /// Ranks that the world goes on without.
    losses: Losses,
    /// What it would have been stopped for.
    forgiven: Option<Verdict>,
    /// How often all ranks were started again.
    restarts: u32,
    recorder: Recorder,
    watch: Watch,
    suspects: Suspects,
    /// Ranks that wait where nothing is seen of it.
    sleepers: Sleepers,
    /// Where the ranks were when the job failed of a hang.
    stacks: Vec<Class>,
    next_watch: Instant,
    /// Lost ranks that the others do not know of yet.
    due: Vec<deliver::Due>,
    suspicion: deliver::Suspicion,
    heard: Heard,
    /// Ranks whose programs have ended and whose processes have not.
    lingering: HashMap<u32, Instant>,
    /// Those of them that have been named because others wait for them.
    suspected_lingering: HashSet<u32>,
    timings: timings::Watching,
    /// This host.
    host: String,
    others: Option<nodes::Others>,
    /// What ranks of other nodes that have ended in order left behind.
    views_elsewhere: HashMap<u32, RankView>,
    started: Instant,
    oom_kills_before: u64,
    tx: Senders,
}

/// The sending ends of what the tasks tell the loop.
struct Senders {
    chunks: mpsc::Sender<Chunk>,
    control: mpsc::Sender<ControlEvent>,
    server: mpsc::Sender<ServerEvent>,
}

struct Receivers {
    chunks: mpsc::Receiver<Chunk>,
    control: mpsc::Receiver<ControlEvent>,
    server: mpsc::Receiver<ServerEvent>,
    nodes: mpsc::Receiver<NodeEvent>,
    signals: Signals<Asked>,
}

/// What a signal asks of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    /// INT, TERM, HUP or QUIT: end the job.
    Stop(Signal),
    /// USR1 or USR2: for the ranks.
    PassOn(Signal),
    /// A child has ended.
    Reap,
    /// Nobody waits for us any more.
    FrontDied,
}

enum Phase {
    /// The fork server imports, or the store comes up.
    Starting,
    Running,
    /// A rank has failed; one that failed before it may be seen a moment later.
    Settling {
        until: Instant,
    },
    Stopping(Stopping),
    Clearing(Clearing),
}

/// The ranks have been asked to end.
struct Stopping {
    why: Why,
    asked_at: Instant,
    kill_at: Instant,
    victims: Vec<u32>,
    killing_since: Option<Instant>,
    /// Asked more than once: nothing is waited for any more.
    is_hurried: bool,
    /// Ranks that finish what they do have been left out when the others were killed.
    has_spared: bool,
}

/// All ranks have ended, and so must what they have started, before others take their place.
struct Clearing {
    stopping: Stopping,
    until: Instant,
    is_clear: bool,
}

impl Phase {
    /// What ranks get that are asked to end: KeyboardInterrupt is what Python programs expect of Ctrl-C.
    fn signal(&self) -> Signal {
        match self {
            Phase::Stopping(Stopping { why: Why::Asked(Signal::INT), .. }) => Signal::INT,
            _ => Signal::TERM,
        }
    }
}

enum Why {
    Failed(Box<Verdict>),
    /// This failed, and so many ranks are started instead.
    Restart(Box<Verdict>, u32),
    Asked(Signal),
    FrontDied,
}

impl Agent {
    async fn supervise(&mut self, rx: &mut Receivers) {
        while !self.is_over() {
            let wake = tokio::time::Instant::from_std(self.next_deadline());
            tokio::select! {
                biased;
                asked = rx.signals.next() => self.on_signal(asked),
                Some(event) = rx.server.recv() => self.on_server(event).await,
                Some(event) = rx.control.recv() => self.control.handle(event),
                Some(event) = rx.nodes.recv() => self.on_node(event),
                // A few at a time, so that signals are answered meanwhile.
                () = std::future::ready(()), if self.may_start() => self.start_some().await,
                Some(chunk) = rx.chunks.recv(), if self.screen.has_room() => self.on_chunk(chunk),
                () = self.screen.room(), if !self.screen.has_room() => {}
                () = tokio::time::sleep_until(wake) => {}
            }
            self.on_time(Instant::now());
            self.advance(rx).await;
            self.show();
        }
    }

    fn is_over(&self) -> bool {
        match &self.phase {
            Phase::Stopping(Stopping { why: Why::Restart(..), .. }) => false,
            Phase::Running if self.others.as_ref().is_some_and(|others| !others.is_over()) => false,
            Phase::Running | Phase::Stopping(_) => !self.is_anybody_alive(),
            // Settling is decided first.
            Phase::Starting | Phase::Settling { .. } | Phase::Clearing(_) => false,
        }
    }

    fn is_anybody_alive(&self) -> bool {
        self.ranks.iter().any(Rank::is_alive)
    }

    fn next_deadline(&self) -> Instant {
        let phase = match &self.phase {
            Phase::Settling { until } => Some(*until),
            Phase::Stopping(stopping) => Some(stopping.kill_at),
            Phase::Clearing(clearing) if !clearing.is_clear => Some(clearing.until),
            // Of a world that is gone from here it is known when it is gone from everywhere.
            Phase::Starting | Phase::Running | Phase::Clearing(_) => None,
        };
        let proposal = self.others.as_ref().and_then(nodes::Others::next_deadline);
        let deadlines =
            [phase, proposal, self.output.poll_deadline(), self.next_delivery(), self.next_timing()];
        deadlines.into_iter().flatten().chain([self.next_watch]).min().expect("the list is not empty")
    }

    fn on_time(&mut self, now: Instant) {
        self.output.tick(now);
        self.deliver_losses(now);
        self.look_at_proposal(now);
        self.look_at_proof(now);
        self.look_at_others();
        self.look_at_timings(now);
        if now >= self.next_watch {
            self.next_watch = now + WATCH_EVERY;
            let before = processor_time();
            self.look_around(now);
            // What takes longer, of hundreds of ranks, is done less often: they need the processor themselves.
            self.next_watch += (processor_time() - before) * PAUSE_PER_LOOK;
        }
        let is_anybody_alive = self.is_anybody_alive();
        let finishing = self.finishing(now);
        match &mut self.phase {
            Phase::Settling { until } if now >= *until || !is_anybody_alive => self.decide(),
            Phase::Stopping(stopping) if !finishing.is_empty() => {
                stopping.kill_at = now + WATCH_EVERY;
                let is_news = !std::mem::replace(&mut stopping.has_spared, true);
                let others = self.running().into_keys().filter(|pid| !finishing.contains_key(pid));
                others.for_each(kill::kill_group);
                if is_news {
                    self.say_who_finishes(finishing.into_values().collect());
                }
            }
            Phase::Stopping(stopping) if now >= stopping.kill_at => {
                let is_first = stopping.killing_since.is_none();
                let since = *stopping.killing_since.get_or_insert(now);
                stopping.kill_at = now + KILL_EVERY;
                match (&stopping.why, &self.server) {
                    (Why::Restart(..), Some(server)) => kill::kill_descendants_but(server.pid),
                    _ => kill::kill_descendants(self.cgroup.as_ref()),
                }
                if matches!(stopping.why, Why::Restart(..)) && now >= since + lives::CLEARED_WITHIN {
                    self.call_off_everywhere(&self.leftover());
                }
                if is_first {
                    self.say_who_is_killed();
                }
            }
            _ => {}
        }
    }

    /// Ranks that would be killed now, and whose programs have ended: what their processes do still, such as their exit
    /// handlers, is theirs to end, for as long as ranks have that are asked to.
    fn finishing(&self, now: Instant) -> HashMap<i32, u32> {
        let Phase::Stopping(stopping) = &self.phase else { return HashMap::new() };
        let may_finish = !stopping.is_hurried && now < stopping.asked_at + self.job.stop_grace;
        if !may_finish || now < stopping.kill_at {
            return HashMap::new();
        }
        self.ended_programs()
    }

    fn ended_programs(&self) -> HashMap<i32, u32> {
        let has_ended = |rank: u32| self.run_dir.program_end_of(rank).is_some();
        self.running().into_iter().filter(|(_, rank)| has_ended(*rank)).collect()
    }

    fn say_who_finishes(&mut self, ranks: RankSet) {
        let (of, goes) =
            if ranks.len() == 1 { ("rank", "its process goes") } else { ("ranks", "their processes go") };
        let grace = self.stop_grace_text();
        self.say(&format!(
            "the program of {of} {ranks} has ended, and {goes} on (an exit handler, or a thread that is no daemon): \
             killed after {grace}"
        ));
    }

    /// For how long ranks are waited for that were asked to end, and the option that says so.
    fn stop_grace_text(&self) -> String {
        format!("{} s (--shutdown-timeout)", self.job.stop_grace.as_secs_f64())
    }

    /// Of ranks that somebody has asked to end, and that did not.
    fn say_who_is_killed(&mut self) {
        let Phase::Stopping(Stopping { why: Why::Asked(_), is_hurried: false, .. }) = &self.phase else {
            return;
        };
        let late: RankSet = self.running().into_values().collect();
        if late.is_empty() {
            return;
        }
        let grace = self.stop_grace_text();
        self.say(&format!("killed after {grace}: ranks {late}, which had not ended"));
    }

    fn look_around(&mut self, now: Instant) {
        // The kernel's signal says so, too; but it is lost when the front died before we asked for it.
        if getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(self.front) {
            self.on_signal(Asked::FrontDied);
        }
        self.note_heard();
        self.look_for_orphans();
        self.look_for_ended_programs(now);
        self.look_at_helpers(now);
        let ranks = &self.ranks;
        self.control.forget(|rank| ranks.get(rank as usize).is_none_or(Rank::has_ended));
        self.show_watchers(now);
        match self.others {
            Some(_) => self.look_with_others(now),
            None => self.judge_waits(&self.views(), now),
        }
        self.look_for_sleepers(now);
        // As SIGPIPE ends a program that writes to `head`.
        if self.screen.is_broken() && matches!(self.phase, Phase::Running) {
            self.stop(Why::Asked(Signal::PIPE), self.job.failure_grace);
        }
    }

    /// Ranks whose fork server has died die with it; as children of another process when that was a warm one's fork.
    fn look_for_orphans(&mut self) {
        if self.server.is_some() || self.warm.is_none() {
            return;
        }
        let is_gone = |pid| Process::read(pid).is_none_or(|process| process.is_zombie());
        for (pid, rank) in self.running() {
            if self.job.programs.of(rank).start == Start::ForkServer && is_gone(pid) {
                self.on_end(rank, Ending::Signal(Signal::KILL.as_raw()));
            }
        }
    }

    /// What follows from who waits for whom.
    fn judge_waits(&mut self, views: &[RankView], now: Instant) {
        // One judge of what is true of all nodes, in one text.
        if self.others.as_ref().is_none_or(|others| others.nodes().is_first()) {
            self.look_for_deadlock(views, now);
        }
        if matches!(self.phase, Phase::Running)
            && let Some(verdict) = self.watch.look(views, &self.ranks, &self.left, now)
        {
            self.judge(verdict);
        }
        if matches!(self.phase, Phase::Running) {
            self.look_for_suspects(views, now);
        }
    }

    fn on_signal(&mut self, asked: Asked) {
        match asked {
            Asked::Reap => self.reap(),
            Asked::PassOn(signal) => {
                for pid in self.ranks.iter().filter(|rank| rank.is_alive()).filter_map(Rank::pid) {
                    let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, signal));
                }
            }
            Asked::FrontDied => self.stop(Why::FrontDied, Duration::ZERO),
            Asked::Stop(signal) if self.interrupt_restart(signal) => self.tell_stop(signal),
            Asked::Stop(signal) => match &mut self.phase {
                Phase::Stopping(stopping) => {
                    stopping.kill_at = Instant::now();
                    stopping.is_hurried = true;
                }
                _ => {
                    let again = if signal == Signal::INT { "; Ctrl-C again ends them at once" } else { "" };
                    let alive = self.ranks.iter().filter(|rank| rank.is_alive()).count();
                    self.say(&format!("{}: stopping {alive} ranks{again}", signal_word(signal)));
                    self.tell_stop(signal);
                    self.stop(Why::Asked(signal), self.job.stop_grace);
                }
            },
        }
    }

    async fn on_server(&mut self, event: ServerEvent) {
        match event {
            ServerEvent::Forked { pid } => self.on_forked(pid),
            ServerEvent::NotForked { reason } => self.start_cold(&reason).await,
            ServerEvent::Ready { python_ns, torch_ns } => {
                self.timings.reached_at(Step::PythonStarted, python_ns);
                self.timings.reached_at(Step::TorchImported, torch_ns);
                self.timings.reached(Step::ServerReady);
                self.server.iter_mut().for_each(|server| server.is_ready = true);
                self.start_store().await;
            }
            ServerEvent::Refuse { reason, quiet } => {
                if !quiet {
                    self.say(&format!("no fork server ({reason}): starting an interpreter for each rank"));
                }
                self.on_refusal(quiet).await;
            }
            ServerEvent::Store { port, reason, pid } => {
                pid.map(Helper::store).into_iter().for_each(|store| self.note_helper(store));
                self.on_store(port, &reason).await;
            }
            ServerEvent::Started { rank, pid, ns } => {
                self.timings.started(rank, ns);
                self.on_started(rank, pid);
            }
            ServerEvent::Failed { rank, reason } => self.on_not_started(rank, &reason),
            ServerEvent::Exited { rank, code, signal } => self.on_end(rank, Ending::told(code, signal)),
            ServerEvent::StoreEnded { code, signal } => self.on_store_gone(Ending::told(code, signal)),
            ServerEvent::Cleared => self.on_cleared(true),
            ServerEvent::Closed => self.on_server_gone(),
        }
    }

    fn on_started(&mut self, rank: u32, pid: i32) {
        let Some(state) = self.ranks.get_mut(rank as usize) else { return };
        *state = Rank::Running(pid);
        let program = &self.job.programs.of(rank).name;
        self.run_dir.event("rank started", json!({"rank": rank, "program": program, "pid": pid}));
        if matches!(self.phase, Phase::Stopping(_)) {
            kill::ask_to_end([pid], self.phase.signal());
        }
    }

    fn on_not_started(&mut self, rank: u32, reason: &str) {
        self.forget_to_start();
        self.on_end(rank, Ending::Exit(1));
        let cause = Cause::NotStarted(reason.to_owned());
        self.fail(Verdict::plain(Some(rank), cause, Instant::now()));
    }

    fn on_server_gone(&mut self) {
        if self.server.take().is_none() {
            return;
        }
        self.helpers.clear();
        let is_over = matches!(self.phase, Phase::Stopping(_)) || !self.is_anybody_alive();
        match self.phase {
            Phase::Starting => {
                self.say("no fork server (it ended): starting an interpreter for each rank");
                self.fall_back();
            }
            Phase::Clearing(_) => self.end_world(),
            _ if is_over => {}
            _ => self.fail(Verdict::plain(None, Cause::ForkServerDied, Instant::now())),
        }
        self.forget_to_start();
        // Its children die with it; those whose number it has not told are not seen otherwise.
        for rank in self.job.here.clone() {
            if self.ranks[rank as usize] == Rank::Requested {
                self.on_end(rank, Ending::Signal(Signal::KILL.as_raw()));
            }
        }
    }

    /// Ranks that are our own children, and whatever came to us because its parent ended.
    fn reap(&mut self) {
        let running: HashMap<i32, u32> = self.running();
        let mut ended = Vec::new();
        kill::reap(&mut |pid, status| ended.push((pid, Ending::of(status))));
        let ended: Vec<(i32, Option<Ending>)> =
            ended.into_iter().map(|(pid, ending)| (pid.as_raw_nonzero().get(), ending)).collect();
        // A forked rank comes to us only when its parent is gone, which then is the cause.
        if let Some(server) = self.server.as_ref().map(|server| server.pid)
            && ended
                .iter()
                .any(|(pid, _)| *pid == server || running.get(pid).is_some_and(|rank| self.is_forked(*rank)))
        {
            self.on_server_gone();
        }
        for (pid, ending) in ended {
            if let (Some(rank), Some(ending)) = (running.get(&pid), ending) {
                self.on_end(*rank, ending);
            }
        }
    }

    fn running(&self) -> HashMap<i32, u32> {
        let alive = self.ranks.iter().zip(0_u32..).filter(|(rank, _)| rank.is_alive());
        alive.filter_map(|(rank, index)| Some((rank.pid()?, index))).collect()
    }

    fn on_end(&mut self, rank: u32, ending: Ending) {
        let now = Instant::now();
        let Some(state) = self.ranks.get_mut(rank as usize).filter(|state| state.is_alive()) else { return };
        // Nobody knows earlier how this rank has ended.
        *state = Rank::Ended { pid: state.pid(), ending, at: now };
        let program = &self.job.programs.of(rank).name;
        let details = match ending {
            Ending::Exit(code) => json!({"rank": rank, "program": program, "code": code}),
            Ending::Signal(number) => json!({"rank": rank, "program": program, "signal": number}),
        };
        self.run_dir.event("rank ended", details);
        self.tell_end(rank, ending);
        if matches!(self.phase, Phase::Stopping(_)) {
            return;
        }
        // Its program had failed before, while threads kept its process.
        if self.failures.iter().any(|failure| failure.rank == rank) {
            return;
        }
        if ending == Ending::Exit(0) {
            self.left.push(rank);
            return;
        }
        self.on_failure(rank, ending, now);
    }

    /// The program of a rank has failed, whether or not its process is still there.
    fn on_failure(&mut self, rank: u32, ending: Ending, now: Instant) {
        self.note_heard();
        self.mourn(rank, now);
        let own = self.run_dir.error_of(rank);
        let error = self.heard.explain(rank, ending, own, &self.board.records(rank), board::now_ns());
        self.failures.push(Failure { rank, ending, error, at: now });
        if matches!(self.phase, Phase::Running | Phase::Starting) {
            self.phase = Phase::Settling { until: now + SETTLE };
        }
    }

    /// Remembers which communicators have failed, before their ranks act on it.
    fn note_heard(&mut self) {
        self.heard.note(self.control.supervisor().all());
    }

    /// A program that has failed is over, also while a thread that it has left keeps its process.
    fn look_for_ended_programs(&mut self, now: Instant) {
        if matches!(self.phase, Phase::Stopping(_) | Phase::Clearing(_) | Phase::Starting) {
            return;
        }
        let is_known = |rank: u32| self.failures.iter().any(|failure| failure.rank == rank);
        let running = self.running().into_values().filter(|rank| !is_known(*rank));
        let ended: Vec<(u32, Ending)> =
            running.filter_map(|rank| Some((rank, self.run_dir.program_end_of(rank)?))).collect();
        for (rank, ending) in ended {
            let since = *self.lingering.entry(rank).or_insert(now);
            if ending != Ending::Exit(0) && now >= since + LINGERS_FOR {
                self.run_dir.event("program ended", json!({"rank": rank}));
                self.on_failure(rank, ending, now);
            } else if ending == Ending::Exit(0) {
                self.suspect_lingering(rank, now);
            }
        }
    }

    /// A thread that outlives a program which has ended well may still post what others wait for: no proof, but they
    /// should know. Says so once.
    fn suspect_lingering(&mut self, rank: u32, now: Instant) {
        if self.suspected_lingering.contains(&rank) {
            return;
        }
        let verdict = verdict::of_leaving(&[rank], &self.views(), board::now_ns(), now);
        let Some(waiting) = verdict.and_then(|verdict| verdict.waiting) else { return };
        self.suspected_lingering.insert(rank);
        let Waiting { ranks, group, .. } = waiting;
        let (noun, verb) = if ranks.len() == 1 { ("rank", "waits") } else { ("ranks", "wait") };
        self.run_dir.event("program lingers", json!({"rank": rank, "waiting": ranks.to_string()}));
        self.say(&format!(
            "suspect: the program of rank {rank} has ended, but a thread that is no daemon keeps its process; \
             {noun} {ranks} {verb} for it in group {group}"
        ));
    }

    /// Asks all ranks to end, and kills what is left after `grace`. The first reason stands.
    fn stop(&mut self, why: Why, grace: Duration) {
        let now = Instant::now();
        let is_urgent = matches!(why, Why::FrontDied);
        if let Phase::Stopping(stopping) = &mut self.phase {
            if is_urgent {
                stopping.kill_at = now;
                stopping.why = why;
                stopping.is_hurried = true;
            }
            return;
        }
        self.forget_to_start();
        self.run_dir.event("stop", self.describe_stop(&why));
        self.output.expect_interrupts(matches!(why, Why::Asked(Signal::INT)));
        let is_asked = matches!(why, Why::Asked(_));
        let reason = if is_asked { "stopped" } else { "failed" };
        let running = self.running();
        let mut victims: Vec<u32> = running.values().copied().collect();
        victims.sort_unstable();
        self.phase = Phase::Stopping(Stopping {
            why,
            asked_at: now,
            kill_at: now + grace,
            victims,
            killing_since: None,
            is_hurried: is_urgent,
            has_spared: false,
        });
        if !is_urgent {
            // First, while they still do what they did.
            self.record_flight(reason);
            let spared = if is_asked { HashMap::new() } else { self.ended_programs() };
            let asked = running.keys().copied().filter(|pid| !spared.contains_key(pid));
            kill::ask_to_end(asked, self.phase.signal());
        }
    }

    fn describe_stop(&self, why: &Why) -> Value {
        match why {
            Why::Failed(verdict) | Why::Restart(verdict, _) => {
                json!({"culprit": verdict.culprit, "exit": verdict.exit_code()})
            }
            Why::Asked(signal) => json!({"signal": signal.as_raw()}),
            Why::FrontDied => json!({"front": "gone"}),
        }
    }

    fn on_chunk(&mut self, chunk: Chunk) {
        if !chunk.bytes.is_empty() {
            return self.output.feed(chunk.rank, chunk.stream, &chunk.bytes, Instant::now());
        }
        let open = &mut self.open_streams[chunk.rank as usize];
        *open -= 1;
        if *open == 0 {
            self.output.finish(chunk.rank, Instant::now());
        }
    }

    /// Passes on what is ready to be seen.
    fn show(&mut self) {
        let pieces = RefCell::new(Vec::new());
        let to = |stream| Pieces { stream, pieces: &pieces };
        self.output.drain(&mut to(Stream::Out), &mut to(Stream::Err)).expect("memory takes everything");
        for (stream, bytes) in pieces.into_inner() {
            self.screen.write(stream, bytes);
        }
    }

    /// A line of our own, in its place among those of the ranks.
    fn say(&mut self, line: &str) {
        self.output.note(&format!("tpurun: {line}"));
        self.show();
    }
}

/// Takes what is written to one of the two streams, in order with what is written to the other.
struct Pieces<'a> {
    stream: Stream,
    pieces: &'a RefCell<Vec<(Stream, Vec<u8>)>>,
}

impl io::Write for Pieces<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.pieces.borrow_mut().push((self.stream, bytes.to_vec()));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn signal_word(signal: Signal) -> &'static str {
    match signal {
        Signal::INT => "interrupted",
        Signal::TERM => "terminated",
        Signal::HUP => "hung up",
        Signal::PIPE => "output closed",
        _ => "asked to quit",
    }
}

/// What this thread has had of it: time in which others had it says nothing about how long its work takes.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Sent to the agent by the kernel when the front dies; nobody else uses it.
const FRONT_DIED: Signal = Signal::POWER;
const WATCH_EVERY: Duration = Duration::from_millis(100);
/// Looks take a tenth of a processor at most.
const PAUSE_PER_LOOK: u32 = 9;
/// How much later a failure may be seen that happened before the one seen first.
const SETTLE: Duration = Duration::from_millis(30);
/// An interpreter that goes down takes less.
const LINGERS_FOR: Duration = Duration::from_millis(500);
const KILL_EVERY: Duration = Duration::from_millis(20);
