//! One honest rank, the last to arrive among hostile ones, from the comparison of the keys to the result.

use std::sync::Arc;
use std::time::Duration;

use super::{Input, Target};
use crate::execute::presence::Presence;
use crate::matching::validate::validate;
use crate::plan::planning::Planner;
use crate::queue::lane::{Call, Lane};
use tpurun_kernels::dtype::Dtype;
use tpurun_protocol::config::{Config, Matching};
use tpurun_protocol::match_key::SLOT_BYTES;
use tpurun_protocol::match_key::{Offer, Planned, Slot};
use tpurun_protocol::op::{Op, OpKind};
use tpurun_protocol::segment::Segment;
use tpurun_protocol::strategy::Strategy;
use tpurun_protocol::testing::{KINDS, TestTensors, chunks, op};

pub(super) const TARGET: Target = Target { name: "meeting", run, seeds };

fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let ranks = 2 + input.below(3) as u32;
    let segment = Arc::new(Segment::alone("dp0", ranks, 4096));
    let config = Config { cpus: 1, ..Config::default() };
    let mut memory = TestTensors::default();
    let bytes = 4 * input.below(64);
    let op = any_op(&mut input, &mut memory, ranks, bytes);
    if validate(&op, segment.members()).is_err() {
        return;
    }
    // Sometimes with another one behind it.
    let count = 1 + bytes / 4 % 2;
    // First comes what an honest rank would write, then what these ranks do.
    let print =
        Planner::new(segment.members(), &config, 1, segment.tuning()).expect("a ring of ranks").fingerprint();
    let strategy = (op.kind != OpKind::Barrier).then_some(Strategy::Windows);
    for rank in 1..ranks {
        let slot = Slot::new(segment.region(), segment.layout().slot(rank, 0));
        slot.write(
            &op,
            &Planned {
                seq: 0,
                epoch: 0,
                rounds: 1,
                mapped: None,
                strategy,
                print,
                behind: count - 1,
                matching: Matching::Normal,
            },
        );
        let offer = Offer::new(segment.region(), segment.layout().behind(rank, 0), 0);
        offer.write(&op, strategy, Matching::Normal);
        let _ = segment.meeting().arrive(ranks);
    }
    spoil(&segment, &mut input);
    let presence = Arc::new(Presence::new(None, segment.members()));
    let lane = Lane::new(segment.clone(), config, presence, Arc::default());
    let call = Call { op: &op, timeout: Duration::from_millis(1), recording: None };
    let (ran, outcome) = lane.expect("a ring of ranks").run_some(&vec![call; count], None);
    assert!((1..=count).contains(&ran));
    if let Err(failure) = outcome {
        assert!(!failure.text().contains("a bug in tpurun"), "{failure}");
    }
}

fn any_op(input: &mut Input<'_>, memory: &mut TestTensors, ranks: u32, bytes: usize) -> Op {
    let kind = input.one_of(&KINDS);
    let root = input.below(ranks as usize) as u32;
    let (inputs, outputs) = chunks(kind, root, ranks as usize);
    let (inputs, outputs) = (memory.spans(inputs, bytes), memory.spans(outputs, bytes));
    let root = kind.is_rooted().then_some(root);
    Op { root, ..op(kind, Dtype::F32, inputs, outputs) }
}

/// Words of slots, counts, windows, and of the meeting itself.
fn spoil(segment: &Segment, input: &mut Input<'_>) {
    let (region, layout) = (segment.region(), segment.layout());
    while !input.is_empty() {
        let rank = 1 + input.below(segment.size() as usize - 1) as u32;
        let word =
            |area: usize, index: usize, value: u64| region.write(area + index * 8, &value.to_le_bytes());
        match input.below(7) {
            0 => word(layout.slot(rank, 0), input.below(SLOT_BYTES / 8), input.u64()),
            1 => word(layout.slot(rank, 0), 6, input.number(3)),
            2 => word(layout.splits(rank, 0), input.below(2 * segment.size() as usize), input.number(70)),
            3 => region.write(layout.window(rank, 0), input.take(256)),
            4 => word(layout.meeting(), input.below(32), input.number(70)),
            5 => word(layout.behind(rank, 0), input.below(8), input.number(70)),
            _ => word(layout.agreed(0), 0, input.u64()),
        }
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let ranks_bytes_kind_root = |kind: u8| vec![1, 8, kind, 0];
    let mut seeds: Vec<Vec<u8>> = (0..KINDS.len() as u8).map(ranks_bytes_kind_root).collect();
    // More rounds than there are, sizes that differ, a meeting that is open already.
    seeds.push([&ranks_bytes_kind_root(1)[..], &[1, 1, 2]].concat());
    seeds.push([&ranks_bytes_kind_root(5)[..], &[1, 2, 0, 9]].concat());
    seeds.push([&ranks_bytes_kind_root(1)[..], &[1, 4, 0, 4]].concat());
    // Two all-reduces at once; the second one has another count; more behind it than there is.
    seeds.push(vec![1, 9, 0, 0]);
    seeds.push(vec![1, 9, 0, 0, 0, 5, 1, 9]);
    seeds.push([&[1, 9, 0, 0, 0, 0, 6][..], &0x3f00_0001_u64.to_le_bytes()].concat());
    seeds
}
