//! Signals that a sleeping thread has to answer: the caller's check runs when a sleep ends early, and now and then.

use std::cell::Cell;
use std::ffi::c_void;
use std::time::{Duration, Instant};

/// A function of the caller and its argument.
pub type Check = (extern "C" fn(*mut c_void), *mut c_void);

thread_local! {
    static CHECK: Cell<Option<Check>> = const { Cell::new(None) };
    static IS_STOPPED: Cell<bool> = const { Cell::new(false) };
}

/// Sets what this thread's sleeps call, and returns what they called before.
#[inline]
pub fn set(check: Option<Check>) -> Option<Check> {
    IS_STOPPED.set(false);
    CHECK.replace(check)
}

/// Whether there is a check.
#[inline]
pub fn is_set() -> bool {
    CHECK.get().is_some()
}

/// The check wants the thread to wait no longer for a communicator to be made, which it cannot abort yet.
#[inline]
pub fn stop() {
    IS_STOPPED.set(true);
}

/// Whether it does.
#[inline]
pub fn is_stopped() -> bool {
    IS_STOPPED.get()
}

/// Until when this thread may sleep: a signal that comes between two sleeps is found after `PERIOD`.
#[inline]
pub fn bound(deadline: Option<Instant>) -> Option<Instant> {
    if CHECK.get().is_none() {
        return deadline;
    }
    let next = Instant::now() + PERIOD;
    Some(deadline.map_or(next, |deadline| deadline.min(next)))
}

/// Runs the check, if there is one. A sleep of the check itself runs none.
#[inline]
pub fn check() {
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

    #[test]
    fn who_is_stopped_waits_again_with_another_check() {
        extern "C" fn no_more(_: *mut c_void) {
            stop();
        }
        set(Some((no_more, std::ptr::null_mut())));
        Word::default().sleep(0, None);
        assert!(is_stopped() && is_set());
        set(None);
        assert!(!is_stopped() && !is_set());
    }
}
