//! Tracks and the slices on them, whatever these show.

use super::messages::{Data, DebugAnnotation, TracePacket, TrackDescriptor, TrackEvent, Value};

/// Numbers of tracks, unique in the trace.
#[derive(Default)]
pub(super) struct Tracks(u64);

impl Tracks {
    pub(super) fn next(&mut self) -> u64 {
        self.0 += 1;
        self.0
    }
}

/// Tracks of one name. Slices of one track must nest, and some overlap: each goes to the first track that is free.
/// Perfetto shows tracks of one name and parent as one.
pub(super) struct Rows {
    name: String,
    parent: u64,
    /// Each track, and until when it is taken; None: for good.
    rows: Vec<(u64, Option<u64>)>,
}

impl Rows {
    pub(super) fn new(name: String, parent: u64) -> Self {
        Self { name, parent, rows: Vec::new() }
    }

    /// The track for a slice of this time; None: it never ends. Slices come in the order of their beginnings.
    pub(super) fn take(
        &mut self,
        packets: &mut Vec<TracePacket>,
        tracks: &mut Tracks,
        begin: u64,
        end: Option<u64>,
    ) -> u64 {
        let free = self.rows.iter().position(|(_, until)| until.is_some_and(|until| until <= begin));
        let row = free.unwrap_or_else(|| {
            let uuid = tracks.next();
            packets.push(describe(TrackDescriptor {
                uuid: Some(uuid),
                parent_uuid: Some(self.parent),
                name: Some(self.name.clone()),
                ..TrackDescriptor::default()
            }));
            self.rows.push((uuid, None));
            self.rows.len() - 1
        });
        self.rows[row].1 = end;
        self.rows[row].0
    }
}

pub(super) fn describe(track: TrackDescriptor) -> TracePacket {
    TracePacket { data: Some(Data::TrackDescriptor(track)), ..TracePacket::default() }
}

pub(super) fn event(at_ns: u64, event: TrackEvent) -> TracePacket {
    TracePacket { timestamp: Some(at_ns), data: Some(Data::TrackEvent(event)), ..TracePacket::default() }
}

pub(super) fn slice_begin(track: u64, name: String) -> TrackEvent {
    TrackEvent {
        r#type: Some(SLICE_BEGIN),
        track_uuid: Some(track),
        name: Some(name),
        ..TrackEvent::default()
    }
}

pub(super) fn slice_end(track: u64) -> TrackEvent {
    TrackEvent { r#type: Some(SLICE_END), track_uuid: Some(track), ..TrackEvent::default() }
}

pub(super) fn text(name: &str, text: &str) -> DebugAnnotation {
    annotation(name, Value::String(text.to_owned()))
}

pub(super) fn number(name: &str, number: u64) -> DebugAnnotation {
    annotation(name, Value::Uint(number))
}

pub(super) fn annotation(name: &str, value: Value) -> DebugAnnotation {
    DebugAnnotation { name: Some(name.to_owned()), value: Some(value) }
}

pub(super) const SLICE_BEGIN: i32 = 1;
const SLICE_END: i32 = 2;
