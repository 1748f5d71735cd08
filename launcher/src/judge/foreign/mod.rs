//! Groups of ranks that another backend serves, such as Gloo: tpurun sees nothing of what happens in them, and says
//! so where that matters. Ranks write which they have (`python/tpurun/backend/_foreign.py`).

mod sleepers;

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::base::rank_set::RankSet;
use crate::observe::run_dir;
pub(crate) use sleepers::Sleepers;

/// One such group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Group {
    pub(crate) name: String,
    pub(crate) backend: String,
    pub(crate) size: u32,
    /// Those of this host that have it, as `0-3,7`.
    pub(crate) ranks: String,
}

/// The facts that one rank has written of one group.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
struct GroupFacts {
    name: String,
    backend: String,
    size: u32,
}

/// Those of a run of so many ranks, by their names; groups of equal names and sizes are one.
pub(crate) fn groups(run: &Path, ranks: u32) -> Vec<Group> {
    let mut all: Vec<(GroupFacts, Vec<u32>)> = Vec::new();
    for rank in 0..ranks {
        for told in told_by(run, rank) {
            match all.iter_mut().find(|(known, _)| *known == told) {
                Some((_, members)) => members.push(rank),
                None => all.push((told, vec![rank])),
            }
        }
    }
    all.sort();
    let group = |(told, members): (GroupFacts, Vec<u32>)| {
        let ranks = members.into_iter().collect::<RankSet>().to_string();
        Group { name: told.name, backend: told.backend, size: told.size, ranks }
    };
    all.into_iter().map(group).collect()
}

/// The line that a person should read about them; None when there are none.
pub(crate) fn line(groups: &[Group]) -> Option<String> {
    if groups.is_empty() {
        return None;
    }
    let named: Vec<String> = groups
        .iter()
        .take(MOST_NAMED)
        .map(|group| format!("{} ({}, ranks {})", group.name, group.backend, group.ranks))
        .collect();
    let more = match groups.len().saturating_sub(MOST_NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let noun = if groups.len() == 1 { "group" } else { "groups" };
    let advice = advice(groups.iter().map(|group| group.backend.as_str()));
    Some(format!("not of tpurun: {noun} {}{more}: {advice}", named.join(", ")))
}

/// Says what tpurun cannot do for groups of these backends, and what can be done about it.
fn advice<'a>(mut backends: impl Iterator<Item = &'a str>) -> String {
    let what = "tpurun sees nothing of what happens there, no check and no verdict";
    match backends.any(|backend| backend.split(", ").any(|one| one == "gloo")) {
        true => format!("{what}; --backend-for gloo makes groups of Gloo its own"),
        false => what.to_owned(),
    }
}

/// Ranks write what they like there.
fn told_by(run: &Path, rank: u32) -> Vec<GroupFacts> {
    let path = run_dir::error_file(run, rank).with_extension("json.groups");
    let is_ours = |found: fs::Metadata| found.is_file() && found.len() <= MAX_BYTES;
    if !path.symlink_metadata().is_ok_and(is_ours) {
        return Vec::new();
    }
    let text = fs::read(path).unwrap_or_default();
    let mut told: Vec<GroupFacts> = serde_json::from_slice(&text).unwrap_or_default();
    for one in &mut told {
        one.name = clean(&one.name);
        one.backend = clean(&one.backend);
    }
    told
}

fn clean(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_CHARS).collect()
}

const MOST_NAMED: usize = 3;
/// Most bytes of the file of one rank: about 600 groups.
const MAX_BYTES: u64 = 1 << 16;
/// Most characters of a name.
const MAX_CHARS: usize = 80;

#[cfg(test)]
mod tests {
    use super::*;

    fn run(told: &[&str]) -> tempfile::TempDir {
        let run = tempfile::tempdir().unwrap();
        fs::create_dir(run.path().join("errors")).unwrap();
        for (rank, text) in (0..).zip(told) {
            let path = run_dir::error_file(run.path(), rank).with_extension("json.groups");
            fs::write(path, text).unwrap();
        }
        run
    }

    #[test]
    fn ranks_of_one_group_are_one_line() {
        let world = r#"[{"name": "0", "backend": "gloo", "size": 3}]"#;
        let more =
            r#"[{"name": "0", "backend": "gloo", "size": 3}, {"name": "5", "backend": "mpi", "size": 1}]"#;
        let run = run(&[world, more, world]);
        let groups = groups(run.path(), 4);
        assert_eq!(groups.len(), 2);
        assert_eq!((groups[0].ranks.as_str(), groups[1].ranks.as_str()), ("0-2", "1"));
        assert_eq!(
            line(&groups).unwrap(),
            "not of tpurun: groups 0 (gloo, ranks 0-2), 5 (mpi, ranks 1): tpurun sees nothing of what happens \
             there, no check and no verdict; --backend-for gloo makes groups of Gloo its own"
        );
        assert!(!line(&groups[1..]).unwrap().contains("--backend-for"));
        assert_eq!(line(&[]), None);
    }

    #[test]
    fn whatever_a_rank_writes_is_read_or_not() {
        let long = format!(r#"[{{"name": "{}", "backend": "a\nb", "size": 1}}]"#, "x".repeat(1000));
        let run = run(&["", "{", "[1]", &long, &" ".repeat(70_000)]);
        let groups = groups(run.path(), 5);
        assert_eq!((groups.len(), groups[0].backend.as_str()), (1, "ab"));
        assert_eq!(groups[0].name.len(), MAX_CHARS);
    }
}
