//! Why operations fail: one small text that every rank of the communicator raises alike.

use std::any::Any;
use std::sync::Arc;

/// The kinds of failure, numbered as `TpurunStatus` in the C ABI.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
#[non_exhaustive]
pub enum FailureKind {
    /// This rank alone asked for something that cannot work; the communicator stays healthy.
    InvalidUsage = 1,
    /// The ranks posted different operations.
    Mismatch = 2,
    /// A rank's process is gone.
    RankLost = 3,
    /// The ranks wait for each other in a circle.
    Deadlock = 4,
    /// Not all ranks came in time.
    Timeout = 5,
    /// A rank gave the communicator up.
    Aborted = 6,
    /// The host refused a resource.
    Transport = 7,
    /// A bug in tpurun.
    Internal = 8,
}

impl FailureKind {
    /// The kind with this number; unknown numbers (another process wrote them) are `Internal`.
    pub fn from_code(code: u32) -> Self {
        use FailureKind::*;
        [InvalidUsage, Mismatch, RankLost, Deadlock, Timeout, Aborted, Transport]
            .into_iter()
            .find(|kind| *kind as u32 == code)
            .unwrap_or(Internal)
    }
}

/// A failed operation. Cheap to clone: one failure reaches every waiter.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text}")]
pub struct Failure {
    kind: FailureKind,
    text: Arc<str>,
    ranks: Arc<[u32]>,
}

impl Failure {
    /// A failure with its whole text.
    pub fn new(kind: FailureKind, text: impl Into<Arc<str>>) -> Self {
        Self { kind, text: text.into(), ranks: Arc::default() }
    }

    /// The same, with the guilty ranks by their rank in the world.
    pub fn blaming(self, ranks: impl Into<Arc<[u32]>>) -> Self {
        Self { ranks: ranks.into(), ..self }
    }

    /// A panic caught where it must not go on: a bug of ours.
    pub fn of_panic(panic: &(dyn Any + Send)) -> Self {
        Self::new(FailureKind::Internal, bug(panic))
    }

    /// Returns what went wrong, as a number.
    pub fn kind(&self) -> FailureKind {
        self.kind
    }

    /// Returns what went wrong, as a person reads it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The guilty ranks, by their rank in the world: the minority of a mismatch, the ranks that are lost, those that
    /// did not come. Empty when nobody in particular is to blame.
    pub fn ranks(&self) -> &[u32] {
        &self.ranks
    }
}

/// Ends every text of a rank whose program was interrupted while it waited; the shim looks for it.
pub const INTERRUPTED: &str = "its program was interrupted";

/// Returns what a panic said, as the text of an `Internal` failure.
pub fn bug(panic: &(dyn Any + Send)) -> String {
    let what = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    format!("a bug in tpurun, please report it: {}", what.unwrap_or("a panic without a text"))
}

/// A failure of kind `InvalidUsage` with a formatted text.
#[doc(hidden)]
#[macro_export]
macro_rules! invalid_usage {
    ($($text:tt)*) => {
        $crate::failure::Failure::new($crate::failure::FailureKind::InvalidUsage, format!($($text)*))
    };
}
