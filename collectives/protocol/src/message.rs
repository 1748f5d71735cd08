//! The header in front of every message between two ranks of a host; fixed size, little endian.

use crate::op::{Op, Shape};
use tpurun_kernels::dtype::Dtype;
use tpurun_memory::text::tail;

const MAGIC: u32 = u32::from_le_bytes(*b"tpum");
const SITE_BYTES: usize = 96;
const SHOWN_DIMS: usize = 4;
/// Bytes of an encoded header.
pub const HEADER_BYTES: usize = SITE_AT + SITE_BYTES;
const DIMS_AT: usize = 40;
const SITE_AT: usize = DIMS_AT + SHOWN_DIMS * 8;

/// The description of a message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MessageHeader {
    /// The epoch of the communicator: a message of another one is refused.
    pub epoch: u32,
    /// The tag that send and receive must have alike.
    pub tag: i32,
    /// The type of its elements.
    pub dtype: Dtype,
    /// The length of the message.
    pub bytes: u64,
    ndim: u32,
    dims: [i64; SHOWN_DIMS],
    site: String,
}

/// Bytes that are no header.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a message header has {what} {given}")]
pub struct BadHeader {
    what: &'static str,
    given: u64,
}

impl MessageHeader {
    /// The header of a send, or the one a receive expects.
    pub fn of(op: &Op, epoch: u32) -> Self {
        let mut dims = [0; SHOWN_DIMS];
        for (to, from) in dims.iter_mut().zip(op.shape.dims()) {
            *to = *from;
        }
        let bytes = op.inputs.total().max(op.outputs.total()) as u64;
        let site = op.site.to_string();
        Self { epoch, tag: op.tag, dtype: op.dtype, bytes, ndim: op.shape.ndim(), dims, site }
    }

    /// The bytes on the ring.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&MAGIC.to_le_bytes());
        put(&self.tag.to_le_bytes());
        put(&self.bytes.to_le_bytes());
        put(&(self.dtype as u32).to_le_bytes());
        put(&self.ndim.to_le_bytes());
        let site = tail(&self.site, SITE_BYTES);
        put(&(site.len() as u64).to_le_bytes());
        put(&u64::from(self.epoch).to_le_bytes());
        for dim in self.dims {
            put(&dim.to_le_bytes());
        }
        put(site.as_bytes());
        out
    }

    /// Reads what [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// The field that cannot be.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, BadHeader> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if word(0) != MAGIC {
            return Err(BadHeader { what: "magic", given: word(0).into() });
        }
        let dtype =
            Dtype::try_from(word(16)).map_err(|_| BadHeader { what: "dtype", given: word(16).into() })?;
        let payload = long(8);
        if !payload.is_multiple_of(dtype.size() as u64) || payload > 1 << 48 {
            return Err(BadHeader { what: "a length of", given: payload });
        }
        let site_bytes = long(24);
        if site_bytes > SITE_BYTES as u64 {
            return Err(BadHeader { what: "a call site of length", given: site_bytes });
        }
        let epoch = long(32);
        let epoch = u32::try_from(epoch).map_err(|_| BadHeader { what: "epoch", given: epoch })?;
        let site = &bytes[SITE_AT..SITE_AT + site_bytes as usize];
        Ok(Self {
            epoch,
            tag: word(4) as i32,
            dtype,
            bytes: payload,
            ndim: word(20),
            dims: std::array::from_fn(|dim| long(DIMS_AT + dim * 8) as i64),
            site: String::from_utf8_lossy(site).into_owned(),
        })
    }

    /// `send(f32[4], to rank 1) at train.py:3`.
    pub fn describe(&self, to: u32) -> String {
        let shape = Shape::new(&self.dims[..(self.ndim as usize).min(SHOWN_DIMS)]);
        let at = if self.site.is_empty() { String::new() } else { format!(" at {}", self.site) };
        format!("send({}{shape}, to rank {to}){at}", self.dtype)
    }
}

#[cfg(test)]
#[cfg(not(tpurun_loom))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> MessageHeader {
        MessageHeader {
            epoch: 3,
            tag: -7,
            dtype: Dtype::F32,
            bytes: 24,
            ndim: 2,
            dims: [2, 3, 0, 0],
            site: "a.py:1".into(),
        }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        assert_eq!(MessageHeader::decode(&header().encode()), Ok(header()));
        assert_eq!(header().describe(1), "send(f32[2, 3], to rank 1) at a.py:1");
    }

    proptest! {
        #[test]
        fn foreign_bytes_never_panic(noise in prop::collection::vec(any::<(usize, u8)>(), 0..8)) {
            let mut bytes = header().encode();
            for (at, byte) in noise {
                bytes[at % HEADER_BYTES] = byte;
            }
            if let Ok(header) = MessageHeader::decode(&bytes) {
                let _ = header.describe(0);
            }
        }
    }
}
