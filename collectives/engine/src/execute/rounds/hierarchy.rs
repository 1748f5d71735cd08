//! The work of a meeting where ranks are on several hosts: it says which data of this host others need, and folds
//! in two halves, first over the ranks of each host, so that a host sends one result and not one tensor for
//! each of its ranks, then over the hosts.
//!
//! The second half is done by every host for itself, from all that all have sent; or each host folds the
//! stretches of its ranks and sends the results at the next meeting (Rabenseifner, "Optimization of
//! Collective Reduction Operations", ICCS 2004): H hosts then send 2 S (H - 1) / H each for S bytes, and not
//! S (H - 1). For a reduce-scatter, each rank does the second half of its own chunk. Partial results of small
//! floats are `f32`, and so many times as large on their way.

use std::ops::Range;

use crate::matching::splits;
use tpurun_kernels::reduce::{Copying, Reduction};
use tpurun_memory::buffer::Spans;
use tpurun_memory::failure::Failure;
use tpurun_protocol::match_key::{OFFER_BYTES, Slot};
use tpurun_protocol::op::Op;
use tpurun_protocol::segment::Segment;
use tpurun_protocol::segment::remote::Gathered;
use tpurun_protocol::segment::remote::{ArenaStretch, Written};
use tpurun_protocol::strategy::Strategy;

use super::fold::cut;
use super::{About, Meet, Rounds, turn_of};

/// The work of a meeting between hosts, beside its work on one host.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Between {
    /// Distance of the ranks' stretches in what is folded, where every host folds those of its ranks alone.
    pub(crate) scattered: Option<usize>,
    /// Distance of what has been staged for each rank, of which a host sends the sum over its ranks.
    pub(crate) for_each: Option<usize>,
    /// The stretches that were folded that way at the meeting before, which all hosts get now.
    pub(crate) gathered: Gathered,
}

/// Where the partial results of all hosts are at a round of this turn.
pub(crate) fn partials(segment: &Segment, turn: usize) -> impl Iterator<Item = usize> + Clone {
    let (hosts, layout) = (segment.hosts(), segment.layout());
    (0..hosts.count()).map(move |host| match host == segment.host() {
        true => layout.partial(turn),
        false => layout.window(hosts.first(host), turn % 2),
    })
}

impl Rounds {
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
        let mut stretches = vec![];
        if let Some((first, _)) = halves {
            let Between { scattered, for_each, .. } = meet.between;
            if let Some(stride) = scattered {
                let parts = Gathered { stride, bytes: meet.fold_bytes };
                staged.each = segment.ranks().map(|rank| parts.of(rank).len()).collect();
            }
            if let Some(stride) = for_each {
                stretches.extend((0..).step_by(stride).zip(staged.each.iter().copied()));
            }
            (written.for_all, written.stride) = (0, 0);
            match scattered.or(for_each) {
                _ if !is_first => {}
                None => written.partial = meet.fold_bytes * first.widening(),
                Some(stride) => {
                    staged.each.iter_mut().for_each(|bytes| *bytes *= first.widening());
                    (written.stride, written.is_partial) = (stride * first.widening(), true);
                }
            }
        }
        if is_first {
            written.folded = meet.between.gathered;
        }
        segment.remote().set_written(parity, written, &staged.each);
        segment.remote().count_written(|| {
            let Some((first, _)) = halves else { return };
            for (offset, bytes) in stretches {
                self.fold_here(first, self.turn(), offset, bytes);
            }
        });
    }

    /// Where the input of a fold can be read by the other ranks of this host, if it need not be staged for them.
    pub(crate) fn place(&mut self, op: &Op) -> Option<ArenaStretch> {
        let is_apart = !op.outputs.overlaps(&op.inputs) || op.outputs.is_same_memory(&op.inputs);
        let is_alike = op.reduction(self.segment.size()).widening() == 1;
        // A rank that folds has the pages of all ranks in its page table. With more ranks than cores, a
        // different rank folds each time.
        let segment = &self.segment;
        let here = segment.ranks_here().len();
        if !(is_apart && is_alike && here <= segment.planned_cpus() as usize) {
            return None;
        }
        let place = self.mapping.place(segment, &self.config.arenas, &op.inputs);
        self.is_lent |= place.is_some() && here > 1;
        place
    }

    /// Whether the first half of a fold is left to this rank, and all others here have what they fold in their windows:
    /// then this one can read its own where it is.
    pub(crate) fn can_fold_own(&self, turn: usize) -> bool {
        let (segment, parity) = (&self.segment, turn % 2);
        let is_staged =
            |rank: &u32| *rank == segment.rank() || segment.remote().place(*rank, parity).is_none();
        segment.remote().stages_last(parity) && segment.ranks_here().iter().all(is_staged)
    }

    /// The first half of a fold of so many bytes that this rank has for the round of this turn, if it is the last one
    /// here to say so. That round may begin later. `own` is where its input has them, if they are not staged.
    pub(crate) fn staged_half(
        &self,
        op: &Op,
        turn: usize,
        bytes: usize,
        own: Option<usize>,
    ) -> Result<(), Failure> {
        let first = op.reduction(self.segment.size()).first_half();
        let is_last = self.segment.remote().count_staged(turn % 2);
        match own {
            Some(offset) => self.fold_own(first, turn, (&op.inputs, offset), bytes),
            None if is_last => return self.fold_placed(first, turn, bytes),
            None => {}
        }
        Ok(())
    }

    /// The same, of this rank's tensor and the windows of the others here.
    fn fold_own(&self, first: Reduction, turn: usize, (inputs, offset): (&Spans, usize), bytes: usize) {
        let (segment, layout) = (&self.segment, self.segment.layout());
        let ranks = segment.ranks_here();
        let window = |rank: &u32| (*rank != segment.rank()).then(|| layout.window(*rank, turn % 2));
        let (region, out) = (segment.region(), layout.partial(turn));
        inputs.fold_with((offset, bytes), first, region, ranks.iter().map(window), out);
        self.shared.traffic.in_place(bytes, 1, 0);
        self.shared.traffic.fold_staged(bytes, ranks.len() - 1);
    }

    /// The same, of what may not be in windows.
    fn fold_placed(&self, first: Reduction, turn: usize, bytes: usize) -> Result<(), Failure> {
        let (segment, layout) = (&self.segment, self.segment.layout());
        let ranks = segment.ranks_here();
        let places: Vec<_> = ranks.iter().map(|rank| segment.remote().place(*rank, turn % 2)).collect();
        if first.widening() != 1 || places.iter().all(Option::is_none) {
            self.fold_here(first, turn, 0, bytes);
            return Ok(());
        }
        // The place is of another operation than this rank's: the keys will say so.
        if places.iter().flatten().any(|place| place.bytes != bytes as u64) {
            return Ok(());
        }
        let source = |(rank, place): (&u32, &Option<_>)| match place {
            Some(place) => self.mapping.read_at(segment, *rank, *place),
            None => Ok(Spans::of_region(segment.region(), layout.window(*rank, turn % 2), bytes)),
        };
        let staged = places.iter().filter(|place| place.is_none()).count();
        let sources = ranks.iter().zip(&places).map(source).collect::<Result<Vec<_>, _>>()?;
        let out = Spans::of_region(segment.region(), layout.partial(turn), bytes);
        self.in_place(|| {
            Spans::fold_to_each(Copying::Cached, &sources, &[out], first, 0, bytes);
            self.shared.traffic.in_place(bytes, sources.len() - staged, 0);
            self.shared.traffic.fold_staged(bytes, staged);
            Ok(())
        })
    }

    /// The first half of a fold, over the windows of this host.
    fn fold_here(&self, first: Reduction, turn: usize, offset: usize, bytes: usize) {
        let (segment, layout) = (&self.segment, self.segment.layout());
        let ranks = segment.ranks_here();
        let windows = ranks.iter().map(|rank| layout.window(*rank, turn % 2) + offset);
        let (region, out) = (segment.region(), layout.partial(turn) + first.bytes_of(offset));
        region.read_alone(bytes, windows.clone(), |start, bytes| {
            let windows = windows.clone().map(|window| window + start);
            region.fold(first, windows, out + first.bytes_of(start), bytes / first.dtype().size());
        });
        self.shared.traffic.fold_staged(bytes, ranks.len());
    }

    /// The two halves of a fold between hosts, where it is done so.
    pub(super) fn halves(&self, meet: &Meet<'_>) -> Option<(Reduction, Reduction)> {
        let is_fold = meet.fold_bytes > 0 || meet.between.for_each.is_some();
        if !(is_fold && meet.strategy.is_some_and(Strategy::is_hierarchical)) {
            return None;
        }
        let reduction = meet.op.reduction(self.segment.size());
        Some((reduction.first_half(), reduction.second_half()))
    }

    /// Bytes that are read for the fold of a meeting.
    pub(super) fn fold_work(&self, meet: &Meet<'_>) -> usize {
        let segment = &self.segment;
        let Some((first, _)) = self.halves(meet) else { return meet.fold_bytes * segment.size() as usize };
        let own = match meet.between.scattered {
            Some(stride) => stride * segment.ranks_here().len(),
            None => meet.fold_bytes,
        };
        own * first.widening() * segment.hosts().count() as usize
    }

    /// A piece of the second half of a fold: over what each host has made of its ranks' windows.
    pub(super) fn fold_hosts(&self, meet: &Meet<'_>, second: Reduction, (piece, of): (u32, u32), round: u32) {
        let turn = turn_of(round);
        let (segment, layout) = (&self.segment, self.segment.layout());
        let Some(stride) = meet.between.scattered else {
            self.fold_partials(second, cut(meet.fold_bytes, piece, of), turn, layout.folded(turn));
            return;
        };
        let stretches = Gathered { stride, bytes: meet.fold_bytes };
        for rank in segment.ranks_here() {
            let Range { start, end } = stretches.of(*rank);
            let part = cut(end - start, piece, of);
            // It is whole at the next meeting.
            let out = layout.folded(turn + 1);
            self.fold_partials(second, start + part.start..start + part.end, turn, out);
        }
    }

    fn fold_partials(&self, second: Reduction, stretch: Range<usize>, turn: usize, folded: usize) {
        let segment = &self.segment;
        let count = stretch.len() / second.out().size();
        let at = second.bytes_for(stretch.start);
        let sources = partials(segment, turn).map(|start| start + at);
        segment.region().fold(second, sources, folded + stretch.start, count);
        self.shared.traffic.fold_staged(stretch.len(), segment.hosts().count() as usize);
    }
}
