//! The ballot: the ranks that are left of a communicator agree on who they are.
//!
//! Each rank writes its wish for a round into its own word. A rank that sees that every rank that is present
//! has the wish writes the list of them into its own words and proposes it by one compare-and-swap on the
//! state: the first proposal is the decision. Nobody holds anything that another would have to take over, so
//! ranks may die anywhere. A rank that gives up waiting takes its wish back, and by changing the state makes
//! every proposal fail that may have counted on it: it is in the decision if it learns of it, and else not.
//!
//! Ranks need not see the same others as present: the list decides, not the view. A list is overwritten only
//! for a later round, which all present ranks wish for only after they have read this one.

use super::{AtomicU32, AtomicU64, Doorbell, Ordering};

/// Where the words of a ballot are; all zeroes is "no round decided yet".
pub trait Roll {
    /// Ranks that may take part.
    fn ranks(&self) -> u32;
    /// The last decision.
    fn state(&self) -> &AtomicU64;
    /// Rung whenever a wish or the state changed.
    fn bell(&self) -> &Doorbell;
    /// The round that `rank` wishes for; 0 is none. Written by that rank alone.
    fn wish(&self, rank: u32) -> &AtomicU32;
    /// A word of the list that `rank` proposes, a bit for each rank. Written by that rank alone.
    fn list(&self, rank: u32, word: usize) -> &AtomicU64;
}

/// How a round stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Tally {
    /// These ranks survive.
    Decided(Vec<u32>),
    /// These are present and do not wish for it yet.
    Missing(Vec<u32>),
    /// The state names a rank that does not exist.
    Corrupt,
}

const ATTEMPT: u64 = 1 << 16;
const ATTEMPTS: u64 = 0xffff << 16;
const BY: u64 = 0xffff;

/// The round that was decided last; 0 is none.
#[inline]
pub fn decided(roll: &impl Roll) -> u32 {
    round_of(roll.state().load(Ordering::Acquire))
}

/// Says that `me` wants `round` to be decided.
#[inline]
pub fn wish(roll: &impl Roll, me: u32, round: u32) {
    // Release: what I did before, above all reading the list of the round before.
    roll.wish(me).store(round, Ordering::Release);
    roll.bell().ring();
}

/// Decides `round` if all `present` ranks are there. `me` must wish for it.
pub fn count(roll: &impl Roll, me: u32, round: u32, present: impl Fn(u32) -> bool) -> Tally {
    loop {
        let seen = roll.state().load(Ordering::Acquire);
        if round_of(seen) >= round {
            return read(roll, seen);
        }
        let there: Vec<u32> = (0..roll.ranks()).filter(|rank| present(*rank)).collect();
        let wishes = |rank: &u32| roll.wish(*rank).load(Ordering::Acquire) == round;
        let (list, missing): (Vec<u32>, Vec<u32>) = there.into_iter().partition(wishes);
        if !missing.is_empty() {
            return Tally::Missing(missing);
        }
        write(roll, me, &list);
        let mine = u64::from(round) << 32 | seen & ATTEMPTS | u64::from(me);
        // Release: my list. A rank that reads the state with acquire may read it.
        if roll.state().compare_exchange(seen, mine, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            roll.bell().ring();
            return Tally::Decided(list);
        }
    }
}

/// Takes the wish of `me` back; false when `round` was decided before that.
pub fn retract(roll: &impl Roll, me: u32, round: u32) -> bool {
    roll.wish(me).store(0, Ordering::Relaxed);
    let mut seen = roll.state().load(Ordering::Relaxed);
    loop {
        if round_of(seen) >= round {
            return false;
        }
        let next = seen & !ATTEMPTS | seen.wrapping_add(ATTEMPT) & ATTEMPTS;
        // Release: a rank that proposes on top of this sees that the wish is gone.
        match roll.state().compare_exchange(seen, next, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(now) => seen = now,
        }
    }
}

/// The list of the round decided last.
#[inline]
pub fn last(roll: &impl Roll) -> Tally {
    read(roll, roll.state().load(Ordering::Acquire))
}

fn read(roll: &impl Roll, state: u64) -> Tally {
    let by = (state & BY) as u32;
    if by >= roll.ranks() {
        return Tally::Corrupt;
    }
    let has = |rank: &u32| roll.list(by, *rank as usize / 64).load(Ordering::Relaxed) & 1 << (rank % 64) != 0;
    Tally::Decided((0..roll.ranks()).filter(has).collect())
}

fn write(roll: &impl Roll, me: u32, list: &[u32]) {
    for word in 0..roll.ranks().div_ceil(64) {
        let bits =
            list.iter().filter(|rank| *rank / 64 == word).fold(0, |bits, rank| bits | 1 << (rank % 64));
        roll.list(me, word as usize).store(bits, Ordering::Relaxed);
    }
}

fn round_of(state: u64) -> u32 {
    (state >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::model::{Arc, model, spawn};

    #[derive(Default)]
    struct Words<const RANKS: usize> {
        state: AtomicU64,
        bell: Doorbell,
        wishes: [AtomicU32; 3],
        lists: [AtomicU64; 3],
    }

    impl<const RANKS: usize> Roll for Words<RANKS> {
        fn ranks(&self) -> u32 {
            RANKS as u32
        }
        fn state(&self) -> &AtomicU64 {
            &self.state
        }
        fn bell(&self) -> &Doorbell {
            &self.bell
        }
        fn wish(&self, rank: u32) -> &AtomicU32 {
            &self.wishes[rank as usize]
        }
        fn list(&self, rank: u32, word: usize) -> &AtomicU64 {
            assert_eq!(word, 0);
            &self.lists[rank as usize]
        }
    }

    fn wait<const RANKS: usize>(
        words: &Words<RANKS>,
        me: u32,
        round: u32,
        present: impl Fn(u32) -> bool,
    ) -> Vec<u32> {
        loop {
            let seen = words.bell.rings();
            match count(words, me, round, &present) {
                Tally::Decided(list) => return list,
                Tally::Missing(_) => words.bell.wait(seen, None),
                Tally::Corrupt => unreachable!("only ranks write the state"),
            }
        }
    }

    /// Rank 2 wishes and dies. One survivor still sees it, the other does not: they return one list.
    #[test]
    fn loom_all_return_one_list_whatever_they_see() {
        model(|| {
            let words = Arc::new(Words::<3>::default());
            wish(&*words, 2, 1);
            let other = {
                let words = words.clone();
                spawn(move || {
                    wish(&*words, 1, 1);
                    wait(&words, 1, 1, |rank| rank != 2)
                })
            };
            wish(&*words, 0, 1);
            let mine = wait(&words, 0, 1, |_| true);
            assert_eq!(other.join().expect("the other does not panic"), mine);
            assert!(mine == [0, 1] || mine == [0, 1, 2], "{mine:?}");
        });
    }

    /// A list is read whole although the next round begins at once.
    #[test]
    fn loom_rounds_do_not_mix() {
        model(|| {
            let words = Arc::new(Words::<2>::default());
            let rounds = |words: &Words<2>, me: u32| {
                wish(words, me, 1);
                let first = wait(words, me, 1, |_| true);
                wish(words, me, 2);
                // In the second round, rank 0 sees itself alone.
                (first, if me == 0 { wait(words, 0, 2, |rank| rank == 0) } else { vec![] })
            };
            let other = {
                let words = words.clone();
                spawn(move || rounds(&words, 1).0)
            };
            let (first, second) = rounds(&words, 0);
            assert_eq!((first, second), (vec![0, 1], vec![0]));
            let theirs = other.join().expect("the other does not panic");
            // A rank that was left out of a round may find its list instead of the one before.
            assert!(theirs == [0, 1] || theirs == [0], "{theirs:?}");
        });
    }

    /// A rank that takes its wish back is in no decision that it has not heard of.
    #[test]
    fn loom_a_wish_taken_back_does_not_count() {
        model(|| {
            let words = Arc::new(Words::<2>::default());
            wish(&*words, 0, 1);
            let other = {
                let words = words.clone();
                spawn(move || {
                    wish(&*words, 1, 1);
                    retract(&*words, 1, 1)
                })
            };
            let found = count(&*words, 0, 1, |_| true);
            let left = other.join().expect("the other does not panic");
            match found {
                Tally::Decided(list) => {
                    assert_eq!(list, [0, 1]);
                    assert!(!left, "rank 1 left, and is in the list");
                }
                Tally::Missing(missing) => assert_eq!(missing, [1]),
                Tally::Corrupt => unreachable!("only ranks write the state"),
            }
            // Once it has left, nobody decides with it any more.
            if left {
                assert_eq!(count(&*words, 0, 1, |_| true), Tally::Missing(vec![1]));
            }
        });
    }

    #[test]
    fn a_state_that_names_no_rank_is_noticed() {
        let words = Words::<2>::default();
        words.state.store(1 << 32 | 7, Ordering::Relaxed);
        assert_eq!(last(&words), Tally::Corrupt);
        assert_eq!(count(&words, 0, 1, |_| true), Tally::Corrupt);
    }
}
