//! The frames that come from another host.

use tpurun_protocol::frame::{FrameHeader, HEADER_BYTES};

/// Says why something that another host sent can not be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Wrong(pub(super) &'static str);

/// Finds the frames in a stream of bytes. Pieces of what ranks have written are handed on as they come, so that
/// nothing large is kept here.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    /// The beginning of a frame that is not whole yet.
    begun: Vec<u8>,
    /// The rest of a piece that has not come yet.
    piece: Option<FrameHeader>,
}

impl Frames {
    /// # Errors
    /// When the bytes are no frames, and what `take` says of them.
    pub(crate) fn feed(
        &mut self,
        mut bytes: &[u8],
        mut take: impl FnMut(&FrameHeader, &[u8]) -> Result<(), Wrong>,
    ) -> Result<(), Wrong> {
        while !bytes.is_empty() {
            if let Some(piece) = &mut self.piece {
                let (now, rest) = bytes.split_at(bytes.len().min(piece.bytes as usize));
                take(&FrameHeader { bytes: now.len() as u32, ..*piece }, now)?;
                bytes = rest;
                piece.offset = piece.offset.saturating_add(now.len() as u32);
                piece.bytes -= now.len() as u32;
                if piece.bytes == 0 {
                    self.piece = None;
                }
                continue;
            }
            let wanted = match self.begun.len() < HEADER_BYTES {
                true => HEADER_BYTES,
                false => HEADER_BYTES + self.header()?.bytes as usize,
            };
            let (now, rest) = bytes.split_at(bytes.len().min(wanted - self.begun.len()));
            self.begun.extend_from_slice(now);
            bytes = rest;
            if self.begun.len() < HEADER_BYTES {
                continue;
            }
            let header = self.header()?;
            if header.kind.is_piece() && header.bytes > 0 {
                self.begun.clear();
                self.piece = Some(header);
            } else if self.begun.len() == HEADER_BYTES + header.bytes as usize {
                take(&header, &self.begun[HEADER_BYTES..])?;
                self.begun.clear();
            }
        }
        Ok(())
    }

    fn header(&self) -> Result<FrameHeader, Wrong> {
        let header = self.begun.first_chunk().and_then(FrameHeader::decode);
        header.ok_or(Wrong("bytes that are no frame"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// However a stream is cut, the same comes out of it.
        #[test]
        fn frames_are_found_however_they_come(
            frames in proptest::collection::vec((1_u8..=12, proptest::collection::vec(any::<u8>(), 0..50)), 0..9),
            cuts in proptest::collection::vec(1_usize..40, 1..99),
        ) {
            let mut stream = vec![];
            let mut expected: Vec<(u8, u32, u8)> = vec![];
            for (kind, payload) in &frames {
                let mut header = [0; HEADER_BYTES];
                header[0] = *kind;
                header[16..].copy_from_slice(&(payload.len() as u32).to_le_bytes());
                stream.extend(header);
                stream.extend(payload);
                expected.extend((0_u32..).zip(payload).map(|(at, byte)| (*kind, at, *byte)));
            }
            let (mut found, mut rest, mut parser) = (vec![], &stream[..], Frames::default());
            let mut cuts = cuts.iter().cycle();
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rest.len().min(*cuts.next().expect("for ever")));
                rest = later;
                let took = parser.feed(now, |header, payload| {
                    assert_eq!(header.bytes as usize, payload.len());
                    let bytes = (header.offset..).zip(payload);
                    found.extend(bytes.map(|(at, byte)| (header.kind as u8, at, *byte)));
                    Ok(())
                });
                prop_assert_eq!(took, Ok(()));
            }
            prop_assert_eq!(found, expected);
        }
    }
}
