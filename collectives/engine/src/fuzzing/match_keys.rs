//! Slots, counts and call sites that other ranks wrote, as the last rank to arrive reads them.

use super::{Input, Target};
use crate::matching::{splits, verdict, verify};
use tpurun_kernels::dtype::Dtype;
use tpurun_protocol::config::Matching;
use tpurun_protocol::match_key::SLOT_BYTES;
use tpurun_protocol::match_key::{self, MAX_BEHIND, Offer, Planned, Slot};
use tpurun_protocol::op::OpKind;
use tpurun_protocol::segment::Segment;
use tpurun_protocol::testing::{TestTensors, op};

pub(super) const TARGET: Target = Target { name: "match_keys", run, seeds };

const KINDS: [OpKind; 5] =
    [OpKind::AllReduce, OpKind::AllGather, OpKind::Broadcast, OpKind::AllToAll, OpKind::Barrier];

fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let ranks = 1 + input.below(4) as u32;
    let kind = input.one_of(&KINDS);
    let segment = Segment::alone("dp0", ranks, 4096);
    let (region, layout) = (segment.region(), segment.layout());
    let mut memory = TestTensors::default();
    let op = op(kind, Dtype::F32, memory.spans(1, 32), memory.spans(1, 32));
    let slots: Vec<Slot<'_>> = segment.ranks().map(|rank| Slot::new(region, layout.slot(rank, 0))).collect();
    for slot in &slots {
        slot.write(
            &op,
            &Planned {
                seq: 3,
                epoch: 0,
                rounds: 1,
                mapped: None,
                strategy: None,
                print: 7,
                behind: 0,
                matching: Matching::Strict,
            },
        );
    }
    // Some words of some slots and counts become something else.
    while !input.is_empty() {
        let rank = input.below(ranks as usize) as u32;
        match input.below(3) {
            0 => region
                .write(layout.slot(rank, 0) + input.below(SLOT_BYTES / 8) * 8, &input.u64().to_le_bytes()),
            1 => region.write(layout.slot(rank, 0), input.take(SLOT_BYTES)),
            _ => {
                let at = layout.splits(rank, 0) + input.below(2 * ranks as usize) * 8;
                region.write(at, &input.u64().to_le_bytes());
            }
        }
    }
    for matching in [Matching::Normal, Matching::Strict] {
        if let Err(difference) = match_key::compare(&slots, matching) {
            let text = verdict::mismatch(&segment, 3, &difference).text().to_owned();
            assert!(text.starts_with("collective mismatch in dp0"), "{text}");
        }
    }
    let offer = |rank| Offer::new(region, layout.behind(rank, 0), 0);
    let _ = match_key::all_agree(segment.ranks().map(offer));
    assert!(slots.iter().all(|slot| slot.behind() <= MAX_BEHIND));
    let texts = slots.iter().map(|slot| slot.posted().to_string());
    assert!(texts.into_iter().all(|text| !text.is_empty()));
    let _ = splits::uneven(&segment, 0);
    let _ = verify::compare(&segment, &op, 3, 0);
    if let Err(pairs) = splits::compare(&segment, 0) {
        assert!(!splits::mismatch(&segment, &op, 3, &slots, &pairs).text().is_empty());
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let word = |rank: u8, index: u8, value: u64| [&[rank, 0, index][..], &value.to_le_bytes()].concat();
    vec![
        // All agree; the root of one differs; the length of one call site is a lie; counts that do not fit.
        vec![3, 0],
        [&[3, 2][..], &word(1, 0, 1 << 32 | 3)].concat(),
        [&[1, 0][..], &word(1, 16, u64::MAX), &word(0, 8, u64::MAX)].concat(),
        [&[2, 3][..], &[1, 2, 4], &9_u64.to_le_bytes()].concat(),
    ]
}
