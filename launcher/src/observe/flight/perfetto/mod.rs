//! The document as a trace that <https://ui.perfetto.dev> shows: a process for each rank, in it a track for each
//! communicator, on it a slice for each operation, and a track for each compiled program, on it a slice for each
//! run. A slice that never ended stays open. An arrow leads from rank to rank through one collective, in the order
//! in which they posted it, and from a send to its receive.

mod flows;
mod messages;
mod programs;
#[cfg(test)]
mod tests;
mod tracks;

use prost::Message;

use crate::observe::flight::{Communicator, Flight, LaneFlight, Outcome, RankFlight, Record};
use flows::Flows;
use messages::{
    Clock, ClockSnapshot, Data, DebugAnnotation, ProcessDescriptor, Trace, TracePacket, TracePacketDefaults,
    TrackDescriptor, TrackEvent, Value,
};
use tracks::{Rows, Tracks, annotation, describe, event, number, slice_begin, slice_end, text};

/// The bytes of a `.perfetto-trace` file.
pub(crate) fn encode(flight: &Flight) -> Vec<u8> {
    trace(flight).encode_to_vec()
}

fn trace(flight: &Flight) -> Trace {
    let mut packets = vec![begin(), clocks(flight)];
    let flows = Flows::of(flight);
    let mut tracks = Tracks::default();
    for rank in flight.ranks.iter().filter(|rank| !rank.lanes.is_empty() || !rank.runs.is_empty()) {
        let process = tracks.next();
        packets.push(describe(rank_track(flight, rank, process)));
        for lane in &rank.lanes {
            add_lane(&mut packets, &mut tracks, process, &View { flight, rank, lane, flows: &flows });
        }
        programs::add(&mut packets, &mut tracks, process, rank);
    }
    for packet in &mut packets {
        packet.trusted_packet_sequence_id = Some(SEQUENCE);
    }
    Trace { packet: packets }
}

/// One lane and what its slices refer to.
struct View<'a> {
    flight: &'a Flight,
    rank: &'a RankFlight,
    lane: &'a LaneFlight,
    flows: &'a Flows,
}

/// From here on times are CLOCK_MONOTONIC.
fn begin() -> TracePacket {
    TracePacket {
        sequence_flags: Some(INCREMENTAL_STATE_CLEARED),
        trace_packet_defaults: Some(TracePacketDefaults { timestamp_clock_id: Some(MONOTONIC) }),
        ..TracePacket::default()
    }
}

fn clocks(flight: &Flight) -> TracePacket {
    let clock = |id, ns| Clock { clock_id: Some(id), timestamp: Some(ns) };
    let clocks = vec![clock(MONOTONIC, flight.taken_ns), clock(REALTIME, flight.taken_unix_ns)];
    let snapshot = ClockSnapshot { clocks, primary_trace_clock: Some(MONOTONIC) };
    TracePacket { data: Some(Data::ClockSnapshot(snapshot)), ..TracePacket::default() }
}

fn rank_track(flight: &Flight, rank: &RankFlight, uuid: u64) -> TrackDescriptor {
    // Perfetto tells processes apart by it, and hosts may have the same.
    let is_alone = flight.ranks.iter().filter(|other| other.pid == rank.pid).count() == 1;
    let program = rank.program.as_ref().map(|program| format!(" {program}")).unwrap_or_default();
    let process = ProcessDescriptor {
        pid: Some(rank.pid.filter(|_| is_alone).unwrap_or(NO_PID + rank.rank as i32)),
        process_name: Some(format!("rank {}{program}", rank.rank)),
        legacy_sort_index: Some(rank.rank as i32),
    };
    TrackDescriptor { uuid: Some(uuid), process: Some(process), ..TrackDescriptor::default() }
}

fn add_lane(packets: &mut Vec<TracePacket>, tracks: &mut Tracks, process: u64, view: &View<'_>) {
    let mut rows = Rows::new(format!("group {}", view.communicator().name), process);
    for record in by_post(&view.lane.records) {
        let track = rows.take(packets, tracks, record.posted_ns, end_of(record));
        add_slices(packets, track, record, view);
    }
}

impl View<'_> {
    fn communicator(&self) -> &Communicator {
        self.flight.communicator(self.lane)
    }
}

/// Ranks write the times themselves.
fn by_post(records: &[Record]) -> Vec<&Record> {
    let mut records: Vec<&Record> = records.iter().filter(|record| record.posted_ns != 0).collect();
    records.sort_by_key(|record| record.posted_ns);
    records
}

/// None while it is pending and when it failed: it never came to its end.
fn end_of(record: &Record) -> Option<u64> {
    let done = record.done_ns.filter(|_| record.outcome == Outcome::Done)?;
    Some(done.max(record.posted_ns))
}

fn add_slices(packets: &mut Vec<TracePacket>, track: u64, record: &Record, view: &View<'_>) {
    let category = match record.outcome {
        Outcome::Done => "done",
        Outcome::Pending => "pending",
        Outcome::Failed => "failed",
    };
    let end = end_of(record);
    let matched = record.matched_ns.filter(|at| *at >= record.posted_ns && end.is_none_or(|end| *at <= end));
    let name = match record.is_message {
        true => record.operation.to_string(),
        false => format!("{}#{}", record.operation, record.seq),
    };
    packets.push(event(
        record.posted_ns,
        TrackEvent {
            categories: vec![category.into()],
            debug_annotations: arguments(record, view),
            flow_ids: view.flows.id(view.rank.rank, view.lane, record).into_iter().collect(),
            ..slice_begin(track, name)
        },
    ));
    // A send that is done does not say when its receive was met.
    let has_phases = matched.is_some() || end.is_none();
    if has_phases {
        packets.push(event(record.posted_ns, slice_begin(track, "wait for ranks".into())));
    }
    if let Some(matched) = matched {
        packets.push(event(matched, slice_end(track)));
        packets.push(event(matched, slice_begin(track, "move data".into())));
    }
    if let Some(end) = end {
        packets.extend(has_phases.then(|| event(end, slice_end(track))));
        packets.push(event(end, slice_end(track)));
    }
}

fn arguments(record: &Record, view: &View<'_>) -> Vec<DebugAnnotation> {
    let communicator = view.communicator();
    let mut list = vec![
        text("operation", &record.text),
        text("site", &record.site),
        text("group", &communicator.name),
        number("group_size", u64::from(communicator.size)),
        number("comm_rank", u64::from(view.lane.comm_rank)),
        number("seq", record.seq),
        number("bytes", record.input_bytes),
        number("count", record.count),
        text("dtype", &record.dtype),
    ];
    list.extend(record.reduce_op.as_ref().map(|reduce_op| text("reduce_op", reduce_op)));
    list.extend(record.root.map(|root| number(if record.is_message { "peer" } else { "root" }, root.into())));
    list.extend(record.is_message.then(|| annotation("tag", Value::Int(record.tag.into()))));
    list.extend(record.strategy.as_ref().map(|strategy| text("strategy", strategy)));
    list.extend(record.first_byte_ns.map(|at| number("first_byte_ns", at)));
    let failed = record.done_ns.filter(|_| record.outcome == Outcome::Failed);
    list.extend(failed.map(|at| number("failed_ns", at)));
    list
}

const SEQUENCE: u32 = 1;
const INCREMENTAL_STATE_CLEARED: u32 = 1;
// `BuiltinClock`.
const REALTIME: u32 = 1;
const MONOTONIC: u32 = 3;
/// Above every number that Linux gives a process.
const NO_PID: i32 = 1 << 24;
