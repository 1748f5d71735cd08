//! Folds of what is large among the ranks of one host, as a pipeline.
//!
//! Every rank folds its tensor to what the ranks before it have left, piece after piece; what the last one leaves is
//! the result, which the others take. (The pipeline of Worringen, "Pipelining and overlapping for MPI collective
//! operations", LCN 2003, over memory that all share.) Windows are as many as ranks; pieces are few and stay in a
//! level 2 cache, and a rank goes through several of them in its turn, where it would come to two meetings for each
//! stretch of a window.
//!
//! Data that outgrows the caches is limited by memory, and by ranks taking turns. There a rank takes no turn to take
//! a piece: it copies one while it folds another, so that memory reads and writes at once.
//!
//! Where a piece begins, all ranks hold copies of the result that was there before: the first one writes past the
//! caches. It does so with long pieces only where that is faster. There cores share no cache, and an operation takes
//! two thirds of the time; where they do share one, it would take 1.05 of it, as the second rank reads memory.
//!
//! Bytes moved for an all-reduce of S bytes on N ranks: 2 to begin, 3 (N - 1) to fold, 2 N to take the result.

use std::ops::Range;

use crate::execute::lookout::Lookout;
use crate::plan::copying;
use crate::plan::measured_choice::{MeasuredChoice, Method};
use crate::plan::sizes::{BEHIND, Flow, PipelinePieces, Taking};
use tpurun_kernels::reduce::{Copying, Reduction};
use tpurun_memory::buffer::{Fetch, Link};
use tpurun_memory::failure::Failure;
use tpurun_memory::sync::Chain;
use tpurun_memory::traffic::{Counter, Traffic};
use tpurun_protocol::layout::LINE;
use tpurun_protocol::op::{Op, OpKind};
use tpurun_protocol::segment::Segment;

/// One operation.
#[derive(Debug)]
pub(crate) struct Pipelined<'a> {
    segment: &'a Segment,
    op: &'a Op,
    traffic: &'a Counter,
    reduction: Reduction,
    link: Link,
    /// Elements of a piece, but of the last one.
    piece: usize,
    places: usize,
    /// Ranks between a piece and a rank at which that rank begins to look for it.
    near: u32,
    /// Where the pieces lie.
    memory: Range<usize>,
    /// The bytes of the tensor whose result this rank takes.
    taken: Range<usize>,
    taking: Taking,
    /// How this rank's tensor is read, or copied by the first one, and how results are taken.
    copying: (Copying, Copying),
}

impl<'a> Pipelined<'a> {
    /// The pieces go through `memory`, which nobody else uses meanwhile.
    pub(crate) fn new(segment: &'a Segment, op: &'a Op, traffic: &'a Counter, memory: Range<usize>) -> Self {
        let (rank, ranks) = (segment.rank(), segment.size());
        let tuning = segment.tuning();
        let reduction = op.reduction(ranks);
        let cores = ranks.min(segment.planned_cpus()) as usize;
        let wide = reduction.wide().size();
        let total = op.inputs.total() / reduction.dtype().size() * wide;
        let outgrows_caches = copying::operands_outgrow_caches(op, ranks as usize, tuning.cache_bytes);
        let flow = Flow { ranks: ranks as usize, cores, bytes: total, outgrows_caches };
        let pieces = PipelinePieces::of(flow, memory.len(), tuning);
        let PipelinePieces { taking, places, bytes, near, .. } = pieces;
        let link = Link::of(rank, ranks);
        let copying = copying::pipeline(segment, op, link, &pieces);
        let taken = match op.kind {
            OpKind::ReduceScatter => {
                let start = (0..rank as usize).map(|chunk| op.inputs.chunk_bytes(chunk)).sum();
                start..start + op.inputs.chunk_bytes(rank as usize)
            }
            OpKind::Reduce if op.root != Some(rank) => 0..0,
            _ => 0..op.inputs.total(),
        };
        let piece = (bytes / wide / LINE * LINE).max(LINE);
        Self { segment, op, traffic, reduction, link, piece, places, near, memory, taken, taking, copying }
    }

    /// How many pieces there are.
    pub(crate) fn pieces(&self) -> u64 {
        let elements = self.op.inputs.total() / self.reduction.dtype().size();
        elements.div_ceil(self.piece) as u64
    }

    /// Goes through the pieces, of which `first` is the number of the first one since the communicator began. `choice`
    /// is of how the first rank wrote all those before.
    pub(crate) fn run(
        &self,
        first: u64,
        choice: &mut MeasuredChoice,
        mut lookout: Lookout<'_>,
    ) -> Result<(), Failure> {
        let segment = self.segment;
        let behind = BEHIND as u64;
        let is_at_once = self.taking == Taking::AtOnce;
        let most = if is_at_once { self.places } else { BEHIND };
        let chain = segment.rings().chain(self.places as u64, most as u64, self.near);
        let end = first + self.pieces();
        let (mut to_fold, mut to_take) = (first, first);
        while to_take < end {
            let seen = lookout.rings();
            let takes_alone = is_at_once || to_fold == end;
            if takes_alone && to_take < to_fold && chain.is_whole(to_take) {
                self.take(to_take, first);
                self.leave(&chain, to_take);
                to_take += 1;
            } else if to_fold < end && chain.may_fold(to_fold) {
                // That one is whole: otherwise nobody would have begun this one.
                let is_due = !is_at_once && to_take + behind == to_fold;
                self.fold(to_fold, is_due.then_some(to_take), first, choice);
                chain.folded(to_fold);
                self.tell(is_at_once || to_fold + behind >= end);
                to_fold += 1;
                if is_due {
                    self.leave(&chain, to_take);
                    to_take += 1;
                }
            } else {
                let needed = || segment.ranks().collect();
                let is_soon = (to_fold < end && chain.may_fold_soon(to_fold))
                    || (takes_alone && to_take < to_fold && chain.is_whole_soon(to_take));
                if is_soon {
                    lookout.wait(seen, needed)?
                } else {
                    lookout.sleep(seen, needed)?
                }
                continue;
            }
            lookout.moved();
        }
        Ok(())
    }

    fn leave(&self, chain: &Chain<'_>, piece: u64) {
        if chain.leave(piece) {
            self.segment.doorbell(0).ring();
        }
    }

    /// Tells the ranks that wait for what this rank has folded, and those for whom it comes near. All wait for a
    /// piece that they take alone, otherwise the first one does, to begin another.
    fn tell(&self, is_taken_alone: bool) {
        let (segment, me) = (self.segment, self.segment.rank());
        match self.link {
            Link::Last if is_taken_alone => {
                segment.ranks().filter(|rank| *rank != me).for_each(|rank| segment.doorbell(rank).ring())
            }
            Link::Last => segment.doorbell(0).ring(),
            _ => {
                let next = [me + 1, me + self.near];
                next.into_iter()
                    .filter(|rank| *rank < segment.size())
                    .for_each(|rank| segment.doorbell(rank).ring());
            }
        }
    }

    /// Folds a piece, and takes another one if that is due.
    fn fold(&self, piece: u64, due: Option<u64>, first: u64, choice: &mut MeasuredChoice) {
        let (stretch, at) = self.place(piece, first);
        let bytes = stretch.len();
        let region = self.segment.region();
        let due = due.and_then(|due| self.taken(due, first));
        let fetch = due.map(|(place, at)| Fetch { to: &self.op.outputs, place, at });
        let fold = |how| {
            self.op.inputs.fold_on(
                self.link,
                (how, fetch),
                (stretch.start, bytes),
                self.reduction,
                region,
                at,
            );
        };
        // Others take no time that these could be compared by.
        let full = self.piece * self.reduction.dtype().size();
        let is_full = bytes == full && due.is_some_and(|((_, bytes), _)| bytes == full);
        match self.link {
            Link::First if is_full => choice.run(|way| {
                fold(if way == Method::Usual { Copying::Loading } else { Copying::Streaming });
            }),
            _ => fold(self.copying.0),
        }
        self.traffic.stage(due.map_or(0, |((_, bytes), _)| bytes));
        let partial = bytes * self.reduction.widening();
        let (found, left) = match self.link {
            Link::First => (0, partial),
            Link::Middle => (partial, partial),
            Link::Last => (partial, bytes),
        };
        let (read, written, staged) = (bytes + found, left, found + left);
        self.traffic.add(Traffic { read: read as u64, written: written as u64, staged: staged as u64 });
    }

    fn take(&self, piece: u64, first: u64) {
        if let Some(((start, bytes), at)) = self.taken(piece, first) {
            self.op.outputs.fetch(self.copying.1, (0, start), bytes, self.segment.region(), at);
            self.traffic.stage(bytes);
        }
    }

    /// Returns what this rank takes of a piece: the bytes of its result, and where they lie.
    fn taken(&self, piece: u64, first: u64) -> Option<((usize, usize), usize)> {
        let (stretch, at) = self.place(piece, first);
        let (start, end) = (stretch.start.max(self.taken.start), stretch.end.min(self.taken.end));
        (start < end).then(|| ((start - self.taken.start, end - start), at + start - stretch.start))
    }

    /// The bytes of the tensor that a piece is of, and where it lies.
    fn place(&self, piece: u64, first: u64) -> (Range<usize>, usize) {
        let (size, wide) = (self.reduction.dtype().size(), self.reduction.wide().size());
        let start = (piece - first) as usize * self.piece * size;
        let end = (start + self.piece * size).min(self.op.inputs.total());
        let place = (piece % self.places as u64) as usize;
        (start..end, self.memory.start + place * self.piece * wide)
    }
}
