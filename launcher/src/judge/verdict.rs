//! The rank that is to blame: pure decisions from how ranks ended, what they left in writing, and the board.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tpurun_protocol::board::{LaneView, OpView, RankView, WaitKind, WaitView};

use crate::base::rank_set::RankSet;
use crate::nodes::JobFailure;
use crate::observe::run_dir::ErrorRecord;
use crate::ranks::Ending;

/// Why the job failed.
#[derive(Clone, Debug)]
pub(crate) struct Verdict {
    /// None when no rank is.
    pub(crate) culprit: Option<u32>,
    pub(crate) cause: Cause,
    /// The ranks that waited for the culprit.
    pub(crate) waiting: Option<WaitingRanks>,
    /// Ranks that the store does not answer, if the culprit holds it.
    pub(crate) asking: RankSet,
    pub(crate) at: Instant,
}

/// The deed of the culprit.
#[derive(Clone, Debug)]
pub(crate) enum Cause {
    /// It ended; with an exception if it left word of one.
    Ended { ending: Ending, error: Option<ErrorRecord> },
    /// An error that ranks raised, not necessarily this one, names it.
    Blamed { ending: Ending, error: ErrorRecord },
    /// It exited with code 0 while others needed it.
    LeftEarly { error: Option<ErrorRecord> },
    /// It was stopped, for this long, while others needed it.
    Stopped(Duration),
    /// It could not be started.
    NotStarted(String),
    /// The process that all ranks were forked from is gone.
    ForkServerDied,
    /// The process of the launcher that holds the store is gone.
    StoreDied(Ending),
    /// The node that knows says it so.
    JobFailure(JobFailure),
}

/// Ranks that wait for the culprit in the same communicator.
#[derive(Clone, Debug)]
pub(crate) struct WaitingRanks {
    pub(crate) ranks: RankSet,
    pub(crate) group: String,
    /// The operation that one of them waits in; None when its record was torn.
    pub(crate) op: Option<OpView>,
}

/// A rank that ended other than with exit code 0.
#[derive(Clone, Debug)]
pub(crate) struct FailedRank {
    pub(crate) rank: u32,
    pub(crate) ending: Ending,
    pub(crate) error: Option<ErrorRecord>,
    pub(crate) at: Instant,
}

impl Verdict {
    /// The culprit's, as a shell would say it; never 0.
    pub(crate) fn exit_code(&self) -> i32 {
        match &self.cause {
            Cause::Ended { ending, .. } | Cause::Blamed { ending, .. } => ending.exit_code().max(1),
            Cause::JobFailure(told) => (told.exit_code & 0xff).max(1),
            _ => 1,
        }
    }

    /// Whether the culprit's program has said itself what is wrong.
    pub(crate) fn is_exception(&self) -> bool {
        matches!(self.cause, Cause::Ended { error: Some(_), .. })
    }

    /// Whether ranks were waiting, so that it matters where they are in their programs.
    pub(crate) fn is_hang(&self) -> bool {
        match &self.cause {
            Cause::LeftEarly { .. } | Cause::Stopped(_) => true,
            Cause::Ended { error: Some(error), .. } | Cause::Blamed { error, .. } => {
                HANG_KINDS.contains(&error.kind.as_str())
            }
            _ => false,
        }
    }

    /// A verdict on a failure of which the board tells nothing more.
    pub(crate) fn plain(culprit: Option<u32>, cause: Cause, at: Instant) -> Verdict {
        Verdict { culprit, cause, waiting: None, asking: RankSet::default(), at }
    }
}

/// The first failure is the cause, unless it only echoes another one.
///
/// `failures` in the order they were seen, which is not quite the order they happened: the kernel hands out
/// the dead by number. `left` are the ranks that had exited with code 0, first one first.
pub(crate) fn of_failures(failures: &[FailedRank], left: &[u32], views: &[RankView]) -> Option<Verdict> {
    let first = failures.iter().find(|failure| !is_echo(failure)).or_else(|| failures.first())?;
    let named = first.error.as_ref().and_then(named_by).filter(|rank| (*rank as usize) < views.len());
    let missed = left.iter().copied().find(|rank| is_behind(views, *rank));
    let culprit = named.or(missed.filter(|_| is_echo(first))).unwrap_or(first.rank);
    let cause = match &first.error {
        error if left.contains(&culprit) => Cause::LeftEarly { error: error.clone() },
        Some(error) if named.is_some() => Cause::Blamed { ending: first.ending, error: error.clone() },
        error => Cause::Ended { ending: first.ending, error: error.clone() },
    };
    let waiting = largest(waiting_for(views, culprit, 0, 0));
    Some(Verdict { waiting, ..Verdict::plain(Some(culprit), cause, first.at) })
}

/// A rank that exited with code 0, and that others have waited for since at least [`LEFT_AFTER`].
pub(crate) fn of_leaving(left: &[u32], views: &[RankView], now_ns: u64, at: Instant) -> Option<Verdict> {
    left.iter().find_map(|rank| {
        let waiting = largest(waiting_for(views, *rank, now_ns, LEFT_AFTER.as_nanos() as u64))?;
        let cause = Cause::LeftEarly { error: None };
        Some(Verdict { waiting: Some(waiting), ..Verdict::plain(Some(*rank), cause, at) })
    })
}

/// A rank that is stopped and that others have waited for since at least [`STOPPED_AFTER`].
pub(crate) fn of_stopping(
    stopped: &[(u32, Duration)],
    views: &[RankView],
    now_ns: u64,
    at: Instant,
) -> Option<Verdict> {
    let long = stopped.iter().filter(|(_, since)| *since >= STOPPED_AFTER);
    long.into_iter().find_map(|(rank, since)| {
        let waiting = largest(blocked_beside(views, *rank, now_ns, STOPPED_AFTER.as_nanos() as u64))?;
        let plain = Verdict::plain(Some(*rank), Cause::Stopped(*since), at);
        Some(Verdict { waiting: Some(waiting), ..plain })
    })
}

/// A rank that is stopped and whose store others have asked since at least [`STOPPED_AFTER`]. `asking` says who has
/// asked that of each rank, and for how long.
pub(crate) fn of_stores(
    stopped: &[(u32, Duration)],
    asking: &BTreeMap<u32, (RankSet, Duration)>,
    at: Instant,
) -> Option<Verdict> {
    stopped.iter().find_map(|(rank, since)| {
        let (ranks, _) = asking.get(rank).filter(|(_, asked)| *asked >= STOPPED_AFTER)?;
        Some(Verdict { asking: ranks.clone(), ..Verdict::plain(Some(*rank), Cause::Stopped(*since), at) })
    })
}

/// Whether any rank has been blocked for so long.
pub(crate) fn is_anybody_blocked(views: &[RankView], now_ns: u64, after: Duration) -> bool {
    let since = after.as_nanos() as u64;
    let is_waiting =
        |view: &RankView| view.waits.iter().any(|wait| now_ns.saturating_sub(wait.since_ns) >= since);
    views.iter().any(|view| view.lanes.iter().any(|lane| is_blocked(lane, now_ns, since)) || is_waiting(view))
}

/// The rank that an error blames: it says so, or it lists what groups of ranks posted and one rank is alone.
fn named_by(error: &ErrorRecord) -> Option<u32> {
    if let Some(rank) = error.ranks.first() {
        return Some(*rank);
    }
    let posted = |line: &str| {
        let (who, _) = line.trim().strip_prefix("rank")?.trim_start_matches('s').split_once(" posted ")?;
        who.trim().parse::<RankSet>().ok()
    };
    let groups: Vec<RankSet> = error.message.lines().filter_map(posted).collect();
    let smallest = groups.iter().min_by_key(|group| group.len())?;
    // Two against two blames nobody.
    let is_alone = groups.iter().filter(|group| group.len() == smallest.len()).count() == 1;
    smallest.first().filter(|_| is_alone && groups.len() > 1)
}

/// An error that is nothing but the echo of another rank's failure: it names others, or nobody and somebody is gone.
pub(crate) fn is_victim(rank: u32, error: &ErrorRecord) -> bool {
    match error.ranks.is_empty() {
        true => ECHO_KINDS.contains(&error.kind.as_str()),
        false => !error.ranks.contains(&rank),
    }
}

/// An error that says only that somebody else is gone.
pub(crate) fn is_echo(failure: &FailedRank) -> bool {
    let Some(error) = &failure.error else { return false };
    // A rank that waited for one that left says so with this kind, as does a rank in a circle.
    let blames_others = !error.ranks.is_empty() && !error.ranks.contains(&failure.rank);
    if error.kind == "DeadlockError" && blames_others {
        return true;
    }
    ECHO_KINDS.contains(&error.kind.as_str()) || ECHO_TEXTS.iter().any(|text| error.message.contains(text))
}

/// Whether any other rank has posted a collective that this one has not.
fn is_behind(views: &[RankView], rank: u32) -> bool {
    !collect(views, rank, |own, other, _| own.is_some_and(|own| other.posted > own.posted)).is_empty()
}

/// By communicator of `culprit`: the ranks that wait in an operation that it has not posted.
///
/// With a time, only those that have been blocked for it; without, also those that the engine has already
/// let go with an error.
fn waiting_for(views: &[RankView], culprit: u32, now_ns: u64, blocked_for_ns: u64) -> Vec<WaitingRanks> {
    collect(views, culprit, |own, other, _| {
        let is_waiting = match blocked_for_ns {
            0 => other.blocked_since_ns.is_some() || other.in_flight().is_some(),
            long => is_blocked(other, now_ns, long),
        };
        is_waiting && own.is_none_or(|own| other.in_flight().is_some_and(|seq| own.posted <= seq))
    })
}

/// By communicator of `culprit`: the ranks blocked in it, whatever it has posted.
fn blocked_beside(views: &[RankView], culprit: u32, now_ns: u64, blocked_for_ns: u64) -> Vec<WaitingRanks> {
    collect(views, culprit, |own, other, waits| {
        let message = waits.iter().filter(|wait| wait.wait.comm_id == other.comm_id).find(|wait| {
            now_ns.saturating_sub(wait.since_ns) >= blocked_for_ns
                && own.is_some_and(|own| is_message_with(wait.wait.kind, own.comm_rank))
        });
        message.is_some() || is_blocked(other, now_ns, blocked_for_ns)
    })
}

/// Also in communicators of the whole world that the culprit has not joined: it is one of their ranks.
fn collect(
    views: &[RankView],
    culprit: u32,
    accept: impl Fn(Option<&LaneView>, &LaneView, &[WaitView]) -> bool,
) -> Vec<WaitingRanks> {
    let Some(culprit_view) = views.get(culprit as usize) else { return Vec::new() };
    let own = |comm_id: u64| culprit_view.lanes.iter().find(|lane| lane.comm_id == comm_id);
    let others = views.iter().zip(0_u32..).filter(|(_, rank)| *rank != culprit);
    let lanes = others.flat_map(|(view, rank)| view.lanes.iter().map(move |lane| (rank, lane, &view.waits)));
    let mut found: BTreeMap<u64, Vec<(u32, &LaneView)>> = BTreeMap::new();
    for (rank, lane, waits) in lanes {
        let own = own(lane.comm_id);
        let concerned = own.is_some() || lane.size as usize == views.len();
        if concerned && accept(own, lane, waits) {
            found.entry(lane.comm_id).or_default().push((rank, lane));
        }
    }
    found
        .into_values()
        .map(|waiting| WaitingRanks {
            ranks: waiting.iter().map(|(rank, _)| *rank).collect(),
            group: waiting[0].1.name.clone(),
            op: waiting[0].1.op.clone(),
        })
        .collect()
}

/// Whether a wait is for a message to or from this rank of the communicator.
fn is_message_with(kind: WaitKind, comm_rank: u32) -> bool {
    match kind {
        WaitKind::Send { to } => to == comm_rank,
        WaitKind::Recv { from } => from.is_none_or(|from| from == comm_rank),
        WaitKind::Collective { .. } | WaitKind::Creation => false,
    }
}

fn largest(waiting: Vec<WaitingRanks>) -> Option<WaitingRanks> {
    waiting.into_iter().max_by_key(|waiting| waiting.ranks.len())
}

fn is_blocked(lane: &LaneView, now_ns: u64, for_ns: u64) -> bool {
    lane.blocked_since_ns.is_some_and(|since| now_ns.saturating_sub(since) >= for_ns)
}

/// How long others wait before an orderly exit counts as leaving early, where no error has reached them.
const LEFT_AFTER: Duration = Duration::from_secs(2);
/// How long ranks wait before anybody looks whether others are stopped.
pub(crate) const NOTICED_AFTER: Duration = Duration::from_millis(100);
/// How long a rank is stopped, and others wait, before it counts as a failure.
const STOPPED_AFTER: Duration = Duration::from_secs(1);
const HANG_KINDS: [&str; 2] = ["CollectiveTimeoutError", "DeadlockError"];
const ECHO_KINDS: [&str; 2] = ["RankLostError", "AbortedError"];
/// The words of Gloo and of sockets.
const ECHO_TEXTS: [&str; 3] = ["Connection closed by peer", "Connection reset by peer", "Broken pipe"];

#[cfg(test)]
mod tests {
    use tpurun_protocol::board::Wait;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn lane(comm_id: u64, comm_rank: u32, posted: u64, blocked_since_ns: Option<u64>) -> LaneView {
        let completed = if blocked_since_ns.is_some() { posted - 1 } else { posted };
        let name = format!("dp{comm_id}");
        LaneView {
            comm_id,
            name,
            size: 4,
            comm_rank,
            closed: false,
            posted,
            completed,
            attended: posted,
            blocked_since_ns,
            op: None,
        }
    }

    fn view(lanes: Vec<LaneView>) -> RankView {
        RankView { pid: 1, lanes, waits: Vec::new() }
    }

    fn failure(rank: u32, kind: &str, message: &str, ranks: &[u32]) -> FailedRank {
        let error = (!kind.is_empty()).then(|| ErrorRecord {
            kind: kind.into(),
            message: message.into(),
            ranks: ranks.to_vec(),
            ..ErrorRecord::default()
        });
        FailedRank { rank, ending: Ending::Exit(1), error, at: Instant::now() }
    }

    fn waiting_world() -> Vec<RankView> {
        (0..4)
            .map(|rank| {
                view(vec![lane(1, rank, if rank == 2 { 10 } else { 11 }, (rank != 2).then_some(SECOND))])
            })
            .collect()
    }

    #[test]
    fn the_first_failure_is_the_cause() {
        let failures = [failure(2, "ValueError", "x", &[]), failure(0, "KeyError", "y", &[])];
        let verdict = of_failures(&failures, &[], &waiting_world()).unwrap();
        assert_eq!((verdict.culprit, verdict.exit_code()), (Some(2), 1));
        let waiting = verdict.waiting.unwrap();
        assert_eq!((waiting.ranks.to_string().as_str(), waiting.group.as_str()), ("0-1,3", "dp1"));
    }

    #[test]
    fn an_echo_is_passed_over() {
        let views = vec![RankView::default(); 4];
        let failures = [
            failure(0, "RankLostError", "rank 3 is gone", &[]),
            failure(1, "RuntimeError", "gloo: Connection closed by peer [127.0.0.1]", &[]),
            FailedRank { ending: Ending::Signal(11), error: None, ..failure(3, "", "", &[]) },
        ];
        let verdict = of_failures(&failures, &[], &views).unwrap();
        assert_eq!((verdict.culprit, verdict.exit_code()), (Some(3), 139));
        let verdict = of_failures(&failures[..2], &[], &views).unwrap();
        assert_eq!(verdict.culprit, Some(0));
    }

    /// It destroyed its groups on the way out, and those that waited in them were sooner.
    #[test]
    fn an_error_comes_before_what_it_leads_to() {
        let failures =
            [failure(0, "DeadlockError", "rank 2 destroyed dp1", &[2]), failure(2, "ValueError", "x", &[])];
        let verdict = of_failures(&failures, &[], &waiting_world()).unwrap();
        assert_eq!(verdict.culprit, Some(2));
        assert!(verdict.is_exception());
        let circle =
            [failure(0, "DeadlockError", "a circle", &[1]), failure(1, "DeadlockError", "a circle", &[1])];
        assert_eq!(of_failures(&circle, &[], &waiting_world()).unwrap().culprit, Some(1));
    }

    #[test]
    fn an_echo_of_a_rank_that_left_points_to_it() {
        let failures = [failure(0, "RankLostError", "rank 2 exited", &[])];
        let verdict = of_failures(&failures, &[2], &waiting_world()).unwrap();
        assert_eq!((verdict.culprit, verdict.exit_code()), (Some(2), 1));
        assert!(matches!(verdict.cause, Cause::LeftEarly { error: Some(_) }));
        let own = [failure(0, "ValueError", "bad", &[])];
        assert_eq!(of_failures(&own, &[2], &waiting_world()).unwrap().culprit, Some(0));
    }

    #[test]
    fn an_error_that_names_the_guilty_is_believed() {
        let failures = [failure(1, "CollectiveMismatchError", "rank 3 posted", &[3])];
        let verdict = of_failures(&failures, &[], &vec![RankView::default(); 4]).unwrap();
        assert_eq!(verdict.culprit, Some(3));
        assert!(matches!(verdict.cause, Cause::Blamed { .. }));
        let wild = [failure(1, "CollectiveMismatchError", "", &[99])];
        assert_eq!(of_failures(&wild, &[], &vec![RankView::default(); 4]).unwrap().culprit, Some(1));
    }

    #[test]
    fn a_mismatch_blames_the_rank_that_is_alone() {
        let culprit = |text: &str| {
            let failures = [failure(1, "CollectiveMismatchError", text, &[])];
            of_failures(&failures, &[], &vec![RankView::default(); 4]).unwrap().culprit
        };
        let mismatch = "collective mismatch in group 0, operation 10: the ranks differ in dtype";
        assert_eq!(
            culprit(&format!("{mismatch}\n  ranks 0-1,3 posted a(f32)\n  rank 2 posted a(f64)")),
            Some(2)
        );
        assert_eq!(
            culprit(&format!("{mismatch}\n  ranks 0-1 posted a(f32)\n  ranks 2-3 posted a(f64)")),
            Some(1)
        );
        assert_eq!(culprit(mismatch), Some(1));
    }

    #[test]
    fn an_engine_that_gave_up_still_shows_who_was_behind() {
        let mut views = waiting_world();
        for view in &mut views {
            view.lanes[0].completed = view.lanes[0].posted;
            view.lanes[0].blocked_since_ns = None;
        }
        let failures = [failure(0, "RankLostError", "rank 2 is gone", &[])];
        assert_eq!(of_failures(&failures, &[1, 2], &views).unwrap().culprit, Some(2));
    }

    #[test]
    fn leaving_early_needs_somebody_who_waits_long_enough() {
        let views = waiting_world();
        let soon = 3 * SECOND - 1;
        assert!(of_leaving(&[2], &views, soon, Instant::now()).is_none());
        let verdict = of_leaving(&[2], &views, soon + 1, Instant::now()).unwrap();
        assert_eq!((verdict.culprit, verdict.waiting.unwrap().ranks.len()), (Some(2), 3));
        // Rank 0 has posted what the others wait in: it did its part.
        assert!(of_leaving(&[0], &views, 9 * SECOND, Instant::now()).is_none());
        let elsewhere = vec![view(vec![lane(1, 0, 10, None)]), view(vec![lane(2, 1, 11, Some(SECOND))])];
        assert!(of_leaving(&[0], &elsewhere, 9 * SECOND, Instant::now()).is_none());
    }

    #[test]
    fn a_stopped_rank_is_blamed_when_others_wait() {
        let views = waiting_world();
        let stopped = [(2, Duration::from_millis(1100))];
        assert!(of_stopping(&stopped, &views, SECOND + SECOND / 2, Instant::now()).is_none());
        assert!(
            is_anybody_blocked(&views, 2 * SECOND, NOTICED_AFTER)
                && !is_anybody_blocked(&views, SECOND + 1, NOTICED_AFTER)
        );
        let verdict = of_stopping(&stopped, &views, 2 * SECOND, Instant::now()).unwrap();
        assert_eq!((verdict.culprit, verdict.exit_code()), (Some(2), 1));
        let short = [(2, Duration::from_millis(900))];
        assert!(of_stopping(&short, &views, 9 * SECOND, Instant::now()).is_none());
    }

    #[test]
    fn a_stopped_rank_is_blamed_when_its_store_is_asked() {
        let asked = |ms| BTreeMap::from([(2, ("0-1".parse().unwrap(), Duration::from_millis(ms)))]);
        let stopped = [(1, Duration::from_secs(9)), (2, Duration::from_millis(2100))];
        assert!(of_stores(&stopped, &asked(999), Instant::now()).is_none());
        assert!(of_stores(&stopped[..1], &asked(1000), Instant::now()).is_none());
        let verdict = of_stores(&stopped, &asked(1000), Instant::now()).unwrap();
        assert_eq!((verdict.culprit, verdict.asking.to_string().as_str()), (Some(2), "0-1"));
        assert!(verdict.is_hang());
    }

    #[test]
    fn a_stopped_rank_is_blamed_when_its_message_is_waited_for() {
        let idle = |rank| view(vec![lane(1, rank, 10, None)]);
        let views_waiting_for = |from| {
            let kind = WaitKind::Recv { from };
            let wait = Wait { comm_id: 1, kind, python_threads: 1 };
            let waits = vec![WaitView { token: 1, since_ns: SECOND, wait }];
            vec![RankView { waits, ..idle(0) }, idle(1), idle(2), idle(3)]
        };
        let stopped = [(2, Duration::from_millis(1100))];
        let culprit = |from| {
            let verdict = of_stopping(&stopped, &views_waiting_for(from), 2 * SECOND, Instant::now())?;
            verdict.culprit
        };
        assert_eq!([culprit(Some(2)), culprit(None), culprit(Some(3))], [Some(2), Some(2), None]);
        assert!(is_anybody_blocked(&views_waiting_for(Some(2)), 2 * SECOND, NOTICED_AFTER));
    }
}
