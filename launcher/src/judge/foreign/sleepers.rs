//! Ranks that wait in groups of another backend for so long that it looks like a hang. Only their stacks can tell;
//! a rank that works is never asked for its stack.

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::json;

use super::advice;
use crate::base::private;
use crate::base::rank_set::RankSet;
use crate::judge::report::clip;
use crate::judge::suspects::Notice;
use crate::observe::stacks::{self, Asker, Inquiry, RankStack, StackFrame};
use crate::processes::{Activity, Sample, classify};

/// Watches the ranks of this host that have such groups.
#[derive(Debug)]
pub(crate) struct Sleepers {
    asker: Asker,
    run: PathBuf,
    /// The file that all stacks go to.
    file: PathBuf,
    /// The last look at each, and since when it has slept.
    asleep: HashMap<u32, (Sample, Instant)>,
    asked: Option<Inquiry>,
    next_look: Instant,
    next_question: Instant,
    /// Lines so far.
    told: u32,
}

impl Sleepers {
    pub(crate) fn new(run: PathBuf, stacks: PathBuf, file: PathBuf) -> Sleepers {
        let now = Instant::now();
        Sleepers {
            asker: Asker::new(stacks),
            run,
            file,
            asleep: HashMap::new(),
            asked: None,
            next_look: now,
            next_question: now,
            told: 0,
        }
    }

    /// Forgets these ranks: another world follows, which knows nothing of them.
    pub(crate) fn forget(&mut self) {
        self.asleep.clear();
        self.asked = None;
    }

    /// Whether it is time for a look.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.asked.is_some() || now >= self.next_look
    }

    /// Looks at the ranks, given with their processes, that do not wait in the engine; to be called when it is due.
    pub(crate) fn look(&mut self, ranks: &[(u32, i32)], now: Instant) -> Option<Notice> {
        if let Some(mut inquiry) = self.asked.take() {
            if inquiry.is_over(now) {
                return self.conclude(&inquiry.answers(), now);
            }
            self.asked = Some(inquiry);
            return None;
        }
        self.next_look = now + LOOK_EVERY;
        let with_groups: Vec<(u32, i32)> =
            ranks.iter().copied().filter(|(rank, _)| !super::told_by(&self.run, *rank).is_empty()).collect();
        self.asleep.retain(|rank, _| with_groups.iter().any(|(other, _)| other == rank));
        for (rank, pid) in &with_groups {
            self.sample(*rank, Sample::read(*pid), now);
        }
        if now >= self.next_question && self.longest(now) >= ASKED_AFTER {
            self.next_question = now + ASK_AGAIN;
            self.asked = Some(self.asker.ask(&with_groups, now));
        }
        None
    }

    fn sample(&mut self, rank: u32, sample: Option<Sample>, now: Instant) {
        let Some(sample) = sample else {
            self.asleep.remove(&rank);
            return;
        };
        let since = match self.asleep.get(&rank) {
            Some((before, since)) if classify(before, &sample, false) == Activity::Sleeping => *since,
            _ => now,
        };
        self.asleep.insert(rank, (sample, since));
    }

    fn longest(&self, now: Instant) -> Duration {
        self.asleep.values().map(|(_, since)| now.duration_since(*since)).max().unwrap_or_default()
    }

    fn slept(&self, rank: u32, now: Instant) -> Duration {
        self.asleep.get(&rank).map(|(_, since)| now.duration_since(*since)).unwrap_or_default()
    }

    fn conclude(&mut self, answers: &[RankStack], now: Instant) -> Option<Notice> {
        let (waiting, others): (Vec<RankStack>, Vec<RankStack>) = answers
            .iter()
            .cloned()
            .partition(|stack| self.slept(stack.rank, now) >= ASKED_AFTER && is_in_collective(stack));
        let first = waiting.first()?;
        self.next_question = now + if self.told == 0 { TELL_AGAIN } else { TELL_LATER };
        self.told += 1;
        let seconds = self.slept(first.rank, now).as_secs_f64();
        let backends: Vec<String> = waiting
            .iter()
            .flat_map(|stack| super::told_by(&self.run, stack.rank))
            .map(|group| group.backend)
            .collect();
        let line = line(&waiting, &others, seconds, &backends);
        let file = private::appended(&self.file);
        let _ = file.and_then(|mut file| file.write_all(stacks::full_text(&line, answers).as_bytes()));
        let ranks: RankSet = waiting.iter().map(|stack| stack.rank).collect();
        let details = json!({"waiting": ranks.to_string(), "backend": backends.first(), "seconds": seconds});
        Some(Notice { line, event: "waits elsewhere", details })
    }
}

/// `suspect: 3 ranks 0-2  all_reduce <- train.py:5 wait since 5.0 s in a group of gloo; rank 3  train.py:9 in load; ..`
fn line(waiting: &[RankStack], others: &[RankStack], seconds: f64, backends: &[String]) -> String {
    let text = |stacks: &[RankStack]| {
        let lines = stacks::lines(&stacks::classes(stacks), MOST_CLASSES);
        clip(&lines.join("; ").replace("  no ", " with no ").replace("  ", " in "))
    };
    let others = if others.is_empty() { String::new() } else { format!("; others: {}", text(others)) };
    let backend = backends.first().map_or("another backend", String::as_str);
    format!(
        "suspect: a group of {backend} keeps ranks waiting since {seconds:.1} s: {}{others}; {}",
        text(waiting),
        advice(backends.iter().map(String::as_str))
    )
}

/// Whether a rank that sleeps does so in torch's part of a collective, as far as Python shows it.
fn is_in_collective(stack: &RankStack) -> bool {
    let Some(StackFrame { file, line, .. }) = stack.main_frames().first() else { return false };
    let of_torch = ["/torch/distributed/", "/torch/autograd/graph.py", "/torch/_ops.py"];
    of_torch.iter().any(|part| file.contains(part)) || waits(file, *line)
}

/// Whether this line of a program waits for a work of torch.
fn waits(file: &str, line: u32) -> bool {
    let is_small = fs::metadata(file).is_ok_and(|found| found.is_file() && found.len() <= MAX_SOURCE_BYTES);
    let text = if is_small { fs::read_to_string(file).unwrap_or_default() } else { String::new() };
    text.lines().nth((line as usize).wrapping_sub(1)).is_some_and(|line| line.contains(".wait("))
}

/// A look reads a few files of every thread, about 0.1 ms for each rank.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Long beside the collectives of a healthy job, short beside the half hour that Gloo waits.
const ASKED_AFTER: Duration = Duration::from_secs(5);
/// Time until the next question where the stacks said nothing.
const ASK_AGAIN: Duration = Duration::from_secs(10);
/// Time until another line, after the first one and after all later ones.
const TELL_AGAIN: Duration = Duration::from_secs(60);
const TELL_LATER: Duration = Duration::from_secs(600);
const MOST_CLASSES: usize = 3;
const MAX_SOURCE_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::stacks::{Dump, Thread};

    fn stack(rank: u32, file: &str, line: u32, function: &str) -> RankStack {
        let frames = vec![
            StackFrame { file: file.into(), line, function: function.into() },
            StackFrame { file: "/home/me/train.py".into(), line: 5, function: "main".into() },
        ];
        let thread = Thread { id: 1, is_current: true, frames };
        let dump = Dump { holds_gil: None, threads: vec![thread], is_cut: false };
        RankStack { rank, header: None, dump: Some(dump) }
    }

    #[test]
    fn who_waits_and_who_does_not_is_told_by_the_innermost_frame() {
        let c10d = "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py";
        let waiting: Vec<RankStack> = (0..3).map(|rank| stack(rank, c10d, 9, "all_reduce")).collect();
        let late = stack(3, "/home/me/data.py", 7, "load");
        assert!(waiting.iter().all(is_in_collective) && !is_in_collective(&late));
        assert_eq!(
            line(&waiting, &[late], 5.04, &["gloo".to_owned()]),
            "suspect: a group of gloo keeps ranks waiting since 5.0 s: 3 ranks 0-2 in all_reduce <- train.py:5 in \
             main; others: rank 3 in data.py:7 in load <- train.py:5 in main; tpurun sees nothing of what happens \
             there, no check and no verdict; --backend-for gloo makes groups of Gloo its own"
        );
    }

    #[test]
    fn a_line_that_waits_for_a_work_is_a_wait() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("a.py");
        fs::write(&program, "import time\nwork.wait()\n").unwrap();
        let program = program.to_str().unwrap();
        assert!(waits(program, 2) && !waits(program, 1) && !waits(program, 0) && !waits("/nope", 1));
    }
}
