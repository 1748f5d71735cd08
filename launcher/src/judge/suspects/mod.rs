//! Names the ranks that keep others waiting although they live: in the log, with their stacks. It never fails
//! a job: what looks stuck may only be slow, and the group's timeout decides.

mod absent;
mod ledger;
mod text;

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tpurun_protocol::board::RankView;

use crate::base::private;
use crate::base::rank_set::RankSet;
use crate::observe::stacks::{self, Asker, Inquiry, RankStack, StackClass};
use crate::place::hosts::JobHosts;
use crate::processes::Sample;
use crate::ranks::Rank;
use absent::{absences, is_in_engine};
use ledger::{Case, Cleared, Ledger, NOTICED_AFTER};
use text::ExaminedSuspect;
pub(crate) use text::note;

/// Watches for ranks that others wait for.
#[derive(Debug)]
pub(crate) struct Suspects {
    asker: Asker,
    dir: PathBuf,
    /// Where all stacks go.
    file: PathBuf,
    hosts: JobHosts,
    ledger: Ledger,
    /// Suspects that have been asked for their stacks.
    asked: Option<(Case, Inquiry)>,
    cleared: Vec<Cleared>,
    /// The ledger of the ranks that are suspected now.
    findings: Vec<ExaminedSuspect>,
    has_news: bool,
    next_line: Option<Instant>,
}

/// Something to say.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Notice {
    pub(crate) line: String,
    /// The name of an event in events.jsonl.
    pub(crate) event: &'static str,
    pub(crate) details: Value,
}

impl Suspects {
    /// `dir` is where ranks write their stacks, `file` where ours go.
    pub(crate) fn new(dir: PathBuf, file: PathBuf, hosts: JobHosts) -> Suspects {
        Suspects {
            hosts,
            asker: Asker::new(dir.clone()),
            dir,
            file,
            ledger: Ledger::default(),
            asked: None,
            cleared: Vec::new(),
            findings: Vec::new(),
            has_news: false,
            next_line: None,
        }
    }

    /// For the ranks of another world, which knows nothing of these.
    pub(crate) fn renewed(&self) -> Suspects {
        Suspects::new(self.dir.clone(), self.file.clone(), self.hosts.clone())
    }

    /// Looks at the ranks; to be called a few times a second. Says at most one thing in a second.
    pub(crate) fn look(
        &mut self,
        views: &[RankView],
        ranks: &[Rank],
        now: Instant,
        now_ns: u64,
    ) -> Option<Notice> {
        let absences = absences(views, now_ns, NOTICED_AFTER.as_nanos() as u64);
        let pid = |rank: u32| ranks.get(rank as usize).filter(|rank| rank.is_alive()).and_then(Rank::pid);
        let look = |rank| Sample::read(pid(rank)?);
        let in_engine = |rank: u32| views.get(rank as usize).is_some_and(is_in_engine);
        let cleared = self.ledger.update(&absences, now, now_ns, look, in_engine);
        self.has_news |= !cleared.is_empty();
        self.findings.retain(|finding| cleared.iter().all(|cleared| cleared.rank != finding.suspect.rank));
        self.cleared.extend(cleared);
        if let Some((case, mut inquiry)) = self.asked.take() {
            if inquiry.is_over(now) {
                return Some(self.conclude(case, &inquiry.answers(), pid, now));
            }
            self.asked = Some((case, inquiry));
        } else if self.next_line.is_none_or(|next| now >= next) {
            if !self.cleared.is_empty() {
                return Some(self.tell_cleared(now));
            }
            if let Some(case) = self.ledger.due(&absences, now) {
                let suspects =
                    case.suspects.iter().filter_map(|suspect| Some((suspect.rank, pid(suspect.rank)?)));
                let inquiry = self.asker.ask(&suspects.collect::<Vec<_>>(), now);
                self.asked = Some((case, inquiry));
            }
        }
        None
    }

    /// The line about each rank that is suspected now.
    pub(crate) fn lines(&self) -> impl Iterator<Item = (u32, String)> {
        self.findings.iter().map(|finding| (finding.suspect.rank, text::finding(finding)))
    }

    /// Whether the lines are others since this was asked last.
    pub(crate) fn has_news(&mut self) -> bool {
        std::mem::take(&mut self.has_news)
    }

    /// Where the ranks, given with their processes, are in their programs; all of it goes to the file.
    pub(crate) fn stacks(&self, title: &str, ranks: &[(u32, i32)]) -> Vec<StackClass> {
        let answers = self.asker.ask_and_wait(ranks);
        self.keep(title, &answers);
        if answers.iter().all(|answer| answer.dump.is_none()) {
            Vec::new()
        } else {
            stacks::classes(&answers)
        }
    }

    fn conclude(
        &mut self,
        case: Case,
        answers: &[RankStack],
        pid: impl Fn(u32) -> Option<i32>,
        now: Instant,
    ) -> Notice {
        self.ledger.name(&case);
        self.next_line = Some(now + LINE_EVERY);
        let found = |suspect: &ledger::Suspect| {
            let stack = answers.iter().find(|answer| answer.rank == suspect.rank).cloned();
            let host = self.hosts.of(suspect.rank).map(|(_, host)| host.name.clone());
            Some(ExaminedSuspect { suspect: suspect.clone(), host, pid: pid(suspect.rank)?, stack })
        };
        let findings: Vec<ExaminedSuspect> = case.suspects.iter().filter_map(found).collect();
        let line = text::line(&case, &findings);
        self.keep(&line, answers);
        let details = text::event(&case, &findings);
        self.findings.retain(|old| findings.iter().all(|new| new.suspect.rank != old.suspect.rank));
        self.findings.extend(findings);
        self.has_news = true;
        Notice { line, event: "suspect", details }
    }

    fn tell_cleared(&mut self, now: Instant) -> Notice {
        self.next_line = Some(now + LINE_EVERY);
        let cleared = std::mem::take(&mut self.cleared);
        let ranks: RankSet = cleared.iter().map(|cleared| cleared.rank).collect();
        let details = json!({"ranks": ranks.to_string()});
        Notice { line: text::cleared_line(&cleared), event: "suspect cleared", details }
    }

    /// A full disk does not end a job.
    fn keep(&self, title: &str, answers: &[RankStack]) {
        let file = private::appended(&self.file);
        let _ = file.and_then(|mut file| file.write_all(stacks::full_text(title, answers).as_bytes()));
    }
}

/// For the whole job, however many ranks are suspected.
const LINE_EVERY: Duration = Duration::from_secs(1);
