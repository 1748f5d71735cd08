//! The text of suspects on the screen, in the events and in a timeout.

use serde_json::{Value, json};

use super::ledger::{Case, Cleared, Suspect};
use crate::base::rank_set::RankSet;
use crate::observe::stacks::RankStack;
use crate::processes::Activity;

/// A suspect with what could be found out about it.
#[derive(Clone, Debug)]
pub(crate) struct ExaminedSuspect {
    pub(crate) suspect: Suspect,
    /// The host, where there are several.
    pub(crate) host: Option<String>,
    pub(crate) pid: i32,
    pub(crate) stack: Option<RankStack>,
}

/// `rank 37 (pid 123) keeps 63 ranks waiting in all_reduce#11 since 1.0 s: sleeping at data.py:7 in load`
pub(crate) fn line(case: &Case, findings: &[ExaminedSuspect]) -> String {
    let (who, verb) = match findings {
        [one] => (one.who(), "keeps"),
        _ => (format!("ranks {}", ranks_of(findings.iter())), "keep"),
    };
    let waiting = match case.absence.waiting.len() {
        1 => format!("rank {}", case.absence.waiting),
        count => format!("{count} ranks"),
    };
    let since = case.waited.as_secs_f64();
    format!(
        "suspect: {who} {verb} {waiting} waiting in {} since {since:.1} s: {}",
        case.absence.operation,
        joined(findings)
    )
}

/// `ranks 3,37 cleared after 4.2 s`
pub(crate) fn cleared_line(cleared: &[Cleared]) -> String {
    let ranks: RankSet = cleared.iter().map(|cleared| cleared.rank).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    let after = cleared.iter().map(|cleared| cleared.after).max().unwrap_or_default();
    format!("suspect: {noun} {ranks} cleared after {:.1} s", after.as_secs_f64())
}

/// `rank 37 (pid 123) is sleeping at data.py:7 in load`
pub(crate) fn finding(finding: &ExaminedSuspect) -> String {
    format!("{} is {}", finding.who(), description(finding))
}

impl ExaminedSuspect {
    fn who(&self) -> String {
        let host = self.host.as_ref().map(|host| format!("host {host}, ")).unwrap_or_default();
        format!("rank {} ({host}pid {})", self.suspect.rank, self.pid)
    }
}

/// The text that a timeout adds about the suspects among the ranks that it may be waiting for: one line for each
/// suspect, a few at most; empty while there are none.
pub(crate) fn note(suspects: &[(u32, String)], ranks: &[u32]) -> String {
    let of_these = suspects.iter().filter(|(rank, _)| ranks.contains(rank));
    let mut lines: Vec<String> = of_these.map(|(_, line)| line.clone()).collect();
    if lines.len() > MAX_NOTED {
        let more = lines.split_off(MAX_NOTED).len();
        lines.push(format!("and {more} ranks more"));
    }
    lines.join("\n")
}

/// The details of the event in events.jsonl.
pub(crate) fn event(case: &Case, findings: &[ExaminedSuspect]) -> Value {
    let suspects: Vec<Value> = findings
        .iter()
        .map(|finding| {
            let place = finding.stack.as_ref().map(RankStack::place);
            let gil = finding.stack.as_ref().and_then(RankStack::holds_gil);
            json!({
                "rank": finding.suspect.rank,
                "pid": finding.pid,
                "state": finding.suspect.activity.to_string(),
                "holds_gil": gil,
                "place": place.unwrap_or_default(),
            })
        })
        .collect();
    json!({
        "suspects": suspects,
        "waiting": case.absence.waiting.to_string(),
        "operation": case.absence.operation,
        "group": case.absence.group,
        "seconds": (case.waited.as_secs_f64() * 10.0).round() / 10.0,
    })
}

/// Findings that read the same are one; more than a few are for the file.
fn joined(findings: &[ExaminedSuspect]) -> String {
    let mut groups: Vec<(String, Vec<&ExaminedSuspect>)> = Vec::new();
    for finding in findings {
        match groups.iter_mut().find(|(_, group)| is_alike(group[0], finding)) {
            Some((_, group)) => group.push(finding),
            None => groups.push((description(finding), vec![finding])),
        }
    }
    groups.sort_by_key(|(_, group)| std::cmp::Reverse(group.len()));
    if let [(text, _)] = groups.as_slice() {
        return text.clone();
    }
    let one = |(text, group): &(String, Vec<&ExaminedSuspect>)| {
        format!("{} {text}", ranks_of(group.iter().copied()))
    };
    let mut parts: Vec<String> = groups.iter().take(MAX_GROUPS).map(one).collect();
    if groups.len() > MAX_GROUPS {
        let more: usize = groups[MAX_GROUPS..].iter().map(|(_, group)| group.len()).sum();
        parts.push(format!("{more} more in stacks.txt"));
    }
    parts.join("; ")
}

/// `computing in user code (98 % CPU) at data.py:7 in load`
fn description(finding: &ExaminedSuspect) -> String {
    let stack = finding.stack.as_ref();
    let gil = stack.and_then(RankStack::holds_gil);
    let place = stack.map(RankStack::place).unwrap_or_default();
    let what = match (&finding.suspect.activity, gil) {
        (Activity::Computing { share }, Some(false)) => {
            format!("computing in native code ({:.0} % CPU)", share * 100.0)
        }
        (Activity::Computing { share }, _) if !place.is_empty() => {
            format!("computing in user code ({:.0} % CPU)", share * 100.0)
        }
        // Python itself gives the lock away before it sleeps.
        (Activity::Sleeping, Some(true)) => "blocked in a native call that holds the GIL".to_owned(),
        (activity, _) => activity.to_string(),
    };
    let near: Vec<&str> = place.split(" <- ").take(MAX_PLACES).collect();
    if place.is_empty() { what } else { format!("{what} at {}", near.join(" <- ")) }
}

/// Two ranks that compute are alike, whatever their share of a CPU.
fn is_alike(a: &ExaminedSuspect, b: &ExaminedSuspect) -> bool {
    let share = |finding: &ExaminedSuspect| match finding.suspect.activity {
        Activity::Computing { .. } => Suspect { rank: 0, activity: Activity::Computing { share: 1.0 } },
        _ => Suspect { rank: 0, ..finding.suspect.clone() },
    };
    let text = |finding: &ExaminedSuspect| {
        description(&ExaminedSuspect { suspect: share(finding), ..finding.clone() })
    };
    text(a) == text(b)
}

fn ranks_of<'a>(findings: impl Iterator<Item = &'a ExaminedSuspect>) -> RankSet {
    findings.map(|finding| finding.suspect.rank).collect()
}

const MAX_GROUPS: usize = 3;
const MAX_PLACES: usize = 3;
const MAX_NOTED: usize = 4;

#[cfg(test)]
mod tests {
    use super::super::absent::absences;
    use super::super::absent::tests::{SECOND, world};
    use super::*;
    use expect_test::expect;
    use std::time::Duration;

    use crate::observe::stacks::{Dump, StackFrame, Thread};

    fn case(ranks: u32, absent: &[u32]) -> Case {
        let posted: Vec<u64> = (0..ranks).map(|rank| if absent.contains(&rank) { 11 } else { 12 }).collect();
        let absence = absences(&world(&posted), SECOND, 0).remove(0);
        Case { absence, suspects: Vec::new(), waited: Duration::from_millis(1040) }
    }

    fn finding(rank: u32, activity: Activity, gil: Option<bool>, line: u32) -> ExaminedSuspect {
        let frames = vec![StackFrame { file: "/me/data.py".into(), line, function: "load".into() }];
        let thread = Thread { id: 1, is_current: true, frames };
        let dump = Dump { holds_gil: gil, threads: vec![thread], is_cut: false };
        let stack = Some(RankStack { rank, header: None, dump: Some(dump) });
        ExaminedSuspect { suspect: Suspect { rank, activity }, host: None, pid: 100 + rank as i32, stack }
    }

    #[test]
    fn one_rank_in_every_state() {
        let busy = || Activity::Computing { share: 0.98 };
        let lines: Vec<String> = [
            finding(37, busy(), Some(true), 7),
            finding(37, busy(), Some(false), 7),
            finding(37, Activity::Sleeping, Some(false), 7),
            finding(37, Activity::Sleeping, Some(true), 7),
            finding(37, Activity::Traced, None, 7),
            ExaminedSuspect { stack: None, host: Some("n1".into()), ..finding(37, busy(), None, 7) },
        ]
        .iter()
        .map(|finding| line(&case(64, &[37]), std::slice::from_ref(finding)))
        .collect();
        expect![[r#"
            suspect: rank 37 (pid 137) keeps 63 ranks waiting in all_reduce#11 since 1.0 s: computing in user code (98 % CPU) at data.py:7 in load
            suspect: rank 37 (pid 137) keeps 63 ranks waiting in all_reduce#11 since 1.0 s: computing in native code (98 % CPU) at data.py:7 in load
            suspect: rank 37 (pid 137) keeps 63 ranks waiting in all_reduce#11 since 1.0 s: sleeping at data.py:7 in load
            suspect: rank 37 (pid 137) keeps 63 ranks waiting in all_reduce#11 since 1.0 s: blocked in a native call that holds the GIL at data.py:7 in load
            suspect: rank 37 (pid 137) keeps 63 ranks waiting in all_reduce#11 since 1.0 s: held by a debugger at data.py:7 in load
            suspect: rank 37 (host n1, pid 137) keeps 63 ranks waiting in all_reduce#11 since 1.0 s: computing (98 % CPU)"#]]
        .assert_eq(&lines.join("\n"));
    }

    #[test]
    fn many_suspects_are_one_line() {
        let busy = |rank: u32| finding(rank, Activity::Computing { share: f64::from(rank) / 10.0 }, None, 7);
        let mut findings: Vec<ExaminedSuspect> = (0..4).map(busy).collect();
        let absent = [0, 1, 2, 3, 4, 5, 6];
        let text = |findings: &[ExaminedSuspect]| line(&case(8, &absent), findings);
        assert!(
            text(&findings).ends_with("since 1.0 s: computing in user code (0 % CPU) at data.py:7 in load")
        );
        findings.extend((4..7).map(|rank| finding(rank, Activity::Sleeping, None, rank)));
        expect![[r#"suspect: ranks 0-6 keep rank 7 waiting in all_reduce#11 since 1.0 s: 0-3 computing in user code (0 % CPU) at data.py:7 in load; 4 sleeping at data.py:4 in load; 5 sleeping at data.py:5 in load; 1 more in stacks.txt"#]]
        .assert_eq(&text(&findings));
        let lines: Vec<(u32, String)> =
            findings.iter().map(|one| (one.suspect.rank, super::finding(one))).collect();
        let noted = note(&lines, &absent);
        assert_eq!(note(&lines, &[4]), "rank 4 (pid 104) is sleeping at data.py:4 in load");
        assert!(noted.lines().count() == 5 && noted.ends_with("and 3 ranks more"), "{noted}");
        let told = event(&case(8, &absent), &findings);
        assert_eq!(
            (told["suspects"][4]["state"].as_str(), told["waiting"].as_str()),
            (Some("sleeping"), Some("7"))
        );
    }

    #[test]
    fn who_came_is_told() {
        let cleared = |rank, ms| Cleared { rank, after: Duration::from_millis(ms) };
        assert_eq!(cleared_line(&[cleared(37, 4200)]), "suspect: rank 37 cleared after 4.2 s");
        assert_eq!(
            cleared_line(&[cleared(3, 900), cleared(4, 4200)]),
            "suspect: ranks 3-4 cleared after 4.2 s"
        );
    }
}
