//! Frames of another host that are anything, in any order, of ranks that are somewhere else.

use super::{Input, Target};
use crate::hosts::bridge::{Bridge, Frames, Shares};
use crate::hosts::network::{Addresses, Greeting};
use tpurun_protocol::frame::{Failed, FrameHeader, FrameKind, HEADER_BYTES, RankStatus};
use tpurun_protocol::hosts::Hosts;
use tpurun_protocol::layout::P2P_CHANNEL;
use tpurun_protocol::segment::Segment;

pub(super) const TARGET: Target = Target { name: "bridge_frames", run, seeds };

/// Ranks 0 and 2 are here, the others on two other hosts.
const HOSTS: &str = "0 1 0 2 1\nn0\nn1\nn2";
const RANKS: u32 = 5;

fn run(bytes: &[u8]) {
    if let Some(greeting) = bytes.first_chunk().and_then(Greeting::decode) {
        assert_eq!(&greeting.encode()[..], &bytes[..greeting.encode().len()]);
    }
    if let Some(addresses) = Addresses::parse(&String::from_utf8_lossy(bytes), 7) {
        assert_eq!(Addresses::parse(&addresses.to_string(), 7), Some(addresses));
    }
    let hosts = Hosts::parse(HOSTS, RANKS).expect("hosts of five ranks");
    let segment = std::sync::Arc::new(Segment::alone("dp0", RANKS, 4096).with_hosts(hosts));
    let mut bridges = Bridge::all(&segment, Shares::All(2));
    let mut frames: Vec<[Frames; 3]> = bridges.iter().map(|_| Default::default()).collect();
    let mut input = Input::new(bytes);
    while !input.is_empty() {
        let (connection, host) = (input.below(2), input.below(3));
        let bridge = &mut bridges[connection];
        let mut stream = vec![];
        match input.below(6) {
            // The ranks here come to their next round, and the other hosts are told.
            0 => {
                segment.remote().count_written(|| {});
                segment.remote().count_written(|| {});
                drop(bridge.look_closely());
            }
            1 => {
                segment.rings().notify(1);
                drop(bridge.look());
            }
            2 => stream = input.take(64).to_vec(),
            3 => {
                let ring = segment.rings().ring(P2P_CHANNEL, 0, 1);
                ring.publish(input.below(9) as u32);
            }
            _ => {
                let header = invented(&mut input);
                let payload = input.take(header.bytes as usize).to_vec();
                let header = FrameHeader { bytes: payload.len() as u32, ..header };
                stream = [&header.encode()[..], &payload].concat();
            }
        }
        let taken = frames[connection][host]
            .feed(&stream, |header, payload| bridge.take(host as u32, header, payload));
        if let Err(wrong) = taken {
            bridge.refuse(host as u32, wrong);
            return;
        }
    }
    bridges.iter_mut().for_each(|bridge| bridge.lose(1));
}

fn invented(input: &mut Input<'_>) -> FrameHeader {
    let mut bytes = [0; HEADER_BYTES];
    bytes[0] = 1 + input.below(12) as u8;
    let kind = FrameHeader::decode(&bytes).expect("a kind").kind;
    FrameHeader {
        kind,
        rank: input.number(6) as u32,
        round: input.number(8) as u32,
        offset: input.number(500) as u32,
        bytes: input.below(80) as u32,
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let frame = |kind, rank, payload: &[u8]| {
        let header = FrameHeader { kind, rank, round: 0, offset: 0, bytes: payload.len() as u32 };
        [&header.encode()[..], payload].concat()
    };
    let arrived = |rank, of| {
        FrameHeader { kind: FrameKind::Arrived, rank, round: 0, offset: of, bytes: 0 }.encode().to_vec()
    };
    // Connection, host, action, then bytes for its stream, at most 64 of them.
    let sent_over = |connection: u8, host: u8, bytes: Vec<u8>| {
        let chunk = |bytes: &[u8]| [&[connection, host, 2][..], bytes, &vec![0; 64 - bytes.len()]].concat();
        bytes.chunks(64).take(1).flat_map(chunk).collect::<Vec<u8>>()
    };
    let sent = |host, bytes| sent_over(0, host, bytes);
    let status = RankStatus { arrived: 1, posted: 2, left: 1, lost: 0 };
    let failed = Failed { kind: 3, blamed: vec![1], text: "rank 1 is gone".to_owned() };
    vec![
        sent(1, frame(FrameKind::Member, 1, &7_u32.to_le_bytes())),
        sent(1, frame(FrameKind::Slot, 1, &[3; 40])),
        [sent(2, frame(FrameKind::Window, 3, &[5; 40])), sent(2, arrived(3, 1)), vec![0, 0, 0]].concat(),
        [sent(2, arrived(3, 2)), sent_over(1, 2, frame(FrameKind::Window, 3, &[5; 40]))].concat(),
        [sent_over(1, 2, arrived(3, 0)), sent(2, arrived(3, 2)), vec![0, 0, 0]].concat(),
        sent(1, frame(FrameKind::Status, 4, &status.encode())),
        sent(1, frame(FrameKind::Failed, 1, &failed.encode())),
        Greeting { communicator: 5, host: 1 }.encode().to_vec(),
        b"127.0.0.1:9,10,11 3082".to_vec(),
    ]
}
