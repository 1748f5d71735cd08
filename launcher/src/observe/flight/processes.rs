//! The processes of the ranks: which they are, what they have used, how they ended. All of this is from the events
//! of the run and from /proc, so that a process outside the agent can tell it, too.

use std::fs;
use std::path::Path;

use serde_json::Value;

/// The story of a run and its ranks, from the events of the run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Story {
    /// By rank.
    pub(crate) ranks: Vec<RankStory>,
    /// Fork servers, which ranks can be children of.
    pub(crate) servers: Vec<i32>,
    /// Exit code of the whole job; None while it runs.
    pub(crate) exit: Option<i64>,
    /// Time from the start of the job until its end, or until the last event.
    pub(crate) ran_ms: u64,
}

/// The last life of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RankStory {
    pub(crate) pid: Option<i32>,
    /// `exit 3`, `signal 9`.
    pub(crate) ending: Option<String>,
}

/// Resources that a process has used so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    /// As in `ps`.
    pub(crate) state: char,
    pub(crate) parent: i32,
    pub(crate) cpu_ms: u64,
    pub(crate) rss_bytes: u64,
}

/// Reads `events.jsonl`; a line that is not understood is passed over.
pub(crate) fn story(run_dir: &Path, ranks: u32) -> Story {
    let path = run_dir.join("events.jsonl");
    let is_small = path.metadata().is_ok_and(|metadata| metadata.len() <= MAX_EVENTS_BYTES);
    let text = if is_small { fs::read_to_string(path).unwrap_or_default() } else { String::new() };
    tell(&text, ranks)
}

fn tell(events: &str, ranks: u32) -> Story {
    let mut story = Story { ranks: vec![RankStory::default(); ranks as usize], ..Story::default() };
    let events = events.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    for event in events {
        story.ran_ms = event["ms"].as_u64().unwrap_or(story.ran_ms);
        let rank = event["rank"].as_u64().and_then(|rank| usize::try_from(rank).ok());
        let rank = rank.and_then(|rank| story.ranks.get_mut(rank));
        match (event["event"].as_str(), rank) {
            (Some("rank started"), Some(rank)) => {
                *rank = RankStory { pid: pid(&event), ending: None };
            }
            (Some("rank ended"), Some(rank)) => {
                let code = event["code"].as_i64().map(|code| format!("exit {code}"));
                let signal = || event["signal"].as_i64().map(|number| format!("signal {number}"));
                rank.ending = code.or_else(signal);
            }
            (Some("fork server started"), _) => story.servers.extend(pid(&event)),
            (Some("restart"), _) => story.ranks.fill(RankStory::default()),
            (Some("ended"), _) => story.exit = event["exit"].as_i64(),
            _ => {}
        }
    }
    story
}

fn pid(event: &Value) -> Option<i32> {
    event["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).filter(|pid| *pid > 0)
}

/// Returns the usage of one process; None when it is gone.
pub(crate) fn usage(pid: i32) -> Option<Usage> {
    parse_usage(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The name is in parentheses and may contain anything, parentheses too.
fn parse_usage(stat: &str) -> Option<Usage> {
    let (_, fields) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
    // Numbered from 1 in proc(5); the state is field 3.
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    let ticks = number(14)?.saturating_add(number(15)?);
    Some(Usage {
        state: fields.first()?.chars().next()?,
        parent: fields.get(1)?.parse().ok()?,
        cpu_ms: ticks.saturating_mul(1000) / rustix::param::clock_ticks_per_second().max(1),
        rss_bytes: number(24)?.saturating_mul(rustix::param::page_size() as u64),
    })
}

const MAX_EVENTS_BYTES: u64 = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_tell_who_lives() {
        let story = tell(
            r#"{"event":"started","ms":0,"ranks":3}
{"event":"fork server started","ms":1,"pid":9}
{"event":"rank started","ms":5,"rank":0,"pid":10}
{"event":"rank started","ms":6,"rank":1,"pid":11}
{"event":"rank started","ms":6,"rank":7,"pid":12}
{"event":"rank ended","ms":9,"rank":1,"code":3}
{"event":"rank ended","ms":9,"rank":0,"signal":9}
{"event":"rank started","ms":12,"rank":0,"pid":-4}
nonsense
{"event":"ended","ms":20,"exit":3}
{"event":"rank ended""#,
            3,
        );
        assert_eq!(story.ranks[0], RankStory::default());
        assert_eq!(story.ranks[1], RankStory { pid: Some(11), ending: Some("exit 3".into()) });
        assert_eq!((story.ranks[2].pid, story.exit, story.ran_ms), (None, Some(3), 20));
        assert_eq!(story.servers, [9]);
    }

    #[test]
    fn odd_names_do_not_shift_the_fields() {
        let rest = "1 1 1 0 -1 4194304 1 2 3 4 250 50 7 8 20 0 1 0 777 1000 3";
        let usage = parse_usage(&format!("9 (a ) Z 5 (b) T {rest}")).unwrap();
        assert_eq!(
            (usage.state, usage.parent, usage.rss_bytes),
            ('T', 1, 3 * rustix::param::page_size() as u64)
        );
        assert_eq!(usage.cpu_ms, 300 * 1000 / rustix::param::clock_ticks_per_second());
        assert_eq!(parse_usage("9 (short) S 1 2"), None);
    }

    #[test]
    fn this_process_has_used_something() {
        let usage = usage(rustix::process::getpid().as_raw_nonzero().get()).unwrap();
        assert!(usage.rss_bytes > 0 && usage.parent > 0 && "RS".contains(usage.state), "{usage:?}");
    }
}
