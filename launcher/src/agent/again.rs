//! The way from one world to the next on several nodes: the next one begins on all of them or on none.
//!
//! Node 0 says with its verdict whether there is a next world. Every node ends its ranks and says that nothing is
//! left of them; once all have, node 0 says that the next world begins. Frames keep their order on the way to node 0
//! and from there, so that what a node says of ranks before it says that it has begun is of the world before, and is
//! dropped.

use rustix::process::Signal;

use super::nodes::Others;
use super::{Agent, Clearing, Phase, Stopping, Why, signal_word};
use crate::kill;
use crate::nodes::Frame;
use crate::verdict::Verdict;

/// How far the nodes are on the way to the next world.
#[derive(Debug)]
pub(super) struct Turn {
    /// By node, on node 0: nothing is left there of the ranks that have failed.
    cleared: Vec<bool>,
    /// Node 0 has said that nothing is left of them anywhere.
    is_here: bool,
    /// By node, on node 0: frames from there are of the world before.
    behind: Vec<bool>,
    /// A node is gone, and with it every further world.
    is_over: bool,
}

impl Turn {
    pub(super) fn new(nodes: u32) -> Turn {
        let nodes = nodes as usize;
        Turn { cleared: vec![false; nodes], is_here: false, behind: vec![false; nodes], is_over: false }
    }

    /// Whether what comes from a node is of a world that has ended.
    pub(super) fn is_stale(&self, node: u32, frame: &Frame) -> bool {
        let is_of_job = matches!(frame, Frame::Stop { .. } | Frame::Watched { .. } | Frame::Flight { .. });
        self.behind[node as usize] && !is_of_job
    }

    /// A node has begun the world that node 0 is in.
    pub(super) fn begun(&mut self, node: u32) {
        self.behind[node as usize] = false;
    }

    pub(super) fn cleared(&mut self, node: u32) {
        self.cleared[node as usize] = true;
    }

    pub(super) fn come(&mut self) {
        self.is_here = true;
    }

    pub(super) fn node_is_gone(&mut self) {
        self.is_over = true;
    }

    /// Whether a failure can be followed by another world.
    pub(super) fn may_come(&self) -> bool {
        !self.is_over
    }
}

impl Others {
    /// Whether the next world begins; node 0 lets the others know.
    fn is_turn(&mut self) -> bool {
        if self.nodes().is_first() && self.turn.cleared.iter().all(|cleared| *cleared) {
            // Nobody comes to the store of the world before.
            self.nodes().store_is_gone();
            self.nodes().tell(&Frame::Again);
            self.turn.is_here = true;
        }
        self.turn.is_here
    }

    /// The next world begins here.
    pub(super) fn renew(&mut self) {
        self.forget_world();
        let nodes = self.nodes();
        let (own, is_first) = (nodes.node as usize, nodes.is_first());
        if !is_first {
            nodes.tell(&Frame::Begun);
        }
        self.turn = Turn::new(nodes.count());
        self.turn.behind = (0..self.turn.behind.len()).map(|node| is_first && node != own).collect();
    }
}

impl Agent {
    /// Whether the next world may begin, here and everywhere.
    pub(super) fn is_turn(&mut self) -> bool {
        self.others.as_mut().is_none_or(Others::is_turn)
    }

    /// Nothing is left here of the ranks that have failed.
    pub(super) fn tell_cleared(&mut self) {
        let Some(others) = &mut self.others else { return };
        let node = others.nodes().node;
        others.turn.cleared(node);
        if node != 0 {
            others.nodes().tell(&Frame::Cleared);
        }
    }

    /// Returns the number of ranks of the world that follows one that has failed; None when no world follows.
    pub(super) fn next_world(&self, verdict: &Verdict) -> Option<u32> {
        let is_ending = matches!(self.phase, Phase::Stopping(_) | Phase::Clearing(_));
        let may_come = !is_ending && self.others.as_ref().is_none_or(|others| others.turn.may_come());
        self.job.policy.next_world(&self.census_with(verdict), self.restarts).filter(|_| may_come)
    }

    /// Makes the world that is being ended the last one, if another one was to follow it.
    fn end_with_this_world(&mut self) -> Option<&mut Stopping> {
        if !self.is_restarting() {
            return None;
        }
        self.phase = match std::mem::replace(&mut self.phase, Phase::Starting) {
            Phase::Clearing(Clearing { stopping, .. }) => Phase::Stopping(stopping),
            phase => phase,
        };
        let Phase::Stopping(stopping) = &mut self.phase else { return None };
        if let Why::Restart(verdict, _) = &stopping.why {
            stopping.why = Why::Failed(verdict.clone());
        }
        Some(stopping)
    }

    /// There is no next world, for this reason.
    pub(super) fn call_off(&mut self, why: &str) {
        if self.end_with_this_world().is_some() {
            self.say_once(&format!("no restart: {why}"));
        }
    }

    /// A signal asks for the end: the failure that the ranks were stopped for gets no report any more, but one line.
    /// Returns whether there was a restart to call off.
    pub(super) fn interrupt_restart(&mut self, signal: Signal) -> bool {
        let Some(stopping) = self.end_with_this_world() else { return false };
        if let Why::Failed(verdict) = std::mem::replace(&mut stopping.why, Why::Asked(signal)) {
            let after = self.headline(&verdict);
            self.say_once(&format!("{}: no restart after this: {after}", signal_word(signal)));
        }
        kill::ask_to_end(self.running().keys().copied(), Signal::TERM);
        true
    }

    /// Calls the next world off, also on all other nodes.
    pub(super) fn call_off_everywhere(&mut self, why: &str) {
        self.call_off(why);
        if let Some(others) = &self.others {
            others.nodes().tell(&Frame::NoRestart { why: why.to_owned() });
        }
    }

    /// Says why the next world cannot begin here.
    pub(super) fn leftover(&self) -> String {
        let place = self.others.as_ref().map_or(String::new(), |_| format!(" on host {}", self.host));
        format!("some processes of the ranks{place} do not end")
    }

    /// Whether the world that is being ended is to be followed by another one.
    pub(super) fn is_restarting(&self) -> bool {
        match &self.phase {
            Phase::Clearing(Clearing { stopping, .. }) | Phase::Stopping(stopping) => {
                matches!(stopping.why, Why::Restart(..))
            }
            _ => false,
        }
    }
}
