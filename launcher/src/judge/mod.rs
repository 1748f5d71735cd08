//! The judgement on the ranks: who is to blame, who waits for whom, and the words for it.
//!
//! This room decides from what it is given. It starts, ends and tells no rank.

pub(crate) mod alone;
pub(crate) mod foreign;
pub(crate) mod heard;
pub(crate) mod last_words;
pub(crate) mod losses;
pub(crate) mod report;
pub(crate) mod suspects;
pub(crate) mod verdict;
pub(crate) mod wait_graph;
pub(crate) mod watch;
