//! The table that people read.

use std::fmt::Write;

use super::Timings;

/// The whole text, one newline after every line. The time of a phase counts from the end of the one before, so
/// that the column adds up to the whole; it is left open when not all ranks were there.
pub(crate) fn render(timings: &Timings) -> String {
    let mut text = format!("{:<28}{:>9}{:>8}{:>8}\n", "tpurun: timings", "first s", "last s", "took s");
    let mut before_ns = 0;
    for phase in &timings.phases {
        let missing = phase.ranks.filter(|ranks| *ranks < timings.ranks);
        let first = if phase.ranks.is_some() { phase.first_ns } else { None };
        let took = phase.last_ns.filter(|_| missing.is_none()).map(|last| last.saturating_sub(before_ns));
        before_ns = phase.last_ns.unwrap_or(before_ns).max(before_ns);
        let name = phase.phase.name();
        let line = format!("  {name:<26}{:>9}{:>8}{:>8}", shown(first), shown(phase.last_ns), shown(took));
        let _ = match missing {
            Some(ranks) => writeln!(text, "{line}  {ranks} of {}", counted(timings.ranks)),
            None => writeln!(text, "{line}"),
        };
    }
    let _ = writeln!(text, "  {}", summary(timings));
    text
}

fn summary(timings: &Timings) -> String {
    let (is_done, sum) = match timings.total_ns() {
        Some(ns) => (true, format!("{} in {} s", counted(timings.ranks), shown(Some(ns)))),
        None => (false, "ended before every rank had a collective done".into()),
    };
    let Some(cost) = &timings.cost else { return sum };
    let cpu = cost.cpu_ms as f64 / 1e3;
    let memory = match &cost.memory {
        Some(memory) => format!(", {} MiB (PSS of {} processes)", memory.pss_bytes >> 20, memory.processes),
        None if is_done => "; memory not measured, ranks were leaving".into(),
        None => String::new(),
    };
    format!("{sum}: {cpu:.1} s of CPU{memory}")
}

fn counted(ranks: u32) -> String {
    format!("{ranks} rank{}", if ranks == 1 { "" } else { "s" })
}

fn shown(ns: Option<u64>) -> String {
    ns.map_or_else(String::new, |ns| format!("{:.3}", (ns / 1000) as f64 / 1e6))
}
