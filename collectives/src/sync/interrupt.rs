//! Signals that a sleeping thread has to answer: the caller's check runs when a sleep ends early, and now and then.

use std::cell::Cell;
use std::ffi::c_void;
use std::time::{Duration, Instant};

/// A function of the caller and its argument.
pub(crate) type Check = (extern "C" fn(*mut c_void), *mut c_void);

thread_local! {
    static CHECK: Cell<Option<Check>> = const { Cell::new(None) };
}

/// Sets what this thread's sleeps call, and returns what they called before.
pub(crate) fn set(check: Option<Check>) -> Option<Check> {
    CHECK.replace(check)
}

/// Until when this thread may sleep: a signal that comes between two sleeps is found after [`PERIOD`].
pub(super) fn bound(deadline: Option<Instant>) -> Option<Instant> {
    if CHECK.get().is_none() {
        return deadline;
    }
    let next = Instant::now() + PERIOD;
    Some(deadline.map_or(next, |deadline| deadline.min(next)))
}

/// Runs the check, if there is one. A sleep of the check itself runs none.
pub(super) fn check() {
    if let Some((function, argument)) = CHECK.take() {
        function(argument);
        CHECK.set(Some((function, argument)));
    }
}

/// A fifth of the second in which Ctrl-C is to be answered, and rare enough to cost nothing.
const PERIOD: Duration = Duration::from_millis(200);

#[cfg(all(test, not(tpurun_loom)))]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::sync::Word;

    static CALLS: AtomicU32 = AtomicU32::new(0);

    extern "C" fn count(_: *mut c_void) {
        CALLS.fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn a_sleep_without_an_end_lets_the_caller_look() {
        assert!(set(Some((count, std::ptr::null_mut()))).is_none());
        Word::default().sleep(0, None);
        assert_eq!(CALLS.load(Ordering::Relaxed), 1);
        assert!(set(None).is_some(), "the check stays");
    }
}
