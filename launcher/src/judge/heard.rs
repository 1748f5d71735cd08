//! The failures that ranks have heard of from the engine before they ended. A program may wrap the error of a
//! collective, log it and exit, or abort: the engine's failure then still is why it ended. Pure, but for the look at
//! the segments.

use std::time::Duration;

use tpurun_memory::FailureKind;
use tpurun_protocol::board::{LaneView, OpView, Outcome};
use tpurun_protocol::supervise::Supervised;

use crate::observe::run_dir::ErrorRecord;
use crate::ranks::Ending;

/// The communicators of this host that have failed in this world.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    failed: Vec<Failed>,
}

#[derive(Debug)]
struct Failed {
    comm_id: u64,
    error: ErrorRecord,
}

/// The flight recorder of a rank.
type Records = [(LaneView, Vec<OpView>)];

impl Heard {
    /// Remembers the communicators that have failed since the last look.
    pub(crate) fn note<'a>(&mut self, groups: impl Iterator<Item = &'a Supervised>) {
        for group in groups {
            let Some(failure) = group.failure().filter(|_| self.failed.len() < MOST_FAILED) else { continue };
            let comm_id = group.comm_id();
            let is_known = |known: &Failed| known.comm_id == comm_id && known.error.message == failure.text();
            if self.failed.iter().any(is_known) {
                continue;
            }
            // Other failures are of a host and its network, and blame nobody but the rank that met them.
            let Some(kind) = class_name(failure.kind()) else { continue };
            let error = ErrorRecord {
                kind: kind.into(),
                message: failure.text().into(),
                ranks: failure.ranks().to_vec(),
                ..ErrorRecord::default()
            };
            self.failed.push(Failed { comm_id, error });
        }
    }

    /// Why a rank has ended: its own error, or the engine's failure that its program did not survive.
    pub(crate) fn explain(
        &self,
        rank: u32,
        ending: Ending,
        own: Option<ErrorRecord>,
        records: &Records,
        now_ns: u64,
    ) -> Option<ErrorRecord> {
        if own.as_ref().is_some_and(|own| ENGINE_KINDS.contains(&own.kind.as_str())) {
            return own;
        }
        let told = own.as_ref().and_then(|own| own.wrapped(went_on(records)));
        let told = told.or_else(|| self.unhandled(rank, ending, own.as_ref(), records, now_ns).cloned());
        let Some(told) = told else { return own };
        let ErrorRecord { file, line, function, source, .. } = own.unwrap_or_default();
        Some(ErrorRecord { file, line, function, source, ..told })
    }

    /// The first failure that this rank has heard of and after which it has done nothing but end.
    fn unhandled(
        &self,
        rank: u32,
        ending: Ending,
        own: Option<&ErrorRecord>,
        records: &Records,
        now_ns: u64,
    ) -> Option<&ErrorRecord> {
        // A signal from outside is a reason of its own; SIGABRT is how a program gives up.
        if matches!(ending, Ending::Signal(number) if number != SIGABRT) {
            return None;
        }
        let within = if own.is_some() { RAISED_WITHIN } else { ENDED_WITHIN };
        let since_ns = now_ns.saturating_sub(within.as_nanos() as u64).max(last_success_ns(records));
        // Whoever is missed, or has left, has a reason of its own.
        let is_own_doing = |error: &ErrorRecord| error.ranks.contains(&rank) && error.kind != MISMATCH;
        let heard = |failed: &Failed| heard_ns(records, failed.comm_id).filter(|ns| *ns >= since_ns);
        let candidates = self.failed.iter().filter(|failed| !is_own_doing(&failed.error));
        let (_, first) =
            candidates.filter_map(|failed| Some((heard(failed)?, failed))).min_by_key(|it| it.0)?;
        Some(&first.error)
    }
}

/// When the first operation of the rank in this communicator failed.
fn heard_ns(records: &Records, comm_id: u64) -> Option<u64> {
    let of_it = records.iter().filter(|(lane, _)| lane.comm_id == comm_id);
    of_it.flat_map(|(_, ops)| ops).filter(|op| is_failed(op)).map(|op| op.done_ns).min()
}

/// When the rank posted the last operation that did not fail.
fn last_success_ns(records: &Records) -> u64 {
    let ops = records.iter().flat_map(|(_, ops)| ops);
    ops.filter(|op| !is_failed(op)).map(|op| op.posted_ns).max().unwrap_or(0)
}

/// Whether the rank has handled every failure that it has heard of: it has posted others since that did not fail.
fn went_on(records: &Records) -> bool {
    let ops = records.iter().flat_map(|(_, ops)| ops);
    let last_failure_ns = ops.filter(|op| is_failed(op)).map(|op| op.done_ns).max();
    last_failure_ns.is_some_and(|failed_ns| last_success_ns(records) > failed_ns)
}

fn is_failed(op: &OpView) -> bool {
    op.outcome == Outcome::Failed
}

/// The exception of `tpurun.errors` for a failure.
fn class_name(kind: FailureKind) -> Option<&'static str> {
    Some(match kind {
        FailureKind::Mismatch => MISMATCH,
        FailureKind::RankLost => "RankLostError",
        FailureKind::Deadlock => "DeadlockError",
        FailureKind::Timeout => "CollectiveTimeoutError",
        FailureKind::Aborted => "AbortedError",
        _ => return None,
    })
}

const MISMATCH: &str = "CollectiveMismatchError";
const ENGINE_KINDS: [&str; 5] =
    [MISMATCH, "RankLostError", "DeadlockError", "CollectiveTimeoutError", "AbortedError"];
const SIGABRT: i32 = 6;
/// How long after a failure an exception that does not refer to it still is taken for its consequence.
const RAISED_WITHIN: Duration = Duration::from_secs(5);
/// The same for a program that ends without an exception: it may write a checkpoint first.
const ENDED_WITHIN: Duration = Duration::from_secs(60);
/// A bound on memory: some KiB each.
const MOST_FAILED: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn op(at_s: u64, outcome: Outcome) -> OpView {
        OpView { outcome, posted_ns: at_s * SECOND, done_ns: at_s * SECOND, ..OpView::default() }
    }

    fn lane(comm_id: u64, ops: Vec<OpView>) -> (LaneView, Vec<OpView>) {
        let lane = LaneView {
            comm_id,
            name: "0".into(),
            size: 4,
            comm_rank: 0,
            closed: false,
            posted: 1,
            completed: 1,
            attended: 1,
            blocked_since_ns: None,
            op: None,
        };
        (lane, ops)
    }

    /// In communicator 1 an operation failed at 100 s; in communicator 2 one ended well at `other_s`.
    fn records(other_s: u64) -> Vec<(LaneView, Vec<OpView>)> {
        let one = lane(1, vec![op(90, Outcome::Done), op(100, Outcome::Failed)]);
        vec![one, lane(2, vec![op(other_s, Outcome::Done)])]
    }

    fn heard(kind: &str, guilty: &[u32]) -> Heard {
        let error = ErrorRecord { kind: kind.into(), ranks: guilty.to_vec(), ..ErrorRecord::default() };
        Heard { failed: vec![Failed { comm_id: 1, error }] }
    }

    fn own(kind: &str) -> Option<ErrorRecord> {
        Some(ErrorRecord { kind: kind.into(), file: "x.py".into(), line: 3, ..ErrorRecord::default() })
    }

    fn kind(found: Option<ErrorRecord>) -> String {
        found.map_or_else(String::new, |error| error.kind)
    }

    #[test]
    fn a_rank_that_ends_after_a_failure_ends_because_of_it() {
        let heard = heard(MISMATCH, &[2]);
        let at = 101 * SECOND;
        for ending in [Ending::Exit(1), Ending::Signal(SIGABRT)] {
            for rank in 0..3 {
                assert_eq!(kind(heard.explain(rank, ending, None, &records(95), at)), MISMATCH);
            }
        }
        let raised = heard.explain(0, Ending::Exit(1), own("RuntimeError"), &records(95), at).unwrap();
        assert_eq!((raised.kind.as_str(), raised.file.as_str(), raised.line), (MISMATCH, "x.py", 3));
        assert_eq!(kind(heard.explain(0, Ending::Signal(9), None, &records(95), at)), "");
        // It never heard of the failure.
        assert_eq!(kind(heard.explain(3, Ending::Exit(1), None, &records(95)[1..], at)), "");
    }

    #[test]
    fn a_failure_that_was_handled_excuses_nobody() {
        let heard = heard("RankLostError", &[2]);
        let found = |own, other_s, now_s: u64| {
            kind(heard.explain(0, Ending::Exit(1), own, &records(other_s), now_s * SECOND))
        };
        assert_eq!(found(None, 101, 102), "");
        assert_eq!(found(own("ValueError"), 101, 102), "ValueError");
        assert_eq!(found(own("ValueError"), 95, 106), "ValueError");
        assert_eq!(found(None, 95, 106), "RankLostError");
        assert_eq!(found(None, 95, 161), "");
    }

    #[test]
    fn the_one_that_is_missed_has_a_reason_of_its_own() {
        for missed in ["RankLostError", "DeadlockError", "CollectiveTimeoutError"] {
            let heard = heard(missed, &[2]);
            let found = heard.explain(2, Ending::Exit(1), own("ValueError"), &records(95), 101 * SECOND);
            assert_eq!(kind(found), "ValueError");
        }
    }

    #[test]
    fn an_exception_says_what_it_wraps() {
        let wrapping = |explicit: bool, age_ms: u64, records: &Records| {
            let engine = serde_json::json!({
                "type": "DeadlockError", "message": "why", "ranks": [2], "explicit": explicit, "age_ms": age_ms,
            });
            let file = serde_json::json!({
                "exception": {"type": "RuntimeError", "message": "step failed", "engine": engine},
            });
            let own = ErrorRecord::parse(file.to_string().as_bytes());
            assert!(own.is_some());
            kind(Heard::default().explain(0, Ending::Exit(1), own, records, 0))
        };
        assert_eq!(wrapping(true, 1_000_000, &[]), "DeadlockError");
        assert_eq!(wrapping(false, 100, &[]), "DeadlockError");
        assert_eq!(wrapping(false, 1_000_000, &[]), "RuntimeError");
        assert_eq!(wrapping(false, 100, &records(95)), "DeadlockError");
        assert_eq!(wrapping(false, 100, &records(101)), "RuntimeError");
    }
}
