//! Merges the stacks of ranks into classes: `63 ranks 0-36,38-63  all_reduce <- train.py:5 in main`.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::RankStack;
use super::parse::{StackFrame, Thread};
use crate::base::rank_set::RankSet;

/// Ranks whose main threads are at the same place of the user's program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StackClass {
    pub(crate) ranks: RankSet,
    /// Frames, innermost first, joined by arrows; empty for ranks that have not answered.
    pub(crate) place: String,
}

/// Largest class first; ranks that have not answered come last.
pub(crate) fn classes(stacks: &[RankStack]) -> Vec<StackClass> {
    let mut by_place: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for stack in stacks {
        by_place.entry(stack.place()).or_default().push(stack.rank);
    }
    let mut classes: Vec<StackClass> = by_place
        .into_iter()
        .map(|(place, ranks)| StackClass { ranks: ranks.into_iter().collect(), place })
        .collect();
    classes.sort_by_key(|class| {
        (class.place.is_empty(), std::cmp::Reverse(class.ranks.len()), class.ranks.first())
    });
    classes
}

/// At most `max` lines; the last one says how many classes it stands for.
pub(crate) fn lines(classes: &[StackClass], max: usize) -> Vec<String> {
    let shown = if classes.len() <= max { classes.len() } else { max.saturating_sub(1) };
    let mut lines: Vec<String> = classes[..shown].iter().map(line).collect();
    if shown < classes.len() && max > 0 {
        let ranks: usize = classes[shown..].iter().map(|class| class.ranks.len()).sum();
        lines.push(format!("{ranks} ranks in {} other places: see stacks.txt", classes.len() - shown));
    }
    lines
}

fn line(class: &StackClass) -> String {
    let who = match class.ranks.len() {
        1 => format!("rank {}", class.ranks),
        count => format!("{count} ranks {}", class.ranks),
    };
    match class.place.as_str() {
        "" => format!("{who}  no Python stack to be had"),
        place => format!("{who}  {place}"),
    }
}

/// Returns where in the user's program a thread is, innermost first: the function that the user called, then the
/// user's own lines. `torch` is the folder of torch.
pub(super) fn place(frames: &[StackFrame], torch: &str) -> String {
    let is_library = |frame: &StackFrame| is_library(&frame.file, torch);
    let frames = without_launcher(frames);
    let Some(first) = frames.iter().position(|frame| !is_library(frame)) else {
        // A module of a library that runs as the program.
        let innermost = frames.iter().take(MAX_FRAMES).map(place_of);
        return innermost.collect::<Vec<_>>().join(ARROW);
    };
    let called = frames[..first].iter().rev().find(|frame| !WRAPPERS.contains(&frame.function.as_str()));
    let own = frames[first..].iter().filter(|frame| !is_library(frame)).map(place_of);
    let called = called.map(|frame| frame.function.clone());
    called.into_iter().chain(own).take(MAX_FRAMES).collect::<Vec<_>>().join(ARROW)
}

/// Every stack in full, equal ones once, as the run directory keeps them.
pub(crate) fn full_text(title: &str, stacks: &[RankStack]) -> String {
    let mut text = format!("{title}\n");
    let mut whole: BTreeMap<(bool, Vec<StackFrame>), Vec<u32>> = BTreeMap::new();
    for stack in stacks {
        let main = stack.main();
        if main.is_none() {
            whole.entry((false, Vec::new())).or_default().push(stack.rank);
        }
        for thread in stack.threads() {
            let is_other = main.is_none_or(|main: &Thread| main.id != thread.id);
            let ranks = whole.entry((is_other, without_launcher(&thread.frames).to_vec())).or_default();
            if ranks.last() != Some(&stack.rank) {
                ranks.push(stack.rank);
            }
        }
    }
    for ((is_other, frames), ranks) in whole {
        let (count, set) = (ranks.len(), ranks.into_iter().collect::<RankSet>());
        let noun = if count == 1 { "rank" } else { "ranks" };
        let which = if is_other { "another thread" } else { "main thread" };
        let _ = writeln!(text, "\n{count} {noun} {set}, {which}:");
        if frames.is_empty() {
            text.push_str("  no Python stack\n");
        }
        for StackFrame { file, line, function } in &frames {
            let _ = writeln!(text, "  {file}:{line} in {function}");
        }
    }
    text.push('\n');
    text
}

/// Drops the frames that run the program: runpy, and our own part around it.
fn without_launcher(frames: &[StackFrame]) -> &[StackFrame] {
    let ours = |frame: &StackFrame| frame.file.ends_with("/tpurun/run_rank.py");
    let end = frames.iter().position(ours).unwrap_or(frames.len());
    &frames[..end]
}

fn is_library(path: &str, torch: &str) -> bool {
    let installed = ["/site-packages/", "/dist-packages/"];
    let is_installed = installed.iter().any(|part| path.contains(part));
    let is_torch = || !torch.is_empty() && path.strip_prefix(torch).is_some_and(|rest| rest.starts_with('/'));
    is_installed || path.starts_with('<') || is_standard_library(path) || is_torch()
}

/// `/usr/lib/python3.11/threading.py`
fn is_standard_library(path: &str) -> bool {
    path.split_once("/lib/python3.").is_some_and(|(_, rest)| {
        rest.split_once('/').is_some_and(|(minor, _)| minor.chars().all(|c| c.is_ascii_digit() || c == 't'))
    })
}

/// `data.py:7 in load`; a file that every package has comes with its folder.
fn place_of(frame: &StackFrame) -> String {
    let mut parts = frame.file.rsplit('/');
    let name = parts.next().unwrap_or_default();
    let folder = parts.next().filter(|_| matches!(name, "__init__.py" | "__main__.py"));
    let name = folder.map_or_else(|| name.to_owned(), |folder| format!("{folder}/{name}"));
    match frame.function.as_str() {
        "<module>" => format!("{name}:{}", frame.line),
        function => format!("{name}:{} in {function}", frame.line),
    }
}

const ARROW: &str = " <- ";
const MAX_FRAMES: usize = 6;
/// Names of functions that say nothing of the operation behind them.
const WRAPPERS: [&str; 9] = [
    "wrapper",
    "wrapped",
    "inner",
    "_fn",
    "_wrapped_call_impl",
    "_call_impl",
    "decorate_context",
    "__call__",
    "<lambda>",
];

#[cfg(test)]
mod tests {
    use super::super::parse::Dump;
    use super::*;
    use expect_test::{Expect, expect};

    const TORCH: &str = "/v/lib/python3.11/site-packages/torch";

    fn frame(file: &str, line: u32, function: &str) -> StackFrame {
        StackFrame { file: file.into(), line, function: function.into() }
    }

    fn stack(rank: u32, frames: Vec<StackFrame>) -> RankStack {
        let thread = Thread { id: 1, is_current: true, frames };
        let dump = Dump { holds_gil: None, threads: vec![thread], is_cut: false };
        RankStack { rank, header: None, dump: Some(dump) }
    }

    fn waiting(rank: u32) -> RankStack {
        stack(
            rank,
            vec![
                frame(&format!("{TORCH}/distributed/distributed_c10d.py"), 2900, "all_reduce"),
                frame(&format!("{TORCH}/distributed/c10d_logger.py"), 83, "wrapper"),
                frame("/home/me/train.py", 5, "main"),
                frame("/home/me/train.py", 12, "<module>"),
                frame("/src/python/tpurun/run_rank.py", 70, "run"),
                frame("/src/python/tpurun/fork_server.py", 190, "become_rank"),
                frame("<frozen runpy>", 88, "_run_code"),
            ],
        )
    }

    fn loading(rank: u32) -> RankStack {
        let frames = vec![frame("/home/me/data.py", 7, "load"), frame("/home/me/train.py", 12, "main")];
        stack(rank, frames)
    }

    fn check(stacks: &[RankStack], max: usize, expected: Expect) {
        expected.assert_eq(&lines(&classes(stacks), max).join("\n"));
    }

    #[test]
    fn equal_places_are_one_class() {
        let mut stacks: Vec<RankStack> = (0..64).filter(|rank| *rank != 37).map(waiting).collect();
        stacks.push(loading(37));
        stacks.push(RankStack { rank: 64, header: None, dump: None });
        check(
            &stacks,
            6,
            expect![[r#"
                63 ranks 0-36,38-63  all_reduce <- train.py:5 in main <- train.py:12
                rank 37  data.py:7 in load <- train.py:12 in main
                rank 64  no Python stack to be had"#]],
        );
        check(
            &stacks,
            2,
            expect![[r#"
                63 ranks 0-36,38-63  all_reduce <- train.py:5 in main <- train.py:12
                2 ranks in 2 other places: see stacks.txt"#]],
        );
        check(&stacks, 0, expect![""]);
    }

    #[test]
    fn a_place_names_what_the_user_called() {
        let own = frame("/home/me/pkg/__init__.py", 3, "f");
        let of = |frames: &[StackFrame]| place(frames, "/opt/torch");
        assert_eq!(of(&[]), "");
        assert_eq!(of(std::slice::from_ref(&own)), "pkg/__init__.py:3 in f");
        let library = frame("/usr/lib/python3.11/socket.py", 706, "readinto");
        assert_eq!(of(&[library.clone(), own.clone()]), "readinto <- pkg/__init__.py:3 in f");
        assert_eq!(of(std::slice::from_ref(&library)), "socket.py:706 in readinto");
        let torch = |folder: &str| frame(&format!("{folder}/nn/linear.py"), 9, "forward");
        assert_eq!(of(&[torch("/opt/torch"), own.clone()]), "forward <- pkg/__init__.py:3 in f");
        assert!(of(&[torch("/opt/torch2"), own.clone()]).starts_with("linear.py:9 in forward <- "));
        // Library frames between the user's own, as callbacks have, are left out.
        assert_eq!(
            of(&[own.clone(), library, own.clone()]),
            "pkg/__init__.py:3 in f <- pkg/__init__.py:3 in f"
        );
        let deep = vec![own; 50];
        assert_eq!(of(&deep).matches(ARROW).count(), MAX_FRAMES - 1);
    }

    #[test]
    fn the_file_has_all_threads_in_full() {
        let mut with_thread = loading(1);
        let other = Thread { id: 2, is_current: false, frames: vec![frame("/home/me/log.py", 9, "run")] };
        with_thread.dump.as_mut().unwrap().threads.insert(0, other);
        let silent = RankStack { rank: 2, header: None, dump: None };
        expect![[r#"
            after 3.0 s

            1 rank 2, main thread:
              no Python stack

            2 ranks 0-1, main thread:
              /home/me/data.py:7 in load
              /home/me/train.py:12 in main

            1 rank 1, another thread:
              /home/me/log.py:9 in run

        "#]]
        .assert_eq(&full_text("after 3.0 s", &[loading(0), with_thread, silent]));
    }
}
