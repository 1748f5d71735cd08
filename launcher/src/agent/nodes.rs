//! The agents of a job of several nodes: what each tells the others, and the reason why the job has failed, in the
//! same words everywhere.
//!
//! Each agent judges what its own ranks do and proposes that to node 0, whose word stands. A proposal that only
//! follows from another rank's failure waits a moment there, for the node that knows better.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use tpurun_memory::FailureKind;
use tpurun_protocol::board::{self, RankView};

use super::command::{Instruction, MayRestart};
use super::looks::Looks;
use super::turn::Turn;
use super::watchers::Watchers;
use super::world::World;
use crate::control::supervisor::Spread;
use crate::job::Job;
use crate::nodes::{DeadlockProof, Frame, JobFailure, Nodes, RankSays};
use crate::observe::run_dir::RunDir;
use crate::place::cluster;
use crate::place::hosts::{self, JobHosts};
use crate::place::schedulers;
use crate::ranks::Ending;

/// The other nodes, as this one knows them.
#[derive(Debug)]
pub(super) struct Others {
    pub(super) nodes: Nodes,
    pub(super) looks: Looks,
    pub(super) watchers: Watchers,
    /// A proposal that waits until then for a better one, or for the word of node 0.
    proposal: Option<(JobFailure, Instant)>,
    /// A proven deadlock, and the time at which the ranks here hear of it.
    proven: Option<(DeadlockProof, Instant)>,
    pub(super) turn: Turn,
    /// By node: all its ranks have ended well.
    pub(super) done: Vec<bool>,
    /// Node 0 says that all ranks have ended well.
    pub(super) is_over: bool,
    /// Node 0 has said why the job has failed, or this node goes by itself.
    pub(super) stands: bool,
    /// Node 0 says it, at the place where people read what this node writes, too.
    pub(super) is_said_by_node_0: bool,
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
    if let Err(error) = job.spread(JobHosts::new(parts), nodes.ranks_of(nodes.node)) {
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

    /// The next world begins here: nothing that was said of the ranks before is true of those that follow them.
    pub(super) fn renew(&mut self) {
        self.looks = Looks::new(self.nodes.ranks());
        (self.proposal, self.proven) = (None, None);
        self.done.fill(false);
        (self.stands, self.is_said_by_node_0) = (false, false);
        self.turn.renew(&self.nodes);
    }

    pub(super) fn is_node_0(&self) -> bool {
        self.nodes.is_first()
    }

    /// Whether the next world begins.
    pub(super) fn is_turn(&mut self) -> bool {
        self.turn.is_due(&self.nodes)
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let proposal = self.proposal.as_ref().map(|(_, until)| *until);
        let proven = self.proven.as_ref().map(|(_, until)| *until);
        proposal.into_iter().chain(proven).min()
    }

    /// Nothing is left here of the ranks that have failed.
    pub(super) fn tell_cleared(&mut self) {
        let node = self.nodes.node;
        self.turn.cleared(node);
        if node != 0 {
            self.nodes.tell(&Frame::Cleared);
        }
    }

    /// Tells the other nodes how a rank here has ended.
    pub(super) fn tell_end(&self, world: &World, rank: u32, ending: Ending) {
        let (code, signal) = match ending {
            Ending::Exit(code) => (Some(code), None),
            Ending::Signal(number) => (None, Some(number)),
        };
        // A rank that never made a communicator has no number on the board.
        let pid = world.roster.of(rank).pid().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0);
        let view = RankView { pid, ..world.board.read(rank) };
        let left = RankSays::new(rank, &view, board::now_ns());
        self.nodes.tell(&Frame::Ended { code, signal, left });
    }

    /// Tells the other nodes which ranks here keep others waiting.
    pub(super) fn tell_suspects(&self, lines: Vec<(u32, String)>) {
        self.nodes.tell(&Frame::Suspects { node: self.nodes.node, lines });
    }

    /// Tells the other nodes what those raise who need a rank that is lost.
    pub(super) fn tell_loss(&self, rank: u32, text: &str) {
        let (kind, text) = (FailureKind::RankLost as u32, text.to_owned());
        self.nodes.tell(&Frame::Lost { rank, kind, text });
    }

    /// Somebody asked this node to end the job.
    pub(super) fn tell_stop(&self, signal: Signal) {
        self.nodes.tell(&Frame::Stop { signal: signal.as_raw() });
    }

    /// No other world begins, on no node.
    pub(super) fn tell_no_restart(&self, why: &str) {
        self.nodes.tell(&Frame::NoRestart { why: why.to_owned() });
    }

    /// Tells the other nodes of a deadlock. The ranks here hear of it when those nodes have heard of it, too: a rank
    /// that wakes up wakes those there, which would act on the failure in one communicator while others still wait in
    /// another one.
    pub(super) fn tell_deadlock(&mut self, proof: DeadlockProof, now: Instant) {
        self.nodes.tell(&Frame::Deadlock(proof.clone()));
        self.proven = Some((proof, now + HEARD_AFTER));
    }

    /// The deadlock that the ranks here hear of now.
    pub(super) fn take_proof(&mut self, now: Instant) -> Option<DeadlockProof> {
        self.proven.take_if(|(_, until)| now >= *until).map(|(proof, _)| proof)
    }

    /// Has node 0 say why the job fails; this node knows it as `told`.
    pub(super) fn propose(&mut self, told: JobFailure) -> Option<Instruction> {
        if self.is_node_0() {
            return self.consider(told);
        }
        let is_better = self.proposal.as_ref().is_none_or(|(before, _)| before.is_echo && !told.is_echo);
        if is_better {
            self.nodes.tell(&Frame::Proposed(told.clone()));
            self.proposal = Some((told, Instant::now() + WORD));
        }
        None
    }

    /// On node 0, a proposal that is no echo stands at once.
    pub(super) fn consider(&mut self, told: JobFailure) -> Option<Instruction> {
        if !told.is_echo {
            return Some(Instruction::Obey { told, may_restart: MayRestart::Yes });
        }
        self.proposal.get_or_insert((told, Instant::now() + BETTER));
        None
    }

    /// The proposal stands when its time is over and neither a better one nor the word of node 0 has come.
    pub(super) fn take_proposal(&mut self, now: Instant) -> Option<Instruction> {
        let (told, _) = self.proposal.take_if(|(_, until)| now >= *until)?;
        let may_restart = if self.is_node_0() { MayRestart::Yes } else { MayRestart::No };
        Some(Instruction::Obey { told, may_restart })
    }

    /// The reason why the job has failed stands from now on; false when one has stood before.
    pub(super) fn settle(&mut self) -> bool {
        self.proposal = None;
        !std::mem::replace(&mut self.stands, true)
    }

    /// All ranks here have ended well: the others hear of it, and node 0 when all have.
    pub(super) fn end_well(&mut self) {
        if self.proposal.is_some() {
            return;
        }
        let own = self.nodes.node as usize;
        if !std::mem::replace(&mut self.done[own], true) && own != 0 {
            self.nodes.tell(&Frame::Done);
        }
        if own == 0 && !self.is_over && self.done.iter().all(|done| *done) {
            self.is_over = true;
            self.nodes.tell(&Frame::Over);
        }
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
