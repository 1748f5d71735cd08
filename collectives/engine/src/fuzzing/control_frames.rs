//! The frames that ranks and agents send each other over the control socket.

use super::Target;
use tpurun_protocol::control::{AgentFrame, RankFrame};

pub(super) const TARGET: Target = Target { name: "control_frames", run, seeds };

fn run(bytes: &[u8]) {
    let framed = [&RankFrame::Want { key: String::new(), request: 0, from: 0 }.encode()[..8], bytes].concat();
    for bytes in [bytes, &framed] {
        if let Ok(frame) = RankFrame::decode(bytes) {
            assert_eq!(RankFrame::decode(&frame.encode()).expect("our own encoding"), frame);
        }
        if let Ok(frame) = AgentFrame::decode(bytes) {
            assert_eq!(AgentFrame::decode(&frame.encode()).expect("our own encoding"), frame);
        }
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let key = || "default_pg/0123456789abcdef".to_owned();
    vec![
        RankFrame::Offer { key: key(), readers: 7 }.encode(),
        RankFrame::Want { key: key(), request: 3, from: 0 }.encode(),
        RankFrame::Want { key: "short".to_owned(), request: u64::MAX, from: 7 }.encode(),
        RankFrame::GiveUp { key: key(), readers: 7, text: "rank 0 cannot".to_owned() }.encode(),
        AgentFrame::Segment { key: key(), request: 3 }.encode(),
        AgentFrame::Refused { key: key(), request: 3, reason: "too many are waiting already".to_owned() }
            .encode(),
        AgentFrame::Failed {
            key: key(),
            request: 3,
            kind: 3,
            text: "rank 0 is gone".to_owned(),
            ranks: vec![0],
        }
        .encode(),
    ]
}
