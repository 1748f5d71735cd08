//! Collectives of tensors that all lie in arenas: the last to arrive and who helps it read and write them in
//! place (contract C7). Nothing is staged, and one meeting does whatever the size.
//!
//! Bytes moved for an all-reduce of S bytes on N ranks: N to read, N to write.
//!
//! A rank says where its tensors are in the window it would stage them in. When one of them has a tensor
//! elsewhere, which all learn at the meeting, the operation is staged instead (`flat.rs`).

use std::cell::OnceCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::arena::{Arena, ArenaKind, Arenas, Export, PeerArena};
use crate::buffer::Spans;
use crate::failure::Failure;
use crate::layout::LINE;
use crate::op::{Op, OpKind};
use crate::segment::Segment;
use crate::sync::{AtomicU64, Ordering};
use crate::traffic::Counter;

/// Smaller tensors are staged: reading where they are takes longer than copying them.
pub(crate) const MIN_BYTES: usize = 16 << 10;
/// Pieces of one rank's tensors: what has more is staged.
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
pub(crate) struct Mapped {
    kind: ArenaKind,
    arenas: Arc<[Arc<PeerArena>]>,
    parity: usize,
    /// Made by who works on it, once all have arrived.
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
    /// The operation, described in the window of this parity, unless it is to be staged.
    pub(crate) fn take(
        &mut self,
        segment: &Segment,
        arenas: &Arenas,
        op: &Op,
        parity: usize,
    ) -> Option<Mapped> {
        if cfg!(tpurun_unmatched)
            || segment.size() == 1
            || op.inputs.total().max(op.outputs.total()) < MIN_BYTES
        {
            return None;
        }
        let places = |kind: &ArenaKind| {
            let own = arenas.get(*kind)?;
            Some((*kind, own, op.inputs.places(own)?, op.outputs.places(own)?))
        };
        let (kind, own, inputs, outputs) = ArenaKind::ALL.iter().find_map(places)?;
        let peers = &mut self.0[kind as usize];
        if matches!(peers, Peers::Missing) {
            *peers = Peers::open(segment, kind, own);
        }
        let Peers::Ready(arenas) = peers else { return None };
        let words = HEAD + 2 * (inputs.len() + outputs.len());
        let fits =
            words * 8 <= segment.layout().window_bytes() && inputs.len().max(outputs.len()) <= MAX_PIECES;
        if !fits || is_hazardous(op, segment.rank() as usize) {
            return None;
        }
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
        Some(Mapped { kind, arenas: arenas.clone(), parity, plan: OnceCell::new() })
    }
}

/// Whether a result could be written over an input that is still needed. What a rank gives to itself may stay
/// where it is.
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
        let exports = segment.ranks().map(|rank| announced(segment, rank, kind));
        let Some(exports) = exports.collect::<Option<Vec<_>>>() else { return Self::Missing };
        match exports.iter().map(known_peer).collect() {
            Ok(peers) => Self::Ready(peers),
            Err(failure) => {
                tracing::info!("{} is staged: {failure}", segment.members().name);
                Self::Refused
            }
        }
    }
}

/// Writes where the arena of this rank is, for the others.
pub(crate) fn announce(segment: &Segment, kind: ArenaKind, own: &Arena) {
    let at = segment.layout().export(segment.rank(), kind);
    let ready: &AtomicU64 = segment.region().at(at);
    if ready.load(Ordering::Relaxed) == 0 {
        segment.region().write(at + 8, &own.export().to_bytes());
        // Release: what was written above.
        ready.store(1, Ordering::Release);
    }
}

fn announced(segment: &Segment, rank: u32, kind: ArenaKind) -> Option<Export> {
    let at = segment.layout().export(rank, kind);
    let ready: &AtomicU64 = segment.region().at(at);
    (ready.load(Ordering::Acquire) != 0).then(|| {
        let mut bytes = [0; Export::BYTES];
        segment.region().read(at + 8, &mut bytes);
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

impl Mapped {
    /// Of the arenas that its tensors are in.
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
        let plan = self.plan(segment, op)?;
        let reduction = op.kind.reduces().then(|| op.reduction(segment.size()));
        let cut = |n: u32| (plan.total as u128 * u128::from(n) / u128::from(of)) as usize;
        let (from, to) = (cut(piece), cut(piece + 1));
        let mut start = 0;
        for task in &plan.tasks {
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
                    Spans::fold_to_each(&task.sources, &task.sinks, reduction, first, end - first);
                }
                None => task.sources[0].copy_to_each(&task.sinks, first, end - first),
            }
        }
        Ok(())
    }

    fn plan(&self, segment: &Segment, op: &Op) -> Result<&Plan, Failure> {
        if let Some(plan) = self.plan.get() {
            return Ok(plan);
        }
        let plan = self.make_plan(segment, op)?;
        Ok(self.plan.get_or_init(|| plan))
    }

    fn make_plan(&self, segment: &Segment, op: &Op) -> Result<Plan, Failure> {
        let tensors: Vec<Tensors> = segment
            .ranks()
            .map(|rank| {
                let tensors = self.tensors(segment, op, rank);
                tensors.ok_or_else(|| segment.corrupt(rank, "tensors that are not in its arena"))
            })
            .collect::<Result<_, _>>()?;
        let (tasks, total) = tasks(op, segment.size() as usize, &tensors)
            .map_err(|rank| segment.corrupt(rank as u32, "tensors of other sizes than it said"))?;
        Ok(Plan { tasks, total })
    }

    /// What a rank says about its tensors, which may be anything.
    fn tensors(&self, segment: &Segment, op: &Op, rank: u32) -> Option<Tensors> {
        if rank == segment.rank() {
            return Some(Tensors { inputs: op.inputs.clone(), outputs: op.outputs.clone() });
        }
        let window = segment.layout().window(rank, self.parity);
        let words = |first: usize, count: usize| -> Vec<u64> {
            let mut bytes = vec![0; 8 * count];
            segment.region().read(window + 8 * first, &mut bytes);
            bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight"))).collect()
        };
        let head: Vec<usize> =
            words(0, HEAD).into_iter().map(usize::try_from).collect::<Result<_, _>>().ok()?;
        let (inputs, outputs) = (head[0], head[1]);
        let fits = |words: usize| words * 8 <= segment.layout().window_bytes();
        if inputs.max(outputs) > MAX_PIECES || !fits(HEAD + 2 * (inputs + outputs)) {
            return None;
        }
        let arena = &self.arenas[rank as usize];
        let spans = |first: usize, count: usize, per_chunk: usize| {
            let words = words(first, 2 * count);
            let places: Vec<(u64, u64)> = words.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
            let are_elements = |(_, bytes): &(u64, u64)| bytes.is_multiple_of(op.dtype.size() as u64);
            if !places.iter().all(are_elements) {
                return None;
            }
            Spans::of_peer(arena, &places, per_chunk)
        };
        Some(Tensors {
            inputs: spans(HEAD, inputs, head[2])?,
            outputs: spans(HEAD + 2 * inputs, outputs, head[3])?,
        })
    }
}

/// Of one rank.
#[derive(Debug)]
struct Tensors {
    inputs: Spans,
    outputs: Spans,
}

/// What goes where; the error is a rank whose tensors do not fit those of the others.
fn tasks(op: &Op, ranks: usize, tensors: &[Tensors]) -> Result<(Vec<Task>, usize), usize> {
    let root = op.root.map_or(0, |root| root as usize);
    let chunk = |rank: usize, spans: &Spans, index: usize| {
        if index < spans.chunks() { Ok((rank, spans.chunk(index))) } else { Err(rank) }
    };
    let input = |rank: usize, index: usize| chunk(rank, &tensors[rank].inputs, index);
    let output = |rank: usize, index: usize| chunk(rank, &tensors[rank].outputs, index);
    type Part = Result<(usize, Spans), usize>;
    let mut parts: Vec<(Vec<Part>, Vec<Part>)> = Vec::new();
    let all = || 0..ranks;
    match op.kind {
        OpKind::AllReduce => {
            parts.push((all().map(|r| input(r, 0)).collect(), all().map(|r| output(r, 0)).collect()));
        }
        OpKind::Reduce => parts.push((all().map(|r| input(r, 0)).collect(), vec![output(root, 0)])),
        OpKind::ReduceScatter => {
            parts.extend(all().map(|to| (all().map(|r| input(r, to)).collect(), vec![output(to, 0)])));
        }
        OpKind::AllGather => {
            parts.extend(all().map(|of| (vec![input(of, 0)], all().map(|r| output(r, of)).collect())));
        }
        OpKind::Gather => parts.extend(all().map(|of| (vec![input(of, 0)], vec![output(root, of)]))),
        OpKind::Broadcast => {
            let others = all().filter(|r| *r != root).map(|r| output(r, 0)).collect();
            parts.push((vec![input(root, 0)], others));
        }
        OpKind::Scatter => parts.extend(all().map(|to| (vec![input(root, to)], vec![output(to, 0)]))),
        OpKind::AllToAll => {
            parts.extend(
                all().flat_map(|of| all().map(move |to| (vec![input(of, to)], vec![output(to, of)]))),
            );
        }
        OpKind::Barrier | OpKind::Send | OpKind::Recv => {}
    }
    let mut total = 0;
    let mut tasks = Vec::with_capacity(parts.len());
    for (sources, sinks) in parts {
        let sources: Vec<(usize, Spans)> = sources.into_iter().collect::<Result<_, _>>()?;
        let sinks: Vec<(usize, Spans)> = sinks.into_iter().collect::<Result<_, _>>()?;
        let bytes = sources[0].1.total();
        if let Some((rank, _)) = sources.iter().chain(&sinks).find(|(_, spans)| spans.total() != bytes) {
            return Err(*rank);
        }
        total += bytes;
        let spans = |parts: Vec<(usize, Spans)>| parts.into_iter().map(|(_, spans)| spans).collect();
        tasks.push(Task { sources: spans(sources), sinks: spans(sinks), bytes });
    }
    Ok((tasks, total))
}
