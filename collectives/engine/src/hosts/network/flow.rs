//! The states of a stream.

/// The state of a stream or connection after it was read or written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum StreamFlow {
    Open,
    /// The other side has said that it will say no more, or that it takes no more.
    Ended,
    /// The connection is gone, or the process at the other end is not let in.
    Broken(String),
}
