//! Messages of an honest rank whose peers write anything into their rings.

use std::sync::Arc;
use std::time::Duration;

use super::{Input, Target};
use crate::execute::presence::Presence;
use crate::queue::p2p::Messages;
use crate::queue::work::{Carrier, Work};
use tpurun_kernels::dtype::Dtype;
use tpurun_protocol::board::WaitKind;
use tpurun_protocol::layout::P2P_CHANNEL;
use tpurun_protocol::message::{HEADER_BYTES, MessageHeader};
use tpurun_protocol::op::{Op, OpKind};
use tpurun_protocol::segment::Segment;
use tpurun_protocol::testing::{TestTensors, op};

pub(super) const TARGET: Target = Target { name: "message_lane", run, seeds };

const TIMEOUT: Duration = Duration::from_secs(60);
const MOST_STEPS: usize = 200;

fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    if let Some(bytes) = bytes.first_chunk::<HEADER_BYTES>()
        && let Ok(header) = MessageHeader::decode(bytes)
    {
        let _ = header.describe(0);
        assert_eq!(MessageHeader::decode(&header.encode()).map(|again| again.bytes), Ok(header.bytes));
    }
    let segment = Arc::new(Segment::alone("dp0", 3, 4096));
    let mut memory = TestTensors::default();
    let mut works = Vec::new();
    let mut messages = Messages::new(segment.clone(), Arc::new(Presence::new(None, segment.members())));
    let mut steps = 0;
    while !input.is_empty() && steps < MOST_STEPS {
        steps += 1;
        let peer = 1 + input.below(2) as u32;
        match input.below(8) {
            0 | 1 => {
                let op = message(&mut input, &mut memory, peer);
                let work = Arc::new(Work::new(Carrier::Messages(WaitKind::Send { to: peer }), 0, None));
                works.push(work.clone());
                messages.post(Op { timeout: Some(TIMEOUT), ..op }, work, TIMEOUT, None);
            }
            2 | 3 => write_header(&segment, &mut input, &mut memory, peer),
            4 => {
                let count = input.below(256);
                write(&segment, peer, input.take(count));
            }
            5 => lie(&segment, &mut input, peer),
            6 => {
                let ring = segment.rings().ring(P2P_CHANNEL, 0, peer);
                if let Ok(run) = ring.readable() {
                    ring.consume(run.bytes.min(input.byte().into()));
                }
            }
            _ => messages.check(),
        }
        messages.progress();
    }
    let failed = segment.failure();
    if let Some(failure) = failed {
        assert!(!failure.text().contains("a bug in tpurun"), "{failure}");
        messages.fail_all(&failure);
        assert!(works.iter().all(|work| work.is_done()), "a failed communicator has no pending messages");
    }
}

fn message(input: &mut Input<'_>, memory: &mut TestTensors, peer: u32) -> Op {
    let (tag, bytes) = (input.below(3) as i32, 4 * input.below(64));
    let dtype = input.one_of(&[Dtype::U8, Dtype::F32]);
    if input.below(2) == 0 {
        let root = if input.below(4) == 0 { None } else { Some(peer) };
        return Op { root, tag, ..op(OpKind::Recv, dtype, memory.spans(0, 0), memory.spans(1, bytes)) };
    }
    // More than a ring holds, sometimes.
    let bytes = if input.below(8) == 0 { 300_000 } else { bytes };
    Op { root: Some(peer), tag, ..op(OpKind::Send, dtype, memory.spans(1, bytes), memory.spans(0, 0)) }
}

/// An honest header of which some bytes were changed.
fn write_header(segment: &Segment, input: &mut Input<'_>, memory: &mut TestTensors, peer: u32) {
    let mut bytes = MessageHeader::of(&message(input, memory, peer), 0).encode();
    for _ in 0..input.below(4) {
        // Payload lengths of gigabytes are bounded elsewhere, and only take time.
        let at = input.below(HEADER_BYTES);
        bytes[at] = if (11..16).contains(&at) { bytes[at] } else { input.byte() };
    }
    write(segment, peer, &bytes);
}

/// As the peer would, as long as its counters are in order.
fn write(segment: &Segment, peer: u32, bytes: &[u8]) {
    let ring = segment.rings().ring(P2P_CHANNEL, peer, 0);
    let Ok(run) = ring.writable() else { return };
    if run.bytes as usize >= bytes.len() {
        segment.rings().write_run(segment.layout().ring_data(P2P_CHANNEL, peer, 0), run, bytes);
        ring.publish(bytes.len() as u32);
    }
}

/// Counters of a ring become something else.
fn lie(segment: &Segment, input: &mut Input<'_>, peer: u32) {
    let (from, to) = if input.below(2) == 0 { (peer, 0) } else { (0, peer) };
    let counters = segment.layout().ring_counters(P2P_CHANNEL, from, to);
    let at = counters + input.below(2) * 64;
    segment.region().write(at, &input.number(400).to_le_bytes());
}

fn seeds() -> Vec<Vec<u8>> {
    // Peer, step, then: tag, length, dtype, direction, any source.
    let receive = [0, 0, 1, 4, 0, 0, 1];
    let header = [0, 2, 1, 4, 0, 1, 1, 0];
    let payload = [&[0, 4, 16][..], &[7; 16]].concat();
    let send = [0, 0, 1, 4, 0, 1, 1];
    vec![
        [&receive[..], &header, &payload].concat(),
        [&header[..], &payload, &receive].concat(),
        [&send[..], &[0, 6, 200]].concat(),
        [&receive[..], &[0, 5, 0, 1, 255], &u64::MAX.to_le_bytes()].concat(),
        [&header[..], &[1, 7]].concat(),
    ]
}
