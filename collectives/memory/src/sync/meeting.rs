//! The meeting: all ranks of a communicator arrive, the last one decides, then all go on together.
//!
//! This is the slot protocol. In each round a rank writes its own slot and window (single writer), then
//! arrives. The last to arrive has seen every slot: it compares the match keys, folds what is to be folded,
//! and opens the round; the others sleep on one word, so that one wake-all frees them. A large fold is cut
//! into pieces which the ranks that are awake claim. The data that a rank wrote in round k is read by others
//! until it arrives in round k + 1, so it may be overwritten from round k + 2 on: slots and windows come in
//! pairs.
//!
//! Nothing is locked and nothing needs a cleanup: a rank that dies has arrived or has not.

use std::time::Instant;

use super::{AtomicU64, EVERYBODY, Ordering, Patience, Word};

const SLEEPERS: u32 = 1;
const POISONED: u32 = 2;
/// All have arrived, the last of them from another host: one of those here has yet to do what the last one does.
const DUTY: u32 = 4;
/// Counts nudges, modulo 256: a waiter misses one only if 255 others follow before it looks.
const NUDGE: u32 = 8;
const NUDGES: u32 = 0xff * NUDGE;
const ROUND_SHIFT: u32 = 11;
const ROUND_MASK: u32 = u32::MAX >> ROUND_SHIFT;

/// The shared words of a communicator's rounds; all zeroes is "no round opened yet".
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Meeting {
    opened: OwnLine<Word>,
    arrivals: OwnLine<AtomicU64>,
    pieces: OwnLine<AtomicU64>,
    folded: OwnLine<AtomicU64>,
}

// Waiters read `opened` while others still arrive: on one cache line every arrival would stall them.
#[repr(C, align(64))]
#[derive(Debug, Default)]
struct OwnLine<T>(T);

/// The state of a round as a rank finds it on arriving.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrival {
    /// All others are here: compare, fold, then [`open`](Meeting::open).
    Last,
    /// Others are missing: [`wait`](Meeting::wait).
    Early,
}

/// How long a rank waits at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bound {
    /// For ever: in models alone, as every other wait has a deadline (law I7).
    #[cfg(test)]
    Never,
    /// As long as it is too early to sleep.
    Awake,
    /// Until this time.
    Until(Instant),
}

/// Why a wait returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Opened {
    /// The round is over: results may be read.
    Yes,
    /// All are here, and it falls to this rank to do what [`Arrival::Last`] asks for.
    Duty,
    /// Fold this piece, then call [`piece_done`](Meeting::piece_done), then wait again.
    Help {
        /// The number of the piece.
        piece: u32,
        /// How many pieces the fold has.
        of: u32,
    },
    /// The communicator failed.
    Poisoned,
    /// `until` passed, or there was a nudge.
    NotYet,
}

impl Meeting {
    /// Announces that this rank's slot and window of the current round are complete.
    #[inline]
    pub fn arrive(&self, ranks: u32) -> Arrival {
        // Release: my slot and window. Acquire (of the last): everybody's, through the chain of increments.
        let before = self.arrivals.0.fetch_add(1, Ordering::AcqRel);
        // Another process may have put the count anywhere.
        if before.wrapping_add(1).is_multiple_of(u64::from(ranks)) { Arrival::Last } else { Arrival::Early }
    }

    /// Announces that the slots and windows of so many ranks of other hosts are complete. When nobody is
    /// missing then, one of the ranks that wait here, or the next one that does, is to do what the last to
    /// arrive does.
    pub fn arrive_for(&self, others: u32, ranks: u32) {
        // As in `arrive`.
        let before = self.arrivals.0.fetch_add(others.into(), Ordering::AcqRel);
        if before.wrapping_add(others.into()).is_multiple_of(u64::from(ranks)) {
            // Release, with the acquire in `wait`: the arrivals above. Changes the word that a rank about to sleep
            // sleeps on.
            self.opened.0.atomic().fetch_or(DUTY, Ordering::AcqRel);
            self.opened.0.wake(1);
        }
    }

    /// Whether somebody is yet to do what the last to arrive does.
    #[inline]
    pub fn has_duty(&self) -> bool {
        self.opened.0.atomic().load(Ordering::Acquire) & DUTY != 0
    }

    /// Opens the round for everybody; called once per round.
    pub fn open(&self) {
        let word = self.opened.0.atomic();
        let mut seen = word.load(Ordering::Relaxed);
        loop {
            if seen & POISONED != 0 {
                return;
            }
            let next = ((seen >> ROUND_SHIFT).wrapping_add(1) & ROUND_MASK) << ROUND_SHIFT | seen & NUDGES;
            // Release pairs with the acquire in `wait`. The new value has no SLEEPERS bit: a rank that sleeps
            // afterwards sets it again.
            match word.compare_exchange_weak(seen, next, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => seen = now,
            }
        }
        if seen & SLEEPERS != 0 {
            self.opened.0.wake(EVERYBODY);
        }
    }

    /// The nudges so far; read them before looking at what a nudge announces.
    #[inline]
    pub fn nudges(&self) -> u32 {
        // Acquire pairs with `nudge`: a rank that sees it sees what it announces.
        self.opened.0.atomic().load(Ordering::Acquire) & NUDGES
    }

    /// Makes every waiter look again at what it waits for: something was announced.
    pub fn nudge(&self) {
        let word = self.opened.0.atomic();
        let mut seen = word.load(Ordering::Relaxed);
        loop {
            let next = seen & !NUDGES | seen.wrapping_add(NUDGE) & NUDGES;
            match word.compare_exchange_weak(seen, next, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => seen = now,
            }
        }
        if seen & SLEEPERS != 0 {
            self.opened.0.wake(EVERYBODY);
        }
    }

    /// Waits until round `round` (counted from 0) is open, there is something to fold, or a nudge after the count
    /// `nudges`; how long is up to `bound`.
    pub fn wait(&self, round: u32, patience: Patience, bound: Bound, nudges: u32) -> Opened {
        let word = self.opened.0.atomic();
        let mut patience = patience.begin();
        loop {
            let seen = word.load(Ordering::Acquire);
            // First: a round that was opened has succeeded for all, whatever came later.
            if seen >> ROUND_SHIFT != round & ROUND_MASK {
                return Opened::Yes;
            }
            if seen & POISONED != 0 {
                return Opened::Poisoned;
            }
            if seen & DUTY != 0 {
                // The rank that clears the bit has the duty.
                if word.fetch_and(!DUTY, Ordering::AcqRel) & DUTY != 0 {
                    return Opened::Duty;
                }
                continue;
            }
            if let Some((piece, of)) = self.claim(round) {
                return Opened::Help { piece, of };
            }
            if seen & NUDGES != nudges {
                return Opened::NotYet;
            }
            if patience.again() {
                continue;
            }
            let until = match bound {
                #[cfg(test)]
                Bound::Never => None,
                Bound::Awake => return Opened::NotYet,
                Bound::Until(until) if Instant::now() >= until => return Opened::NotYet,
                Bound::Until(until) => Some(until),
            };
            let asleep = seen | SLEEPERS;
            if seen == asleep
                || word.compare_exchange(seen, asleep, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                self.opened.0.sleep(asleep, until);
            }
        }
    }

    /// Offers a fold of `of` pieces to at most `helpers` sleeping ranks; called by the last arriver, which
    /// then claims pieces itself and waits like the others.
    pub fn share(&self, round: u32, of: u32, helpers: u32) {
        debug_assert!((1..=u32::from(u16::MAX)).contains(&of));
        self.folded.0.store(u64::from(round) << 32, Ordering::Relaxed);
        // Release: the counter above, and through the caller's arrival everybody's windows.
        self.pieces.0.store(u64::from(round) << 32 | u64::from(of) << 16, Ordering::Release);
        if helpers > 0 {
            self.opened.0.wake(helpers);
        }
    }

    /// Claims the next piece of the fold of this round.
    pub fn claim(&self, round: u32) -> Option<(u32, u32)> {
        let mut seen = self.pieces.0.load(Ordering::Acquire);
        loop {
            let (of, next) = ((seen >> 16 & 0xffff) as u32, (seen & 0xffff) as u32);
            if (seen >> 32) as u32 != round || next >= of {
                return None;
            }
            match self.pieces.0.compare_exchange_weak(seen, seen + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some((next, of)),
                Err(now) => seen = now,
            }
        }
    }

    /// Reports a claimed piece as folded; the rank that reports the last one opens the round.
    #[inline]
    pub fn piece_done(&self, of: u32) {
        // AcqRel chain: the opener has seen every folder's writes, and publishes them by opening.
        let before = self.folded.0.fetch_add(1, Ordering::AcqRel);
        if (before as u32).wrapping_add(1) == of {
            self.open();
        }
    }

    /// Whether round `round` (counted from 0) is over.
    #[inline]
    pub fn is_open(&self, round: u32) -> bool {
        // Acquire pairs with the release in `open`, as in `wait`.
        self.opened.0.atomic().load(Ordering::Acquire) >> ROUND_SHIFT != round & ROUND_MASK
    }

    /// Fails every present and future wait.
    #[inline]
    pub fn poison(&self) {
        self.poison_quietly();
        self.opened.0.wake(EVERYBODY);
    }

    /// As [`poison`](Self::poison), but wakes nobody: a sleeper learns of it when somebody does.
    #[inline]
    pub fn poison_quietly(&self) {
        self.opened.0.atomic().fetch_or(POISONED, Ordering::AcqRel);
    }

    /// Fails every wait from round `round` on, unless that one is open by now. Returns whether it did.
    pub fn poison_round(&self, round: u32) -> bool {
        let word = self.opened.0.atomic();
        let mut seen = word.load(Ordering::Relaxed);
        loop {
            if seen >> ROUND_SHIFT != round & ROUND_MASK {
                return false;
            }
            match word.compare_exchange_weak(seen, seen | POISONED, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => seen = now,
            }
        }
        self.opened.0.wake(EVERYBODY);
        true
    }

    /// Whether no round will open any more.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        self.opened.0.atomic().load(Ordering::Acquire) & POISONED != 0
    }
}

#[cfg(test)]
mod deaths;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::AtomicU32;
    use crate::sync::model::{Arc, Bytes, model, spawn};

    const RANKS: u32 = 2;

    #[derive(Default)]
    struct Shared {
        meeting: Meeting,
        // [round parity][rank]: relaxed, so that only the protocol's own orderings make them visible.
        slots: [[AtomicU32; RANKS as usize]; 2],
        windows: [[Bytes; RANKS as usize]; 2],
        folded: [[AtomicU32; 2]; 2],
    }

    fn rank(shared: &Shared, rank: u32, rounds: u32, pieces: u32) {
        for round in 0..rounds {
            let parity = (round % 2) as usize;
            shared.windows[parity][rank as usize].write();
            shared.slots[parity][rank as usize].store(round * 10 + rank + 1, Ordering::Relaxed);
            let expected: u32 = (0..RANKS).map(|r| round * 10 + r + 1).sum();
            let fold = |piece: u32| {
                shared.windows[parity].iter().for_each(Bytes::read);
                let sum = shared.slots[parity].iter().map(|s| s.load(Ordering::Relaxed)).sum();
                assert_eq!(sum, expected, "the folder sees every slot of its round");
                shared.folded[parity][piece as usize].store(sum, Ordering::Relaxed);
                shared.meeting.piece_done(pieces);
            };
            if shared.meeting.arrive(RANKS) == Arrival::Last {
                shared.meeting.share(round, pieces, RANKS);
                while let Some((piece, _)) = shared.meeting.claim(round) {
                    fold(piece);
                }
            }
            loop {
                match shared.meeting.wait(round, Patience::NONE, Bound::Never, 0) {
                    Opened::Yes => break,
                    Opened::Help { piece, .. } => fold(piece),
                    other => unreachable!("nobody poisons, there is no deadline, all are here: {other:?}"),
                }
            }
            shared.windows[parity].iter().for_each(Bytes::read);
            for (r, slot) in shared.slots[parity].iter().enumerate() {
                let slot = slot.load(Ordering::Relaxed);
                assert_eq!(slot, round * 10 + r as u32 + 1, "a slot stays while others may read it");
            }
            for piece in 0..pieces as usize {
                assert_eq!(shared.folded[parity][piece].load(Ordering::Relaxed), expected);
            }
        }
    }

    fn meet(rounds: u32, pieces: u32) {
        model(move || {
            let shared = Arc::new(Shared::default());
            let other = {
                let shared = shared.clone();
                spawn(move || rank(&shared, 1, rounds, pieces))
            };
            rank(&shared, 0, rounds, pieces);
            other.join().expect("the other rank does not panic");
        });
    }

    #[test]
    fn loom_every_rank_sees_every_slot_in_every_round() {
        meet(3, 1);
    }

    #[test]
    fn loom_a_shared_fold_is_done_once_and_seen_whole() {
        meet(1, 2);
    }

    /// A rank of another host arrives, maybe last: then one of those that wait here does for all what the last one
    /// does, and sees every slot.
    #[test]
    fn loom_a_duty_is_done_once() {
        #[derive(Default)]
        struct Bridged {
            meeting: Meeting,
            slots: [AtomicU32; 3],
            folded: AtomicU32,
        }
        fn decide(shared: &Bridged) {
            let sum: u32 = shared.slots.iter().map(|slot| slot.load(Ordering::Relaxed)).sum();
            assert_eq!(sum, 6, "who decides sees every slot");
            assert_eq!(shared.folded.fetch_add(sum, Ordering::Relaxed), 0, "one of them decides");
            shared.meeting.open();
        }
        fn rank(shared: &Bridged, rank: u32) {
            shared.slots[rank as usize].store(rank + 1, Ordering::Relaxed);
            if shared.meeting.arrive(3) == Arrival::Last {
                decide(shared);
            }
            loop {
                match shared.meeting.wait(0, Patience::NONE, Bound::Never, 0) {
                    Opened::Yes => break,
                    Opened::Duty => decide(shared),
                    other => unreachable!("nothing else happens: {other:?}"),
                }
            }
            assert_eq!(shared.folded.load(Ordering::Relaxed), 6);
        }
        model(|| {
            let shared = Arc::new(Bridged::default());
            let (other, bridge) = (shared.clone(), shared.clone());
            let other = spawn(move || rank(&other, 1));
            let bridge = spawn(move || {
                bridge.slots[2].store(3, Ordering::Relaxed);
                bridge.meeting.arrive_for(1, 3);
            });
            rank(&shared, 0);
            for thread in [other, bridge] {
                thread.join().expect("nobody panics");
            }
        });
    }

    /// One rank arrives and waits, the other never does but poisons: the waiter must learn of it.
    #[test]
    fn loom_poison_reaches_a_waiter() {
        model(|| {
            let meeting = Arc::new(Meeting::default());
            let guilty = {
                let meeting = meeting.clone();
                spawn(move || meeting.poison())
            };
            assert_eq!(meeting.arrive(RANKS), Arrival::Early);
            assert_eq!(meeting.wait(0, Patience::NONE, Bound::Never, 0), Opened::Poisoned);
            guilty.join().expect("the guilty rank does not panic");
        });
    }

    /// A round that was opened is a success for all, whatever comes later.
    #[test]
    fn loom_an_opened_round_stays_open() {
        model(|| {
            let meeting = Arc::new(Meeting::default());
            let last = {
                let meeting = meeting.clone();
                spawn(move || {
                    if meeting.arrive(RANKS) == Arrival::Last {
                        meeting.open();
                    }
                    if meeting.wait(0, Patience::NONE, Bound::Never, 0) == Opened::Yes {
                        // This rank goes on, and its next operation fails.
                        meeting.poison();
                    }
                })
            };
            if meeting.arrive(RANKS) == Arrival::Last {
                meeting.open();
            }
            assert_eq!(meeting.wait(0, Patience::NONE, Bound::Never, 0), Opened::Yes);
            last.join().expect("the last to arrive does not panic");
        });
    }

    /// A waiter sees what a nudge announces, and a round that opens at the same time stays open.
    #[test]
    fn loom_no_nudge_is_lost() {
        model(|| {
            let shared = Arc::new((Meeting::default(), AtomicU32::new(0)));
            let leaver = {
                let shared = shared.clone();
                spawn(move || {
                    shared.1.store(1, Ordering::Relaxed);
                    shared.0.nudge();
                    shared.0.arrive(RANKS) == Arrival::Last
                })
            };
            assert_eq!(shared.0.arrive(RANKS + 1), Arrival::Early);
            loop {
                let nudges = shared.0.nudges();
                if shared.1.load(Ordering::Relaxed) == 1 {
                    break;
                }
                assert_eq!(shared.0.wait(0, Patience::NONE, Bound::Never, nudges), Opened::NotYet);
            }
            if leaver.join().expect("the leaver does not panic") {
                shared.0.open();
                let opened = shared.0.wait(0, Patience::NONE, Bound::Never, shared.0.nudges());
                assert_eq!(opened, Opened::Yes);
            }
        });
    }
}
