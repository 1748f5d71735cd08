//! The first words of a stream.

/// Which stream it is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Greeting {
    /// The same on all hosts of one communicator, another one for each that is made.
    pub(crate) communicator: u64,
    /// Whose stream it is.
    pub(crate) host: u32,
}

pub(super) const GREETING_BYTES: usize = 16;
const GREETING_MAGIC: u32 = u32::from_le_bytes(*b"TPNB");

impl Greeting {
    pub(crate) fn encode(self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        bytes[..4].copy_from_slice(&GREETING_MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.host.to_le_bytes());
        bytes[8..].copy_from_slice(&self.communicator.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; GREETING_BYTES]) -> Option<Self> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four"));
        let communicator = u64::from_le_bytes(bytes[8..].try_into().expect("eight"));
        (word(0) == GREETING_MAGIC).then_some(Self { communicator, host: word(4) })
    }
}
