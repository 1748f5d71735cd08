//! Schedules as text: a table of ranks and steps for each channel.

use std::fmt;

use super::{Block, Schedule, Step};

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Table(std::slice::from_ref(self)).fmt(f)
    }
}

/// Prints schedules of one collective as a table of ranks and steps for each channel.
///
/// Cells are steps as they print alone; where all blocks of a channel are of one part, the heading says so
/// and the cells leave it out.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a>(pub &'a [Schedule]);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(first) = self.0.first() else { return writeln!(f, "no ranks") };
        let Schedule { collective, algorithm, ranks, parts, .. } = first;
        writeln!(f, "{collective}, {algorithm}, ranks {ranks}, parts {parts}")?;
        let channels = self.0.iter().map(|schedule| schedule.channels.len()).max().unwrap_or(0);
        (0..channels).try_for_each(|channel| self.write_channel(f, channel))
    }
}

impl Table<'_> {
    fn write_channel(&self, f: &mut fmt::Formatter<'_>, channel: usize) -> fmt::Result {
        let steps_of = |schedule: &'_ Schedule| schedule.channels.get(channel).cloned().unwrap_or_default();
        let lanes: Vec<(u32, Vec<Step>)> = self.0.iter().map(|s| (s.rank, steps_of(s))).collect();
        let blocks = || lanes.iter().flat_map(|(_, steps)| steps).flat_map(Step::blocks);
        let part = blocks().next().map(|first| first.part);
        let part = part.filter(|&part| blocks().all(|block| block.part == part));
        match part {
            Some(part) => writeln!(f, "channel {channel}, part {part}")?,
            None => writeln!(f, "channel {channel}")?,
        }
        let name = |block: Block| if part.is_some() { block.chunk.to_string() } else { block.to_string() };
        let cells = |steps: &[Step]| steps.iter().map(|step| step.cell(name)).collect::<Vec<_>>();
        let rows: Vec<(u32, Vec<String>)> = lanes.iter().map(|(rank, steps)| (*rank, cells(steps))).collect();
        let columns = rows.iter().map(|(_, cells)| cells.len()).max().unwrap_or(0);
        let width = |column| rows.iter().filter_map(|(_, cells)| cells.get(column)).map(String::len).max();
        let widths: Vec<usize> = (0..columns).filter_map(width).collect();
        for (rank, cells) in &rows {
            let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
            let line = padded.collect::<Vec<_>>().join("  ");
            writeln!(f, "{rank:>4} | {}", line.trim_end())?;
        }
        Ok(())
    }
}
