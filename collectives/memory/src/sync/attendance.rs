//! The attendance: the ranks of a communicator that is being made count themselves, until all are there.
//!
//! A sleeper has nothing to do when one more rank comes, so nobody is woken for that: the rank that makes the
//! count whole wakes all the others, once. One word holds the count and the bit that ends it, so that it is
//! decided in one step whether a communicator came to be: no rank has one that another has not.

use std::time::Instant;

use super::{EVERYBODY, Ordering, Word};

/// The communicator will not come to be.
const ENDED: u32 = 1 << 31;

/// How the creation of a communicator stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// The ranks that are there, a count; others are missing.
    Waiting(u32),
    /// All are there: the communicator has come to be, for all of them.
    Whole,
    /// Somebody ended it before that.
    Ended,
}

/// A futex word in shared memory; all zeroes is "nobody is there".
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct Attendance(Word);

impl Attendance {
    /// Counts one rank of `ranks`.
    #[inline]
    pub fn count(&self, ranks: u32) {
        // Release: what the rank wrote before. Acquire pairs with it, through the chain of increments.
        let before = self.0.atomic().fetch_add(1, Ordering::AcqRel);
        if before.wrapping_add(1) == ranks {
            self.0.wake(EVERYBODY);
        }
    }

    /// Ends the creation, unless all are there by now. Returns whether it is ended.
    pub fn end(&self, ranks: u32) -> bool {
        let mut seen = self.0.atomic().load(Ordering::Acquire);
        loop {
            if of(seen, ranks) == Standing::Whole {
                return false;
            }
            let ended = seen | ENDED;
            match self.0.atomic().compare_exchange_weak(seen, ended, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                Err(now) => seen = now,
            }
        }
        self.0.wake(EVERYBODY);
        true
    }

    /// Sleeps until the communicator is whole or ended, or `until` has passed.
    pub fn wait(&self, ranks: u32, until: Option<Instant>) -> Standing {
        loop {
            // Acquire pairs with `count` and `end`.
            let seen = self.0.atomic().load(Ordering::Acquire);
            let standing = of(seen, ranks);
            let is_late = || until.is_some_and(|until| Instant::now() >= until);
            if !matches!(standing, Standing::Waiting(_)) || is_late() {
                return standing;
            }
            self.0.sleep(seen, until);
        }
    }
}

/// Another process may have put the count anywhere.
fn of(seen: u32, ranks: u32) -> Standing {
    match seen {
        _ if seen & ENDED != 0 => Standing::Ended,
        _ if seen >= ranks => Standing::Whole,
        count => Standing::Waiting(count),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::AtomicU32;
    use crate::sync::model::{Arc, model, spawn};

    /// The ranks see what each wrote before it came, and each of them wakes for the last one.
    #[test]
    fn loom_all_see_all_when_all_have_come() {
        const RANKS: u32 = 3;
        #[derive(Default)]
        struct Shared {
            attendance: Attendance,
            wrote: [AtomicU32; RANKS as usize],
        }
        fn rank(shared: &Shared, rank: usize) {
            shared.wrote[rank].store(1, Ordering::Relaxed);
            shared.attendance.count(RANKS);
            assert_eq!(shared.attendance.wait(RANKS, None), Standing::Whole);
            let wrote = |word: &AtomicU32| word.load(Ordering::Relaxed) == 1;
            assert!(
                shared.wrote.iter().all(wrote),
                "a rank that goes on sees what all wrote before they came"
            );
        }
        model(|| {
            let shared = Arc::new(Shared::default());
            let others: Vec<_> = (1..RANKS as usize)
                .map(|other| {
                    let shared = shared.clone();
                    spawn(move || rank(&shared, other))
                })
                .collect();
            rank(&shared, 0);
            for other in others {
                other.join().expect("nobody panics");
            }
        });
    }

    /// One rank waits, one comes, one ends the creation meanwhile: both ranks go on, or neither does, and nobody
    /// sleeps for ever.
    #[test]
    fn loom_all_have_it_or_nobody_has() {
        const RANKS: u32 = 2;
        model(|| {
            let attendance = Arc::new(Attendance::default());
            let ender = {
                let attendance = attendance.clone();
                spawn(move || attendance.end(RANKS))
            };
            let other = {
                let attendance = attendance.clone();
                spawn(move || {
                    attendance.count(RANKS);
                    attendance.wait(RANKS, None)
                })
            };
            attendance.count(RANKS);
            let own = attendance.wait(RANKS, None);
            let others = other.join().expect("nobody panics");
            let has_ended = ender.join().expect("nobody panics");
            assert_eq!(own, others, "no rank has a communicator that another has not");
            assert_eq!(own == Standing::Ended, has_ended, "the thread that ends it knows whether it did");
        });
    }
}
