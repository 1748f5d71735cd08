//! Why a wait will not end: the time is up, a rank is gone or has left, or this one shuts down. And what is said then.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use tpurun_memory::failure::{Failure, FailureKind};
use tpurun_memory::process::LOOK_PERIOD;
use tpurun_protocol::match_key::Posted;
use tpurun_protocol::segment::{Segment, Verdict};

use super::{Meet, Shared};

/// Whether other ranks may use this rank's tensors where they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Tensors {
    Own,
    Lent,
}

/// The prospects of this rank's operations: each may still complete, or it will not, for a reason.
#[derive(Debug)]
pub(crate) struct Prospects {
    segment: Arc<Segment>,
    shared: Arc<Shared>,
    /// Looks at the processes of others so far.
    looks: AtomicU32,
    /// Since which operation this rank takes no part any more, and why.
    given_up: Option<(u64, Failure)>,
    /// When it has seen that this rank shuts down.
    closing_since: Option<Instant>,
}

impl Prospects {
    pub(super) fn new(segment: Arc<Segment>, shared: Arc<Shared>) -> Self {
        Self { segment, shared, looks: AtomicU32::new(0), given_up: None, closing_since: None }
    }

    /// Fails a round that can not be opened any more; the next look at the meeting tells whether it did.
    pub(super) fn give_up_if_hopeless(&self, meet: &Meet<'_>, round: u32) {
        let missing = self.segment.roster().missing(round);
        // When all came, the last of them opens the round, with the help of any of them: they must be alive,
        // but may have left since, for what they gave is here.
        let all: Vec<u32> = self.segment.ranks().collect();
        let needed = if missing.is_empty() { &all } else { &missing };
        let verdict = self.lost(meet, &missing, needed).or_else(|| self.hopeless(meet, &missing, &missing));
        if let Some(verdict) = verdict {
            self.segment.failure_word().fail_round(round, &verdict);
        }
    }

    /// Ends operations that not all ranks have posted, as this rank shuts down: it waits for those that all
    /// have posted, and for no other. They end here, and only for this rank. Where others could use its
    /// tensors in place, as those that are lent, the communicator fails.
    pub(super) fn refuse_if_closing(
        &mut self,
        meet: &Meet<'_>,
        round: u32,
        tensors: Tensors,
    ) -> Result<(), Failure> {
        // Acquire pairs with `shutdown`, whose nudge comes after it.
        if !self.shared.closing.load(Ordering::Acquire) {
            return Ok(());
        }
        let missing = self.not_posted(meet.seq, round);
        if missing.is_empty() {
            return Ok(());
        }
        let segment = &self.segment;
        let (who, name) = (segment.roster().describe(&[segment.rank()]), segment.members().title());
        let text = format!("{who} shut {name} down during {}: {}", self.name(meet), self.came(&missing));
        let failure = Failure::new(FailureKind::Aborted, text).blaming([segment.world_rank(segment.rank())]);
        if tensors == Tensors::Lent {
            segment.failure_word().fail_round(round, &self.destroyed(meet, &missing, &[segment.rank()]));
            if segment.meeting().is_open(round) || !segment.meeting().is_poisoned() {
                return Ok(());
            }
        }
        self.given_up = Some((meet.seq, failure.clone()));
        Err(failure)
    }

    /// Ranks that have not posted this operation, as far as that can be known by now.
    fn not_posted(&mut self, seq: u64, round: u32) -> Vec<u32> {
        let since = *self.closing_since.get_or_insert_with(Instant::now);
        // Posts of ranks on other hosts are told now and then; that such a rank has come to a round, at once.
        let knows = |rank: &u32| self.segment.is_here(*rank) || since.elapsed() >= LOOK_PERIOD;
        let absent = self.segment.roster().missing(round);
        self.segment
            .roster()
            .without(seq)
            .into_iter()
            .filter(|rank| knows(rank) && absent.contains(rank))
            .collect()
    }

    /// This rank takes no part in any later operation. Tells the others.
    pub(crate) fn leave(&mut self, seq: u64) {
        let segment = &self.segment;
        let text = format!("{} was shut down by this rank", segment.members().title());
        let gone = || (seq, Failure::new(FailureKind::Aborted, text));
        let (seq, _) = self.given_up.get_or_insert_with(gone);
        segment.roster().leave(*seq);
    }

    /// Whether any of `needed` is dead, while all but `missing` wait. A rank that has destroyed the group and ended
    /// since is not lost.
    fn lost(&self, meet: &Meet<'_>, missing: &[u32], needed: &[u32]) -> Option<Verdict> {
        let segment = &self.segment;
        let waiting: Vec<u32> = segment.ranks().filter(|rank| missing.binary_search(rank).is_err()).collect();
        let look = self.looks.fetch_add(1, Ordering::Relaxed);
        // In this order: a rank leaves before it ends.
        let mut lost = segment.roster().lost_among(needed, &waiting, look);
        lost.retain(|rank| segment.roster().left(*rank).is_none());
        if lost.is_empty() {
            return None;
        }
        let text = format!("{}: {} can not complete", segment.roster().describe_gone(&lost), self.name(meet));
        Some(Verdict::new(FailureKind::RankLost, text).blaming(lost))
    }

    /// Looks after a wait that takes long: did the time run out, is one of `needed` dead or has left?
    /// `missing` did not come to the meeting; none when all did.
    pub(super) fn hopeless(&self, meet: &Meet<'_>, missing: &[u32], needed: &[u32]) -> Option<Verdict> {
        let segment = &self.segment;
        if let Some(verdict) = self.lost(meet, missing, needed) {
            return Some(verdict);
        }
        let has_left = |rank: &u32| {
            segment.roster().left(*rank).is_some_and(|seq| seq <= meet.seq || segment.roster().is_gone(*rank))
        };
        let left: Vec<u32> = needed.iter().copied().filter(has_left).collect();
        if !left.is_empty() {
            return Some(self.destroyed(meet, missing, &left));
        }
        if Instant::now() >= meet.deadline {
            let (name, came, note) = (self.name(meet), self.came(missing), segment.note());
            let text = format!("Timed out after {:?} in {name}: by the timeout {came}{note}", meet.timeout);
            return Some(Verdict::new(FailureKind::Timeout, text).blaming(missing));
        }
        None
    }

    fn destroyed(&self, meet: &Meet<'_>, missing: &[u32], left: &[u32]) -> Verdict {
        let (who, name) = (self.segment.roster().describe(left), self.segment.members().title());
        let text = format!("{who} destroyed {name} before {}: {}", self.name(meet), self.came(missing));
        Verdict::new(FailureKind::Deadlock, text).blaming(left)
    }

    fn name(&self, meet: &Meet<'_>) -> String {
        format!("operation {} of {}, {}", meet.seq, self.segment.members().title(), Posted::of(meet.op))
    }

    fn came(&self, missing: &[u32]) -> String {
        let (ranks, here) = (self.segment.size() as usize, self.segment.size() as usize - missing.len());
        match missing {
            [] => format!("all {ranks} ranks came, not all went on"),
            _ => format!("{here} of {ranks} ranks came, missing {}", self.segment.roster().describe(missing)),
        }
    }

    /// Why no operation begins any more, if so.
    pub(crate) fn over(&self) -> Option<Failure> {
        let given_up = self.given_up.as_ref().map(|(_, failure)| failure.clone());
        given_up.or_else(|| self.poisoned())
    }

    pub(super) fn poisoned(&self) -> Option<Failure> {
        let segment = &self.segment;
        let unsaid = || {
            let text =
                format!("{} was poisoned by a process that did not say why", segment.members().title());
            segment.failure_word().fail(FailureKind::Internal, &text)
        };
        segment.meeting().is_poisoned().then(|| segment.failure().unwrap_or_else(unsaid))
    }
}
