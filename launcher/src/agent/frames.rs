//! The frames of other nodes: each is believed for what it may speak of, and passed on by node 0.

use std::time::Instant;

use rustix::process::Signal;
use serde_json::json;
use tpurun_memory::FailureKind;

use super::command::{Instruction, MayRestart, Scope};
use super::nodes::Others;
use super::world::World;
use crate::nodes::{Frame, JobFailure, OVER, RankSays};
use crate::ranks::Ending;

impl Others {
    /// Believes a node what it says of its own ranks, and node 0 what it says of the job.
    pub(super) fn on_frame(&mut self, world: &mut World, node: u32, frame: Frame) -> Option<Instruction> {
        let nodes = &self.nodes;
        let is_node_0 = nodes.is_first();
        let may_speak_of =
            |rank: u32| rank < nodes.ranks() && (!is_node_0 || nodes.ranks_of(node).contains(&rank));
        let may_tell_of = |of: u32| of < nodes.count() && of != nodes.node && (!is_node_0 || of == node);
        match frame {
            Frame::Begun if is_node_0 => self.turn.begun(node),
            _ if self.turn.is_stale(node, &frame) => {}
            Frame::Ended { code, signal, left } if may_speak_of(left.rank) => {
                self.on_end(world, node, (code, signal), left);
            }
            Frame::Lost { rank, kind, text } if may_speak_of(rank) => {
                nodes.tell_but(&Frame::Lost { rank, kind, text: text.clone() }, Some(node));
                world.lose(rank, FailureKind::from_code(kind), &text);
            }
            Frame::Proposed(told) if is_node_0 => return self.consider(told),
            Frame::Stands { told, again } if !is_node_0 => return Some(self.obey(world, told, again)),
            Frame::Cleared if is_node_0 => self.turn.cleared(node),
            Frame::Again if !is_node_0 => self.turn.come(),
            Frame::NoRestart { why } => return Some(self.call_off(node, why)),
            Frame::Stop { signal } => return Some(self.stop(node, signal)),
            Frame::Uneasy if is_node_0 => return Some(Instruction::LookBy(self.looks.want(Instant::now()))),
            Frame::Look { number } if !is_node_0 => self.looks.say_what_ranks_do(nodes, world, number),
            Frame::Seen { number, node: of, said } if may_tell_of(of) => {
                return self.looks.on_seen(nodes, world, number, of, said);
            }
            Frame::Complete { number } if !is_node_0 => return self.looks.on_complete(world, number),
            Frame::Deadlock(proof) if !is_node_0 => return Some(Instruction::Deadlock(proof)),
            Frame::Suspects { node: of, lines } if may_tell_of(of) => {
                nodes.tell_but(&Frame::Suspects { node: of, lines: lines.clone() }, Some(node));
                self.looks.keep_suspects(of, lines);
                return Some(Instruction::NoteSuspects);
            }
            Frame::Watched { by } if may_tell_of(by) => self.on_watched(node, by),
            Frame::Flight { of, to, document } if may_tell_of(of) && to == nodes.node => {
                self.watchers.keep(world.run_dir.path(), of, nodes.ranks_of(of), document);
            }
            Frame::Flight { of, to, document } if is_node_0 && may_tell_of(of) && to < nodes.count() => {
                nodes.tell_if_room(to, &Frame::Flight { of, to, document });
            }
            Frame::Done if is_node_0 => self.done[node as usize] = true,
            Frame::Over if !is_node_0 => self.is_over = true,
            // A frame of another protocol, or of a node that says what is not its to say.
            _ => world.run_dir.event("unexpected frame", json!({"node": node})),
        }
        None
    }

    /// A rank of another node has ended, with an exit code or by a signal.
    fn on_end(&self, world: &mut World, node: u32, how: (Option<i32>, Option<i32>), left: RankSays) {
        let (code, signal) = how;
        let ending = code.map(Ending::Exit).or(signal.map(Ending::Signal)).unwrap_or(Ending::Exit(1));
        self.nodes.tell_but(&Frame::Ended { code, signal, left: left.clone() }, Some(node));
        world.on_end_elsewhere(ending, left);
    }

    /// Node 0 has decided why the job fails.
    fn obey(&mut self, world: &World, told: JobFailure, again: bool) -> Instruction {
        let is_one_terminal = world.job.nodes.as_ref().is_some_and(|plan| plan.is_one_terminal);
        self.is_said_by_node_0 = is_one_terminal && !self.stands;
        let may_restart = if again { MayRestart::Yes } else { MayRestart::No };
        Instruction::Obey { told, may_restart }
    }

    fn call_off(&self, node: u32, why: String) -> Instruction {
        self.nodes.tell_but(&Frame::NoRestart { why: why.clone() }, Some(node));
        let why = why.replace(char::is_control, " ");
        Instruction::CallOff { why, scope: Scope::ThisNode }
    }

    fn stop(&self, node: u32, signal: i32) -> Instruction {
        self.nodes.tell_but(&Frame::Stop { signal }, Some(node));
        let signal = Signal::from_named_raw(signal).unwrap_or(Signal::TERM);
        Instruction::StopAsAskedOn { node, signal }
    }

    /// A node has somebody who watches the job; node 0 tells the others.
    fn on_watched(&mut self, node: u32, by: u32) {
        if self.is_node_0() {
            self.nodes.tell_but(&Frame::Watched { by }, Some(node));
        }
        self.watchers.come(by, Instant::now());
    }

    /// A node from which nothing comes any more has lost all its ranks.
    pub(super) fn on_gone(&mut self, world: &mut World, node: u32, why: &str) -> Option<Instruction> {
        let is_restarting = world.phase.is_restarting();
        self.looks.expect_no_answer(node);
        self.turn.node_is_gone();
        // A node 0 that ends after a verdict has said it before; one that is killed, or was to begin again, has not.
        if node == 0 && (is_restarting || why != OVER) {
            self.is_said_by_node_0 = false;
        }
        let was_done = self.done[node as usize] || self.is_over;
        world.run_dir.event("node gone", json!({"node": node, "why": why}));
        let text = format!("host {} (node {node}) is gone: {why}", self.nodes.host(node));
        if is_restarting {
            let scope = if self.is_node_0() { Scope::AllNodes } else { Scope::ThisNode };
            return Some(Instruction::CallOff { why: text, scope });
        }
        if was_done || world.phase.is_ending() {
            return None;
        }
        let culprit = self.lose_ranks_of(world, node, &text);
        let told = JobFailure {
            culprit,
            exit_code: 1,
            is_echo: false,
            who: vec![text],
            why: vec![],
            last_line: None,
        };
        match self.is_node_0() {
            true => self.consider(told),
            false => Some(Instruction::Obey { told, may_restart: MayRestart::No }),
        }
    }

    /// Tells all ranks of the end of those of a node, and returns the first one.
    fn lose_ranks_of(&self, world: &mut World, node: u32, text: &str) -> Option<u32> {
        let nodes = &self.nodes;
        let alive: Vec<u32> = nodes.ranks_of(node).filter(|rank| !world.roster.has_ended(*rank)).collect();
        for rank in &alive {
            let text = format!("rank {rank} (host {}) is lost: {text}", nodes.host(node));
            nodes.tell(&Frame::Lost { rank: *rank, kind: FailureKind::RankLost as u32, text: text.clone() });
            world.control.lose(*rank, FailureKind::RankLost, &text);
        }
        alive.first().copied()
    }
}
