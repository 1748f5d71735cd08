//! Ranks that die anywhere in a round: every other rank completes it or learns the one failure.
//!
//! A rank that dies simply stops. The event that follows its death (the agent, or another rank's sentinel,
//! fails the communicator) runs on the same model thread: it can only come after the death, and nothing else
//! is ordered with it.

use super::*;
use crate::sync::model::{Arc, model_within, spawn};
use crate::sync::{AtomicU32, Publication, Settled, Writer};

/// At most; the dying one is among them.
const MOST_RANKS: u32 = 3;
const DYING: u32 = 0;
const FIRST: u32 = 1;
const WATCHER: u32 = 7;
/// The text of a verdict: that the dying rank is gone (and, to be told apart, who says so), or what the dying
/// rank itself had found.
const GONE: u32 = 100;
const FOUND: u32 = 200;
/// Pieces of a shared fold.
const PIECES: u32 = 2;

/// Where a rank dies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Death {
    BeforeItsSlot,
    AmidItsSlot,
    BeforeArriving,
    /// As the last one: before opening. Else: while others wait for the last one.
    AfterArriving,
    /// As the last one: the pieces are offered, none is done.
    AfterSharing,
    /// With a piece of the fold in its hands.
    AmidAPiece,
    /// As the last one, that found a mismatch: the failure is claimed and half written.
    AmidItsVerdict,
}

/// How the death is found out and told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Watch {
    /// The agent's verdict fails the communicator, whatever it is doing.
    Agent,
    /// The sentinel makes the ranks look for themselves; they fail the round unless it is open.
    Sentinel,
    /// As before, but only the first of them sees it yet.
    OneSentinel,
}

#[derive(Default)]
struct Shared {
    ranks: u32,
    meeting: Meeting,
    publication: Publication,
    // Relaxed, so that only the protocol's own orderings make them visible. Twice the same is whole.
    slots: [[AtomicU32; 2]; MOST_RANKS as usize],
    folded: [AtomicU32; PIECES as usize],
    text: [AtomicU32; 2],
    dead: AtomicU32,
    /// A bit for each rank that can see a departure.
    departures: AtomicU32,
}

impl Shared {
    fn write_slot(&self, rank: u32) {
        for half in &self.slots[rank as usize] {
            half.store(rank + 1, Ordering::Relaxed);
        }
    }

    /// Checks that a rank that arrives last, or folds, has every slot, and has it whole.
    fn check_slots(&self) {
        for (rank, slot) in self.slots.iter().take(self.ranks as usize).enumerate() {
            let halves = [0, 1].map(|half| slot[half].load(Ordering::Relaxed));
            assert_eq!(halves, [rank as u32 + 1; 2], "a slot that is not whole was taken");
        }
    }

    fn fold(&self, piece: u32) {
        self.check_slots();
        self.folded[piece as usize].store(1, Ordering::Relaxed);
        self.meeting.piece_done(PIECES);
    }

    fn say(&self, text: u32) {
        for half in &self.text {
            half.store(text, Ordering::Relaxed);
        }
    }

    fn look_at(&self, writer: u32) -> Writer {
        let dead = writer == DYING && self.dead.load(Ordering::Acquire) == 1;
        if dead { Writer::Gone } else { Writer::Alive }
    }

    fn speak_for_the_dead(&self, speaker: u32) {
        self.say(GONE + speaker);
        self.meeting.poison();
    }

    fn publish(&self, writer: u32, text: u32, take_effect: impl Fn() -> bool) -> Settled {
        let look_at = |writer| self.look_at(writer);
        self.publication.publish(
            writer,
            || self.say(text),
            take_effect,
            look_at,
            |_| self.speak_for_the_dead(writer),
        )
    }

    /// Returns the failure that a rank raises.
    fn failure(&self, reader: u32) -> Option<u32> {
        let look_at = |writer| self.look_at(writer);
        let settled = self.publication.settled(|| reader, look_at, |_| self.speak_for_the_dead(reader));
        (settled == Settled::Stands).then(|| {
            let text = [0, 1].map(|half| self.text[half].load(Ordering::Relaxed));
            assert_eq!(text[0], text[1], "half of a text");
            text[0]
        })
    }

    /// One round of a rank that lives: its success, or the failure it raises.
    fn rank(&self, rank: u32, pieces: u32) -> Result<(), u32> {
        self.write_slot(rank);
        if self.meeting.arrive(self.ranks) == Arrival::Last {
            self.check_slots();
            self.share_or_open(pieces);
        }
        let mut departures = 0;
        loop {
            let nudges = self.meeting.nudges();
            if self.departures.load(Ordering::Acquire) & 1 << rank != departures {
                departures = 1 << rank;
                self.publish(rank, GONE + rank, || self.meeting.poison_round(0));
            }
            match self.meeting.wait(0, Patience::NONE, Bound::Never, nudges) {
                Opened::Yes => break,
                Opened::Help { piece, .. } => self.fold(piece),
                Opened::Poisoned => return Err(self.failure(rank).expect("poisoned for a reason")),
                Opened::NotYet => {}
                Opened::Duty => unreachable!("all ranks are here"),
            }
        }
        self.check_slots();
        let folded = |piece: u32| self.folded[piece as usize].load(Ordering::Relaxed);
        assert!((0..pieces).all(|piece| folded(piece) == 1), "an open round is folded");
        Ok(())
    }

    fn share_or_open(&self, pieces: u32) {
        if pieces == 0 {
            return self.meeting.open();
        }
        self.meeting.share(0, pieces, self.ranks);
        while let Some((piece, _)) = self.meeting.claim(0) {
            self.fold(piece);
        }
    }

    fn dies(&self, death: Death, pieces: u32) {
        if death == Death::BeforeItsSlot {
            return;
        }
        self.slots[DYING as usize][0].store(DYING + 1, Ordering::Relaxed);
        if death == Death::AmidItsSlot {
            return;
        }
        self.write_slot(DYING);
        if death == Death::BeforeArriving {
            return;
        }
        let last = self.meeting.arrive(self.ranks) == Arrival::Last;
        match death {
            Death::AmidItsVerdict if last => self.claims_a_verdict_and_dies(),
            Death::AfterSharing if last => self.meeting.share(0, pieces, self.ranks),
            Death::AmidAPiece if last => {
                self.meeting.share(0, pieces, self.ranks);
                self.meeting.claim(0);
            }
            // Helps like any rank that is awake.
            Death::AmidAPiece => drop(self.meeting.claim(0)),
            _ => {}
        }
    }

    fn claims_a_verdict_and_dies(&self) {
        let claimed = self.publication.claims(DYING);
        if claimed {
            self.text[0].store(FOUND, Ordering::Relaxed);
        }
    }

    /// The kernel tells of the death; nothing the dead had done comes after that.
    fn is_found_out(&self, watch: Watch) {
        self.dead.store(1, Ordering::Release);
        match watch {
            Watch::Agent => {
                self.publish(WATCHER, GONE + WATCHER, || {
                    self.meeting.poison();
                    true
                });
            }
            Watch::Sentinel | Watch::OneSentinel => {
                let seen_by = if watch == Watch::Sentinel { u32::MAX } else { 1 << FIRST };
                self.departures.store(seen_by, Ordering::Release);
                self.meeting.nudge();
            }
        }
    }
}

fn a_rank_dies(ranks: u32, death: Death, watch: Watch, pieces: u32) {
    let preemptions = if ranks == 2 { 2 } else { 1 };
    model_within(preemptions, move || {
        let shared = Arc::new(Shared { ranks, ..Shared::default() });
        let dying = {
            let shared = shared.clone();
            spawn(move || {
                shared.dies(death, pieces);
                shared.is_found_out(watch);
            })
        };
        let other = (ranks > 2).then(|| {
            let shared = shared.clone();
            spawn(move || shared.rank(2, pieces))
        });
        let mine = shared.rank(FIRST, pieces);
        if let Some(other) = other {
            // All complete the round, or none does.
            let other = other.join().expect("a rank that lives does not panic");
            assert_eq!(mine, other, "two stories of one round");
        }
        dying.join().expect("a death is no panic");
        if mine.is_ok() && watch != Watch::Agent {
            assert_eq!(shared.failure(FIRST), None, "a round that was opened failed afterwards");
        }
        if let Err(text) = mine {
            assert!((GONE..FOUND).contains(&text), "the words of a rank that died");
            assert_eq!(shared.failure(FIRST), Some(text), "the first failure stands");
        }
        if matches!(death, Death::BeforeItsSlot | Death::AmidItsSlot | Death::BeforeArriving) {
            assert!(mine.is_err(), "a round without one of its ranks was opened");
        }
    });
}

macro_rules! deaths {
    ($($name:ident: $death:ident, $pieces:expr;)*) => {
        $(
            #[test]
            fn $name() {
                for ranks in 2..=MOST_RANKS {
                    for watch in [Watch::Agent, Watch::Sentinel, Watch::OneSentinel] {
                        a_rank_dies(ranks, Death::$death, watch, $pieces);
                    }
                }
            }
        )*
    };
}

deaths! {
    loom_a_rank_dies_before_its_slot: BeforeItsSlot, 0;
    loom_a_rank_dies_amid_its_slot: AmidItsSlot, 0;
    loom_a_rank_dies_before_it_arrives: BeforeArriving, 0;
    loom_a_rank_dies_after_it_arrived: AfterArriving, 0;
    loom_a_rank_dies_before_a_fold: AfterArriving, PIECES;
    loom_a_rank_dies_that_shared_a_fold: AfterSharing, PIECES;
    loom_a_rank_dies_amid_a_piece: AmidAPiece, PIECES;
    loom_a_rank_dies_amid_its_verdict: AmidItsVerdict, 0;
}
