//! The protocols that connect two hosts.

/// The transport of what a bridge sends.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Protocol {
    /// Everything, or pieces of what is large.
    Quic,
    /// Only such pieces.
    Tcp,
}
