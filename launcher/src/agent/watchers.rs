//! Lets a person who looks at a job on one host see the ranks of all hosts. Meanwhile the agents of the other nodes
//! send the agent there what their own boards say, and it keeps that where `tpurun status` finds it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use tpurun_protocol::board;

use super::world::World;
use crate::nodes::{Frame, Nodes};
use crate::observe::flight::Flight;
use crate::observe::flight::elsewhere::{self, DocumentWriting};

/// The agent's own state for those who look at the job.
#[derive(Debug, Default)]
pub(super) struct Watchers {
    /// Nodes where somebody looks, until then.
    nodes: BTreeMap<u32, Instant>,
    /// The CPU time that the ranks had used when they were told of last.
    before: Option<Flight>,
    /// The documents that other nodes have sent, each on its way to a file.
    writing: BTreeMap<u32, DocumentWriting>,
}

impl Watchers {
    /// Somebody looks at the job on that node.
    pub(super) fn come(&mut self, node: u32, now: Instant) {
        self.nodes.insert(node, now + WANTED_FOR);
    }

    /// Keeps what another node says of its own ranks.
    pub(super) fn keep(&mut self, run_dir: &Path, node: u32, ranks: Range<u32>, document: Vec<u8>) {
        // The next document comes soon.
        if self.writing.get(&node).is_some_and(|writing| !writing.is_finished()) {
            return;
        }
        // Where there can be no thread, nothing is shown.
        if let Ok(writing) = DocumentWriting::start(run_dir, node, ranks, document) {
            self.writing.insert(node, writing);
        }
    }

    /// Says what the ranks here do, where somebody wants to see it, and asks for that if somebody looks here. `look` is
    /// what they do, None before they start.
    pub(super) fn show(
        &mut self,
        nodes: &Nodes,
        world: &World,
        look: impl FnOnce() -> Option<Flight>,
        now: Instant,
    ) {
        if world.board.is_watched(board::now_ns()) {
            nodes.tell(&Frame::Watched { by: nodes.node });
        }
        self.nodes.retain(|_, until| now < *until);
        if self.nodes.is_empty() {
            return;
        }
        let Some(mut flight) = look() else { return };
        let here = &world.job.here;
        flight.ranks.retain(|rank| here.contains(&rank.rank));
        if let Some(before) = &self.before {
            flight.measure_since(before);
        }
        self.before = Some(flight.used());
        let Some(document) = elsewhere::document(flight) else { return };
        let of = nodes.node;
        for to in self.nodes.keys().copied() {
            nodes.tell_if_room(to, &Frame::Flight { of, to, document: document.clone() });
        }
    }
}

/// Time for which the word that somebody looks holds; it comes ten times a second.
const WANTED_FOR: Duration = Duration::from_millis(300);
