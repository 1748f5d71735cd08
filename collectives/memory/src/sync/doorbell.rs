//! The doorbell: "something changed for you, look again", between threads or processes.
//!
//! A ring counts; a waiter names the count it saw *before* it looked, so a ring between looking and
//! sleeping is never lost. One word holds the count and a bit for "somebody may sleep", so that ringing is
//! one atomic step, and a system call only when there is somebody to wake. A waiter that dies leaves the bit
//! behind: one wake-up for nobody.

use std::time::Instant;

use super::{EVERYBODY, Ordering, Word};

const SLEEPERS: u32 = 1;
const ONE_RING: u32 = 2;

/// A futex event counter; may live in shared memory, where all zeroes is its first state.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Doorbell {
    word: Word,
}

impl Doorbell {
    /// The count to pass to [`wait`](Self::wait); read it before looking at what the doorbell announces.
    #[inline]
    pub fn rings(&self) -> u32 {
        // Acquire pairs with the release half of `ring`: a reader that sees the count sees what it announces.
        self.word.atomic().load(Ordering::Acquire) & !SLEEPERS
    }

    /// Wakes whoever sleeps on it.
    pub fn ring(&self) {
        let before = self.word.atomic().fetch_add(ONE_RING, Ordering::AcqRel);
        if before & SLEEPERS != 0 {
            // A sleeper that sets the bit again after this sleeps on another value, so the wake-up cannot
            // miss it.
            self.word.atomic().fetch_and(!SLEEPERS, Ordering::AcqRel);
            self.word.wake(EVERYBODY);
        }
    }

    /// Sleeps until the count is no longer `seen` or the deadline passed; may return early.
    #[inline]
    pub fn wait(&self, seen: u32, deadline: Option<Instant>) {
        let now = self.word.atomic().fetch_or(SLEEPERS, Ordering::AcqRel) | SLEEPERS;
        if now == seen | SLEEPERS {
            self.word.sleep(now, deadline);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::AtomicU32;
    use crate::sync::model::{Arc, model, spawn};

    /// Two ringers, one waiter that must see both announcements and never sleep for ever.
    #[test]
    fn loom_no_ring_is_lost() {
        model(|| {
            let shared = Arc::new((Doorbell::default(), AtomicU32::new(0)));
            let ringers: Vec<_> = (0..2)
                .map(|_| {
                    let shared = shared.clone();
                    spawn(move || {
                        shared.1.fetch_add(1, Ordering::Relaxed);
                        shared.0.ring();
                    })
                })
                .collect();
            loop {
                let seen = shared.0.rings();
                if shared.1.load(Ordering::Relaxed) == 2 {
                    break;
                }
                shared.0.wait(seen, None);
            }
            for ringer in ringers {
                ringer.join().expect("a ringer does not panic");
            }
        });
    }
}
