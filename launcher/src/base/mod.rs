//! Small things that every room uses: sets of ranks, private files, signals.
//!
//! Nothing here knows a job, a process of one, or another room.

pub(crate) mod private;
pub(crate) mod rank_set;
pub(crate) mod signals;
