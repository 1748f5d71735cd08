//! Where the ranks of a host write what other hosts need: the places of each round.

use tpurun_protocol::frame::FrameKind;
use tpurun_protocol::layout::TURNS;
use tpurun_protocol::match_key::{OFFERS_BYTES, SLOT_BYTES};
use tpurun_protocol::segment::Segment;

/// Bytes that a rank has written somewhere, for other hosts.
#[derive(Clone, Copy)]
pub(super) struct WrittenBytes {
    pub(super) kind: FrameKind,
    pub(super) rank: u32,
    /// Where its pieces of this kind begin here.
    pub(super) place: usize,
    pub(super) offset: usize,
    pub(super) bytes: usize,
    /// The only host that needs it.
    pub(super) to: Option<u32>,
}

/// Returns the stretches that come with every round.
pub(super) fn small(segment: &Segment, round: u64) -> Vec<WrittenBytes> {
    let parity = (round % 2) as usize;
    let of_rank = |rank: &u32| {
        let (rank, written) = (*rank, segment.remote().written(*rank, parity));
        let kinds = [
            (FrameKind::Slot, written.slot),
            (FrameKind::Behind, written.behind),
            (FrameKind::Splits, written.splits),
        ];
        kinds.map(|(kind, bytes)| {
            let place = area(segment, kind, rank, round).0;
            WrittenBytes { kind, rank, place, offset: 0, bytes, to: None }
        })
    };
    segment.ranks_here().iter().flat_map(of_rank).collect()
}

/// Returns the stretches that have been staged and folded for a round.
pub(super) fn bulk(segment: &Segment, round: u64) -> Vec<WrittenBytes> {
    let (parity, layout) = ((round % 2) as usize, segment.layout());
    let own_ranks = segment.ranks_here();
    let mut bulk = vec![];
    for rank in own_ranks.iter().copied() {
        let written = segment.remote().written(rank, parity);
        let mut add = |kind, place, offset, bytes, to| {
            bulk.push(WrittenBytes { kind, rank, place, offset, bytes, to });
        };
        let window = layout.window(rank, parity);
        add(FrameKind::Window, window, 0, written.for_all, None);
        let partial = layout.partial(turn(round));
        add(FrameKind::Window, partial, 0, written.partial, None);
        let for_each = if written.is_partial { partial } else { window };
        if written.stride > 0 {
            for to in segment.ranks().filter(|to| !segment.is_here(*to)) {
                let bytes = segment.remote().written_for(rank, parity, to).min(written.stride);
                let offset = written.stride * to as usize;
                if offset + bytes <= layout.window_bytes() {
                    add(FrameKind::Window, for_each, offset, bytes, Some(segment.hosts().of(to)));
                }
            }
        }
        for own in own_ranks {
            let stretch = written.folded.of(*own);
            add(FrameKind::Folded, layout.folded(turn(round)), stretch.start, stretch.len(), None);
        }
    }
    bulk
}

pub(super) fn pieces(stretches: &[WrittenBytes], most: usize) -> impl Iterator<Item = WrittenBytes> {
    stretches.iter().flat_map(move |whole| {
        (0..whole.bytes).step_by(most).map(move |start| WrittenBytes {
            offset: whole.offset + start,
            bytes: (whole.bytes - start).min(most),
            ..*whole
        })
    })
}

fn turn(round: u64) -> usize {
    (round % TURNS as u64) as usize
}

/// Where a rank's pieces of this kind lie, and how much room they have.
pub(super) fn area(segment: &Segment, kind: FrameKind, rank: u32, round: u64) -> (usize, usize) {
    let (parity, layout) = ((round % 2) as usize, segment.layout());
    match kind {
        FrameKind::Slot => (layout.slot(rank, parity), SLOT_BYTES),
        FrameKind::Behind => (layout.behind(rank, parity), OFFERS_BYTES),
        FrameKind::Splits => (layout.splits(rank, parity), layout.splits_bytes()),
        FrameKind::Folded => (layout.folded(turn(round)), layout.window_bytes()),
        _ => (layout.window(rank, parity), layout.window_bytes()),
    }
}
