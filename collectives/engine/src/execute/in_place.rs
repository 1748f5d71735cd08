//! Collectives of tensors that all lie in arenas: ranks read and write them in place. Nothing is staged.
//!
//! Either the last to arrive and the ranks that help it do everything before the meeting opens, or every rank
//! does its share and all meet again. With more ranks than cores the helpers change, and each in turn would
//! have all pages of all ranks in its page table; a rank that does its own share always touches the same
//! ones. A second meeting is little beside that unless few bytes move.
//!
//! Bytes moved for an all-reduce of S bytes on N ranks: N S to read, N S to write. For a broadcast S and (N - 1) S,
//! or (N - 1) S and (N - 1) S where every rank reads its own: more to read, but nobody writes into the pages of all
//! others, which takes longer.
//!
//! Over several hosts only the input of a sum is read so, by the ranks of its host (`rounds/hierarchy.rs`).
//!
//! A rank says where its tensors are in the window it would stage them in. When one of them has a tensor
//! elsewhere, which all learn at the meeting, the operation is staged instead (`windows.rs`).

use std::cell::OnceCell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::plan::copying;
use tpurun_memory::arena::{Arena, ArenaKind, Arenas, Export, PeerArena};
use tpurun_memory::buffer::Spans;
use tpurun_memory::failure::Failure;
use tpurun_memory::region::Region;
use tpurun_memory::sync::{AtomicU64, Ordering};
use tpurun_memory::traffic::Counter;
use tpurun_protocol::layout::LINE;
use tpurun_protocol::op::{Op, OpKind};
use tpurun_protocol::segment::Segment;
use tpurun_protocol::segment::remote::ArenaStretch;

/// Pieces of one rank's tensors: tensors in more pieces are staged.
const MAX_PIECES: usize = 4096;
/// Words of a description before its pieces: how many inputs and outputs, and how many of them are a chunk.
const HEAD: usize = 4;

/// This process's view of the arenas of a communicator.
#[derive(Debug, Default)]
pub(crate) struct Mapping([Peers; ArenaKind::ALL.len()]);

/// The arenas of one kind of all ranks.
#[derive(Debug, Default)]
enum Peers {
    /// Not all ranks have one yet.
    #[default]
    Missing,
    /// One can not be mapped: everything is staged.
    Refused,
    Ready(Arc<[Arc<PeerArena>]>),
}

/// An operation of this rank whose tensors are in its arena.
#[derive(Debug)]
pub(crate) struct InPlace {
    kind: ArenaKind,
    arenas: Arc<[Arc<PeerArena>]>,
    parity: usize,
    /// Made by the ranks that work on it, once all have arrived.
    plan: OnceCell<Plan>,
}

/// All that is to be done.
#[derive(Debug)]
struct Plan {
    tasks: Vec<Task>,
    /// Bytes of all tasks.
    total: usize,
}

/// Something that goes from all sources to each sink: copied, or folded.
#[derive(Debug)]
struct Task {
    sources: Vec<Spans>,
    sinks: Vec<Spans>,
    bytes: usize,
}

impl Mapping {
    /// The operation, described in the window of this parity, unless this rank has its tensors elsewhere.
    pub(crate) fn take(
        &mut self,
        segment: &Segment,
        arenas: &Arenas,
        op: &Op,
        parity: usize,
    ) -> Option<InPlace> {
        if cfg!(tpurun_unmatched) {
            return None;
        }
        let places = |kind: &ArenaKind| {
            let own = arenas.get(*kind)?;
            Some((*kind, own, op.inputs.places(own)?, op.outputs.places(own)?))
        };
        let (kind, own, inputs, outputs) = ArenaKind::ALL.iter().find_map(places)?;
        let arenas = self.of(segment, kind, own)?;
        let words = HEAD + 2 * (inputs.len() + outputs.len());
        let fits =
            words * 8 <= segment.layout().window_bytes() && inputs.len().max(outputs.len()) <= MAX_PIECES;
        if !fits || is_hazardous(op, segment.rank() as usize) {
            return None;
        }
        inputs.iter().chain(&outputs).for_each(|(offset, bytes)| own.lend(*offset, *bytes));
        let window = segment.layout().window(segment.rank(), parity);
        let per_chunk = |spans: &Spans, places: usize| places.checked_div(spans.chunks()).unwrap_or(0);
        let head = [
            inputs.len(),
            outputs.len(),
            per_chunk(&op.inputs, inputs.len()),
            per_chunk(&op.outputs, outputs.len()),
        ];
        let head = head.map(|word| word as u64).into_iter();
        let places = inputs.into_iter().chain(outputs).flat_map(|(offset, bytes)| [offset, bytes]);
        let bytes: Vec<u8> = head.chain(places).flat_map(u64::to_le_bytes).collect();
        segment.region().write(window, &bytes);
        Some(InPlace { kind, arenas, parity, plan: OnceCell::new() })
    }

    /// The arenas of one kind of all ranks of this host, of which this one has `own`, once all can be read.
    fn of(&mut self, segment: &Segment, kind: ArenaKind, own: &Arena) -> Option<Arc<[Arc<PeerArena>]>> {
        let peers = &mut self.0[kind as usize];
        if matches!(peers, Peers::Missing) {
            *peers = Peers::open(segment, kind, own);
        }
        match peers {
            Peers::Ready(arenas) => Some(arenas.clone()),
            Peers::Missing | Peers::Refused => None,
        }
    }
}

/// The places that the first half of a fold between hosts reads from, without staging (`rounds/hierarchy.rs`).
impl Mapping {
    /// Where a tensor begins that is one piece of an arena, if all ranks of this host can read it there.
    pub(crate) fn place(
        &mut self,
        segment: &Segment,
        arenas: &Arenas,
        tensor: &Spans,
    ) -> Option<ArenaStretch> {
        let place = |kind: &ArenaKind| {
            let own = arenas.get(*kind)?;
            match tensor.places(own)?[..] {
                [(offset, bytes)] => Some((ArenaStretch { kind: *kind, offset, bytes }, own)),
                _ => None,
            }
        };
        let (place, own) = ArenaKind::ALL.iter().find_map(place)?;
        let kind = place.kind;
        self.of(segment, kind, own)?;
        own.lend(place.offset, place.bytes);
        // Relaxed: a rank that has mapped them maps them for as long as the communicator lives.
        let can_all = segment
            .ranks_here()
            .iter()
            .all(|rank| ready(segment, *rank, kind).load(Ordering::Relaxed) == MAPPED);
        can_all.then_some(place)
    }

    /// Returns the memory at a place of a rank of this host.
    pub(crate) fn read_at(
        &self,
        segment: &Segment,
        rank: u32,
        ArenaStretch { kind, offset, bytes }: ArenaStretch,
    ) -> Result<Spans, Failure> {
        let index = segment.ranks_here().iter().position(|other| *other == rank);
        let Peers::Ready(arenas) = &self.0[kind as usize] else {
            return Err(segment.failure_word().corrupt(rank, NOT_THERE));
        };
        let arena = index.and_then(|index| arenas.get(index));
        let spans = arena.and_then(|arena| Spans::of_peer(arena, &[(offset, bytes)], 1));
        spans.ok_or_else(|| segment.failure_word().corrupt(rank, NOT_THERE))
    }
}

/// Whether what moves is no rank's own: it is cut for all of them.
fn is_common(kind: OpKind) -> bool {
    matches!(kind, OpKind::AllReduce | OpKind::Reduce)
}

/// Whether a result could be written over an input that is still needed. Data that a rank gives to itself may
/// stay where it is.
fn is_hazardous(op: &Op, me: usize) -> bool {
    let Op { inputs, outputs, .. } = op;
    let (input, output) = match op.kind {
        OpKind::AllGather | OpKind::Gather => (0, me),
        OpKind::ReduceScatter | OpKind::Scatter => (me, 0),
        OpKind::AllToAll => (me, me),
        _ => (0, 0),
    };
    if !outputs.overlaps(inputs) {
        return false;
    }
    // One of them is a single chunk, whose only overlap may be this one.
    let is_own = input < inputs.chunks()
        && output < outputs.chunks()
        && inputs.chunk(input).is_same_memory(&outputs.chunk(output));
    let others = |spans: &Spans, own: usize| (0..spans.chunks()).filter(move |chunk| *chunk != own);
    !is_own
        || others(inputs, input).any(|chunk| outputs.overlaps(&inputs.chunk(chunk)))
        || others(outputs, output).any(|chunk| outputs.chunk(chunk).overlaps(inputs))
}

impl Peers {
    /// Tells the other ranks where this one's arena is, and looks for theirs.
    fn open(segment: &Segment, kind: ArenaKind, own: &Arena) -> Self {
        announce(segment, kind, own);
        let exports = segment.ranks_here().iter().map(|rank| announced(segment, *rank, kind));
        let Some(exports) = exports.collect::<Option<Vec<_>>>() else { return Self::Missing };
        match exports.iter().map(known_peer).collect() {
            Ok(peers) => {
                // Release: what was announced, for a rank that sees this one first.
                ready(segment, segment.rank(), kind).store(MAPPED, Ordering::Release);
                Self::Ready(peers)
            }
            Err(failure) => {
                tracing::info!("{} is staged: {failure}", segment.members().title());
                Self::Refused
            }
        }
    }
}

/// Writes where the arena of this rank is, for the others.
pub(crate) fn announce(segment: &Segment, kind: ArenaKind, own: &Arena) {
    let ready = ready(segment, segment.rank(), kind);
    if ready.load(Ordering::Relaxed) == 0 {
        segment.region().write(segment.layout().export(segment.rank(), kind) + 8, &own.export().to_bytes());
        // Release: what was written above.
        ready.store(ANNOUNCED, Ordering::Release);
    }
}

/// Returns the state of the arena of a rank: nothing, [`ANNOUNCED`], or [`MAPPED`].
fn ready(segment: &Segment, rank: u32, kind: ArenaKind) -> &AtomicU64 {
    segment.region().at(segment.layout().export(rank, kind))
}

/// Where it is.
const ANNOUNCED: u64 = 1;
/// And this rank has mapped those of all others of its host.
const MAPPED: u64 = 2;

fn announced(segment: &Segment, rank: u32, kind: ArenaKind) -> Option<Export> {
    (ready(segment, rank, kind).load(Ordering::Acquire) != 0).then(|| {
        let mut bytes = [0; Export::BYTES];
        segment.region().read(segment.layout().export(rank, kind) + 8, &mut bytes);
        Export::from_bytes(&bytes)
    })
}

/// One mapping serves all communicators of this process.
fn known_peer(export: &Export) -> Result<Arc<PeerArena>, Failure> {
    static KNOWN: OnceLock<Mutex<HashMap<Export, Weak<PeerArena>>>> = OnceLock::new();
    let mut known = KNOWN.get_or_init(Mutex::default).lock().expect("nothing in here panics");
    if let Some(arena) = known.get(export).and_then(Weak::upgrade) {
        return Ok(arena);
    }
    let arena = Arc::new(PeerArena::open(export)?);
    known.retain(|_, arena| arena.strong_count() > 0);
    known.insert(*export, Arc::downgrade(&arena));
    Ok(arena)
}

impl InPlace {
    /// Returns the kind of the arenas that its tensors are in.
    pub(crate) fn kind(&self) -> ArenaKind {
        self.kind
    }

    /// Into how many pieces the work is cut, each worth waking somebody for.
    pub(crate) fn work_bytes(&self, segment: &Segment, op: &Op) -> Result<usize, Failure> {
        let plan = self.plan(segment, op)?;
        Ok(plan.tasks.iter().map(|task| task.bytes * (task.sources.len() + task.sinks.len())).sum())
    }

    /// Does one of `of` pieces of the work.
    pub(crate) fn run(
        &self,
        segment: &Segment,
        op: &Op,
        piece: u32,
        of: u32,
        traffic: &Counter,
    ) -> Result<(), Failure> {
        self.plan(segment, op)?.run(segment, op, piece, of, traffic);
        Ok(())
    }

    /// Does the share of this rank: of tensors that each gives or takes its own; of a fold for all, one
    /// stretch.
    pub(crate) fn run_share(&self, segment: &Segment, op: &Op, traffic: &Counter) -> Result<(), Failure> {
        let (me, ranks) = (segment.rank(), segment.size());
        let (piece, of) = if is_common(op.kind) { (me, ranks) } else { (0, 1) };
        let own = me as usize..me as usize + 1;
        self.make_plan(segment, op, own)?.run(segment, op, piece, of, traffic);
        Ok(())
    }

    fn plan(&self, segment: &Segment, op: &Op) -> Result<&Plan, Failure> {
        if let Some(plan) = self.plan.get() {
            return Ok(plan);
        }
        let plan = self.make_plan(segment, op, 0..segment.size() as usize)?;
        Ok(self.plan.get_or_init(|| plan))
    }

    /// Plans the work on the tensors that the ranks in `owners` have of their own, and on all that are
    /// nobody's own.
    fn make_plan(&self, segment: &Segment, op: &Op, owners: Range<usize>) -> Result<Plan, Failure> {
        let told = segment.ranks().zip(&*self.arenas).map(|(rank, arena)| {
            if rank == segment.rank() {
                return Ok(Tensors { inputs: Chunks::Own(&op.inputs), outputs: Chunks::Own(&op.outputs) });
            }
            let window = segment.layout().window(rank, self.parity);
            let room = segment.layout().window_bytes();
            Tensors::told(segment.region(), room, window, arena).ok_or((rank as usize, NOT_THERE))
        });
        let tensors: Result<Vec<Tensors<'_>>, Wrong> = told.collect();
        let plan = tensors.and_then(|tensors| tasks(op, &tensors, owners));
        plan.map_err(|(rank, what)| segment.failure_word().corrupt(rank as u32, what))
    }
}

impl Plan {
    fn run(&self, segment: &Segment, op: &Op, piece: u32, of: u32, traffic: &Counter) {
        let reduction = op.kind.reduces().then(|| op.reduction(segment.size()));
        let cut = |n: u32| (self.total as u128 * u128::from(n) / u128::from(of)) as usize;
        let (from, to) = (cut(piece), cut(piece + 1));
        let how = copying::in_place(segment, op);
        let mut start = 0;
        for task in &self.tasks {
            let within = |at: usize| match at.saturating_sub(start) {
                beyond if beyond >= task.bytes => task.bytes,
                // Elements are not cut, nor are cache lines of tensors that begin with one.
                within => within / LINE * LINE,
            };
            let (first, end) = (within(from), within(to));
            start += task.bytes;
            if first == end {
                continue;
            }
            traffic.in_place(end - first, task.sources.len(), task.sinks.len());
            match reduction {
                Some(reduction) => {
                    Spans::fold_to_each(how, &task.sources, &task.sinks, reduction, first, end - first);
                }
                None => task.sources[0].copy_to_each(how, &task.sinks, first, end - first),
            }
        }
    }
}

/// A rank whose description is no truth, and what is wrong with it.
type Wrong = (usize, &'static str);
const NOT_THERE: &str = "tensors that are not in its arena";
const OTHER_SIZES: &str = "tensors of other sizes than it said";

/// The tensors of one rank.
#[derive(Debug)]
struct Tensors<'a> {
    inputs: Chunks<'a>,
    outputs: Chunks<'a>,
}

#[derive(Debug)]
enum Chunks<'a> {
    Own(&'a Spans),
    ListedPieces(ListedPieces<'a>),
}

/// Pieces that another rank lists in its window, which may be anything, and something else the next time.
#[derive(Debug)]
struct ListedPieces<'a> {
    region: &'a Region,
    arena: &'a Arc<PeerArena>,
    at: usize,
    count: usize,
    per_chunk: usize,
}

impl<'a> Tensors<'a> {
    fn told(region: &'a Region, room: usize, window: usize, arena: &'a Arc<PeerArena>) -> Option<Self> {
        let head: Vec<usize> =
            words(region, window, HEAD).into_iter().map(usize::try_from).collect::<Result<_, _>>().ok()?;
        let (inputs, outputs) = (head[0], head[1]);
        if inputs.max(outputs) > MAX_PIECES || (HEAD + 2 * (inputs + outputs)) * 8 > room {
            return None;
        }
        let at = window + 8 * HEAD;
        let told =
            |at, count, per_chunk| Chunks::ListedPieces(ListedPieces { region, arena, at, count, per_chunk });
        Some(Self { inputs: told(at, inputs, head[2]), outputs: told(at + 16 * inputs, outputs, head[3]) })
    }
}

impl Chunks<'_> {
    /// `element` are the bytes that no piece may end within.
    fn chunk(&self, index: usize, element: usize) -> Result<Spans, &'static str> {
        match self {
            Self::Own(spans) => (index < spans.chunks()).then(|| spans.chunk(index)).ok_or(OTHER_SIZES),
            Self::ListedPieces(told) => told.chunk(index, element),
        }
    }
}

impl ListedPieces<'_> {
    fn chunk(&self, index: usize, element: usize) -> Result<Spans, &'static str> {
        let Self { count, per_chunk, .. } = *self;
        if !count.checked_rem(per_chunk).is_some_and(|rest| rest == 0 && index < count / per_chunk) {
            return Err(OTHER_SIZES);
        }
        let words = words(self.region, self.at + 16 * index * per_chunk, 2 * per_chunk);
        let places: Vec<(u64, u64)> = words.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
        let are_elements = places.iter().all(|(_, bytes)| bytes.is_multiple_of(element as u64));
        let spans = are_elements.then(|| Spans::of_peer(self.arena, &places, per_chunk)).flatten();
        spans.ok_or(NOT_THERE)
    }
}

fn words(region: &Region, at: usize, count: usize) -> Vec<u64> {
    let mut bytes = vec![0; 8 * count];
    region.read(at, &mut bytes);
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight"))).collect()
}

/// A chunk of a rank, or what is wrong with it.
type Part = Result<(usize, Spans), Wrong>;

/// Plans what goes where, for the chunks that belong to one of `owners`.
fn tasks(op: &Op, tensors: &[Tensors<'_>], owners: Range<usize>) -> Result<Plan, Wrong> {
    let tasks: Vec<Task> = parts(op, tensors, owners)
        .into_iter()
        .map(|(sources, sinks)| Task::of_parts(sources, sinks))
        .collect::<Result<_, _>>()?;
    let total = tasks.iter().map(|task| task.bytes).sum();
    Ok(Plan { tasks, total })
}

impl Task {
    fn of_parts(sources: Vec<Part>, sinks: Vec<Part>) -> Result<Self, Wrong> {
        let sources: Vec<(usize, Spans)> = sources.into_iter().collect::<Result<_, _>>()?;
        let sinks: Vec<(usize, Spans)> = sinks.into_iter().collect::<Result<_, _>>()?;
        let bytes = sources[0].1.total();
        if let Some((rank, _)) = sources.iter().chain(&sinks).find(|(_, spans)| spans.total() != bytes) {
            return Err((*rank, OTHER_SIZES));
        }
        let spans = |parts: Vec<(usize, Spans)>| parts.into_iter().map(|(_, spans)| spans).collect();
        Ok(Self { sources: spans(sources), sinks: spans(sinks), bytes })
    }
}

/// The chunks that go from all of the first to each of the second.
fn parts(op: &Op, tensors: &[Tensors<'_>], owners: Range<usize>) -> Vec<(Vec<Part>, Vec<Part>)> {
    let root = op.root.map_or(0, |root| root as usize);
    let element = op.dtype.size();
    let part = |rank: usize, chunks: &Chunks<'_>, index: usize| match chunks.chunk(index, element) {
        Ok(spans) => Ok((rank, spans)),
        Err(what) => Err((rank, what)),
    };
    let input = |rank: usize, index: usize| part(rank, &tensors[rank].inputs, index);
    let output = |rank: usize, index: usize| part(rank, &tensors[rank].outputs, index);
    let mut parts: Vec<(Vec<Part>, Vec<Part>)> = Vec::new();
    let all = || 0..tensors.len();
    match op.kind {
        OpKind::AllReduce => {
            parts.push((all().map(|r| input(r, 0)).collect(), all().map(|r| output(r, 0)).collect()));
        }
        OpKind::Reduce => parts.push((all().map(|r| input(r, 0)).collect(), vec![output(root, 0)])),
        OpKind::ReduceScatter => {
            parts.extend(owners.map(|to| (all().map(|r| input(r, to)).collect(), vec![output(to, 0)])));
        }
        OpKind::AllGather => {
            parts.extend(owners.map(|of| (vec![input(of, 0)], all().map(|r| output(r, of)).collect())));
        }
        OpKind::Gather => parts.extend(owners.map(|of| (vec![input(of, 0)], vec![output(root, of)]))),
        // Read once by the rank that does it for all; each for itself writes nothing but its own pages.
        OpKind::Broadcast if owners.len() == tensors.len() => {
            let others = all().filter(|r| *r != root).map(|r| output(r, 0)).collect();
            parts.push((vec![input(root, 0)], others));
        }
        OpKind::Broadcast => {
            let own = owners.filter(|to| *to != root);
            parts.extend(own.map(|to| (vec![input(root, 0)], vec![output(to, 0)])));
        }
        OpKind::Scatter => parts.extend(owners.map(|to| (vec![input(root, to)], vec![output(to, 0)]))),
        OpKind::AllToAll => {
            parts.extend(
                owners.flat_map(|of| all().map(move |to| (vec![input(of, to)], vec![output(to, of)]))),
            );
        }
        OpKind::Barrier | OpKind::Send | OpKind::Recv => {}
    }
    parts
}
