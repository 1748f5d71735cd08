//! Segments of a schedule: headers that are anything, and segments that no step waits for.

use std::sync::Arc;

use tpurun_topology::{Algorithm, Collective, Placement, Torus, algorithm};

use super::{Input, Target};
use crate::execute::execution::{Buffers, Delivery, Execution, Operation};
use crate::execute::transport::drive;
use crate::execute::transport::shm::ShmTransport;
use tpurun_kernels::dtype::{Dtype, ReduceOp};
use tpurun_kernels::reduce::Reduction;
use tpurun_protocol::segment::Segment;
use tpurun_protocol::testing::TestTensors;
use tpurun_protocol::wire::{Form, HEADER_BYTES, Header};

pub(super) const TARGET: Target = Target { name: "wire_segments", run, seeds };

const RANKS: usize = 4;
const SEQ: u64 = 5;

fn run(bytes: &[u8]) {
    if let Ok(header) = Header::decode(bytes) {
        assert_eq!(&header.encode()[..], &bytes[..HEADER_BYTES]);
    }
    let mut input = Input::new(bytes);
    let mut memory = TestTensors::default();
    let (collective, algorithm) = what(&mut input);
    let elements = input.below(24);
    let mut ranks: Vec<Execution> =
        (0..RANKS).map(|rank| execution(&mut memory, collective, algorithm, rank, elements)).collect();
    if input.below(2) == 0 {
        hand_over(&mut ranks, &mut input);
    } else {
        read_rings(&mut ranks[0], &mut input);
    }
}

fn what(input: &mut Input<'_>) -> (Collective, Algorithm) {
    let collectives = [
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Broadcast { root: 1 },
        Collective::AllToAll,
    ];
    (input.one_of(&collectives), input.one_of(&[Algorithm::Ring, Algorithm::Bucket]))
}

fn execution(
    memory: &mut TestTensors,
    collective: Collective,
    algorithm: Algorithm,
    rank: usize,
    elements: usize,
) -> Execution {
    let torus: Torus = "2x2".parse().expect("a torus");
    let placement = Placement::new(&torus, &[0, 1, 2, 3]).expect("it has four places");
    let (inputs, outputs) = match collective {
        Collective::AllReduce => (1, 1),
        Collective::AllGather => (1, RANKS),
        Collective::ReduceScatter => (RANKS, 1),
        Collective::Broadcast { root } => {
            (usize::from(root as usize == rank), usize::from(root as usize != rank))
        }
        Collective::AllToAll => (RANKS, RANKS),
    };
    let bytes = elements * Dtype::Bf16.size();
    let buffers = Buffers { input: memory.spans(inputs, bytes), output: memory.spans(outputs, bytes) };
    let schedule = algorithm::schedule(algorithm, collective, &placement, rank as u32);
    let reduction = Reduction::new(Dtype::Bf16, ReduceOp::Sum, 1.0, RANKS as u32).expect("bf16 has sums");
    let operation = Operation { epoch: 0, seq: SEQ };
    Execution::new(&Arc::new(schedule), reduction, buffers, operation, 32).expect("a schedule of the planner")
}

/// Honest segments, honest ones with a changed field, and inventions, in any order.
fn hand_over(ranks: &mut [Execution], input: &mut Input<'_>) {
    while !input.is_empty() {
        let from = input.below(RANKS);
        let kind = input.below(4);
        if kind == 0 {
            let (header, to) = (invented(input), input.below(RANKS));
            let bytes =
                vec![0; if input.below(8) == 0 { input.below(80) } else { header.bytes.min(80) as usize }];
            let _ = ranks[to].handle_segment(input.below(RANKS + 2) as u32, &header, &bytes);
            continue;
        }
        let Some(transmit) = ranks[from].poll_transmit() else {
            ranks[from].retry();
            continue;
        };
        let (to, header, payload) = (transmit.to as usize, transmit.header, transmit.payload.to_vec());
        let header = if kind == 1 { changed(header, input) } else { header };
        match ranks[to].handle_segment(from as u32, &header, &payload) {
            Ok(Delivery::Taken) => ranks[from].sent(),
            Ok(Delivery::Later) | Err(_) => ranks[from].refused(),
        }
    }
}

fn invented(input: &mut Input<'_>) -> Header {
    Header {
        form: input.one_of(&[Form::Whole, Form::Partial]),
        epoch: input.number(2) as u32,
        channel: input.number(5) as u32,
        seq: input.number(3).wrapping_add(SEQ - 1),
        chunk: input.number(17) as u32,
        part: input.number(4) as u32,
        offset: input.number(33),
        bytes: input.number(65) as u32,
    }
}

fn changed(header: Header, input: &mut Input<'_>) -> Header {
    let (field, delta) = (input.below(8), input.number(9));
    let mut header = header;
    match field {
        0 => header.form = if header.form == Form::Whole { Form::Partial } else { Form::Whole },
        1 => header.epoch = header.epoch.wrapping_add(delta as u32),
        2 => header.channel = header.channel.wrapping_add(delta as u32),
        3 => header.seq = header.seq.wrapping_add(delta),
        4 => header.chunk = header.chunk.wrapping_sub(delta as u32),
        5 => header.part = header.part.wrapping_add(delta as u32),
        6 => header.offset = header.offset.wrapping_add(delta),
        _ => header.bytes = header.bytes.wrapping_sub(delta as u32),
    }
    header
}

/// The same through byte rings in shared memory, whose counters and contents are anything.
fn read_rings(execution: &mut Execution, input: &mut Input<'_>) {
    const CHANNELS: usize = 4;
    let segment = Segment::alone("dp0", RANKS as u32, 4096);
    let mut transport = ShmTransport::new(&segment, CHANNELS);
    while !input.is_empty() {
        let (channel, from) = (input.below(CHANNELS) as u32, 1 + input.below(RANKS - 1) as u32);
        let ring = segment.rings().ring(channel, from, 0);
        let data = segment.layout().ring_data(channel, from, 0);
        let bytes = match input.below(4) {
            0 => input.take(64).to_vec(),
            1 => {
                let at = segment.layout().ring_counters(channel, from, 0) + input.below(2) * 64;
                segment.region().write(at, &input.number(200).to_le_bytes());
                vec![]
            }
            _ => {
                let header = invented(input);
                [&header.encode()[..], &vec![3; header.bytes.min(64) as usize]].concat()
            }
        };
        if let Ok(run) = ring.writable() {
            segment.rings().write_run(data, run, &bytes);
            ring.publish(run.bytes.min(bytes.len() as u32));
        }
        if drive(execution, &mut transport).is_err() || transport.corrupt().is_some() {
            return;
        }
    }
}

fn seeds() -> Vec<Vec<u8>> {
    // Collective, algorithm, elements, mode; then honest segments from each rank in turn.
    let honest = |collective, algorithm| {
        let turns = (0..64_u8).flat_map(|turn| [turn % 4, 2]);
        [collective, algorithm, 13, 0].into_iter().chain(turns).collect()
    };
    let mut seeds: Vec<Vec<u8>> =
        (0..5).flat_map(|collective| [honest(collective, 0), honest(collective, 1)]).collect();
    let header = Header {
        form: Form::Partial,
        epoch: 0,
        channel: 0,
        seq: SEQ,
        chunk: 1,
        part: 0,
        offset: 0,
        bytes: 16,
    };
    seeds.push(header.encode().to_vec());
    seeds.push(vec![0, 0, 13, 1, 0, 0, 2, 1, 0, 0, 1, 3, 0, 0, 16]);
    seeds
}
