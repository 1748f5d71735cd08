//! The last rank to arrive among others that offer this and that.

use std::sync::Arc;

use super::*;
use crate::execute::presence::Presence;
use tpurun_kernels::dtype::Dtype;
use tpurun_memory::buffer::Spans;
use tpurun_protocol::config::{Config, Matching};
use tpurun_protocol::match_key::{Planned, Slot};
use tpurun_protocol::op::OpKind;
use tpurun_protocol::segment::Segment;
use tpurun_protocol::testing::{self as memory, TestTensors};

const RANKS: u32 = 3;

/// All-reduces in place of so many elements each.
fn ops(memory: &mut TestTensors, counts: &[usize]) -> Vec<Op> {
    let op = |count: &usize| {
        let tensor = memory.spans(1, count * 8);
        memory::op(OpKind::AllReduce, Dtype::I64, tensor.clone(), tensor)
    };
    counts.iter().map(op).collect()
}

/// The window that these meetings do not use carries elements to tensors and back.
fn fill(segment: &Segment, tensor: &Spans, value: i64) {
    let (region, at) = (segment.region(), segment.layout().window(0, 1));
    region.write(at, &value.to_le_bytes().repeat(tensor.total() / 8));
    tensor.fetch(Copying::Cached, (0, 0), tensor.total(), region, at);
}

fn elements(segment: &Segment, tensor: &Spans) -> Vec<i64> {
    let (region, at) = (segment.region(), segment.layout().window(0, 1));
    tensor.stage(Copying::Cached, (0, 0), tensor.total(), region, at);
    let mut bytes = vec![0; tensor.total()];
    region.read(at, &mut bytes);
    bytes.chunks(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// Returns how many operations rank 0 runs at once, and its tensors afterwards: it has `own` elements each
/// queued, and the others, which are there already, have posted theirs.
fn run(own: &[usize], others: [&[usize]; RANKS as usize - 1]) -> (usize, Vec<Vec<i64>>) {
    let segment = Arc::new(Segment::alone("dp0", RANKS, 4096));
    let mut memory = TestTensors::default();
    let presence = Arc::new(Presence::new(None, segment.members()));
    let config = Config { cpus: 1, ..Config::default() };
    let mut lane = Lane::new(segment.clone(), config, presence, Arc::default()).unwrap();
    let (region, layout) = (segment.region(), segment.layout());
    for (rank, counts) in (1..).zip(others) {
        let ops = ops(&mut memory, counts);
        let planned = Planned {
            seq: 0,
            epoch: 0,
            rounds: 1,
            mapped: None,
            strategy: Some(Strategy::Windows),
            print: lane.rounds.plan_print,
            behind: ops.len() - 1,
            matching: Matching::Normal,
        };
        Slot::new(region, layout.slot(rank, 0)).write(&ops[0], &planned);
        let mut at = layout.window(rank, 0);
        for (index, op) in ops.iter().enumerate() {
            if index > 0 {
                let offer = Offer::new(region, layout.behind(rank, 0), index - 1);
                offer.write(op, Some(Strategy::Windows), Matching::Normal);
            }
            fill(&segment, &op.inputs, i64::from(rank));
            op.inputs.stage(Copying::Cached, (0, 0), op.inputs.total(), region, at);
            at += op.inputs.total().next_multiple_of(LINE);
        }
        segment.meeting().arrive(RANKS);
    }
    let ops = ops(&mut memory, own);
    ops.iter().for_each(|op| fill(&segment, &op.inputs, 10));
    let call = |op| Call { op, timeout: Duration::from_secs(1), recording: None };
    let calls: Vec<Call<'_>> = ops.iter().map(call).collect();
    let (ran, result) = lane.run_some(&calls, None);
    result.unwrap();
    (ran, ops.iter().map(|op| elements(&segment, &op.outputs)).collect())
}

fn summed(count: usize) -> Vec<i64> {
    vec![10 + 1 + 2; count]
}

#[test]
fn what_all_have_queued_is_settled_at_once() {
    let counts = [3, 20, 1, 100];
    let (ran, tensors) = run(&counts, [&counts, &counts]);
    assert_eq!((ran, tensors), (4, counts.map(summed).to_vec()));
}

#[test]
fn as_many_as_every_rank_offers() {
    for (own, others, expected) in [
        (&[3, 4, 5][..], [&[3, 4][..], &[3, 4, 5]], 2),
        (&[3, 4], [&[3, 4, 5], &[3, 4, 5]], 2),
        (&[3, 4, 5], [&[3], &[3, 4, 5]], 1),
        (&[3], [&[3, 4, 5], &[3, 4]], 1),
        // The third one differs: it is the first of a later meeting.
        (&[3, 4, 5], [&[3, 4, 6], &[3, 4, 6]], 2),
        (&[3, 4, 5, 6], [&[3, 4, 5, 6], &[3, 9, 5, 6]], 1),
    ] {
        let (ran, tensors) = run(own, others);
        let untouched = own.iter().skip(expected).map(|count| vec![10; *count]);
        let wanted: Vec<Vec<i64>> =
            own.iter().take(expected).map(|count| summed(*count)).chain(untouched).collect();
        assert_eq!((ran, tensors), (expected, wanted), "{own:?} beside {others:?}");
    }
}

#[test]
fn large_ones_and_those_that_do_not_fit_come_later() {
    // Windows of 4096 bytes.
    let counts = [200, 200, 200];
    assert_eq!(run(&counts, [&counts[..2], &counts[..2]]).0, 2);
    let many = [1; BURST + 3];
    assert_eq!(run(&many, [&many[..BURST], &many[..BURST]]).0, BURST);
}
