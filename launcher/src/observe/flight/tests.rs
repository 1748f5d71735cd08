use super::*;
use crate::observe::flight::samples::{NOW_NS, flight};

#[test]
fn a_document_survives_being_written() {
    let text = serde_json::to_vec(&flight()).unwrap();
    assert_eq!(Flight::parse(&text).unwrap(), flight());
}

#[test]
fn what_is_no_document_is_refused_in_one_line() {
    let mut newer = flight();
    newer.format = FORMAT + 1;
    let mut wrong_lane = flight();
    wrong_lane.ranks[0].lanes[0].communicator = 2;
    let mut wrong_wait = flight();
    wrong_wait.ranks[0].waits[0].communicator = Some(2);
    let write = |flight: &Flight| serde_json::to_vec(flight).unwrap();
    for (bytes, expected) in [
        (b"".to_vec(), "not a flight recorder dump: "),
        (b"{}".to_vec(), "not a flight recorder dump: "),
        (write(&newer), "expected a dump of format 1, given 2"),
        (write(&wrong_lane), "not a flight recorder dump: it names a communicator"),
        (write(&wrong_wait), "not a flight recorder dump: it names a communicator"),
    ] {
        let error = Flight::parse(&bytes).unwrap_err();
        assert!(error.starts_with(expected) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn the_cpu_is_measured_between_two_documents() {
    let mut now = flight();
    let mut before = flight();
    before.taken_ns -= 2_000_000_000;
    before.ranks[0].cpu_ms = Some(0);
    before.ranks[1].pid = Some(9);
    before.ranks[2].cpu_ms = Some(9_000);
    now.measure_since(&before);
    let percents: Vec<Option<f64>> = now.ranks.iter().map(|rank| rank.cpu_percent).collect();
    // Rank 1 is another process by now, rank 4 is none yet.
    assert_eq!(percents, [Some(50.0), None, Some(0.0), Some(0.0), None]);
    let same = now.clone();
    now.measure_since(&same);
    assert!(now.ranks.iter().all(|rank| rank.cpu_percent.is_none()));
}

#[test]
fn rates_count_what_is_recorded() {
    let mut lane = flight().ranks[3].lanes.remove(0);
    let template = lane.records[0].clone();
    let done = |number: u64, at_ns: u64| Record {
        number,
        posted_ns: at_ns - 1_000_000,
        done_ns: Some(at_ns),
        ..template.clone()
    };
    // 5 of them in the last 10 s.
    lane.records = (0..10).map(|index| done(index, NOW_NS - index * 2_000_000_000)).collect();
    assert_eq!(lane.ops_per_second(NOW_NS), 0.6);
    // A ring that has wrapped: 64 in 64 ms.
    lane.records = (0..64).map(|index| done(1000 + index, NOW_NS - (63 - index) * 1_000_000)).collect();
    assert!((lane.ops_per_second(NOW_NS) - 1000.0).abs() < 1e-6);
    let mut rank = flight().ranks.remove(3);
    rank.lanes = vec![lane.clone(), lane.clone()];
    assert!((rank.ops_per_second(NOW_NS) - 2000.0).abs() < 1e-6);
    assert!(rank.ops_per_second(NOW_NS + 900_000_000) > 100.0);
    assert_eq!(rank.ops_per_second(NOW_NS + 5_000_000_000), 0.2);
    lane.records = vec![done(0, NOW_NS + 1)];
    assert_eq!(lane.ops_per_second(NOW_NS), 0.0);
    lane.records.clear();
    assert_eq!(lane.ops_per_second(NOW_NS), 0.0);
}

#[test]
fn a_rank_does_what_it_waits_for_longest() {
    let mut rank = flight().ranks.remove(1);
    let text = |rank: &RankFlight| rank.doing().and_then(|doing| Some(doing.record?.text.clone()));
    assert_eq!(text(&rank).unwrap(), "all_reduce#1 (f32[8], SUM)");
    rank.waits.clear();
    assert_eq!(text(&rank).unwrap(), "all_reduce#1 (f32[8], SUM)");
    rank.lanes[0].records.truncate(1);
    assert_eq!(rank.doing().unwrap().since_ns(), Some(11_005_000_000));
    rank.lanes.clear();
    assert_eq!(rank.doing(), None);
}
