//! The last thing on the screen when a job fails: at most 25 lines, whatever the number of ranks.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use crate::base::rank_set::RankSet;
use crate::judge::verdict::{Cause, Verdict, WaitingRanks};
use crate::observe::op_text;
use crate::observe::run_dir::ErrorRecord;
use crate::observe::stacks::{self, StackClass};
use crate::ranks::Ending;

/// The facts that the report is made from, besides the verdict.
#[derive(Debug)]
pub(crate) struct Facts<'a> {
    pub(crate) ranks: u32,
    pub(crate) ran_for: Duration,
    pub(crate) run_dir: &'a Path,
    pub(crate) host: &'a str,
    /// The program of the culprit, when the job has several.
    pub(crate) program: Option<&'a str>,
    /// The process of the culprit.
    pub(crate) pid: Option<i32>,
    /// The place of the culprit on the torus.
    pub(crate) coordinates: Option<String>,
    /// Ranks that were running when the verdict was reached, without the culprit.
    pub(crate) victims: RankSet,
    /// From the verdict until the last of them was gone.
    pub(crate) stopped_after: Duration,
    pub(crate) last_line: Option<&'a str>,
    /// The culprit's, when it wrote one.
    pub(crate) log_file: Option<&'a Path>,
    /// Whether what the ranks had posted lies in the run directory.
    pub(crate) has_flight: bool,
    /// Groups of other backends, of which nothing is known.
    pub(crate) foreign: Option<String>,
    /// Ranks that had been lost before, or with it.
    pub(crate) lost: Vec<String>,
    /// How many restarts there were; empty when there were none to have.
    pub(crate) restarts: String,
    /// Where the ranks were, when that matters.
    pub(crate) stacks: &'a [StackClass],
    /// The kernel has ended processes for want of memory while the job ran.
    pub(crate) is_out_of_memory: bool,
}

/// The whole text, one newline after every line.
pub(crate) fn render(verdict: &Verdict, facts: &Facts<'_>) -> String {
    let mut text = String::new();
    let clock = clock(facts.ran_for);
    let _ = writeln!(
        text,
        "tpurun: FAILED after {clock}  exit {}  run {}",
        verdict.exit_code(),
        facts.run_dir.display()
    );
    let mut field = |name: &str, lines: Vec<String>| {
        for (index, line) in lines.iter().enumerate() {
            let name = if index == 0 { name } else { "" };
            let _ = writeln!(text, "  {name:<9} {}", clip(line));
        }
    };
    let (culprit, why) = (culprit(verdict, facts), why(verdict, facts));
    let taken = culprit.len() + why.len() + facts.lost.len() + OTHER_LINES;
    let room = MAX_LINES.saturating_sub(taken);
    field("culprit", culprit);
    field("why", why);
    field("stacks", stacks::lines(facts.stacks, room.min(MAX_CLASSES)));
    if !facts.victims.is_empty() {
        let after = facts.stopped_after.as_millis();
        field("victims", vec![format!("{}  all stopped {after} ms later", facts.victims)]);
    }
    field("groups", facts.foreign.iter().cloned().collect());
    field("lost", facts.lost.clone());
    if !facts.restarts.is_empty() {
        field("restarts", vec![facts.restarts.clone()]);
    }
    if let (Some(rank), Some(line)) = (verdict.culprit, facts.last_line) {
        field("last log", vec![format!("rank {rank} | {line}")]);
    }
    field("next", next(facts));
    text
}

fn next(facts: &Facts<'_>) -> Vec<String> {
    let log = facts.log_file.map(|log| format!("less {}", log.display()));
    let run = facts.run_dir.display();
    let flight = facts.has_flight.then(|| format!("tpurun status {run}, tpurun trace {run}"));
    log.into_iter().chain(flight).collect()
}

/// The rank that failed and how, in one line.
pub(crate) fn headline(verdict: &Verdict, facts: &Facts<'_>) -> String {
    let first = culprit(verdict, facts).into_iter().next().unwrap_or_default();
    clip(&first.replacen("  ", " ", 1))
}

/// How a rank failed, in one line.
pub(crate) fn in_one_line(ending: Ending, error: Option<&ErrorRecord>) -> String {
    match (error, ending) {
        (Some(error), _) => {
            let what = raised("raised ", error).into_iter().next().unwrap_or_default();
            let place = match error.file.as_str() {
                "" => String::new(),
                file => format!(" ({}:{})", shown_path(file), error.line),
            };
            clip(&format!("{what}{place}"))
        }
        (None, Ending::Exit(code)) => format!("exited with code {code}"),
        (None, Ending::Signal(number)) => format!("was killed by {}", signal_name(number)),
    }
}

/// The line that stands for the traceback of a rank that failed only because another one did.
pub(crate) fn of_victim(error: &ErrorRecord) -> String {
    let what = raised("", error).into_iter().next().unwrap_or_default();
    let place = match error.file.as_str() {
        "" => String::new(),
        file => format!("{}:{}, ", shown_path(file), error.line),
    };
    format!("{} ({place}--show-victims for all of it)", clip(&what))
}

fn culprit(verdict: &Verdict, facts: &Facts<'_>) -> Vec<String> {
    if let Cause::JobFailure(told) = &verdict.cause {
        return told.who.clone();
    }
    if let Cause::StoreDied(ending) = &verdict.cause {
        return vec![format!(
            "the store of the job, through which the ranks meet, {}",
            in_one_line(*ending, None)
        )];
    }
    let Some(rank) = verdict.culprit else {
        return vec!["the fork server, which all ranks were forked from, is gone".into()];
    };
    let mut place: Vec<String> = facts.program.map(Into::into).into_iter().collect();
    place.push(format!("host {}", facts.host));
    place.extend(facts.pid.map(|pid| format!("pid {pid}")));
    place.extend(facts.coordinates.as_ref().map(|at| format!("coord {at}")));
    let who = format!("rank {rank} ({})", place.join(", "));
    match &verdict.cause {
        Cause::Ended { error: Some(error), .. } => raised(&format!("{who}  raised "), error),
        Cause::Ended { ending: Ending::Exit(code), .. } => vec![format!("{who}  exited with code {code}")],
        Cause::Ended { ending: Ending::Signal(number), .. } => {
            vec![format!("{who}  was killed by {}", signal_name(*number))]
        }
        Cause::Blamed { error, .. } => raised(&format!("{who}  is to blame for "), error),
        Cause::LeftEarly { error } => {
            let mut lines = vec![format!("{who}  exited with code 0 while others were waiting for it")];
            lines.extend(error.iter().flat_map(|error| raised("the others raised ", error)));
            lines
        }
        Cause::Stopped(since) => {
            vec![format!("{who}  has been stopped (SIGSTOP) for {:.1} s", since.as_secs_f64())]
        }
        Cause::NotStarted(reason) => vec![format!("{who}  could not be started: {reason}")],
        Cause::ForkServerDied | Cause::StoreDied(_) => vec![who],
        Cause::JobFailure(told) => told.who.clone(),
    }
}

/// The exception, and where in the user's program it was raised.
fn raised(lead: &str, error: &ErrorRecord) -> Vec<String> {
    let kind = if error.kind.is_empty() { "an error" } else { &error.kind };
    let mut message = error.message.trim_end().lines();
    let mut lines = vec![match message.next() {
        None => format!("{lead}{kind}"),
        Some(first) => format!("{lead}{kind}: {first}"),
    }];
    let rest: Vec<&str> = message.collect();
    lines.extend(rest.iter().take(MAX_MESSAGE_LINES).map(|line| format!("  {line}")));
    if rest.len() > MAX_MESSAGE_LINES {
        lines.push(format!("  ... {} lines more in its log", rest.len() - MAX_MESSAGE_LINES));
    }
    if !error.file.is_empty() {
        let function = if error.function.is_empty() { "?" } else { &error.function };
        let source = if error.source.is_empty() { String::new() } else { format!("  ->  {}", error.source) };
        lines.push(format!("{}:{} in {function}{source}", shown_path(&error.file), error.line));
    }
    lines
}

/// The deed of the culprit, the reason, and the last that it wrote, for other nodes.
pub(crate) fn told(verdict: &Verdict, facts: &Facts<'_>) -> (Vec<String>, Vec<String>, Option<String>) {
    let clipped = |lines: Vec<String>| lines.iter().map(|line| clip(line)).collect();
    let (who, why) = (clipped(culprit(verdict, facts)), clipped(why(verdict, facts)));
    (who, why, facts.last_line.map(clip))
}

fn why(verdict: &Verdict, facts: &Facts<'_>) -> Vec<String> {
    if let Cause::JobFailure(told) = &verdict.cause {
        return told.why.clone();
    }
    let mut lines = Vec::new();
    if matches!(verdict.cause, Cause::Ended { .. }) && facts.ranks > 1 {
        lines.push(format!("first of {} to fail", facts.ranks));
    }
    if let Some(waiting) = &verdict.waiting {
        let waited = waited(waiting);
        match lines.last_mut() {
            Some(line) => *line = format!("{line}; {waited}"),
            None => lines.push(waited),
        }
    }
    if let Some(rank) = verdict.culprit.filter(|_| !verdict.asking.is_empty()) {
        let (asking, noun) = (&verdict.asking, if verdict.asking.len() == 1 { "rank" } else { "ranks" });
        lines.push(format!("the store that rank {rank} holds does not answer {noun} {asking}"));
    }
    let is_killed = matches!(verdict.cause, Cause::Ended { ending: Ending::Signal(SIGKILL), .. });
    if is_killed && facts.is_out_of_memory {
        lines.push("the kernel's out-of-memory killer has ended processes here since the job began".into());
    }
    lines
}

fn waited(waiting: &WaitingRanks) -> String {
    let (count, noun) = match waiting.ranks.len() {
        1 => (format!("rank {}", waiting.ranks), "was"),
        count => (format!("{count} ranks"), "were"),
    };
    let (what, site) = match &waiting.op {
        None => ("a collective".to_owned(), String::new()),
        Some(op) if op.site.is_empty() => (op_text::describe(op), String::new()),
        Some(op) => (op_text::describe(op), format!(" at {}", op.site)),
    };
    format!("{count} {noun} waiting for it in {what}, group {}{site}", waiting.group)
}

/// Tenths of seconds at first, then `00:14:03`.
pub(crate) fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..10 => format!("{:.1} s", time.as_secs_f64()),
        _ => format!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60),
    }
}

/// Relative to the working directory where that is shorter.
fn shown_path(file: &str) -> String {
    let here = std::env::current_dir().ok();
    let relative = here.and_then(|here| Path::new(file).strip_prefix(here).ok().map(Path::to_owned));
    relative.map_or_else(|| file.to_owned(), |path| path.display().to_string())
}

/// One line of a terminal's text: what ranks write must not move the cursor.
pub(crate) fn clip(line: &str) -> String {
    let clean: String =
        line.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_CHARS + 1).collect();
    match clean.char_indices().nth(MAX_CHARS) {
        None => clean,
        Some((end, _)) => format!("{}...", &clean[..end]),
    }
}

fn signal_name(number: i32) -> String {
    let name = usize::try_from(number).ok().and_then(|number| SIGNALS.get(number)).copied().unwrap_or("");
    if name.is_empty() { format!("signal {number}") } else { format!("{name} (signal {number})") }
}

const MAX_LINES: usize = 25;
/// The first line, the victims, the groups, the restarts, the last line of the culprit's log, and what to do next.
const OTHER_LINES: usize = 6;
const MAX_CLASSES: usize = 6;
const MAX_MESSAGE_LINES: usize = 10;
const MAX_CHARS: usize = 240;
const SIGKILL: i32 = 9;
/// By number, as on every architecture that tpurun runs on.
const SIGNALS: [&str; 16] = [
    "", "SIGHUP", "SIGINT", "SIGQUIT", "SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE", "SIGKILL",
    "SIGUSR1", "SIGSEGV", "SIGUSR2", "SIGPIPE", "SIGALRM", "SIGTERM",
];

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::{Expect, expect};
    use std::time::Instant;
    use tpurun_protocol::board::OpView;

    fn facts(victims: &str) -> Facts<'_> {
        Facts {
            ranks: 64,
            ran_for: Duration::from_secs(843),
            run_dir: Path::new("tpurun-runs/20261121-030415-7f3a"),
            host: "n0",
            program: None,
            pid: Some(19910),
            coordinates: Some("0,1,0".into()),
            victims: victims.parse().unwrap_or_default(),
            stopped_after: Duration::from_millis(111),
            last_line: Some("step 9 loss nan"),
            log_file: Some(Path::new("tpurun-runs/20261121-030415-7f3a/rank-0002.log")),
            has_flight: false,
            foreign: None,
            lost: Vec::new(),
            restarts: String::new(),
            stacks: &[],
            is_out_of_memory: false,
        }
    }

    fn waiting() -> WaitingRanks {
        let op = OpView {
            seq: 11,
            collective: 0,
            dtype: 11,
            reduce_op: 0,
            root: -1,
            tag: 0,
            count: 1024,
            shape: vec![1024],
            site: "train.py:5".into(),
            ..OpView::default()
        };
        WaitingRanks { ranks: "0-1,3-61".parse().unwrap(), group: "dp0".into(), op: Some(op) }
    }

    fn error(message: &str) -> ErrorRecord {
        ErrorRecord {
            kind: "ValueError".into(),
            message: message.into(),
            file: "train.py".into(),
            line: 28,
            function: "main".into(),
            source: "raise ValueError(\"loss is NaN at step 10\")".into(),
            ..ErrorRecord::default()
        }
    }

    fn check(cause: Cause, waiting: Option<WaitingRanks>, facts: &Facts<'_>, expected: Expect) {
        let verdict = Verdict { waiting, ..Verdict::plain(Some(2), cause, Instant::now()) };
        let text = render(&verdict, facts);
        assert!(text.lines().count() <= 25, "{text}");
        expected.assert_eq(&text);
    }

    #[test]
    fn an_exception() {
        let cause = Cause::Ended { ending: Ending::Exit(1), error: Some(error("loss is NaN at step 10")) };
        check(
            cause,
            Some(waiting()),
            &Facts { has_flight: true, ..facts("0-1,3-63") },
            expect![[r#"
            tpurun: FAILED after 00:14:03  exit 1  run tpurun-runs/20261121-030415-7f3a
              culprit   rank 2 (host n0, pid 19910, coord 0,1,0)  raised ValueError: loss is NaN at step 10
                        train.py:28 in main  ->  raise ValueError("loss is NaN at step 10")
              why       first of 64 to fail; 61 ranks were waiting for it in all_reduce#11 (f32[1024], SUM), group dp0 at train.py:5
              victims   0-1,3-63  all stopped 111 ms later
              last log  rank 2 | step 9 loss nan
              next      less tpurun-runs/20261121-030415-7f3a/rank-0002.log
                        tpurun status tpurun-runs/20261121-030415-7f3a, tpurun trace tpurun-runs/20261121-030415-7f3a
        "#]],
        );
    }

    #[test]
    fn a_long_message_stays_within_the_screen() {
        let lines: Vec<String> = (0..100).map(|index| format!("line {index} {}", "x".repeat(500))).collect();
        let cause = Cause::Ended {
            ending: Ending::Exit(1),
            error: Some(error(&format!("{}\x1b[2J", lines.join("\n")))),
        };
        let plain = Verdict::plain(Some(2), cause, Instant::now());
        let verdict = Verdict { waiting: Some(waiting()), ..plain };
        let text = render(&verdict, &facts("0"));
        assert!(text.lines().count() <= 25 && text.lines().all(|line| line.chars().count() < 260), "{text}");
        assert!(text.contains("89 lines more") && !text.contains('\x1b'), "{text}");
    }

    #[test]
    fn a_signal() {
        let facts = Facts { is_out_of_memory: true, coordinates: None, last_line: None, ..facts("0") };
        check(
            Cause::Ended { ending: Ending::Signal(9), error: None },
            None,
            &facts,
            expect![[r#"
            tpurun: FAILED after 00:14:03  exit 137  run tpurun-runs/20261121-030415-7f3a
              culprit   rank 2 (host n0, pid 19910)  was killed by SIGKILL (signal 9)
              why       first of 64 to fail
                        the kernel's out-of-memory killer has ended processes here since the job began
              victims   0  all stopped 111 ms later
              next      less tpurun-runs/20261121-030415-7f3a/rank-0002.log
        "#]],
        );
    }

    #[test]
    fn an_early_exit() {
        let facts =
            Facts { log_file: None, last_line: None, ran_for: Duration::from_millis(1234), ..facts("0") };
        check(
            Cause::LeftEarly { error: None },
            Some(WaitingRanks { ranks: "0".parse().unwrap(), group: "dp0".into(), op: None }),
            &facts,
            expect![[r#"
            tpurun: FAILED after 1.2 s  exit 1  run tpurun-runs/20261121-030415-7f3a
              culprit   rank 2 (host n0, pid 19910, coord 0,1,0)  exited with code 0 while others were waiting for it
              why       rank 0 was waiting for it in a collective, group dp0
              victims   0  all stopped 111 ms later
        "#]],
        );
    }

    #[test]
    fn a_stopped_rank() {
        check(
            Cause::Stopped(Duration::from_millis(1234)),
            Some(waiting()),
            &facts("0-1,3-63"),
            expect![[r#"
            tpurun: FAILED after 00:14:03  exit 1  run tpurun-runs/20261121-030415-7f3a
              culprit   rank 2 (host n0, pid 19910, coord 0,1,0)  has been stopped (SIGSTOP) for 1.2 s
              why       61 ranks were waiting for it in all_reduce#11 (f32[1024], SUM), group dp0 at train.py:5
              victims   0-1,3-63  all stopped 111 ms later
              last log  rank 2 | step 9 loss nan
              next      less tpurun-runs/20261121-030415-7f3a/rank-0002.log
        "#]],
        );
    }

    #[test]
    fn a_stopped_rank_that_holds_the_store() {
        let plain = Verdict::plain(Some(2), Cause::Stopped(Duration::from_millis(2100)), Instant::now());
        for (asking, shown) in [("0-1,3", "ranks 0-1,3"), ("7", "rank 7")] {
            let verdict = Verdict { asking: asking.parse().unwrap(), ..plain.clone() };
            let text = render(&verdict, &facts("0-1,3-63"));
            let why = format!("  why       the store that rank 2 holds does not answer {shown}\n");
            assert!(text.contains("has been stopped (SIGSTOP) for 2.1 s\n") && text.contains(&why), "{text}");
        }
    }

    #[test]
    fn stacks_get_the_room_that_is_left() {
        let class = |rank: u32| StackClass {
            ranks: std::iter::once(rank).collect(),
            place: format!("all_reduce <- train.py:{rank} in main"),
        };
        let stacks: Vec<StackClass> = (0..64).map(class).collect();
        check(
            Cause::LeftEarly { error: None },
            None,
            &Facts { stacks: &stacks[..2], last_line: None, log_file: None, ..facts("0-1,3-63") },
            expect![[r#"
            tpurun: FAILED after 00:14:03  exit 1  run tpurun-runs/20261121-030415-7f3a
              culprit   rank 2 (host n0, pid 19910, coord 0,1,0)  exited with code 0 while others were waiting for it
              stacks    rank 0  all_reduce <- train.py:0 in main
                        rank 1  all_reduce <- train.py:1 in main
              victims   0-1,3-63  all stopped 111 ms later
        "#]],
        );
        let long = error(&"line\n".repeat(100));
        let cause = Cause::Ended { ending: Ending::Exit(1), error: Some(long) };
        let plain = Verdict::plain(Some(2), cause, Instant::now());
        let verdict = Verdict { waiting: Some(waiting()), ..plain };
        let text = render(&verdict, &Facts { stacks: &stacks, is_out_of_memory: true, ..facts("0") });
        assert!(text.lines().count() <= 25 && text.contains("ranks in"), "{text}");
    }

    #[test]
    fn a_rank_that_others_name() {
        let mismatch = ErrorRecord {
            kind: "CollectiveMismatchError".into(),
            message: "all_reduce#11 of group dp0\n  rank 2: MAX at b.py:9\n  others: SUM at a.py:5".into(),
            ..ErrorRecord::default()
        };
        check(
            Cause::Blamed { ending: Ending::Exit(1), error: mismatch },
            None,
            &Facts { last_line: None, ..facts("0-1,3-63") },
            expect![[r#"
            tpurun: FAILED after 00:14:03  exit 1  run tpurun-runs/20261121-030415-7f3a
              culprit   rank 2 (host n0, pid 19910, coord 0,1,0)  is to blame for CollectiveMismatchError: all_reduce#11 of group dp0
                            rank 2: MAX at b.py:9
                            others: SUM at a.py:5
              victims   0-1,3-63  all stopped 111 ms later
              next      less tpurun-runs/20261121-030415-7f3a/rank-0002.log
        "#]],
        );
    }
}
