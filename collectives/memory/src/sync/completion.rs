//! The completion latch of one operation: set once, waited for by any number of threads of this process.

use std::time::Instant;

use super::{EVERYBODY, Mutex, Ordering, Word};

const PENDING: u32 = 0;
const PENDING_WITH_SLEEPERS: u32 = 1;
const DONE: u32 = 2;

/// Holds the result of an operation once there is one.
#[derive(Debug)]
pub struct Completion<T> {
    state: Word,
    result: Mutex<Option<T>>,
}

impl<T> Default for Completion<T> {
    fn default() -> Self {
        Self { state: Word::default(), result: Mutex::new(None) }
    }
}

impl<T: Clone> Completion<T> {
    /// Publishes the result; the first one stands. Returns whether this call was the first.
    pub fn set(&self, value: T) -> bool {
        let mut result = self.result.lock().expect("nobody panics while holding a result");
        if result.is_some() {
            return false;
        }
        *result = Some(value);
        drop(result);
        // Release pairs with the acquire in `is_done`.
        if self.state.atomic().swap(DONE, Ordering::AcqRel) == PENDING_WITH_SLEEPERS {
            self.state.wake(EVERYBODY);
        }
        true
    }

    /// Whether the operation has ended.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.state.atomic().load(Ordering::Acquire) == DONE
    }

    /// The result, if there is one by now.
    #[inline]
    pub fn get(&self) -> Option<T> {
        if !self.is_done() {
            return None;
        }
        self.result.lock().expect("nobody panics while holding a result").clone()
    }

    /// Waits for the result, at most until `deadline`.
    pub fn wait(&self, deadline: Option<Instant>) -> Option<T> {
        loop {
            if let Some(result) = self.get() {
                return Some(result);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return None;
            }
            let state = self.state.atomic();
            let seen =
                state.compare_exchange(PENDING, PENDING_WITH_SLEEPERS, Ordering::AcqRel, Ordering::Acquire);
            if seen != Err(DONE) {
                self.state.sleep(PENDING_WITH_SLEEPERS, deadline);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::model::{Arc, model, spawn};

    /// A finisher and an aborter race, two threads wait: all see the same single result.
    #[test]
    fn loom_one_result_reaches_every_waiter() {
        model(|| {
            let latch = Arc::new(Completion::default());
            let finisher = {
                let latch = latch.clone();
                spawn(move || latch.set("finished"))
            };
            let waiter = {
                let latch = latch.clone();
                spawn(move || latch.wait(None))
            };
            let aborted = latch.set("aborted");
            let seen = latch.wait(None).expect("without a deadline there is a result");
            let finished = finisher.join().expect("the finisher does not panic");
            assert!(finished != aborted, "exactly one of the two sets the result");
            assert_eq!(seen, if finished { "finished" } else { "aborted" });
            assert_eq!(waiter.join().expect("the waiter does not panic"), Some(seen));
        });
    }
}
