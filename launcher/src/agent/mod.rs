//! The supervisor of the ranks of this host: starts them, shows what they write, decides why the job failed,
//! and leaves no process behind. One thread, one loop; what it decides is in `judge/verdict.rs`.
//!
//! The loop ([`Agent`]) hands every event to the service that it concerns. Each service has state of its own, and is
//! given the [`World`] that runs now. A service that wants something of another one returns a [`Instruction`].

mod account;
mod all_ranks;
mod command;
mod console;
mod delivery;
mod ending;
mod finish;
mod frames;
mod helpers;
mod judge;
mod lingering;
mod looks;
mod nodes;
mod observation;
mod origin;
mod phase;
mod recorder;
mod report;
mod restart;
mod start;
mod starter;
mod timings;
mod turn;
mod watchers;
mod world;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getppid, kill_process};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc;
use tpurun_protocol::board::RankView;

use crate::base::signals::Signals;
use crate::control::control_server::ControlEvent;
use crate::judge::verdict::{Cause, Verdict};
use crate::nodes::{Frame, JobFailure, NodeEvent, Nodes};
use crate::processes::kill;
use crate::ranks::fork_server::ServerEvent;
use crate::ranks::{Chunk, Ending, Rank};

use command::{Instruction, MayRestart};
use delivery::SECOND_LOOK;
use helpers::Helper;
use judge::Judge;
use nodes::Others;
use phase::{Stopping, Why, WorldPhase, signal_word};
use recorder::Recorder;
use report::Reporter;
use starter::{NotStarted, Starter};
use timings::WATCH_EVERY;
use world::World;

pub(crate) use origin::{AGENT, Origin};
pub(crate) use start::run;

/// The loop over everything that happens to the one job of this process, and the services that it goes to.
struct Agent {
    world: World,
    starter: Starter,
    judge: Judge,
    recorder: Recorder,
    /// The other nodes, if the job has several.
    others: Option<Others>,
    next_watch: Instant,
    /// The kills for want of memory on this host before the job began.
    oom_kills_before: u64,
}

struct Receivers {
    chunks: mpsc::Receiver<Chunk>,
    control: mpsc::Receiver<ControlEvent>,
    server: mpsc::Receiver<ServerEvent>,
    nodes: mpsc::Receiver<NodeEvent>,
    signals: Signals<Asked>,
}

/// The request that a signal is to the agent.
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

impl Agent {
    async fn supervise(&mut self, rx: &mut Receivers) {
        while !self.is_over() {
            let wake = tokio::time::Instant::from_std(self.next_deadline());
            let console = &self.world.console;
            tokio::select! {
                biased;
                asked = rx.signals.next() => self.on_signal(asked),
                Some(event) = rx.server.recv() => self.on_server(event).await,
                Some(event) = rx.control.recv() => self.world.control.handle(event),
                Some(event) = rx.nodes.recv() => self.on_node(event),
                // A few at a time, so that signals are answered meanwhile.
                () = std::future::ready(()), if self.starter.may_start(&self.world) => self.start_some().await,
                Some(chunk) = rx.chunks.recv(), if console.screen.has_room() => self.world.console.on_chunk(chunk),
                () = self.world.console.screen.room(), if !self.world.console.screen.has_room() => {}
                () = tokio::time::sleep_until(wake) => {}
            }
            self.on_time(Instant::now());
            self.advance(rx).await;
            self.world.console.show();
        }
    }

    fn is_over(&self) -> bool {
        match &self.world.phase {
            WorldPhase::Stopping(Stopping { why: Why::Restart(..), .. }) => false,
            WorldPhase::Running if self.others.as_ref().is_some_and(|others| !others.is_over) => false,
            WorldPhase::Running | WorldPhase::Stopping(_) => !self.world.roster.is_anybody_alive(),
            // Settling is decided first.
            WorldPhase::Starting | WorldPhase::Settling { .. } | WorldPhase::Clearing(_) => false,
        }
    }

    fn next_deadline(&self) -> Instant {
        let deadlines = [
            self.world.phase.next_deadline(),
            self.others.as_ref().and_then(Others::next_deadline),
            self.world.console.output.poll_deadline(),
            self.judge.next_delivery(),
            self.starter.timings.next(),
        ];
        deadlines.into_iter().flatten().fold(self.next_watch, Instant::min)
    }

    /// Does what is due at this time.
    fn on_time(&mut self, now: Instant) {
        self.world.console.output.tick(now);
        self.judge.deliver_losses(&mut self.world, self.others.as_ref(), now);
        self.look_at_others(now);
        self.starter.timings.look(&mut self.world, now);
        if now >= self.next_watch {
            self.next_watch = now + WATCH_EVERY;
            let before = processor_time();
            self.look_around(now);
            // A look that takes longer, at hundreds of ranks, is done less often: they need the processor themselves.
            self.next_watch += (processor_time() - before) * PAUSE_PER_LOOK;
        }
        match &self.world.phase {
            WorldPhase::Settling { until } if now >= *until || !self.world.roster.is_anybody_alive() => {
                self.decide()
            }
            WorldPhase::Stopping(stopping) if now >= stopping.kill_at => {
                let command = self.world.kill_or_spare(&self.starter, now);
                command.into_iter().for_each(|command| self.execute(command));
            }
            _ => {}
        }
    }

    /// Does what other nodes wait for, and takes what has come from them.
    fn look_at_others(&mut self, now: Instant) {
        if let Some(command) = self.others.as_mut().and_then(|others| others.take_proposal(now)) {
            self.execute(command);
        }
        if let Some(proof) = self.others.as_mut().and_then(|others| others.take_proof(now)) {
            self.judge.announce_deadlock(&mut self.world, &proof);
        }
        let roster = &self.world.roster;
        let has_ended_well =
            self.world.phase.is_running() && !roster.is_anybody_alive() && roster.failures.is_empty();
        if let Some(others) = self.others.as_mut().filter(|_| has_ended_well) {
            others.end_well();
        }
    }

    fn look_around(&mut self, now: Instant) {
        // The kernel's signal says so, too; but it is lost when the front died before we asked for it.
        if getppid().map(|pid| pid.as_raw_nonzero().get()) != Some(self.world.front) {
            self.on_signal(Asked::FrontDied);
        }
        for rank in self.starter.orphans(&self.world) {
            self.on_end(rank, Ending::Signal(Signal::KILL.as_raw()));
        }
        self.judge.look_for_failures(&mut self.world, now);
        for line in self.starter.helpers.look(now) {
            self.world.say(&line);
        }
        let roster = &self.world.roster;
        self.world.control.forget(|rank| roster.has_ended(rank));
        match &mut self.others {
            Some(others) => {
                let (world, recorder, server) = (&self.world, &self.recorder, self.starter.server_pid());
                others.watchers.show(&others.nodes, world, || recorder.look(world, server, "asked"), now);
                others.looks.ask(&others.nodes, &mut self.world, now);
            }
            None => self.judge_waits(&self.world.views(), now),
        }
        self.judge.look_for_sleepers(&mut self.world, now);
        // As SIGPIPE ends a program that writes to `head`.
        if self.world.console.screen.is_broken() && self.world.phase.is_running() {
            self.stop(Why::Asked(Signal::PIPE), self.world.job.failure_grace);
        }
    }

    /// Judges what follows from who waits for whom.
    fn judge_waits(&mut self, views: &[RankView], now: Instant) {
        let (judge, world) = (&mut self.judge, &mut self.world);
        if let Some(next) = judge.look_for_deadlock(world, self.others.as_mut(), views, now) {
            self.next_watch = self.next_watch.min(next);
        }
        if let Some(verdict) = judge.verdict(world, views, now) {
            self.on_verdict(verdict);
        }
        self.judge.look_for_suspects(&mut self.world, self.others.as_ref(), views, now);
    }

    /// Does what a service has asked for.
    fn execute(&mut self, command: Instruction) {
        match command {
            Instruction::Obey { told, may_restart } => self.obey(told, may_restart),
            Instruction::JudgeTogether(views) => {
                let now = Instant::now();
                self.judge_waits(&views, now);
                // Only node 0 is ever suspicious, and begins the next look.
                let next = now + if self.judge.is_suspicious() { SECOND_LOOK } else { WATCH_EVERY };
                self.others.iter_mut().for_each(|others| others.looks.pause_until(next));
                self.next_watch = self.next_watch.min(next);
            }
            Instruction::LookBy(at) => self.next_watch = self.next_watch.min(at),
            Instruction::Deadlock(proof) => self.judge.hear_of_deadlock(&mut self.world, &proof),
            Instruction::NoteSuspects => self.judge.note_suspects(&self.world, self.others.as_ref()),
            Instruction::CallOff { why, scope } => self.call_off(&why, scope),
            Instruction::StopAsAskedOn { node, signal } => self.on_stop_elsewhere(node, signal),
        }
    }

    fn on_signal(&mut self, asked: Asked) {
        match asked {
            Asked::Reap => self.reap(),
            Asked::PassOn(signal) => {
                for pid in self.world.roster.running().into_keys() {
                    let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, signal));
                }
            }
            Asked::FrontDied => self.stop(Why::FrontDied, Duration::ZERO),
            Asked::Stop(signal) if self.interrupt_restart(signal) => {
                self.others.iter().for_each(|others| others.tell_stop(signal))
            }
            Asked::Stop(signal) => match &mut self.world.phase {
                WorldPhase::Stopping(stopping) => {
                    stopping.kill_at = Instant::now();
                    stopping.is_hurried = true;
                }
                _ => {
                    let again = if signal == Signal::INT { "; Ctrl-C again ends them at once" } else { "" };
                    let alive = self.world.roster.alive();
                    self.world.say(&format!("{}: stopping {alive} ranks{again}", signal_word(signal)));
                    self.others.iter().for_each(|others| others.tell_stop(signal));
                    self.stop(Why::Asked(signal), self.world.job.stop_grace);
                }
            },
        }
    }

    fn on_node(&mut self, event: NodeEvent) {
        let Some(others) = &mut self.others else { return };
        let command = match event {
            NodeEvent::Frame(node, frame) => others.on_frame(&mut self.world, node, frame),
            NodeEvent::Gone(node, why) => others.on_gone(&mut self.world, node, &why),
            NodeEvent::Refused(line) => return self.world.say(&line),
        };
        command.into_iter().for_each(|command| self.execute(command));
    }

    fn on_stop_elsewhere(&mut self, node: u32, signal: Signal) {
        if !self.interrupt_restart(signal) && !self.world.phase.is_stopping() {
            let host = self.others.as_ref().map_or("", |others| others.nodes.host(node));
            self.world.say(&format!("{} on host {host}: stopping", signal_word(signal)));
            self.stop(Why::Asked(signal), self.world.job.stop_grace);
        }
    }

    /// Ends the world for this reason; node 0 tells the others. Another one may follow if node 0 says so.
    fn obey(&mut self, told: JobFailure, may_restart: MayRestart) {
        if !self.others.as_mut().is_some_and(Others::settle) {
            return;
        }
        let culprit = told.culprit.filter(|rank| (*rank as usize) < self.world.roster.ranks.len());
        let verdict = Box::new(Verdict::plain(culprit, Cause::JobFailure(told.clone()), Instant::now()));
        let next_world = self
            .judge
            .next_world(&self.world, self.others.as_ref(), &verdict)
            .filter(|_| may_restart == MayRestart::Yes);
        if let Some(others) = self.others.as_ref().filter(|others| others.is_node_0()) {
            others.nodes.tell(&Frame::Stands { told, again: next_world.is_some() });
        }
        let why = match next_world {
            Some(ranks) => Why::Restart(verdict, ranks),
            None => Why::Failed(verdict),
        };
        self.stop(why, self.world.job.failure_grace);
    }

    /// A line that node 0 says for all nodes where people read what all of them write.
    fn say_once(&mut self, line: &str) {
        if !self.others.as_ref().is_some_and(|others| others.is_said_by_node_0) {
            self.world.say(line);
        }
    }

    /// The ranks, and what they need, are started for the first time or again.
    async fn start(&mut self) {
        let nodes = nodes_of(&self.others);
        self.recorder.publish(&mut self.world, nodes);
        let started = self.starter.start(&mut self.world, nodes).await;
        self.unless_started(started);
    }

    async fn start_some(&mut self) {
        let started = self.starter.start_some(&mut self.world, nodes_of(&self.others)).await;
        self.unless_started(started);
    }

    async fn on_server(&mut self, event: ServerEvent) {
        let (starter, world, nodes) = (&mut self.starter, &mut self.world, nodes_of(&self.others));
        match event {
            ServerEvent::Forked { pid } => starter.on_forked(world, pid),
            ServerEvent::NotForked { reason } => {
                let started = starter.start_cold(world, nodes, &reason).await;
                self.unless_started(started);
            }
            ServerEvent::Ready { python_ns, torch_ns } => {
                let started = starter.on_ready(world, nodes, python_ns, torch_ns).await;
                self.unless_started(started);
            }
            ServerEvent::Refuse { reason, quiet } => {
                let started = starter.on_refusal(world, nodes, (!quiet).then_some(&*reason)).await;
                self.unless_started(started);
            }
            ServerEvent::Store { port, reason, pid } => {
                pid.map(Helper::store).into_iter().for_each(|store| starter.helpers.note(store));
                match port {
                    _ if !world.phase.is_starting() => {}
                    Some(port) => starter.on_store(world, nodes, port),
                    None => {
                        let rank = world.job.here.start;
                        self.on_not_started(rank, &format!("the rendezvous store: {reason}"));
                    }
                }
            }
            ServerEvent::Started { rank, pid, ns } => {
                starter.timings.started(rank, ns);
                world.on_started(rank, pid);
            }
            ServerEvent::Failed { rank, reason } => self.on_not_started(rank, &reason),
            ServerEvent::Exited { rank, code, signal } => self.on_end(rank, Ending::told(code, signal)),
            ServerEvent::StoreEnded { code, signal } => self.on_store_gone(Ending::told(code, signal)),
            ServerEvent::Cleared => self.on_cleared(true),
            ServerEvent::Closed => self.on_server_gone(),
        }
    }

    fn unless_started(&mut self, started: Result<(), NotStarted>) {
        if let Err(NotStarted { rank, reason }) = started {
            self.on_not_started(rank, &reason);
        }
    }

    fn on_not_started(&mut self, rank: u32, reason: &str) {
        self.starter.forget_to_start(&mut self.world);
        self.on_end(rank, Ending::Exit(1));
        let cause = Cause::NotStarted(reason.to_owned());
        self.fail(Verdict::plain(Some(rank), cause, Instant::now()));
    }

    /// Ranks that ask the store next would be blamed for its end.
    fn on_store_gone(&mut self, ending: Ending) {
        self.starter.helpers.forget_store();
        let phase = &self.world.phase;
        let is_over = phase.is_starting() || phase.is_ending();
        if !is_over && self.world.roster.is_anybody_alive() {
            self.fail(Verdict::plain(None, Cause::StoreDied(ending), Instant::now()));
        }
    }

    fn on_server_gone(&mut self) {
        if self.starter.server.take().is_none() {
            return;
        }
        self.starter.helpers.forget_all();
        let is_over = self.world.phase.is_stopping() || !self.world.roster.is_anybody_alive();
        match self.world.phase {
            WorldPhase::Starting => {
                self.world.say("no fork server (it ended): starting an interpreter for each rank");
                let started = self.starter.fall_back(&mut self.world, nodes_of(&self.others));
                self.unless_started(started);
            }
            WorldPhase::Clearing(_) => self.end_world(),
            _ if is_over => {}
            _ => self.fail(Verdict::plain(None, Cause::ForkServerDied, Instant::now())),
        }
        self.starter.forget_to_start(&mut self.world);
        // Its children die with it; those whose number it has not told are not seen otherwise.
        for rank in self.world.job.here.clone() {
            if *self.world.roster.of(rank) == Rank::Requested {
                self.on_end(rank, Ending::Signal(Signal::KILL.as_raw()));
            }
        }
    }

    /// Ranks that are our own children, and whatever came to us because its parent ended.
    fn reap(&mut self) {
        let running = self.world.roster.running();
        let mut ended = Vec::new();
        kill::reap(&mut |pid, status| ended.push((pid.as_raw_nonzero().get(), Ending::of(status))));
        // A forked rank comes to us only when its parent is gone, which then is the cause.
        let is_forked = |rank: &u32| self.starter.is_forked(&self.world, *rank);
        if let Some(server) = self.starter.server_pid()
            && ended.iter().any(|(pid, _)| *pid == server || running.get(pid).is_some_and(is_forked))
        {
            self.on_server_gone();
        }
        for (pid, ending) in ended {
            if let (Some(rank), Some(ending)) = (running.get(&pid), ending) {
                self.on_end(*rank, ending);
            }
        }
    }

    fn on_end(&mut self, rank: u32, ending: Ending) {
        let now = Instant::now();
        if !self.world.on_end(rank, ending, now) {
            return;
        }
        if let Some(others) = &self.others {
            others.tell_end(&self.world, rank, ending);
        }
        // Its program may have failed before, while threads kept its process.
        if self.world.phase.is_stopping() || self.world.roster.has_failed(rank) {
            return;
        }
        if ending == Ending::Exit(0) {
            self.world.roster.left.push(rank);
            return;
        }
        self.judge.on_failure(&mut self.world, rank, ending, now);
    }

    /// Asks all ranks to end, and kills what is left after `grace`. The first reason stands.
    fn stop(&mut self, why: Why, grace: Duration) {
        let now = Instant::now();
        let is_urgent = matches!(why, Why::FrontDied);
        if let WorldPhase::Stopping(stopping) = &mut self.world.phase {
            if is_urgent {
                stopping.kill_at = now;
                stopping.why = why;
                stopping.is_hurried = true;
            }
            return;
        }
        self.starter.forget_to_start(&mut self.world);
        self.world.run_dir.event("stop", why.describe());
        self.world.console.output.expect_interrupts(matches!(why, Why::Asked(Signal::INT)));
        let is_asked = matches!(why, Why::Asked(_));
        let running = self.world.begin_stop(why, grace);
        if !is_urgent {
            // First, while they still do what they did.
            let reason = if is_asked { "stopped" } else { "failed" };
            self.recorder.record(&mut self.world, self.starter.server_pid(), reason);
            let spared = if is_asked { HashMap::new() } else { self.world.ended_programs() };
            let asked = running.into_keys().filter(|pid| !spared.contains_key(pid));
            kill::ask_to_end(asked, self.world.phase.signal());
        }
    }

    fn reporter(&self) -> Reporter<'_> {
        Reporter {
            world: &self.world,
            judge: &self.judge,
            has_flight: self.recorder.has_dump(),
            oom_kills_before: self.oom_kills_before,
        }
    }
}

fn nodes_of(others: &Option<Others>) -> Option<&Nodes> {
    others.as_ref().map(|others| &others.nodes)
}

/// The processor time that this thread has had: time in which others had it says nothing about how long its work takes.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Sent to the agent by the kernel when the front dies; nobody else uses it.
const FRONT_DIED: Signal = Signal::POWER;
/// Looks take a tenth of a processor at most.
const PAUSE_PER_LOOK: u32 = 9;
