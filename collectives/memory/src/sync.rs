//! The facade over atomics, locks and futexes: the only way the engine synchronises.
//!
//! Under `--cfg tpurun_loom` everything here is loom's, so that the models in `sync/` explore every
//! interleaving of the very code that runs. A [`Word`] is a futex word: in the real build 4 bytes that may
//! live in memory shared between processes, under loom a value with a lock and a condition variable, which
//! has the futex's semantics (compare and sleep are one step).

mod attendance;
pub mod ballot;
mod chain;
mod completion;
mod doorbell;
mod hands;
pub mod interrupt;
mod meeting;
#[cfg(test)]
mod model;
mod patience;
mod publication;
mod queue;
mod ring;

pub use attendance::{Attendance, Standing};
pub use chain::{Chain, PieceCount};
pub use completion::Completion;
pub use doorbell::Doorbell;
pub use hands::Hands;
pub use meeting::{Arrival, Bound, Meeting, Opened};
pub use patience::Patience;
pub use publication::{Publication, Settled, Writer};
pub use queue::{Consume, Consumer, OpQueue};
pub use ring::{Ring, RingCounters, RingError, RingRun};

#[cfg(not(tpurun_loom))]
mod imp {
    use std::time::Instant;

    use rustix::io::Errno;
    use rustix::thread::futex;
    pub use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
    pub use std::sync::{Mutex, MutexGuard};

    use super::interrupt;

    /// A futex word.
    #[repr(transparent)]
    #[derive(Debug, Default)]
    pub struct Word(AtomicU32);

    impl Word {
        /// The word as an atomic.
        #[inline]
        pub fn atomic(&self) -> &AtomicU32 {
            &self.0
        }

        /// Sleeps while the word holds `expected`, at most until `deadline`; may return early.
        pub fn sleep(&self, expected: u32, deadline: Option<Instant>) {
            let timeout = match interrupt::bound(deadline) {
                None => None,
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return;
                    }
                    futex::Timespec::try_from(left).ok()
                }
            };
            // Shared between processes: no PRIVATE flag. Every error (value changed, signal, timeout) means
            // the same to the caller: look again.
            let slept = futex::wait(&self.0, futex::Flags::empty(), expected, timeout.as_ref());
            if matches!(slept, Err(Errno::INTR | Errno::TIMEDOUT)) {
                interrupt::check();
            }
        }

        /// Wakes at most `count` sleepers.
        #[inline]
        pub fn wake(&self, count: u32) {
            let _ = futex::wake(&self.0, futex::Flags::empty(), count);
        }
    }

    /// Lets other threads run.
    #[inline]
    pub fn yield_now() {
        std::thread::yield_now();
    }
}

#[cfg(tpurun_loom)]
mod imp {
    use std::time::Instant;

    pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
    pub use loom::sync::{Condvar, Mutex, MutexGuard};

    #[derive(Debug, Default)]
    pub struct Word {
        value: AtomicU32,
        lock: Mutex<()>,
        changed: Condvar,
    }

    impl Word {
        #[inline]
        pub fn atomic(&self) -> &AtomicU32 {
            &self.value
        }

        // Deadlines do not exist in a model: a wake-up that only a timeout would repair is a deadlock there.
        #[inline]
        pub fn sleep(&self, expected: u32, _deadline: Option<Instant>) {
            let guard = self.lock.lock().expect("the model never panics under this lock");
            if self.value.load(Ordering::SeqCst) == expected {
                drop(self.changed.wait(guard));
            }
        }

        #[inline]
        pub fn wake(&self, count: u32) {
            let _guard = self.lock.lock().expect("the model never panics under this lock");
            if count == 1 { self.changed.notify_one() } else { self.changed.notify_all() }
        }
    }

    #[inline]
    pub fn yield_now() {
        loom::thread::yield_now();
    }
}

pub use imp::*;

/// Wake-all for [`Word::wake`].
pub const EVERYBODY: u32 = i32::MAX as u32;
