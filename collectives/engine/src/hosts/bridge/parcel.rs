//! Frames for one host, as the chunks that the network takes: small ones are copied one behind the other, large
//! pieces stay where they are until they have been received.

use std::sync::Arc;

use bytes::Bytes;

use tpurun_protocol::frame::FrameHeader;
use tpurun_protocol::segment::Segment;

/// Bytes of the smallest piece that is shared; a smaller one is copied.
const LEAST_SHARED: usize = 8 << 10;

/// Frames for one host.
#[derive(Debug, Default)]
pub(crate) struct Parcel {
    chunks: Vec<Bytes>,
    /// The last one, while it grows.
    open: Vec<u8>,
}

/// The frames that are to be sent, by host.
pub(crate) type Outbox = Vec<Parcel>;

/// Bytes that ranks have written, of one place.
pub(super) enum Piece {
    Copied(Vec<u8>),
    Shared(Bytes),
}

impl Piece {
    pub(super) fn of(segment: &Arc<Segment>, at: usize, bytes: usize) -> Self {
        if bytes < LEAST_SHARED {
            let mut copy = vec![0; bytes];
            segment.region().read(at, &mut copy);
            return Self::Copied(copy);
        }
        Self::Shared(Bytes::from_owner(Stretch { segment: segment.clone(), at, bytes }))
    }
}

/// Bytes of a segment, which nobody writes until the other hosts have received them: the ranks here write there
/// again two rounds later, or four where they are ahead by one, and for that all hosts have come to a round between,
/// and so have received this one. Bytes that QUIC sends once more after that are thrown away at the other end,
/// whatever they say then.
struct Stretch {
    segment: Arc<Segment>,
    at: usize,
    bytes: usize,
}

impl AsRef<[u8]> for Stretch {
    fn as_ref(&self) -> &[u8] {
        self.segment.region().shared(self.at, self.bytes)
    }
}

impl Parcel {
    /// A small frame.
    pub(super) fn push(&mut self, header: &FrameHeader, payload: &[u8]) {
        self.open.extend(header.encode());
        self.open.extend(payload);
    }

    /// One whose payload is written by `fill`.
    pub(super) fn push_with(&mut self, header: &FrameHeader, fill: impl FnOnce(&mut [u8])) {
        self.open.extend(header.encode());
        let start = self.open.len();
        self.open.resize(start + header.bytes as usize, 0);
        fill(&mut self.open[start..]);
    }

    pub(super) fn push_piece(&mut self, header: &FrameHeader, piece: &Piece) {
        match piece {
            Piece::Copied(bytes) => self.push(header, bytes),
            Piece::Shared(bytes) => {
                self.push(header, &[]);
                self.chunks.push(std::mem::take(&mut self.open).into());
                self.chunks.push(bytes.clone());
            }
        }
    }

    /// All of it, in order.
    pub(crate) fn into_chunks(mut self) -> Vec<Bytes> {
        if !self.open.is_empty() {
            self.chunks.push(self.open.into());
        }
        self.chunks
    }
}
