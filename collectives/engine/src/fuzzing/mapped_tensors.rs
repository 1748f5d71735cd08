#![allow(unsafe_code)]
//! One honest rank that works on tensors where they are, among others that say anything of theirs.

use std::sync::Arc;

use super::{Input, Target};
use crate::execute::in_place::{Mapping, announce};
use crate::matching::validate::validate;
use tpurun_kernels::dtype::Dtype;
use tpurun_memory::arena::{Arena, ArenaKind, Arenas};
use tpurun_memory::buffer::Spans;
use tpurun_memory::traffic::Counter;
use tpurun_protocol::op::Op;
use tpurun_protocol::segment::Segment;
use tpurun_protocol::segment::remote::ArenaStretch;
use tpurun_protocol::testing::{KINDS, chunks, op};

pub(super) const TARGET: Target = Target { name: "mapped_tensors", run, seeds };

/// Bytes of one tensor: more than what is staged, however it lies.
const BYTES: u64 = 16 << 10;
const ARENA_BYTES: u64 = 16 * BYTES;
const RANKS: u32 = 3;
const KIND: ArenaKind = ArenaKind::Host;

fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let segment = Segment::alone("dp0", RANKS, 4096);
    let arenas: Vec<Arc<Arena>> =
        (0..RANKS).map(|_| Arc::new(Arena::create(ARENA_BYTES).expect("memory for an arena"))).collect();
    // All ranks are this process here, so each can be found.
    for rank in 1..RANKS {
        let at = segment.layout().export(rank, KIND);
        segment.region().write(at + 8, &arenas[rank as usize].export().to_bytes());
        segment.region().write(at, &1_u64.to_le_bytes());
    }
    announce(&segment, KIND, &arenas[0]);
    let op = any_op(&mut input, &arenas[0]);
    if validate(&op, segment.members()).is_err() {
        return;
    }
    let own = Arenas::default().with(KIND, arenas[0].clone());
    let mut mapping = Mapping::default();
    let Some(mapped) = mapping.take(&segment, &own, &op, 0) else { return };
    for rank in 1..RANKS {
        describe(&mut input, &segment, rank);
    }
    // Others may write while this one reads, so nothing is known of the numbers.
    let pieces = 1 + input.below(3) as u32;
    let outcome = mapped.work_bytes(&segment, &op).and_then(|_| {
        (0..pieces).try_for_each(|piece| mapped.run(&segment, &op, piece, pieces, &Counter::default()))
    });
    let outcome = outcome.and_then(|()| mapped.run_share(&segment, &op, &Counter::default()));
    if let Err(failure) = outcome {
        assert!(failure.text().contains("its arena") || failure.text().contains("other sizes"), "{failure}");
    }
    read_anywhere(&mut input, &segment, &mapping);
}

/// Checks that a tensor that is summed for other hosts is within an arena, or is not read.
fn read_anywhere(input: &mut Input<'_>, segment: &Segment, mapping: &Mapping) {
    for rank in 0..RANKS {
        let kind = input.one_of(&ArenaKind::ALL);
        let (offset, bytes) = match input.byte() {
            0xff => (input.u64(), input.u64()),
            _ => (input.u64() % (2 * ARENA_BYTES), input.u64() % (2 * ARENA_BYTES)),
        };
        if let Ok(tensor) = mapping.read_at(segment, rank, ArenaStretch { kind, offset, bytes }) {
            let is_within = offset.checked_add(bytes).is_some_and(|end| end <= ARENA_BYTES);
            assert!(kind == KIND && is_within && tensor.total() as u64 == bytes);
        }
    }
}

fn any_op(input: &mut Input<'_>, arena: &Arena) -> Op {
    // A barrier has no tensors.
    let kind = input.one_of(&KINDS[1..]);
    let root = input.below(RANKS as usize) as u32;
    let (inputs, outputs) = chunks(kind, root, RANKS as usize);
    let spans = |first: u64, chunks: usize| {
        let pieces = (0..chunks as u64).map(|chunk| {
            (arena.pointer((first + chunk) * BYTES, BYTES), usize::try_from(BYTES).expect("small"))
        });
        // SAFETY: parts of an arena that outlives the operation and that only this thread touches; they do not
        // overlap.
        unsafe { Spans::new(pieces, 1) }
    };
    let root = kind.is_rooted().then_some(root);
    Op { root, ..op(kind, Dtype::F32, spans(0, inputs), spans(8, outputs)) }
}

/// How many inputs and outputs, how many of them are a chunk, and where each is: mostly what an honest rank
/// could say.
fn describe(input: &mut Input<'_>, segment: &Segment, rank: u32) {
    let mut words: Vec<u64> = (0..4).map(|_| input.number(5)).collect();
    for _ in 0..(words[0].min(64) + words[1].min(64)) {
        words.push(match input.byte() {
            0xff => input.u64(),
            byte => u64::from(byte % 16) * BYTES,
        });
        words.push(match input.byte() {
            0..100 => BYTES,
            100..200 => u64::from(input.byte()) * 4,
            _ => input.u64(),
        });
    }
    let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
    let window = segment.layout().window(rank, 0);
    segment.region().write(window, &bytes[..bytes.len().min(segment.layout().window_bytes())]);
}

fn seeds() -> Vec<Vec<u8>> {
    // An all-reduce of one tensor, where each says one input and one output.
    let one_each = [1, 1, 1, 1, 0, 0, 8, 0];
    let all_reduce = [&[0, 0][..], &one_each, &one_each, &[2]].concat();
    let gathered = [1, 3, 1, 1, 0, 0, 8, 0, 9, 0, 10, 0];
    let all_gather = [&[1, 0][..], &gathered, &gathered, &[1]].concat();
    // Pieces of one chunk, a range beyond the arena, a size that is no number of elements, more than fits.
    let in_pieces = [2, 1, 2, 1, 0, 150, 0, 1, 150, 0, 8, 0];
    let beyond = [1, 1, 1, 1, 0xff, 0, 0, 0, 0, 1, 0, 0, 0, 0, 8, 0];
    let uneven = [1, 1, 1, 1, 0, 220, 3, 0, 0, 0, 0, 0, 0, 0, 8, 0];
    let with = |words: &[u8]| [&[0, 0][..], &one_each, words, &[1]].concat();
    let many = [&[0, 0, 0xff][..], &[255; 8], &[1, 1, 1]].concat();
    vec![all_reduce, all_gather, with(&in_pieces), with(&beyond), with(&uneven), many]
}
