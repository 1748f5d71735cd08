//! The handle of a posted operation.

use std::fmt;
use std::sync::Mutex;
use std::time::Instant;

use tpurun_memory::failure::Failure;
use tpurun_memory::sync::Completion;
use tpurun_protocol::board::WaitKind;

/// How an operation ended: a receive names the rank it heard from.
pub type Outcome = Result<Option<u32>, Failure>;

/// Called once when an operation ends, on the thread that ended it.
pub type OnDone = Box<dyn FnOnce(&Outcome) + Send>;

/// Which part of a communicator an operation runs on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Carrier {
    Lane,
    Messages(WaitKind),
}

/// One posted operation.
pub struct Work {
    carrier: Carrier,
    seq: u64,
    completion: Completion<Outcome>,
    on_done: Mutex<Option<OnDone>>,
}

impl Work {
    pub(crate) fn new(carrier: Carrier, seq: u64, on_done: Option<OnDone>) -> Self {
        Self { carrier, seq, completion: Completion::default(), on_done: Mutex::new(on_done) }
    }

    pub(crate) fn carrier(&self) -> Carrier {
        self.carrier
    }

    /// The position of this operation among those of its communicator.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    /// Whether the operation ended, well or not.
    pub fn is_done(&self) -> bool {
        self.completion.is_done()
    }

    /// The outcome, if there is one by now.
    pub fn outcome(&self) -> Option<Outcome> {
        self.completion.get()
    }

    /// Waits for the outcome, at most until `deadline`.
    pub fn wait(&self, deadline: Option<Instant>) -> Option<Outcome> {
        self.completion.wait(deadline)
    }

    /// Publishes the outcome. The callback is the caller's to call, when it holds no lock any more.
    #[must_use]
    pub(crate) fn settle(&self, outcome: Outcome) -> Option<OnDone> {
        let on_done = self.on_done.lock().expect("a callback is called outside of this lock").take();
        let first = self.completion.set(outcome);
        debug_assert!(first || on_done.is_none(), "an operation with a callback left ends here");
        on_done
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("seq", &self.seq).field("done", &self.is_done()).finish_non_exhaustive()
    }
}
