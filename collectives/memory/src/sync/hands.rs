//! Whether a rank has tensors of others in its hands: it reads or writes them where they are, and the ranks
//! that gave them may not have them back as long.
//!
//! Nobody begins once the communicator has failed, and a rank that takes its tensors back has seen that it
//! has. So one of them sees the other: a rank that works says so and then looks for the failure, a rank that
//! takes back looks at the hands after the failure, each with a sequentially consistent fence between the two
//! (Dekker's way). A rank that dies at its work never lets go: a rank that waits looks whether it lives.

use std::time::Instant;

use super::{EVERYBODY, Ordering, Word, fence};

const EMPTY: u32 = 0;
const FULL: u32 = 1;
const AWAITED: u32 = 2;

/// One rank's; in shared memory, where zero is its first state.
#[repr(transparent)]
#[derive(Debug, Default)]
pub struct Hands(Word);

/// They are full until this is dropped.
#[derive(Debug)]
pub struct Holding<'a>(&'a Hands);

impl Hands {
    /// Fills them, unless the communicator has failed. Only the rank itself may do so.
    #[inline]
    pub fn fill(&self, has_failed: impl FnOnce() -> bool) -> Option<Holding<'_>> {
        self.0.atomic().store(FULL, Ordering::Relaxed);
        let holding = Holding(self);
        fence(Ordering::SeqCst);
        (!has_failed()).then_some(holding)
    }

    /// For a rank that has seen that the communicator has failed: waits until they are empty, or until then;
    /// says whether they are.
    pub fn await_empty(&self, until: Option<Instant>) -> bool {
        fence(Ordering::SeqCst);
        let word = self.0.atomic();
        loop {
            // Acquire pairs with letting go: all that has been done to the tensors. Anything else than these two is
            // nonsense of its process, which nobody waits for.
            if !matches!(word.load(Ordering::Acquire), FULL | AWAITED) {
                return true;
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return false;
            }
            let seen = word.compare_exchange(FULL, AWAITED, Ordering::Relaxed, Ordering::Relaxed);
            if matches!(seen, Ok(FULL) | Err(AWAITED)) {
                self.0.sleep(AWAITED, until);
            }
        }
    }
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        if self.0.0.atomic().swap(EMPTY, Ordering::Release) == AWAITED {
            self.0.0.wake(EVERYBODY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::model::{Arc, Bytes, model, spawn};
    use crate::sync::{Bound, Meeting, Opened, Patience};

    #[derive(Default)]
    struct Shared {
        meeting: Meeting,
        hands: Hands,
        tensor: Bytes,
    }

    impl Shared {
        fn work(&self) {
            if let Some(holding) = self.hands.fill(|| self.meeting.is_poisoned()) {
                self.tensor.read();
                drop(holding);
            }
        }

        fn take_back(&self) {
            assert!(self.hands.await_empty(None));
            self.tensor.write();
        }
    }

    /// One fails the communicator and uses its memory for something else, the other may be at work.
    #[test]
    fn loom_a_tensor_is_taken_back_only_out_of_empty_hands() {
        model(|| {
            let shared = Arc::new(Shared::default());
            let worker = {
                let shared = shared.clone();
                spawn(move || (0..2).for_each(|_| shared.work()))
            };
            shared.meeting.poison();
            shared.take_back();
            worker.join().expect("who works does not panic");
        });
    }

    /// A rank that learns of a failure takes back only out of empty hands, whoever else has failed the
    /// communicator.
    #[test]
    fn loom_who_learns_of_a_failure_takes_back_only_out_of_empty_hands() {
        model(|| {
            let shared = Arc::new(Shared::default());
            let (worker, guilty) = (shared.clone(), shared.clone());
            let worker = spawn(move || worker.work());
            let guilty = spawn(move || guilty.meeting.poison());
            assert_eq!(shared.meeting.wait(0, Patience::NONE, Bound::Never, 0), Opened::Poisoned);
            shared.take_back();
            for thread in [worker, guilty] {
                thread.join().expect("nobody panics");
            }
        });
    }
}
