//! What the lane does where ranks are on several hosts: says what others need of what is here, and folds in two
//! halves, first over the ranks of each host, so that a host sends one result and not one tensor for each of
//! its ranks, then over the hosts.
//!
//! The second half is done by every host for itself, from all that all have sent; or each host folds the stretches
//! of its ranks and sends what comes of it at the next meeting (Rabenseifner, "Optimization of Collective
//! Reduction Operations", ICCS 2004): of S bytes H hosts then send 2 S (H - 1) / H each, and not S (H - 1).

use std::ops::Range;

use crate::layout::LINE;
use crate::match_key::{OFFER_BYTES, Slot};
use crate::op::Op;
use crate::reduce::Reduction;
use crate::segment::Segment;
use crate::segment::crossing::Written;
use crate::splits;

use super::{About, Lane, Meet, cut};

/// What is smaller is folded at once between hosts: it takes longer to send it than to fold it.
const LEAST_HALVED: usize = 16 << 10;
/// What is smaller every host folds for itself: a meeting costs more than the bytes.
const LEAST_SCATTERED: usize = 128 << 10;
/// Two hosts send each other as many bytes either way.
const LEAST_HOSTS: u32 = 3;

/// What a meeting does between hosts beside what it does on one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Between {
    /// Distance of the ranks' stretches in what is folded, where every host folds those of its ranks alone.
    pub(crate) scattered: Option<usize>,
    /// What was folded that way at the meeting before, which all hosts get now.
    pub(crate) gathered: Gathered,
}

/// Stretches of a result, one for each rank, each folded on the rank's host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Gathered {
    /// Distance of the stretches.
    pub(crate) stride: usize,
    /// Of all of them.
    pub(crate) bytes: usize,
}

impl Gathered {
    /// So many bytes among so many ranks.
    pub(crate) fn among(bytes: usize, ranks: u32) -> Self {
        Self { stride: bytes.div_ceil(ranks as usize).next_multiple_of(LINE), bytes }
    }

    /// The stretch of one rank, which may be empty.
    pub(crate) fn of(&self, rank: u32) -> Range<usize> {
        let at = |rank: usize| rank.saturating_mul(self.stride).min(self.bytes);
        at(rank as usize)..at(rank as usize + 1)
    }
}

/// Whether hosts fold stretches of it, and not each of them all of it.
pub(crate) fn is_scattered(segment: &Segment, op: &Op) -> bool {
    segment.hosts().count() >= LEAST_HOSTS
        && op.inputs.total() >= LEAST_SCATTERED
        && op.reduction(segment.size()).first_half().is_some()
}

impl Lane {
    /// Says what of this rank's places other hosts need for the round, where there are any.
    pub(super) fn tell_bridge(&mut self, meet: &Meet<'_>, about: About) {
        if !self.segment.is_bridged() {
            return;
        }
        let mut staged = std::mem::take(&mut self.staged);
        let segment = &self.segment;
        let parity = self.parity();
        let mut written = Written { for_all: staged.for_all, stride: staged.stride, ..Written::default() };
        if about != About::Data {
            written.slot = Slot::new(segment.region(), segment.layout().slot(segment.rank(), parity)).bytes();
            written.behind = meet.behind.len() * OFFER_BYTES;
        }
        if matches!(about, About::Keys(_)) && splits::needed(meet.op.kind) {
            written.splits = segment.layout().splits_bytes();
        }
        let is_first = segment.hosts().first(segment.host()) == segment.rank();
        let halves = self.halves(meet);
        if halves.is_some() {
            written.for_all = 0;
            match meet.between.scattered {
                _ if !is_first => {}
                None => written.partial = meet.fold_bytes,
                Some(stride) => {
                    let stretches = Gathered { stride, bytes: meet.fold_bytes };
                    staged.each = segment.ranks().map(|rank| stretches.of(rank).len()).collect();
                    (written.stride, written.is_partial) = (stride, true);
                }
            }
        }
        if is_first {
            written.folded = meet.between.gathered;
        }
        segment.set_written(parity, written, &staged.each);
        segment.count_written(|| {
            if let Some((first, _)) = halves {
                let (layout, bytes) = (segment.layout(), meet.fold_bytes);
                let ranks = segment.hosts().ranks(segment.host());
                let windows = ranks.iter().map(|rank| layout.window(*rank, parity));
                segment.region().fold(first, windows, layout.partial(parity), bytes);
                self.shared.traffic.fold_staged(bytes, ranks.len());
            }
        });
    }

    /// The two halves of a fold between hosts. Small tensors are folded at once, in the order of ranks, and those
    /// where the halves would not fit together.
    pub(super) fn halves(&self, meet: &Meet<'_>) -> Option<(Reduction, Reduction)> {
        let is_large = meet.fold_bytes > 0 && meet.op.inputs.total() >= LEAST_HALVED;
        if !(self.segment.is_bridged() && is_large) {
            return None;
        }
        let reduction = meet.op.reduction(self.segment.size());
        Some((reduction.first_half()?, reduction.second_half()))
    }

    /// Bytes that are read for the fold of a meeting.
    pub(super) fn fold_work(&self, meet: &Meet<'_>) -> usize {
        let segment = &self.segment;
        match meet.between.scattered {
            Some(stride) => {
                stride * segment.hosts().ranks(segment.host()).len() * segment.hosts().count() as usize
            }
            None => meet.fold_bytes * segment.size() as usize,
        }
    }

    /// A piece of the second half of a fold: over what each host has made of its ranks' windows.
    pub(super) fn fold_hosts(&self, meet: &Meet<'_>, second: Reduction, (piece, of): (u32, u32), round: u32) {
        let parity = (round % 2) as usize;
        let (segment, layout) = (&self.segment, self.segment.layout());
        let Some(stride) = meet.between.scattered else {
            self.fold_partials(second, cut(meet.fold_bytes, piece, of), parity, layout.folded(parity));
            return;
        };
        let stretches = Gathered { stride, bytes: meet.fold_bytes };
        for rank in segment.hosts().ranks(segment.host()) {
            let Range { start, end } = stretches.of(*rank);
            let part = cut(end - start, piece, of);
            // It is whole at the next meeting.
            let out = layout.folded(1 - parity);
            self.fold_partials(second, start + part.start..start + part.end, parity, out);
        }
    }

    fn fold_partials(&self, reduction: Reduction, stretch: Range<usize>, parity: usize, folded: usize) {
        let (segment, layout) = (&self.segment, self.segment.layout());
        let hosts = 0..segment.hosts().count();
        let sources = hosts.clone().map(|host| {
            let own = host == segment.host();
            let at =
                if own { layout.partial(parity) } else { layout.window(segment.hosts().first(host), parity) };
            at + stretch.start
        });
        segment.region().fold(reduction, sources, folded + stretch.start, stretch.len());
        self.shared.traffic.fold_staged(stretch.len(), hosts.len());
    }
}
