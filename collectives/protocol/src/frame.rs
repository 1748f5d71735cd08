//! Frames between the hosts of a communicator: a fixed header, little-endian, and its payload. A frame is trusted in
//! nothing. docs/wire.md describes frames for others.
//!
//! | bytes | field                                             |
//! |-------|---------------------------------------------------|
//! | 0     | kind                                              |
//! | 1-3   | zero                                              |
//! | 4-7   | the rank of the communicator that it is about     |
//! | 8-11  | round of the meeting                              |
//! | 12-15 | offset of the payload in its area of that rank    |
//! | 16-19 | bytes of the payload, which follow                |

/// The content of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum FrameKind {
    /// A piece of a rank's slot: its match key and the details for messages.
    Slot = 1,
    /// A piece of the keys that it offers behind that.
    Behind = 2,
    /// A piece of its counts per peer.
    Splits = 3,
    /// A piece of what it has staged.
    Window = 4,
    /// All ranks of the host have come to the round; their pieces were before this. They come over as many connections
    /// as the offset says, and each says so; those beside the first one say 0.
    Arrived = 5,
    /// A rank is there: its process id.
    Member = 6,
    /// How far a rank is: [`RankStatus`].
    Status = 7,
    /// The communicator has failed, for this reason on all hosts: [`Failed`].
    Failed = 8,
    /// The next bytes of the ring from this rank to the one in the place of the offset, on the channel in the place
    /// of the round.
    Ring = 9,
    /// How many bytes this rank has taken in all from the ring of the rank in the place of the offset, on the
    /// channel in the place of the round.
    Taken = 10,
    /// The communicator has failed on this host: [`Failed`], for the deciding host.
    Proposed = 11,
    /// A piece of the result of the round before that its host has folded for all.
    Folded = 12,
}

impl FrameKind {
    /// Whether it is bytes for a place, which may come one after the other.
    pub fn is_piece(self) -> bool {
        matches!(self, Self::Slot | Self::Behind | Self::Splits | Self::Window | Self::Folded)
    }
}

/// The header of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHeader {
    /// The content.
    pub kind: FrameKind,
    /// The rank of the communicator that it is about.
    pub rank: u32,
    /// The round of the meeting.
    pub round: u32,
    /// Where the payload begins in its area of that rank.
    pub offset: u32,
    /// The length of the payload.
    pub bytes: u32,
}

/// Length of a header.
pub const HEADER_BYTES: usize = 20;
/// Most bytes of a payload: a larger one goes in pieces.
pub const MOST_BYTES: usize = 256 << 10;
/// The same of what goes over several connections, so that each gets as much as the others.
pub const STRIPE_BYTES: usize = 64 << 10;

impl FrameHeader {
    /// The bytes on the wire.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind as u8;
        for (index, word) in [self.rank, self.round, self.offset, self.bytes].into_iter().enumerate() {
            bytes[4 + 4 * index..8 + 4 * index].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// `None` when it is not one that [`encode`](Self::encode) makes, or says that more follows than may.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        use FrameKind::*;
        let kinds =
            [Slot, Behind, Splits, Window, Arrived, Member, Status, Failed, Ring, Taken, Proposed, Folded];
        let kind = kinds.into_iter().find(|kind| *kind as u8 == bytes[0])?;
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four"));
        let header = Self { kind, rank: word(4), round: word(8), offset: word(12), bytes: word(16) };
        (bytes[1..4] == [0; 3] && header.bytes as usize <= MOST_BYTES).then_some(header)
    }
}

/// How far a rank is, for those who do not see it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RankStatus {
    /// Rounds it has come to.
    pub arrived: u64,
    /// Collectives it has posted.
    pub posted: u64,
    /// One more than the first collective that it takes no part in; 0 while there is none.
    pub left: u64,
    /// Not 0 when its process is gone.
    pub lost: u64,
}

impl RankStatus {
    /// The length on the wire.
    pub const BYTES: usize = 32;

    /// The bytes on the wire.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let words = [self.arrived, self.posted, self.left, self.lost];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// `None` for bytes of another length.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight"));
        Some(Self { arrived: word(0), posted: word(8), left: word(16), lost: word(24) })
    }
}

/// Why a communicator has failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failed {
    /// A number of [`FailureKind`](tpurun_memory::failure::FailureKind).
    pub kind: u32,
    /// Ranks of the communicator.
    pub blamed: Vec<u32>,
    /// The text that all ranks raise.
    pub text: String,
}

impl Failed {
    /// The bytes on the wire.
    pub fn encode(&self) -> Vec<u8> {
        let words = [self.kind, self.blamed.len() as u32].into_iter().chain(self.blamed.iter().copied());
        words.flat_map(u32::to_le_bytes).chain(self.text.bytes()).collect()
    }

    /// `None` when they end too early.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().expect("four")));
        let (kind, count) = (word(0)?, word(4)? as usize);
        // Fewer than there are bytes, so the list has an honest length.
        let text = 8_usize.checked_add(count.checked_mul(4)?)?;
        let blamed = bytes.get(8..text)?.chunks_exact(4);
        let blamed = blamed.map(|word| u32::from_le_bytes(word.try_into().expect("four"))).collect();
        Some(Self { kind, blamed, text: String::from_utf8_lossy(&bytes[text..]).into_owned() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_header_is_decoded_or_refused(bytes: [u8; HEADER_BYTES]) {
            if let Some(header) = FrameHeader::decode(&bytes) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }

        #[test]
        fn headers_survive(kind in 1_u8..=12, rank: u32, round: u32, offset: u32, bytes in 0..=MOST_BYTES as u32) {
            let mut words = [0; HEADER_BYTES];
            words[0] = kind;
            let kind = FrameHeader::decode(&words).expect("a kind").kind;
            let header = FrameHeader { kind, rank, round, offset, bytes };
            prop_assert_eq!(FrameHeader::decode(&header.encode()), Some(header));
        }

        #[test]
        fn failures_survive(kind: u32, blamed in proptest::collection::vec(any::<u32>(), 0..9), text in ".{0,99}") {
            let failed = Failed { kind, blamed, text };
            prop_assert_eq!(Failed::decode(&failed.encode()), Some(failed));
        }

        #[test]
        fn any_payload_is_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some(status) = RankStatus::decode(&bytes) {
                prop_assert_eq!(&status.encode()[..], &bytes[..]);
            }
            if let Some(failed) = Failed::decode(&bytes) {
                prop_assert!(failed.blamed.len() * 4 + 8 <= bytes.len());
            }
        }
    }
}
