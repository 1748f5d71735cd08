//! The ranks that a world goes on without: who they are, how they ended, and the words for it.

use std::fmt::Write;
use std::time::Duration;

use crate::base::rank_set::RankSet;
use crate::job::policy::Census;
use crate::judge::report;
use crate::judge::verdict::{self, FailedRank};

/// The losses of a world so far.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    /// The number of seen failures that are accounted for here.
    judged: usize,
    /// By how they failed.
    lost: Vec<(RankSet, String)>,
    /// Failed only because others were lost.
    followed: RankSet,
}

impl Losses {
    /// Accounts for the failures that were not among `failures` the last time. Returns a line for each way
    /// to fail; `running` ranks go on.
    pub(crate) fn take(&mut self, failures: &[FailedRank], running: u32) -> Vec<String> {
        let new = self.new_among(failures);
        self.judged = failures.len();
        let followed: RankSet = new.iter().filter(|one| verdict::is_echo(one)).map(|one| one.rank).collect();
        let lost = by_kind(new.iter().filter(|one| !verdict::is_echo(one)));
        let go_on = match running {
            0 => "no rank goes on".to_owned(),
            1 => "1 rank goes on".to_owned(),
            _ => format!("{running} ranks go on"),
        };
        let mut lines: Vec<String> =
            lost.iter().map(|(ranks, how)| format!("lost {}: {how}; {go_on}", named(ranks))).collect();
        if !followed.is_empty() {
            let who = named(&followed);
            lines.push(format!("{who} failed because of a lost rank and did not handle it; {go_on}"));
        }
        self.lost.extend(lost);
        self.followed = self.followed.ranks().chain(followed.ranks()).collect();
        lines
    }

    /// Those that are not accounted for yet.
    pub(crate) fn new_among<'a>(&self, failures: &'a [FailedRank]) -> &'a [FailedRank] {
        failures.get(self.judged..).unwrap_or_default()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lost.is_empty() && self.followed.is_empty()
    }

    /// How a world of `ranks` ranks stands of which `done` have ended well.
    pub(crate) fn census(&self, ranks: u32, done: u32) -> Census {
        let lost: RankSet = self.lost.iter().flat_map(|(ranks, _)| ranks.ranks()).collect();
        Census { ranks, lost: lost.len() as u32, followed: self.followed.len() as u32, done }
    }

    /// The ranks that were lost, but for the one that the report is about.
    pub(crate) fn besides(&self, culprit: Option<u32>) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        for (ranks, how) in &self.lost {
            let others: RankSet = ranks.ranks().filter(|rank| Some(*rank) != culprit).collect();
            if !others.is_empty() {
                lines.push(format!("{}  {how}", named(&others)));
            }
        }
        let followed: RankSet = self.followed.ranks().filter(|rank| Some(*rank) != culprit).collect();
        if !followed.is_empty() {
            lines.push(format!("{}  did not handle the loss of another rank", named(&followed)));
        }
        if lines.len() > MAX_LINES {
            let more = lines.split_off(MAX_LINES - 1).len();
            lines.push(format!("... and {more} kinds of failure more (see events.jsonl)"));
        }
        lines
    }
}

/// The last lines of a job that has ended well, but not without trouble.
pub(crate) fn survived(losses: &Losses, ranks: u32, restarts: &str, ran_for: Duration, run: &str) -> String {
    let clock = report::clock(ran_for);
    let left = losses.census(ranks, 0).running();
    let mut text = format!("tpurun: ended after {clock}  exit 0  {left} of {ranks} ranks  run {run}\n");
    for line in losses.besides(None) {
        let _ = writeln!(text, "  {:<9} {line}", "lost");
    }
    if !restarts.is_empty() {
        let _ = writeln!(text, "  {:<9} {restarts}", "restarts");
    }
    text
}

/// Failures alike, first ones first.
fn by_kind<'a>(failures: impl Iterator<Item = &'a FailedRank>) -> Vec<(RankSet, String)> {
    let mut kinds: Vec<(Vec<u32>, String)> = Vec::new();
    for failure in failures {
        let how = report::in_one_line(failure.ending, failure.error.as_ref());
        match kinds.iter_mut().find(|(_, known)| *known == how) {
            Some((ranks, _)) => ranks.push(failure.rank),
            None => kinds.push((vec![failure.rank], how)),
        }
    }
    kinds.into_iter().map(|(ranks, how)| (ranks.into_iter().collect(), how)).collect()
}

fn named(ranks: &RankSet) -> String {
    format!("rank{} {ranks}", if ranks.len() == 1 { "" } else { "s" })
}

const MAX_LINES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::run_dir::ErrorRecord;
    use crate::ranks::Ending;
    use expect_test::expect;
    use std::time::Instant;

    fn failure(rank: u32, ending: Ending, kind: &str) -> FailedRank {
        let error = (!kind.is_empty()).then(|| ErrorRecord {
            kind: kind.into(),
            message: "it is bad\nvery".into(),
            file: "train.py".into(),
            line: 7,
            ..ErrorRecord::default()
        });
        FailedRank { rank, ending, error, at: Instant::now() }
    }

    #[test]
    fn losses_are_told_once_and_alike_ones_together() {
        let mut losses = Losses::default();
        let mut failures = vec![
            failure(2, Ending::Exit(1), "ValueError"),
            failure(0, Ending::Exit(1), "RankLostError"),
            failure(3, Ending::Exit(1), "ValueError"),
        ];
        let lines = losses.take(&failures, 2).join("\n");
        expect![[r#"
            lost ranks 2-3: raised ValueError: it is bad (train.py:7); 2 ranks go on
            rank 0 failed because of a lost rank and did not handle it; 2 ranks go on"#]]
        .assert_eq(&lines);
        assert_eq!(losses.take(&failures, 2), [""; 0]);
        failures.push(failure(1, Ending::Signal(9), ""));
        let lines = losses.take(&failures, 1);
        assert_eq!(lines, ["lost rank 1: was killed by SIGKILL (signal 9); 1 rank goes on"]);
        let census = losses.census(6, 1);
        assert_eq!(census, Census { ranks: 6, lost: 3, followed: 1, done: 1 });
        assert_eq!(census.running(), 1);
    }

    #[test]
    fn the_last_lines_say_who_is_missing() {
        let mut losses = Losses::default();
        losses.take(&[failure(2, Ending::Exit(3), ""), failure(5, Ending::Signal(11), "")], 6);
        let text = survived(&losses, 8, "1 of 3", Duration::from_millis(1234), "runs/x");
        expect![[r#"
            tpurun: ended after 1.2 s  exit 0  6 of 8 ranks  run runs/x
              lost      rank 2  exited with code 3
              lost      rank 5  was killed by SIGSEGV (signal 11)
              restarts  1 of 3
        "#]]
        .assert_eq(&text);
        assert_eq!(losses.besides(Some(2)), ["rank 5  was killed by SIGSEGV (signal 11)"]);
    }

    #[test]
    fn many_ways_to_fail_fit_on_the_screen() {
        let mut losses = Losses::default();
        let failures: Vec<FailedRank> =
            (0..64).map(|rank| failure(rank, Ending::Exit(rank as i32 + 1), "")).collect();
        losses.take(&failures, 0);
        let lines = losses.besides(None);
        assert_eq!(lines.len(), MAX_LINES);
        assert_eq!(lines[MAX_LINES - 1], "... and 57 kinds of failure more (see events.jsonl)");
    }
}
