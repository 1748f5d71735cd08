//! How a communicator fails: the first verdict stands, and every rank raises its text.
//!
//! The state machine is `Publication`'s: whoever fails the communicator writes the text ([`FailureWord::fail_by`] and
//! its variants, never waiting for another rank), and every rank reads it with [`FailureWord::failure`], which waits only
//! for a writer that is at work. Between hosts the hosts agree on one of their texts (`decide`).

use std::time::{Duration, Instant};

use tpurun_memory::failure::{Failure, FailureKind};
use tpurun_memory::process::Liveness;
use tpurun_memory::rank_set::SharedRankSet;
use tpurun_memory::sync::{AtomicU32, Ordering, Publication, Settled, Writer};
use tpurun_memory::text::head;

use crate::frame::Failed;
use crate::layout::FAILURE_TEXT_BYTES;

use super::base::Base;
use super::remote::RemoteRanks;
use super::roster::Roster;
use super::words::*;

/// The time that a rank waits for the hosts to agree on why a communicator has failed: they need two
/// messages.
const AGREEMENT: Duration = Duration::from_secs(1);

/// Why a communicator is to fail, and who is to blame, by rank in the group.
#[derive(Clone, Debug)]
pub struct Verdict {
    kind: FailureKind,
    text: String,
    blamed: Vec<u32>,
}

impl Verdict {
    /// Nobody in particular is to blame.
    #[inline]
    pub fn new(kind: FailureKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into(), blamed: vec![] }
    }

    /// The same, and these ranks are to blame.
    #[inline]
    pub fn blaming(self, ranks: impl Into<Vec<u32>>) -> Self {
        Self { blamed: ranks.into(), ..self }
    }

    #[cfg(any(test, fuzzing, feature = "testing"))]
    /// The text that all ranks will raise.
    #[inline]
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// The one failure of a communicator.
#[derive(Clone, Copy, Debug)]
pub struct FailureWord<'a>(pub(super) &'a Base);

impl<'a> FailureWord<'a> {
    /// Fails the communicator for all its ranks, and nobody in particular is to blame.
    #[inline]
    pub fn fail(self, kind: FailureKind, text: &str) -> Failure {
        self.fail_by(&Verdict::new(kind, text))
    }

    /// A verdict that blames those of its ranks that have these ranks in the world.
    #[inline]
    pub fn verdict(self, kind: FailureKind, text: &str, world_ranks: &[u32]) -> Verdict {
        let is_guilty = |rank: &u32| world_ranks.contains(&self.0.world_rank(*rank));
        let blamed: Vec<u32> = self.0.ranks().filter(is_guilty).collect();
        Verdict::new(kind, text).blaming(blamed)
    }

    /// Fails the communicator for all its ranks and returns the failure that stands: the first one.
    #[inline]
    pub fn fail_by(self, verdict: &Verdict) -> Failure {
        self.fail_here(verdict);
        let own = || Failure::new(verdict.kind, &*verdict.text).blaming(self.0.in_world(&verdict.blamed));
        self.failure().unwrap_or_else(own)
    }

    /// As [`fail_by`](Self::fail_by), but asks no other host what stands.
    #[inline]
    pub fn fail_here(self, verdict: &Verdict) {
        self.publish(verdict, || {
            Roster(self.0).attendance().end(self.0.size());
            self.0.meeting().poison();
            true
        });
    }

    /// As [`fail_by`](Self::fail_by), but who sleeps learns of it only from [`announce`](Self::announce).
    #[inline]
    pub fn fail_quietly(self, verdict: &Verdict) {
        self.settle(verdict, || {
            Roster(self.0).attendance().end(self.0.size());
            self.0.meeting().poison_quietly();
            true
        });
    }

    /// Wakes everybody who waits in a communicator that has failed.
    #[inline]
    pub fn announce(self) {
        if self.failure().is_some() {
            self.0.meeting().poison();
            self.0.ring_all();
        }
    }

    /// As [`fail_by`](Self::fail_by), unless round `round` of the meeting is open by now: then nothing happens.
    pub fn fail_round(self, round: u32, verdict: &Verdict) -> Option<Failure> {
        self.fail_round_here(round, verdict);
        let failure = self.failure();
        if failure.is_some() {
            // Poisons the round whoever failed it: a process that only said so must not leave us waiting.
            self.0.meeting().poison_round(round);
        }
        failure
    }

    /// The same, and asks no other host what stands.
    #[inline]
    pub fn fail_round_here(self, round: u32, verdict: &Verdict) {
        self.publish(verdict, || self.0.meeting().poison_round(round));
    }

    fn publication(self) -> &'a Publication {
        self.0.region.at(self.0.layout.failure())
    }

    /// As [`fail_by`](Self::fail_by), unless all ranks are attached by now: then nothing happens.
    pub fn fail_creation(self, verdict: &Verdict) {
        self.publish(verdict, || {
            let ended = Roster(self.0).attendance().end(self.0.size());
            if ended {
                self.0.meeting().poison();
            }
            ended
        });
    }

    /// Writes the text, lets `take_effect` decide whether it stands, and tells everybody.
    fn publish(self, verdict: &Verdict, take_effect: impl Fn() -> bool) {
        if self.settle(verdict, take_effect) == Settled::Stands {
            self.0.ring_all();
        }
    }

    fn settle(self, verdict: &Verdict, take_effect: impl Fn() -> bool) -> Settled {
        let write = || self.write_failure(verdict);
        self.publication().publish(self.writer(), write, take_effect, self.look_at_writer(), |writer| {
            self.speak_for(writer)
        })
    }

    fn write_failure(self, verdict: &Verdict) {
        let Verdict { kind, text, blamed: ranks } = verdict;
        let base = self.0.layout.failure();
        let text = head(text, FAILURE_TEXT_BYTES);
        self.0.region.write(base + F_TEXT, text.as_bytes());
        self.0.region.at::<AtomicU32>(base + F_KIND).store(*kind as u32, Ordering::Relaxed);
        self.0.region.at::<AtomicU32>(base + F_BYTES).store(text.len() as u32, Ordering::Relaxed);
        let blamed = SharedRankSet::new(&self.0.region, self.0.layout.blamed(), self.0.size());
        blamed.clear();
        blamed.add(ranks);
    }

    /// Returns who we are when we write the failure: the agent is no rank, and dies with the job.
    fn writer(self) -> u32 {
        if Roster(self.0).pid(self.0.rank()) == std::process::id() { self.0.rank() } else { OUTSIDER }
    }

    /// Whether who is writing the failure still may finish.
    fn look_at_writer(self) -> impl FnMut(u32) -> Writer {
        // Longer than writing the text takes, even on a machine that is 64 times oversubscribed.
        const PATIENCE: Duration = Duration::from_millis(500);
        let mut deadline = None;
        move |writer| match deadline {
            // Nearly always it is done in a moment.
            None => {
                deadline = Some(Instant::now() + PATIENCE);
                Writer::Alive
            }
            Some(_) if writer < self.0.size() && Roster(self.0).is_gone(writer) => Writer::Gone,
            Some(deadline) if Instant::now() >= deadline => Writer::Silent,
            Some(_) => Writer::Alive,
        }
    }

    /// The failure of a communicator whose member died while it was writing what it is.
    fn speak_for(self, writer: u32) {
        let text = format!(
            "{}: it died while it was saying why {} failed",
            Roster(self.0).describe_gone(&[writer]),
            self.0.members.title()
        );
        self.write_failure(&Verdict::new(FailureKind::RankLost, text).blaming([writer]));
        Roster(self.0).attendance().end(self.0.size());
        self.0.meeting().poison();
        self.0.ring_all();
    }

    /// Fails the communicator because `rank` wrote nonsense into it.
    pub fn corrupt(self, rank: u32, what: &str) -> Failure {
        let text = format!("{} wrote what can not be: {what}", Roster(self.0).describe(&[rank]));
        self.fail_by(&Verdict::new(FailureKind::Internal, text).blaming([rank]))
    }

    /// The failure of this communicator, if it has failed: what all hosts say, which takes them a moment to agree
    /// on.
    #[inline]
    pub fn failure(self) -> Option<Failure> {
        let own = self.own_failure()?;
        Some(if self.0.is_bridged() { self.agreed_failure().unwrap_or(own) } else { own })
    }

    /// As this host has it.
    pub fn own_failure(self) -> Option<Failure> {
        let speak_for = |writer| self.speak_for(writer);
        match self.publication().settled(|| self.writer(), self.look_at_writer(), speak_for) {
            Settled::Nothing => return None,
            Settled::Stands => {}
            Settled::Silent => {
                // All that come later say the same.
                self.0.meeting().poison();
                self.0.ring_all();
                let text = format!("{} failed, and who knows why does not say it", self.0.members.title());
                return Some(Failure::new(FailureKind::RankLost, text));
            }
        }
        let base = self.0.layout.failure();
        let bytes = self.0.region.at::<AtomicU32>(base + F_BYTES).load(Ordering::Relaxed) as usize;
        let mut text = vec![0; bytes.min(FAILURE_TEXT_BYTES)];
        self.0.region.read(base + F_TEXT, &mut text);
        let kind =
            FailureKind::from_code(self.0.region.at::<AtomicU32>(base + F_KIND).load(Ordering::Relaxed));
        let blamed = SharedRankSet::new(&self.0.region, self.0.layout.blamed(), self.0.size()).ranks();
        Some(Failure::new(kind, String::from_utf8_lossy(&text)).blaming(self.0.in_world(&blamed)))
    }

    /// The failure as this host would have it, for the others: its ranks by their number in the communicator.
    #[inline]
    pub fn candidate(self) -> Option<Failed> {
        let failure = self.own_failure()?;
        let blamed =
            self.0.ranks().filter(|rank| failure.ranks().contains(&self.0.world_rank(*rank))).collect();
        Some(Failed { kind: failure.kind() as u32, blamed, text: failure.to_string() })
    }

    /// Says what the hosts have agreed on; by the bridge, or by the agent, who has asked the other agents. Where one of
    /// them has begun to say it, the other one leaves it to that; unless it has died over it.
    pub fn decide(self, failed: &Failed) {
        let bytes = failed.encode();
        let write = || {
            // A text that is too long loses its end, as it does without other hosts.
            let room = FAILURE_TEXT_BYTES.min(bytes.len());
            self.0.region().write(self.0.layout().decided() + 8, &bytes[..room]);
            self.0.region().at::<AtomicU32>(self.0.layout().decided()).store(room as u32, Ordering::Relaxed);
        };
        let look_at = |writer| {
            let is_rank = writer < self.0.size();
            if is_rank && Roster(self.0).liveness(writer) == Liveness::Gone {
                Writer::Gone
            } else {
                Writer::Silent
            }
        };
        // In the place of what a dead one has left, too.
        self.decided().publish(self.writer(), write, || true, look_at, |_| write());
    }

    /// Ranks of several hosts need not wait until these agree on its failure, if it has failed: their agents have, or
    /// nothing joins the hosts over which they could.
    #[inline]
    pub fn decide_alone(self) {
        if RemoteRanks(self.0).says_it_is_bridged()
            && let Some(failed) = self.candidate()
        {
            self.decide(&failed);
        }
    }

    /// Returns the failure that the hosts have agreed on; `None` when they do not in time.
    pub(super) fn agreed_failure(self) -> Option<Failure> {
        let deadline = *self.0.seen_failed.get_or_init(Instant::now) + AGREEMENT;
        if !self.decided().await_standing(Some(deadline)) {
            return None;
        }
        let bytes =
            self.0.region().at::<AtomicU32>(self.0.layout().decided()).load(Ordering::Relaxed) as usize;
        let mut bytes = vec![0; bytes.min(FAILURE_TEXT_BYTES)];
        self.0.region().read(self.0.layout().decided() + 8, &mut bytes);
        let Failed { kind, mut blamed, text } = Failed::decode(&bytes)?;
        blamed.retain(|rank| *rank < self.0.size());
        Some(Failure::new(FailureKind::from_code(kind), text).blaming(self.0.in_world(&blamed)))
    }

    #[cfg(any(test, feature = "testing"))]
    /// Whether the hosts have agreed on a failure.
    #[inline]
    pub fn has_decided(self) -> bool {
        self.decided().await_standing(Some(Instant::now()))
    }

    /// The text that the hosts have agreed on, if they have.
    #[cfg(any(test, feature = "testing"))]
    #[inline]
    pub fn decided_now(self) -> Option<String> {
        self.has_decided().then(|| self.agreed_failure().expect("it is there").to_string())
    }

    fn decided(self) -> &'a Publication {
        self.0.region().at(self.0.layout().header() + H_DECIDED)
    }
}

#[cfg(test)]
mod tests {
    use crate::hosts::Hosts;
    use std::process::Command;

    use super::*;
    use crate::segment::Segment;

    /// The number of a process that has ended.
    fn pid_of_nobody() -> u32 {
        let mut child = Command::new("true").spawn().expect("there is true");
        child.wait().expect("it ends");
        child.id()
    }

    /// A segment of two hosts, of which the first rank is this process or a dead one.
    fn segment(pid: u32) -> Segment {
        let hosts = Hosts::parse("0 1\nn0\nn1", 2).expect("two hosts");
        let segment = Segment::alone("dp0", 2, 4096).with_hosts(hosts);
        segment.member_word(0, M_PID).store(pid, Ordering::Relaxed);
        segment
    }

    fn failed(text: &str) -> Failed {
        Failed { kind: FailureKind::RankLost as u32, blamed: vec![1], text: text.to_owned() }
    }

    /// As a process leaves it that dies after so many bytes of its text.
    fn begin(segment: &Segment, bytes: usize) {
        assert!(segment.failure_word().decided().claims(0));
        let text = failed("what the dead one would have said, and more of it").encode();
        segment.region().write(segment.layout().decided() + 8, &text[..bytes.min(text.len())]);
        let length: &AtomicU32 = segment.region().at(segment.layout().decided());
        length.store(text.len() as u32, Ordering::Relaxed);
    }

    #[test]
    fn who_dies_over_what_the_hosts_agreed_on_is_spoken_for() {
        let nobody = pid_of_nobody();
        for bytes in [0, 1, 20, usize::MAX] {
            let segment = segment(nobody);
            begin(&segment, bytes);
            assert!(!segment.failure_word().has_decided());
            segment.failure_word().decide(&failed("what the agent says"));
            assert_eq!(segment.failure_word().decided_now().as_deref(), Some("what the agent says"));
            // It stays.
            segment.failure_word().decide(&failed("what comes later"));
            assert_eq!(segment.failure_word().decided_now().as_deref(), Some("what the agent says"));
        }
    }

    #[test]
    fn who_lives_is_left_to_finish() {
        let segment = segment(std::process::id());
        begin(&segment, 5);
        segment.failure_word().decide(&failed("what the agent says"));
        assert!(!segment.failure_word().has_decided(), "the other one still writes");
    }
}
