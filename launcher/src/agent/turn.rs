//! The way from one world to the next on several nodes: the next one begins on all of them or on none.
//!
//! Node 0 says with its verdict whether there is a next world. Every node ends its ranks and says that nothing is
//! left of them; once all have, node 0 says that the next world begins. Frames keep their order on the way to node 0
//! and from there, so that what a node says of ranks before it says that it has begun is of the world before, and is
//! dropped.

use crate::nodes::{Frame, Nodes};

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

    /// Whether the next world begins; node 0 lets the others know.
    pub(super) fn is_due(&mut self, nodes: &Nodes) -> bool {
        if nodes.is_first() && self.cleared.iter().all(|cleared| *cleared) {
            // Nobody comes to the store of the world before.
            nodes.store_is_gone();
            nodes.tell(&Frame::Again);
            self.is_here = true;
        }
        self.is_here
    }

    /// The next world begins here.
    pub(super) fn renew(&mut self, nodes: &Nodes) {
        let (own, is_first) = (nodes.node as usize, nodes.is_first());
        if !is_first {
            nodes.tell(&Frame::Begun);
        }
        *self = Turn::new(nodes.count());
        self.behind = (0..self.behind.len()).map(|node| is_first && node != own).collect();
    }
}
