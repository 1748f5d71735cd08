use expect_test::expect;

use super::messages::Trace;
use super::tracks::SLICE_BEGIN;
use super::*;
use crate::observe::flight::samples;

/// One line for each packet.
fn listing(trace: &Trace) -> String {
    let mut text = String::new();
    for packet in &trace.packet {
        let at = packet.timestamp.map(|ns| format!("{ns} ")).unwrap_or_default();
        let what = match packet.data.as_ref() {
            None => format!(
                "clock {:?}",
                packet.trace_packet_defaults.as_ref().and_then(|d| d.timestamp_clock_id)
            ),
            Some(Data::ClockSnapshot(snapshot)) => {
                let clocks = snapshot.clocks.iter().map(|c| format!("{:?}={:?}", c.clock_id, c.timestamp));
                format!("clocks {}", clocks.collect::<Vec<_>>().join(" "))
            }
            Some(Data::TrackDescriptor(track)) => {
                let process = track.process.as_ref();
                let process = process
                    .map(|p| format!("pid {:?} {:?}", p.pid.unwrap(), p.process_name.as_deref().unwrap()));
                format!(
                    "track {} in {:?} {:?} {process:?}",
                    track.uuid.unwrap(),
                    track.parent_uuid,
                    track.name
                )
            }
            Some(Data::TrackEvent(event)) => {
                let name = event.name.as_deref().unwrap_or("");
                let kind = if event.r#type == Some(SLICE_BEGIN) { "begin" } else { "end" };
                let flows: Vec<String> =
                    event.flow_ids.iter().map(|flow| format!(" flow {flow:x}")).collect();
                let category = event.categories.concat();
                format!("{kind} on {} {name} {category}{}", event.track_uuid.unwrap(), flows.concat())
            }
        };
        text.push_str(&format!("{at}{}\n", what.trim_end()));
    }
    text
}

#[test]
fn operations_are_slices_joined_by_flows() {
    let trace = Trace::decode(encode(&samples::flight()).as_slice()).unwrap();
    assert!(trace.packet.iter().all(|packet| packet.trusted_packet_sequence_id == Some(SEQUENCE)));
    expect![[r#"
        clock Some(3)
        clocks Some(3)=Some(20000000000) Some(1)=Some(1795230261000000000)
        track 1 in None None Some("pid 100 \"rank 0\"")
        track 2 in Some(1) Some("group dp0") None
        11000000000 begin on 2 all_reduce#0 done flow 10000000000
        11000000000 begin on 2 wait for ranks
        11004000000 end on 2
        11004000000 begin on 2 move data
        11005000000 end on 2
        11005000000 end on 2
        12000000000 begin on 2 send done flow 8000000000000000
        13000000000 end on 2
        15000000000 begin on 2 all_reduce#1 pending flow 10000000001
        15000000000 begin on 2 wait for ranks
        track 3 in None None Some("pid 101 \"rank 1\"")
        track 4 in Some(3) Some("group dp0") None
        11001000000 begin on 4 all_reduce#0 done flow 10000000000
        11001000000 begin on 4 wait for ranks
        11004000000 end on 4
        11004000000 begin on 4 move data
        11005000000 end on 4
        11005000000 end on 4
        15000000001 begin on 4 all_reduce#1 pending flow 10000000001
        15000000001 begin on 4 wait for ranks
        track 5 in Some(3) Some("group tp") None
        11001000000 begin on 5 broadcast#0 failed flow 20000000000
        11001000000 begin on 5 wait for ranks
        11004000000 end on 5
        11004000000 begin on 5 move data
        track 6 in None None Some("pid 102 \"rank 2\"")
        track 7 in Some(6) Some("group dp0") None
        11002000000 begin on 7 all_reduce#0 done flow 10000000000
        11002000000 begin on 7 wait for ranks
        11004000000 end on 7
        11004000000 begin on 7 move data
        11005000000 end on 7
        11005000000 end on 7
        12000000002 begin on 7 recv done flow 8000000000000000
        12000000002 begin on 7 wait for ranks
        12500000000 end on 7
        12500000000 begin on 7 move data
        13000000000 end on 7
        13000000000 end on 7
        15000000002 begin on 7 all_reduce#1 pending flow 10000000001
        15000000002 begin on 7 wait for ranks
        track 8 in None None Some("pid 103 \"rank 3\"")
        track 9 in Some(8) Some("group dp0") None
        11003000000 begin on 9 all_reduce#0 done flow 10000000000
        11003000000 begin on 9 wait for ranks
        11004000000 end on 9
        11004000000 begin on 9 move data
        11005000000 end on 9
        11005000000 end on 9
        track 10 in Some(8) Some("program 00000000000000ab train.py:171") None
        14000000000 begin on 10 run train.py:171 done
        14000000010 end on 10
        14002000000 begin on 10 run train.py:171 pending
        track 11 in Some(8) Some("program 00000000000000cd train.py:205") None
        14001000000 begin on 11 run train.py:205 done
        14001000020 end on 11
    "#]]
    .assert_eq(&listing(&trace));
}

#[test]
fn a_slice_tells_what_was_posted() {
    let trace = trace(&samples::flight());
    let events = trace.packet.iter().filter_map(|packet| match &packet.data {
        Some(Data::TrackEvent(event)) if !event.debug_annotations.is_empty() => Some(event),
        _ => None,
    });
    let mut text = String::new();
    for event in events.take(2) {
        for annotation in &event.debug_annotations {
            text.push_str(&format!(
                "{}: {:?}\n",
                annotation.name.as_deref().unwrap(),
                annotation.value.as_ref().unwrap()
            ));
        }
        text.push('\n');
    }
    expect![[r#"
        operation: String("all_reduce#0 (f32[8], SUM)")
        site: String("train.py:5")
        group: String("dp0")
        group_size: Uint(5)
        comm_rank: Uint(0)
        seq: Uint(0)
        bytes: Uint(32)
        count: Uint(8)
        dtype: String("f32")
        reduce_op: String("SUM")
        strategy: String("windows")
        first_byte_ns: Uint(11004000001)

        operation: String("send (f32[8], rank 2, tag 7)")
        site: String("train.py:5")
        group: String("dp0")
        group_size: Uint(5)
        comm_rank: Uint(0)
        seq: Uint(0)
        bytes: Uint(32)
        count: Uint(8)
        dtype: String("f32")
        peer: Uint(2)
        tag: Int(7)
        first_byte_ns: Uint(11004000001)

    "#]]
    .assert_eq(&text);
}

/// Every slice that ends has begun on its track, last begun first; times on a track never go back.
fn check_nesting(flight: &Flight) {
    let mut open: std::collections::HashMap<u64, (usize, u64)> = Default::default();
    for packet in trace(flight).packet {
        let (Some(at), Some(Data::TrackEvent(event))) = (packet.timestamp, packet.data) else { continue };
        let (depth, last) = open.entry(event.track_uuid.unwrap()).or_default();
        assert!(at >= *last, "{at} after {last}");
        *last = at;
        *depth = if event.r#type == Some(SLICE_BEGIN) { *depth + 1 } else { depth.checked_sub(1).unwrap() };
    }
}

#[test]
fn overlapping_operations_have_tracks_of_their_own() {
    let mut flight = samples::flight();
    let template = flight.ranks[3].lanes[0].records[0].clone();
    let record = |number: u64, posted_ns: u64, done_ns: u64| Record {
        number,
        posted_ns,
        matched_ns: Some(posted_ns),
        done_ns: Some(done_ns),
        ..template.clone()
    };
    flight.ranks.truncate(4);
    flight.ranks.drain(..3);
    flight.ranks[0].runs.clear();
    flight.ranks[0].lanes[0].records = vec![record(0, 10, 30), record(1, 20, 40), record(2, 30, 35)];
    check_nesting(&flight);
    let tracks = trace(&flight)
        .packet
        .iter()
        .filter(|packet| matches!(packet.data, Some(Data::TrackDescriptor(_))))
        .count();
    assert_eq!(tracks, 3);
}

#[test]
fn threads_that_run_one_program_have_tracks_of_their_own() {
    let mut flight = samples::flight();
    let runs = &mut flight.ranks[3].runs;
    for (run, begun_ns) in runs.iter_mut().zip([10, 20, 30]) {
        run.program = "ab".into();
        (run.begun_ns, run.done_ns) = (begun_ns, Some(begun_ns + 15));
    }
    check_nesting(&flight);
    let is_one = |name: &str| name.starts_with("program ");
    let tracks = trace(&flight).packet.into_iter().filter(|packet| {
        matches!(&packet.data, Some(Data::TrackDescriptor(track)) if track.name.as_deref().is_some_and(is_one))
    });
    assert_eq!(tracks.count(), 2);
}

#[test]
fn impossible_times_are_no_impossible_slices() {
    let mut flight = samples::flight();
    for (index, rank) in flight.ranks.iter_mut().enumerate() {
        for record in rank.lanes.iter_mut().flat_map(|lane| &mut lane.records) {
            record.matched_ns = Some([0, u64::MAX][index % 2]);
            record.done_ns = Some(1);
            record.outcome = Outcome::Done;
        }
        rank.runs.iter_mut().for_each(|run| run.done_ns = Some(1));
    }
    check_nesting(&flight);
}
