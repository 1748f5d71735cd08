//! How long both ends of a connection wait for each other, and how often they look.

use std::time::{Duration, Instant};

/// A host counts as lost when nothing has come from it for so long. Each host says something four times as often.
pub(super) const SILENCE: Duration = Duration::from_secs(10);
/// Time between two looks for what nobody told of: changes in a segment, connections that are late, and hosts that
/// are to be tried again.
const LOOK: Duration = Duration::from_millis(100);

/// When to look next, if anything is to be looked for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NextLook(Option<Instant>);

impl NextLook {
    pub(super) fn after(now: Instant) -> Self {
        Self(Some(now + LOOK))
    }

    /// Has the next look be soon.
    pub(super) fn wake(&mut self, now: Instant) {
        self.0.get_or_insert(now + LOOK);
    }

    pub(super) fn deadline(self) -> Option<Instant> {
        self.0
    }

    pub(super) fn is_due(self, now: Instant) -> bool {
        self.0.is_some_and(|look| look <= now)
    }
}
