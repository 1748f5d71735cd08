//! The compiled programs of a rank: a track for each, and on it a slice for each run.

use super::messages::{TracePacket, TrackEvent};
use super::tracks::{Rows, Tracks, event, number, slice_begin, slice_end, text};
use crate::observe::flight::{Outcome, RankFlight, RunFlight};

/// Adds a track for each program that the rank has run lately, in the order of their first runs.
pub(super) fn add(packets: &mut Vec<TracePacket>, tracks: &mut Tracks, process: u64, rank: &RankFlight) {
    // Ranks write the times themselves.
    let mut runs: Vec<&RunFlight> = rank.runs.iter().filter(|run| run.begun_ns != 0).collect();
    runs.sort_by_key(|run| run.begun_ns);
    let mut programs: Vec<&str> = Vec::new();
    for run in &runs {
        if !programs.contains(&run.program.as_str()) {
            programs.push(&run.program);
        }
    }
    for program in programs {
        let runs: Vec<&RunFlight> = runs.iter().copied().filter(|run| run.program == program).collect();
        let mut rows = Rows::new(format!("program {program} {}", runs[0].line), process);
        for run in runs {
            let end = run.done_ns.map(|done| done.max(run.begun_ns));
            let track = rows.take(packets, tracks, run.begun_ns, end);
            packets.push(event(run.begun_ns, begin(run, track)));
            packets.extend(end.map(|end| event(end, slice_end(track))));
        }
    }
}

fn begin(run: &RunFlight, track: u64) -> TrackEvent {
    let category = match run.outcome {
        Outcome::Done => "done",
        Outcome::Pending => "pending",
        Outcome::Failed => "failed",
    };
    TrackEvent {
        categories: vec![category.into()],
        debug_annotations: vec![
            text("program", &run.program),
            text("site", &run.line),
            number("operations", run.operations),
            number("run", run.number),
        ],
        ..slice_begin(track, format!("run {}", run.line).trim_end().into())
    }
}
