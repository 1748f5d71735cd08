//! How long both ends of a connection wait for each other, and how often they look.

use std::time::Duration;

/// A host counts as lost when nothing has come from it for so long. Each host says something four times as often.
pub(super) const SILENCE: Duration = Duration::from_secs(10);
/// Time between two looks for what nobody told of: changes in a segment, connections that are late, and hosts that
/// are to be tried again.
pub(super) const LOOK: Duration = Duration::from_millis(100);
