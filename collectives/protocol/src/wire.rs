//! The header before every segment: fixed, little-endian, and trusted in nothing.
//!
//! | bytes | field                                               |
//! |-------|-----------------------------------------------------|
//! | 0-3   | magic `TPRN`                                        |
//! | 4     | version                                             |
//! | 5     | form: 0 whole elements, 1 partial results           |
//! | 6-7   | zero                                                |
//! | 8-11  | epoch of the communicator                           |
//! | 12-15 | channel                                             |
//! | 16-23 | sequence number of the operation                    |
//! | 24-27 | chunk                                               |
//! | 28-31 | part of the chunk                                   |
//! | 32-39 | offset of the segment within its block, in bytes    |
//! | 40-43 | bytes of the segment, which follow the header       |
//! | 44-47 | check: a mix of everything before                   |

/// The description that a segment gives of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The form of the elements.
    pub form: Form,
    /// Membership generation of the communicator.
    pub epoch: u32,
    /// Lane of the schedule.
    pub channel: u32,
    /// Which operation of the communicator.
    pub seq: u64,
    /// Which chunk.
    pub chunk: u32,
    /// Which part of the chunk.
    pub part: u32,
    /// Where in the block the segment begins.
    pub offset: u64,
    /// Length of the segment.
    pub bytes: u32,
}

/// The form of the elements of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Form {
    /// Elements of the operation's dtype.
    Whole = 0,
    /// Partial results, in the wide type of the reduction.
    Partial = 1,
}

/// Why bytes are not a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// Fewer bytes than a header has.
    #[error("{bytes} bytes are no segment header, expected {HEADER_BYTES}")]
    Short {
        /// How many there are.
        bytes: usize,
    },
    /// Not ours, or not at the beginning of a header.
    #[error("segment header begins with {found:#010x}, expected {MAGIC:#010x}")]
    Magic {
        /// The number it begins with.
        found: u32,
    },
    /// From another version of this program.
    #[error("segment header of version {found}, expected {VERSION}")]
    Version {
        /// Theirs.
        found: u8,
    },
    /// Something was overwritten.
    #[error("segment header is damaged")]
    Check,
    /// A field has a value it can not have.
    #[error("segment header with {field} {value}")]
    Field {
        /// Which one.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}

/// Length of an encoded header.
pub const HEADER_BYTES: usize = 48;
/// The number that every header begins with.
pub const MAGIC: u32 = u32::from_le_bytes(*b"TPRN");
/// Changes with the layout.
pub const VERSION: u8 = 1;

impl Header {
    /// The bytes on the wire.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = VERSION;
        bytes[5] = self.form as u8;
        bytes[8..12].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.channel.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.seq.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.chunk.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.part.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.offset.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.bytes.to_le_bytes());
        let check = check(&bytes);
        bytes[44..48].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// Reads the header at the beginning of `bytes`.
    ///
    /// # Errors
    /// When it is not one that [`Header::encode`] makes. Whether it is the right one is for the execution.
    pub fn decode(bytes: &[u8]) -> Result<Self, HeaderError> {
        let Some(bytes) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Err(HeaderError::Short { bytes: bytes.len() });
        };
        let magic = word(bytes, 0);
        if magic != MAGIC {
            return Err(HeaderError::Magic { found: magic });
        }
        if bytes[4] != VERSION {
            return Err(HeaderError::Version { found: bytes[4] });
        }
        if word(bytes, 44) != check(bytes) {
            return Err(HeaderError::Check);
        }
        let form = match bytes[5] {
            0 => Form::Whole,
            1 => Form::Partial,
            other => return Err(HeaderError::Field { field: "form", value: other.into() }),
        };
        let reserved = u16::from_le_bytes([bytes[6], bytes[7]]);
        if reserved != 0 {
            return Err(HeaderError::Field { field: "reserved bits", value: reserved.into() });
        }
        Ok(Self {
            form,
            epoch: word(bytes, 8),
            channel: word(bytes, 12),
            seq: long(bytes, 16),
            chunk: word(bytes, 24),
            part: word(bytes, 28),
            offset: long(bytes, 32),
            bytes: word(bytes, 40),
        })
    }
}

fn word(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn long(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

/// Against accidents, not against malice: a torn write, a wrong offset.
fn check(bytes: &[u8; HEADER_BYTES]) -> u32 {
    let mix = |mix: u32, word: u32| (mix ^ word).wrapping_mul(0x9e37_79b1).rotate_left(13);
    (0..11).map(|index| word(bytes, 4 * index)).fold(VERSION.into(), mix)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    prop_compose! {
        fn header()(
            form in prop_oneof![Just(Form::Whole), Just(Form::Partial)],
            epoch: u32, channel: u32, seq: u64, chunk: u32, part: u32, offset: u64, bytes: u32,
        ) -> Header {
            Header { form, epoch, channel, seq, chunk, part, offset, bytes }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_is_encoded_is_decoded(header in header()) {
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert_eq!(&header.encode()[..], &bytes[..HEADER_BYTES]);
            }
        }

        #[test]
        fn a_flipped_bit_is_noticed(header in header(), bit in 0..HEADER_BYTES * 8) {
            let mut bytes = header.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Header::decode(&bytes).is_err());
        }

        /// Fields out of range with a check that fits: from a program that means it.
        #[test]
        fn fields_are_checked_too(header in header(), form in 2u8.., reserved in 1u16..) {
            let seal = |mut bytes: [u8; HEADER_BYTES]| {
                let check = check(&bytes);
                bytes[44..48].copy_from_slice(&check.to_le_bytes());
                bytes
            };
            let mut bytes = header.encode();
            bytes[5] = form;
            let error = HeaderError::Field { field: "form", value: form.into() };
            prop_assert_eq!(Header::decode(&seal(bytes)), Err(error));
            let mut bytes = header.encode();
            bytes[6..8].copy_from_slice(&reserved.to_le_bytes());
            let error = HeaderError::Field { field: "reserved bits", value: reserved.into() };
            prop_assert_eq!(Header::decode(&seal(bytes)), Err(error));
        }
    }
}
