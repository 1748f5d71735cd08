//! How far the world is that runs now, and how it ends.

use std::time::Instant;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::judge::verdict::Verdict;

/// The state of a world, from its start to its end.
#[derive(Debug)]
pub(super) enum WorldPhase {
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
#[derive(Debug)]
pub(super) struct Stopping {
    pub(super) why: Why,
    pub(super) asked_at: Instant,
    pub(super) kill_at: Instant,
    pub(super) victims: Vec<u32>,
    pub(super) killing_since: Option<Instant>,
    /// The ranks were asked more than once: nothing is waited for any more.
    pub(super) is_hurried: bool,
    /// Ranks that finish what they do have been left out when the others were killed.
    pub(super) has_spared: bool,
}

/// All ranks have ended, and so must what they have started, before others take their place.
#[derive(Debug)]
pub(super) struct Clearing {
    pub(super) stopping: Stopping,
    pub(super) until: Instant,
    pub(super) is_clear: bool,
}

/// The reason why a world ends.
#[derive(Debug)]
pub(super) enum Why {
    Failed(Box<Verdict>),
    /// This failed, and so many ranks are started instead.
    Restart(Box<Verdict>, u32),
    Asked(Signal),
    FrontDied,
}

impl WorldPhase {
    /// The signal for ranks that are asked to end: KeyboardInterrupt is what Python programs expect of Ctrl-C.
    pub(super) fn signal(&self) -> Signal {
        match self {
            WorldPhase::Stopping(Stopping { why: Why::Asked(Signal::INT), .. }) => Signal::INT,
            _ => Signal::TERM,
        }
    }

    pub(super) fn is_starting(&self) -> bool {
        matches!(self, WorldPhase::Starting)
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self, WorldPhase::Running)
    }

    pub(super) fn is_stopping(&self) -> bool {
        matches!(self, WorldPhase::Stopping(_))
    }

    /// Whether the ranks have been asked to end, or have ended.
    pub(super) fn is_ending(&self) -> bool {
        matches!(self, WorldPhase::Stopping(_) | WorldPhase::Clearing(_))
    }

    /// Whether the world that is being ended is to be followed by another one.
    pub(super) fn is_restarting(&self) -> bool {
        match self {
            WorldPhase::Clearing(Clearing { stopping, .. }) | WorldPhase::Stopping(stopping) => {
                matches!(stopping.why, Why::Restart(..))
            }
            _ => false,
        }
    }

    /// The time until which nothing has to be done, if the phase has one.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        match self {
            WorldPhase::Settling { until } => Some(*until),
            WorldPhase::Stopping(stopping) => Some(stopping.kill_at),
            WorldPhase::Clearing(clearing) if !clearing.is_clear => Some(clearing.until),
            // A world that is gone from here is known by word when it is gone from everywhere.
            WorldPhase::Starting | WorldPhase::Running | WorldPhase::Clearing(_) => None,
        }
    }

    /// Makes the world that is being ended the last one, if another one was to follow it.
    pub(super) fn end_with_this_world(&mut self) -> Option<&mut Stopping> {
        if !self.is_restarting() {
            return None;
        }
        *self = match std::mem::replace(self, WorldPhase::Starting) {
            WorldPhase::Clearing(Clearing { stopping, .. }) => WorldPhase::Stopping(stopping),
            phase => phase,
        };
        let WorldPhase::Stopping(stopping) = self else { return None };
        if let Why::Restart(verdict, _) = &stopping.why {
            stopping.why = Why::Failed(verdict.clone());
        }
        Some(stopping)
    }
}

impl Why {
    /// The details of the event that says so.
    pub(super) fn describe(&self) -> Value {
        match self {
            Why::Failed(verdict) | Why::Restart(verdict, _) => {
                json!({"culprit": verdict.culprit, "exit": verdict.exit_code()})
            }
            Why::Asked(signal) => json!({"signal": signal.as_raw()}),
            Why::FrontDied => json!({"front": "gone"}),
        }
    }
}

/// The word of people for the signal that ends a job.
pub(super) fn signal_word(signal: Signal) -> &'static str {
    match signal {
        Signal::INT => "interrupted",
        Signal::TERM => "terminated",
        Signal::HUP => "hung up",
        Signal::PIPE => "output closed",
        _ => "asked to quit",
    }
}
