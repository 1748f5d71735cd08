//! The status of a job as people read it.

use std::fmt::Write;
use std::time::Duration;

use crate::commands::status::rows::Row;
use crate::judge::report;
use crate::observe::flight::{Outcome, RankState};

/// A column: its title, the text of a row in it, and the side on which that is aligned.
struct Column {
    title: &'static str,
    cell: fn(&Row) -> String,
    align: Align,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Align {
    Left,
    Right,
}

/// One line for each row under one line of titles; columns that say nothing are left out.
pub(crate) fn render(rows: &[Row]) -> String {
    let mut text = String::new();
    let columns: Vec<(&Column, Vec<String>)> = COLUMNS
        .iter()
        .map(|column| (column, rows.iter().map(column.cell).collect::<Vec<String>>()))
        .filter(|(_, cells)| cells.iter().any(|cell| !cell.is_empty()))
        .collect();
    let width = |column: &Column, cells: &[String]| {
        cells.iter().map(|cell| cell.chars().count()).max().unwrap_or(0).max(column.title.len())
    };
    let widths: Vec<usize> = columns.iter().map(|(column, cells)| width(column, cells)).collect();
    let mut line = |cells: Vec<&str>| {
        let padded =
            cells.iter().zip(&columns).zip(&widths).map(|((cell, (column, _)), width)| match column.align {
                Align::Left => format!("{cell:<width$}"),
                Align::Right => format!("{cell:>width$}"),
            });
        let _ = writeln!(text, "{}", padded.collect::<Vec<String>>().join("  ").trim_end());
    };
    line(columns.iter().map(|(column, _)| column.title).collect());
    for index in 0..rows.len() {
        line(columns.iter().map(|(_, cells)| cells[index].as_str()).collect());
    }
    text
}

const COLUMNS: [Column; 12] = [
    Column { title: "RANKS", cell: |row| row.ranks.clone(), align: Align::Left },
    Column { title: "PROGRAM", cell: |row| row.program.clone().unwrap_or_default(), align: Align::Left },
    Column { title: "STATE", cell: state, align: Align::Left },
    Column { title: "GROUP", cell: |row| row.group.clone().unwrap_or_default(), align: Align::Left },
    Column { title: "OPERATION", cell: operation, align: Align::Left },
    Column { title: "BY", cell: |row| row.strategy.clone().unwrap_or_default().into(), align: Align::Left },
    Column { title: "FOR", cell: duration, align: Align::Right },
    Column { title: "DONE/POSTED", cell: counts, align: Align::Right },
    Column { title: "OPS/S", cell: rate, align: Align::Right },
    Column { title: "CPU %", cell: cpu, align: Align::Right },
    Column { title: "RSS", cell: memory, align: Align::Right },
    Column { title: "AT", cell: |row| row.site.clone().unwrap_or_default(), align: Align::Left },
];

fn state(row: &Row) -> String {
    match (row.state, &row.ending) {
        (RankState::Ended, Some(ending)) => ending.clone(),
        (RankState::Ended, None) => "ended".into(),
        (RankState::Starting, _) => "starting".into(),
        (RankState::Running, _) => "running".into(),
        (RankState::Waiting, _) => "waiting".into(),
        (RankState::Stopped, _) => "stopped".into(),
    }
}

fn operation(row: &Row) -> String {
    let operation = row.operation.clone().unwrap_or_default();
    match row.outcome {
        Some(Outcome::Done) => format!("after {operation}"),
        Some(Outcome::Failed) => format!("failed {operation}"),
        Some(Outcome::Pending) | None => operation,
    }
}

fn duration(row: &Row) -> String {
    row.for_ms.map(|ms| report::clock(Duration::from_millis(ms))).unwrap_or_default()
}

fn counts(row: &Row) -> String {
    let range = |[least, most]: [u64; 2]| match least == most {
        true => least.to_string(),
        false => format!("{least}..{most}"),
    };
    if row.group.is_none() {
        return String::new();
    }
    format!("{}/{}", range(row.completed), range(row.posted))
}

fn rate(row: &Row) -> String {
    match row.ops_per_s {
        _ if row.group.is_none() => String::new(),
        rate if rate < 100.0 => format!("{rate:.1}"),
        rate => format!("{rate:.0}"),
    }
}

fn cpu(row: &Row) -> String {
    row.cpu_percent.map(|percent| format!("{percent:.0}")).unwrap_or_default()
}

fn memory(row: &Row) -> String {
    let mib = row.rss_bytes.map(|bytes| bytes >> 20);
    match mib {
        None => String::new(),
        Some(mib) if mib < 10_240 => format!("{mib} MiB"),
        Some(mib) => format!("{:.1} GiB", mib as f64 / 1024.0),
    }
}
