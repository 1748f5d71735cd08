//! The agents of a job of several nodes: the frames that each sends the others, and the reason why the job has failed,
//! in the same words everywhere.
//!
//! Each agent judges what its own ranks do and proposes that to node 0, whose word stands. A proposal that only
//! follows from another rank's failure waits a moment there, for the node that knows better.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use tpurun_memory::FailureKind;
use tpurun_protocol::board::{self, RankView};

use super::again::Turn;
use super::looks::Looks;
use super::watchers::Watchers;
use super::{Agent, Phase, Why};
use crate::cluster;
use crate::hosts::{self, Hosts};
use crate::job::Job;
use crate::nodes::{Frame, NodeEvent, Nodes, OVER, Proof, RankSays, Told};
use crate::ranks::{Ending, Rank};
use crate::report;
use crate::run_dir::RunDir;
use crate::schedulers;
use crate::supervisor::Spread;
use crate::verdict::{self, Cause, Verdict};

/// The other nodes, as this one knows them.
#[derive(Debug)]
pub(super) struct Others {
    nodes: Nodes,
    pub(super) looks: Looks,
    pub(super) watchers: Watchers,
    /// A proposal that waits until then for a better one, or for the word of node 0.
    proposal: Option<(Told, Instant)>,
    /// A proven deadlock, and the time at which the ranks here hear of it.
    proven: Option<(Proof, Instant)>,
    pub(super) turn: Turn,
    /// By node: all its ranks have ended well.
    done: Vec<bool>,
    /// Node 0 says that all ranks have ended well.
    is_over: bool,
    /// Node 0 has said why the job has failed, or this node goes by itself.
    stands: bool,
    /// Node 0 says it, at the place where people read what this node writes, too.
    is_said_by_node_0: bool,
}

/// Waits until all nodes of the job have come, if it has several, and lets it know where its ranks are.
pub(super) async fn meet(job: &mut Job) -> Result<Option<Nodes>, String> {
    let Some(plan) = job.nodes.clone() else { return Ok(None) };
    let name = own_name();
    let mut say = |line: &str| eprintln!("tpurun: {line}");
    let token = plan.token.token(plan.node == 0, plan.patience).await?;
    let nodes = Nodes::meet(&plan, &token, &name, job.ranks, &mut say).await;
    if plan.node == 0 {
        plan.token.forget();
    }
    let nodes = nodes?;
    let parts = nodes.table.iter().map(|node| (node.host.clone(), node.address.clone(), node.ranks));
    if let Err(error) = job.spread(Hosts::new(parts), nodes.ranks_of(nodes.node)) {
        // The others find the same, as soon as they have been told of all nodes.
        nodes.close().await;
        return Err(error);
    }
    Ok(Some(nodes))
}

/// The name of this host: the one that it was given, or the one that it gives itself.
pub(super) fn own_name() -> String {
    let given = std::env::var("TPURUN_HOST").ok().filter(|name| !name.is_empty());
    let given = given.or_else(|| schedulers::host_name(&cluster::environment));
    let name = given.unwrap_or_else(hosts::own_name);
    name.replace(char::is_control, "")
}

impl Others {
    pub(super) fn new(nodes: Nodes) -> Others {
        let count = nodes.count() as usize;
        Others {
            looks: Looks::new(nodes.ranks()),
            watchers: Watchers::default(),
            turn: Turn::new(nodes.count()),
            nodes,
            proposal: None,
            proven: None,
            done: vec![false; count],
            is_over: false,
            stands: false,
            is_said_by_node_0: false,
        }
    }

    /// Nothing of what was said of its ranks is true of those that follow them.
    pub(super) fn forget_world(&mut self) {
        self.looks = Looks::new(self.nodes.ranks());
        (self.proposal, self.proven) = (None, None);
        self.done.fill(false);
        (self.stands, self.is_said_by_node_0) = (false, false);
    }

    pub(super) fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    pub(super) fn parts(&mut self) -> (&Nodes, &mut Looks) {
        (&self.nodes, &mut self.looks)
    }

    pub(super) fn into_nodes(self) -> Nodes {
        self.nodes
    }

    /// Whether this node may end: no other one needs it.
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Whether people have read why the job has failed.
    pub(super) fn is_said_by_node_0(&self) -> bool {
        self.is_said_by_node_0
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let proposal = self.proposal.as_ref().map(|(_, until)| *until);
        let proven = self.proven.as_ref().map(|(_, until)| *until);
        proposal.into_iter().chain(proven).min()
    }
}

impl Agent {
    pub(super) fn on_node(&mut self, event: NodeEvent) {
        match event {
            NodeEvent::Frame(node, frame) => self.on_frame(node, frame),
            NodeEvent::Gone(node, why) => self.on_node_gone(node, &why),
            NodeEvent::Refused(line) => self.say(&line),
        }
    }

    /// Believes a node what it says of its own ranks, and node 0 what it says of the job.
    fn on_frame(&mut self, node: u32, frame: Frame) {
        let Some(others) = &mut self.others else { return };
        let nodes = &others.nodes;
        let is_node_0 = nodes.is_first();
        let may_speak_of =
            |rank: u32| rank < nodes.ranks() && (!is_node_0 || nodes.ranks_of(node).contains(&rank));
        let may_tell_of = |of: u32| of < nodes.count() && of != nodes.node && (!is_node_0 || of == node);
        match frame {
            Frame::Begun if is_node_0 => others.turn.begun(node),
            _ if others.turn.is_stale(node, &frame) => {}
            Frame::Ended { code, signal, left } if may_speak_of(left.rank) => {
                let ending = code.map(Ending::Exit).or(signal.map(Ending::Signal)).unwrap_or(Ending::Exit(1));
                nodes.tell_but(&Frame::Ended { code, signal, left: left.clone() }, Some(node));
                self.on_end_elsewhere(ending, left);
            }
            Frame::Lost { rank, kind, text } if may_speak_of(rank) => {
                nodes.tell_but(&Frame::Lost { rank, kind, text: text.clone() }, Some(node));
                self.lose_here(rank, FailureKind::from_code(kind), &text);
            }
            Frame::Proposed(told) if is_node_0 => self.consider(told),
            Frame::Stands { told, again } if !is_node_0 => {
                let is_one_terminal = self.job.nodes.as_ref().is_some_and(|plan| plan.is_one_terminal);
                others.is_said_by_node_0 = is_one_terminal && !others.stands;
                self.obey(told, again);
            }
            Frame::Cleared if is_node_0 => others.turn.cleared(node),
            Frame::Again if !is_node_0 => others.turn.come(),
            Frame::NoRestart { why } => {
                nodes.tell_but(&Frame::NoRestart { why: why.clone() }, Some(node));
                self.call_off(&why.replace(char::is_control, " "));
            }
            Frame::Stop { signal } => {
                nodes.tell_but(&Frame::Stop { signal }, Some(node));
                let signal = Signal::from_named_raw(signal).unwrap_or(Signal::TERM);
                self.on_stop_elsewhere(node, signal);
            }
            Frame::Uneasy if is_node_0 => self.on_uneasy(),
            Frame::Look { number } if !is_node_0 => self.say_what_ranks_do(number),
            Frame::Seen { number, node: of, said } if may_tell_of(of) => self.on_seen(number, of, said),
            Frame::Complete { number } if !is_node_0 => self.on_complete(number),
            Frame::Deadlock(proof) if !is_node_0 => self.on_deadlock(&proof),
            Frame::Suspects { node: of, lines } if may_tell_of(of) => {
                nodes.tell_but(&Frame::Suspects { node: of, lines: lines.clone() }, Some(node));
                others.looks.keep_suspects(of, lines);
                self.note_suspects();
            }
            Frame::Watched { by } if may_tell_of(by) => {
                if is_node_0 {
                    nodes.tell_but(&Frame::Watched { by }, Some(node));
                }
                others.watchers.come(by, Instant::now());
            }
            Frame::Flight { of, to, document } if may_tell_of(of) && to == nodes.node => {
                let ranks = nodes.ranks_of(of);
                others.watchers.keep(self.run_dir.path(), of, ranks, document);
            }
            Frame::Flight { of, to, document } if is_node_0 && may_tell_of(of) && to < nodes.count() => {
                nodes.tell_if_room(to, &Frame::Flight { of, to, document });
            }
            Frame::Done if is_node_0 => others.done[node as usize] = true,
            Frame::Over if !is_node_0 => others.is_over = true,
            // A frame of another protocol, or of a node that says what is not its to say.
            _ => self.run_dir.event("unexpected frame", json!({"node": node})),
        }
    }

    fn on_end_elsewhere(&mut self, ending: Ending, left: RankSays) {
        let rank = left.rank;
        let pid = i32::try_from(left.pid).ok().filter(|pid| *pid != 0);
        self.ranks[rank as usize] = Rank::Ended { pid, ending, at: Instant::now() };
        if ending == Ending::Exit(0) {
            self.left.push(rank);
            self.views_elsewhere.insert(rank, left.view(board::now_ns()).unwrap_or_default());
        }
    }

    fn on_stop_elsewhere(&mut self, node: u32, signal: Signal) {
        if !self.interrupt_restart(signal) && !matches!(self.phase, Phase::Stopping(_)) {
            let host = self.host_of_node(node).to_owned();
            self.say(&format!("{} on host {host}: stopping", super::signal_word(signal)));
            self.stop(Why::Asked(signal), self.job.stop_grace);
        }
    }

    fn host_of_node(&self, node: u32) -> &str {
        self.others.as_ref().map_or("", |others| others.nodes.host(node))
    }

    /// A node from which nothing comes any more has lost all its ranks.
    fn on_node_gone(&mut self, node: u32, why: &str) {
        let is_restarting = self.is_restarting();
        let Some(others) = &mut self.others else { return };
        others.looks.expect_no_answer(node);
        others.turn.node_is_gone();
        // A node 0 that ends after a verdict has said it before; one that is killed, or was to begin again, has not.
        if node == 0 && (is_restarting || why != OVER) {
            others.is_said_by_node_0 = false;
        }
        let was_done = others.done[node as usize] || others.is_over;
        self.run_dir.event("node gone", json!({"node": node, "why": why}));
        if is_restarting {
            let host = self.host_of_node(node);
            let why = format!("host {host} (node {node}) is gone: {why}");
            return if self.is_node_0() { self.call_off_everywhere(&why) } else { self.call_off(&why) };
        }
        let Some(others) = &self.others else { return };
        if was_done || matches!(self.phase, Phase::Stopping(_) | Phase::Clearing(_)) {
            return;
        }
        let nodes = &others.nodes;
        let ranks = nodes.ranks_of(node);
        let text = format!("host {} (node {node}) is gone: {why}", nodes.host(node));
        let alive: Vec<u32> = ranks.filter(|rank| !self.ranks[*rank as usize].has_ended()).collect();
        for rank in &alive {
            let text = format!("rank {rank} (host {}) is lost: {text}", nodes.host(node));
            nodes.tell(&Frame::Lost { rank: *rank, kind: FailureKind::RankLost as u32, text: text.clone() });
            self.control.lose(*rank, FailureKind::RankLost, &text);
        }
        let first = alive.first().copied();
        let told = Told {
            culprit: first,
            exit_code: 1,
            is_echo: false,
            who: vec![text],
            why: vec![],
            last_line: None,
        };
        if self.is_node_0() { self.consider(told) } else { self.obey(told, false) }
    }

    /// A line that node 0 says for all nodes where people read what all of them write.
    pub(super) fn say_once(&mut self, line: &str) {
        if !self.others.as_ref().is_some_and(Others::is_said_by_node_0) {
            self.say(line);
        }
    }

    fn is_node_0(&self) -> bool {
        self.others.as_ref().is_some_and(|others| others.nodes.is_first())
    }

    /// Tells the other nodes how a rank here has ended.
    pub(super) fn tell_end(&self, rank: u32, ending: Ending) {
        let Some(others) = &self.others else { return };
        let (code, signal) = match ending {
            Ending::Exit(code) => (Some(code), None),
            Ending::Signal(number) => (None, Some(number)),
        };
        // A rank that never made a communicator has no number on the board.
        let pid = self.ranks[rank as usize].pid().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0);
        let view = RankView { pid, ..self.board.read(rank) };
        let left = RankSays::new(rank, &view, board::now_ns());
        others.nodes.tell(&Frame::Ended { code, signal, left });
    }

    /// Ranks wait in vain, wherever they are. It stands on all nodes before those here wake up, which would wake those
    /// there: these would act on it in one communicator while others still wait in another one.
    pub(super) fn deliver_deadlock(&mut self, proof: Proof, now: Instant) {
        if let Some(others) = &mut self.others {
            others.nodes.tell(&Frame::Deadlock(proof.clone()));
            others.proven = Some((proof.clone(), now + HEARD_AFTER));
            self.settle_deadlock(&proof);
        } else {
            // The ranks are asked before they can hear of the deadlock.
            self.ask_for_stacks();
            self.settle_deadlock(&proof);
            self.announce_deadlock(&proof);
        }
    }

    /// Tells the ranks here of a deadlock that stands on the other nodes.
    fn on_deadlock(&mut self, proof: &Proof) {
        self.settle_deadlock(proof);
        self.ask_for_stacks();
        self.announce_deadlock(proof);
    }

    pub(super) fn look_at_proof(&mut self, now: Instant) {
        let Some(others) = &mut self.others else { return };
        if let Some((proof, _)) = others.proven.take_if(|(_, until)| now >= *until) {
            self.on_deadlock(&proof);
        }
    }

    /// Tells the other nodes which ranks here keep others waiting.
    pub(super) fn tell_suspects(&self) {
        if let Some(others) = &self.others {
            let (node, lines) = (others.nodes.node, self.suspects.lines().collect());
            others.nodes.tell(&Frame::Suspects { node, lines });
        }
    }

    /// Tells the other nodes what those raise who need a rank that is lost.
    pub(super) fn tell_loss(&self, rank: u32, text: &str) {
        if let Some(others) = &self.others {
            let (kind, text) = (FailureKind::RankLost as u32, text.to_owned());
            others.nodes.tell(&Frame::Lost { rank, kind, text });
        }
    }

    /// Somebody asked this node to end the job.
    pub(super) fn tell_stop(&self, signal: Signal) {
        if let Some(others) = &self.others {
            others.nodes.tell(&Frame::Stop { signal: signal.as_raw() });
        }
    }

    /// Has node 0 say why the job fails; here that is known as `verdict`.
    pub(super) fn propose(&mut self, verdict: &Verdict) {
        let facts_of = |facts: &report::Facts<'_>| report::told(verdict, facts);
        let (who, why, last_line) = self.with_words(verdict, facts_of);
        let is_echo = !self.failures.is_empty() && self.failures.iter().all(verdict::is_echo);
        let told =
            Told { culprit: verdict.culprit, exit_code: verdict.exit_code(), is_echo, who, why, last_line };
        self.phase = Phase::Running;
        if self.is_node_0() {
            return self.consider(told);
        }
        let Some(others) = &mut self.others else { return };
        let is_better = others.proposal.as_ref().is_none_or(|(before, _)| before.is_echo && !told.is_echo);
        if is_better {
            others.nodes.tell(&Frame::Proposed(told.clone()));
            others.proposal = Some((told, Instant::now() + WORD));
        }
    }

    /// On node 0, a proposal that is no echo stands at once.
    fn consider(&mut self, told: Told) {
        let Some(others) = &mut self.others else { return };
        if !told.is_echo {
            return self.obey(told, true);
        }
        others.proposal.get_or_insert((told, Instant::now() + BETTER));
    }

    /// The proposal stands when its time is over and neither a better one nor the word of node 0 has come.
    pub(super) fn look_at_proposal(&mut self, now: Instant) {
        let Some(others) = &mut self.others else { return };
        if let Some((told, _)) = others.proposal.take_if(|(_, until)| now >= *until) {
            let is_node_0 = others.nodes.is_first();
            self.obey(told, is_node_0);
        }
    }

    /// Ends the world for this reason; node 0 tells the others. Another one may follow if node 0 says so.
    fn obey(&mut self, told: Told, may_begin_again: bool) {
        let Some(others) = &mut self.others else { return };
        others.proposal = None;
        if std::mem::replace(&mut others.stands, true) {
            return;
        }
        let culprit = told.culprit.filter(|rank| (*rank as usize) < self.ranks.len());
        let verdict = Box::new(Verdict::plain(culprit, Cause::Told(told.clone()), Instant::now()));
        let next_world = self.next_world(&verdict).filter(|_| may_begin_again);
        if let Some(others) = self.others.as_ref().filter(|others| others.nodes.is_first()) {
            others.nodes.tell(&Frame::Stands { told, again: next_world.is_some() });
        }
        let why = match next_world {
            Some(ranks) => Why::Restart(verdict, ranks),
            None => Why::Failed(verdict),
        };
        self.stop(why, self.job.failure_grace);
    }

    /// All ranks here have ended well: the others hear of it, and node 0 when all have.
    pub(super) fn look_at_others(&mut self) {
        if !matches!(self.phase, Phase::Running) || self.is_anybody_alive() || !self.failures.is_empty() {
            return;
        }
        let Some(others) = self.others.as_mut().filter(|others| others.proposal.is_none()) else { return };
        let own = others.nodes.node as usize;
        if !std::mem::replace(&mut others.done[own], true) && own != 0 {
            others.nodes.tell(&Frame::Done);
        }
        if own == 0 && !others.is_over && others.done.iter().all(|done| *done) {
            others.is_over = true;
            others.nodes.tell(&Frame::Over);
        }
    }

    /// The host of a rank, wherever it is.
    pub(super) fn host_of(&self, rank: u32) -> &str {
        self.job.hosts.of(rank).map_or(&self.host, |(_, host)| &host.name)
    }

    /// The view of every rank on the board; ranks on other nodes have only the view that they have left behind.
    pub(super) fn views(&self) -> Vec<RankView> {
        let mut views = crate::watch::views(&self.board);
        for (rank, view) in &self.views_elsewhere {
            views[*rank as usize] = view.clone();
        }
        views
    }
}

/// Returns the node of each rank.
pub(super) fn spread(nodes: &Nodes) -> Spread {
    let node_of = (0..nodes.count()).flat_map(|node| nodes.ranks_of(node).map(move |_| node));
    Spread { node_of: node_of.collect(), own: nodes.node }
}

/// Run directories of several nodes may be on one file system.
pub(super) fn run_dir(job: &Job, nodes: Option<&Nodes>) -> Result<RunDir, String> {
    RunDir::create(job.log_dir.as_deref(), nodes.map(|nodes| nodes.node))
}

/// Time for a node that knows better than one whose ranks only lost another rank.
const BETTER: Duration = Duration::from_millis(500);
/// Much longer than a frame takes.
const HEARD_AFTER: Duration = Duration::from_millis(20);
/// Time for node 0 to say what stands: it waits for a better proposal itself.
const WORD: Duration = Duration::from_secs(2);
