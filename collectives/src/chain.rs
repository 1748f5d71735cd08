//! Folds of what is large among the ranks of one host, as a chain.
//!
//! Every rank folds its tensor to what the ranks before it have left, piece after piece; what the last one leaves is
//! the result, which the others take. (The pipeline of Worringen, "Pipelining and overlapping for MPI collective
//! operations", LCN 2003, over memory that all share.) Windows are as many as ranks; pieces are few and stay in a
//! level 2 cache, and a rank goes through several of them in its turn, where it would come to two meetings for each
//! stretch of a window.
//!
//! Bytes moved for an all-reduce of S bytes on N ranks: 2 to begin, 3 (N - 1) to fold, 2 N to take the result.

use std::ops::Range;

use crate::buffer::Link;
use crate::failure::Failure;
use crate::layout::{LINE, PLACES};
use crate::lookout::Lookout;
use crate::op::{Op, OpKind};
use crate::reduce::{Copying, Reduction};
use crate::segment::Segment;
use crate::sync::Chain;
use crate::traffic::{Counter, Traffic};

/// What is smaller goes through windows. Measured on 2 cores with 2 to 64 ranks, as is what follows.
const LEAST: usize = 1 << 20;
/// Bytes of a piece at least.
const LEAST_PIECE: usize = 64 << 10;
/// Pieces on their way for each core: while one is folded, another one is ready.
const FOR_EACH_CORE: usize = 2;
/// Ranks for each core that are awake before a piece comes to them: more would only take turns from those that fold.
const AWAKE: u32 = 4;
/// What all ranks have folded and not taken yet stays in the caches up to this, so that results can be written there.
const KEPT: usize = 8 << 20;

/// Whether an operation is done that way; the same on every rank.
pub(crate) fn is_chained(segment: &Segment, op: &Op) -> bool {
    // With a core for each rank, all of them fold at once out of windows.
    let is_shared = segment.size() > segment.planned_cpus();
    is_shared && op.kind.reduces() && !segment.is_bridged() && op.inputs.total() >= LEAST
}

/// Bytes of a piece: the more ranks share a core, the more each does in its turn.
fn most_of_piece(ranks_on_core: usize) -> usize {
    match ranks_on_core {
        0..2 => 128 << 10,
        2..16 => 256 << 10,
        _ => 512 << 10,
    }
}

/// One operation.
#[derive(Debug)]
pub(crate) struct Chained<'a> {
    segment: &'a Segment,
    op: &'a Op,
    traffic: &'a Counter,
    reduction: Reduction,
    link: Link,
    /// Elements of a piece, but of the last one.
    piece: usize,
    places: usize,
    /// So many ranks before a piece comes to it, a rank begins to look for it.
    near: u32,
    /// Where the pieces lie.
    memory: Range<usize>,
    /// The bytes of the tensor whose result this rank takes.
    taken: Range<usize>,
    /// How this rank's tensor is read, and how results are taken.
    copying: (Copying, Copying),
}

impl<'a> Chained<'a> {
    /// The pieces go through `memory`, which nobody else uses meanwhile.
    pub(crate) fn new(segment: &'a Segment, op: &'a Op, traffic: &'a Counter, memory: Range<usize>) -> Self {
        let (rank, ranks) = (segment.rank(), segment.size());
        let reduction = op.reduction(ranks);
        let cores = ranks.min(segment.planned_cpus()) as usize;
        let places = (FOR_EACH_CORE * cores).clamp(2 * FOR_EACH_CORE, PLACES);
        let wide = reduction.wide().size();
        let total = op.inputs.total() / reduction.dtype().size() * wide;
        let most = most_of_piece(ranks as usize / cores).min(memory.len() / places);
        let bytes = (total / places).max(LEAST_PIECE).min(most);
        let is_kept = ranks as usize * places * bytes <= KEPT;
        let outgrows = op.outgrows_caches(ranks as usize, false);
        let copying = (
            if outgrows { Copying::Loading } else { Copying::Cached },
            if is_kept { Copying::Cached } else { Copying::Streaming },
        );
        let taken = match op.kind {
            OpKind::ReduceScatter => {
                let start = (0..rank as usize).map(|chunk| op.inputs.chunk_bytes(chunk)).sum();
                start..start + op.inputs.chunk_bytes(rank as usize)
            }
            OpKind::Reduce if op.root != Some(rank) => 0..0,
            _ => 0..op.inputs.total(),
        };
        let link = Link::of(rank, ranks);
        let near = AWAKE * cores as u32;
        let piece = (bytes / wide / LINE * LINE).max(LINE);
        Self { segment, op, traffic, reduction, link, piece, places, near, memory, taken, copying }
    }

    /// How many pieces there are.
    pub(crate) fn pieces(&self) -> u64 {
        let elements = self.op.inputs.total() / self.reduction.dtype().size();
        elements.div_ceil(self.piece) as u64
    }

    /// Goes through the pieces, of which `first` is the number of the first one since the communicator began.
    pub(crate) fn run(&self, first: u64, mut lookout: Lookout<'_>) -> Result<(), Failure> {
        let segment = self.segment;
        let chain = segment.chain(self.places, self.near);
        let end = first + self.pieces();
        let (mut to_fold, mut to_take) = (first, first);
        while to_take < end {
            let seen = lookout.rings();
            // First: who takes a piece frees its place, and it is in the caches.
            if to_take < to_fold && chain.is_whole(to_take) {
                self.take(to_take, first);
                self.leave(&chain, to_take);
                to_take += 1;
            } else if to_fold < end && chain.may_fold(to_fold) {
                self.fold(to_fold, first);
                chain.folded(to_fold);
                self.tell();
                to_fold += 1;
            } else {
                let needed = || segment.ranks().collect();
                let is_soon = (to_fold < end && chain.may_fold_soon(to_fold))
                    || (to_take < to_fold && chain.is_whole_soon(to_take));
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

    /// Tells whoever waits for what this rank has folded, and for whom it comes near.
    fn tell(&self) {
        let (segment, me) = (self.segment, self.segment.rank());
        match self.link {
            Link::Last => {
                segment.ranks().filter(|rank| *rank != me).for_each(|rank| segment.doorbell(rank).ring())
            }
            _ => {
                let next = [me + 1, me + self.near];
                next.into_iter()
                    .filter(|rank| *rank < segment.size())
                    .for_each(|rank| segment.doorbell(rank).ring());
            }
        }
    }

    fn fold(&self, piece: u64, first: u64) {
        let (stretch, at) = self.place(piece, first);
        let bytes = stretch.len();
        let region = self.segment.region();
        self.op.inputs.fold_on(self.link, self.copying.0, (stretch.start, bytes), self.reduction, region, at);
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
        let (stretch, at) = self.place(piece, first);
        let (start, end) = (stretch.start.max(self.taken.start), stretch.end.min(self.taken.end));
        if start < end {
            let at = at + start - stretch.start;
            let place = (0, start - self.taken.start);
            self.op.outputs.fetch(self.copying.1, place, end - start, self.segment.region(), at);
            self.traffic.stage(end - start);
        }
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
