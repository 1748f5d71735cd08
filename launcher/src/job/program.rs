//! The programs of a job, and which ranks run each of them.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::job::target::{Target, TargetKind};

/// One program as the command line or the job file gives it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GivenProgram {
    pub(crate) role: Option<String>,
    /// None: one, or as many as the job has.
    pub(crate) ranks: Option<u32>,
    pub(crate) kind: TargetKind,
    pub(crate) words: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) cwd: Option<PathBuf>,
}

/// One program and the ranks that run it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// Different from those of the others, of letters, digits, `_`, `.` and `-`.
    pub(crate) name: String,
    /// ROLE_NAME.
    pub(crate) role: String,
    pub(crate) first_rank: u32,
    pub(crate) ranks: u32,
    pub(crate) target: Target,
    /// Added to what all ranks get.
    pub(crate) env: Vec<(String, String)>,
    /// None: where tpurun was started.
    pub(crate) cwd: Option<PathBuf>,
    pub(crate) start: Start,
}

/// How ranks come to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// Forked from one interpreter that has imported torch.
    ForkServer,
    /// One process each.
    Spawn,
}

/// The programs of a job in the order of their ranks; there is at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Programs(Vec<Program>);

impl Program {
    pub(crate) fn range(&self) -> Range<u32> {
        self.first_rank..self.first_rank + self.ranks
    }

    /// `3`, or `0-7`.
    pub(crate) fn shown_ranks(&self) -> String {
        match self.ranks {
            1 => self.first_rank.to_string(),
            ranks => format!("{}-{}", self.first_rank, self.first_rank + ranks - 1),
        }
    }
}

impl Programs {
    /// Looks the programs up and numbers their ranks in this order.
    ///
    /// # Errors
    /// One line; of several programs it says which one.
    pub(crate) fn new(given: Vec<GivenProgram>, python: Start) -> Result<Programs, String> {
        let names = unique_names(&given);
        let are_several = given.len() > 1;
        let mut programs = Vec::with_capacity(given.len());
        let mut first_rank = 0_u32;
        for (index, (given, name)) in given.into_iter().zip(names).enumerate() {
            let target = Target::new(given.kind, &given.words, given.cwd.as_deref()).map_err(|error| {
                if are_several { format!("program {}: {error}", index + 1) } else { error }
            })?;
            let is_forked = target.is_python() && !given.env.iter().any(|(name, _)| is_read_at_start(name));
            let role = match given.role {
                Some(role) if !are_several => role,
                None if !are_several => DEFAULT_ROLE.into(),
                _ => name.clone(),
            };
            let start = if is_forked { python } else { Start::Spawn };
            let GivenProgram { env, cwd, .. } = given;
            let ranks = given.ranks.unwrap_or(1);
            programs.push(Program { name, role, first_rank, ranks, target, env, cwd, start });
            first_rank = first_rank.saturating_add(ranks);
        }
        match first_rank {
            1..=MAX_RANKS => Ok(Programs(programs)),
            ranks => Err(format!("expected 1 to {MAX_RANKS} ranks in all programs together, given {ranks}")),
        }
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, Program> {
        self.0.iter()
    }

    /// The one that a rank below [`Programs::ranks`] runs.
    pub(crate) fn of(&self, rank: u32) -> &Program {
        let after = self.0.partition_point(|program| program.first_rank <= rank);
        &self.0[after - 1]
    }

    /// The number of ranks of all programs together.
    pub(crate) fn ranks(&self) -> u32 {
        self.0.iter().map(|program| program.ranks).sum()
    }

    /// Another number of ranks for the only program; of several each keeps its own.
    pub(crate) fn resize(&mut self, ranks: u32) {
        if let [only] = &mut self.0[..] {
            only.ranks = ranks;
        }
    }

    pub(crate) fn are_several(&self) -> bool {
        self.0.len() > 1
    }

    pub(crate) fn has_python(&self) -> bool {
        self.0.iter().any(|program| program.target.is_python())
    }

    pub(crate) fn are_all_forked(&self) -> bool {
        self.0.iter().all(|program| program.start == Start::ForkServer)
    }

    pub(crate) fn are_any_forked(&self) -> bool {
        self.0.iter().any(|program| program.start == Start::ForkServer)
    }

    /// A list of objects: name, first_rank, ranks and argv, which is empty in all when it is too long.
    pub(crate) fn to_json(&self) -> Value {
        let all: Vec<Vec<String>> = self.0.iter().map(|program| program.target.words()).collect();
        let is_long = all.iter().flatten().map(|word| word.len() + PER_WORD).sum::<usize>() > MAX_ARGV_BYTES;
        let entry = |(program, argv): (&Program, Vec<String>)| {
            let argv = if is_long { Vec::new() } else { argv };
            json!({
                "name": program.name, "first_rank": program.first_rank, "ranks": program.ranks, "argv": argv,
            })
        };
        self.0.iter().zip(all).map(entry).collect()
    }
}

/// The role where it is given, else what the program is called; those that are the same are numbered.
fn unique_names(given: &[GivenProgram]) -> Vec<String> {
    let wanted: Vec<String> = given.iter().map(name_of).collect();
    let mut counts: HashMap<&str, u32> = HashMap::new();
    wanted.iter().for_each(|name| *counts.entry(name).or_default() += 1);
    let mut taken: HashSet<String> =
        wanted.iter().filter(|name| counts[name.as_str()] == 1).cloned().collect();
    let mut last_number: HashMap<&str, u32> = HashMap::new();
    let mut numbered = |name| loop {
        let number = last_number.entry(name).or_default();
        *number += 1;
        let numbered = format!("{name}-{number}");
        if taken.insert(numbered.clone()) {
            return numbered;
        }
    };
    let is_alone = |name: &str| counts[name] == 1;
    wanted.iter().map(|name| if is_alone(name) { name.clone() } else { numbered(name.as_str()) }).collect()
}

fn name_of(given: &GivenProgram) -> String {
    let word = given.words.first().map_or("", String::as_str);
    let word = match given.kind {
        TargetKind::Module => word.rsplit('.').next(),
        TargetKind::Guess | TargetKind::Executable => {
            Path::new(word).file_stem().and_then(|stem| stem.to_str())
        }
    };
    let text = given.role.as_deref().filter(|role| !role.is_empty()).or(word).unwrap_or_default();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    let name: String = text.chars().map(|c| if is_plain(c) { c } else { '_' }).take(MAX_NAME_CHARS).collect();
    if name.is_empty() { UNNAMED.into() } else { name }
}

/// The variables that the interpreter, the loader or torch looks at once, when it starts: too late in a forked rank.
fn is_read_at_start(name: &str) -> bool {
    READ_AT_START.iter().any(|prefix| name.starts_with(prefix)) && name != "OMP_NUM_THREADS"
}

const READ_AT_START: [&str; 12] = [
    "PYTHON",
    "LD_",
    "GLIBC_",
    "MALLOC_",
    "TORCH",
    "PYTORCH_",
    "ATEN_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
];
const MAX_RANKS: u32 = tpurun_protocol::board::MAX_RANKS;
const DEFAULT_ROLE: &str = "default";
/// A name for `tpurun .` and the like.
const UNNAMED: &str = "main";
const MAX_NAME_CHARS: usize = 64;
/// A variable of the environment holds 128 KiB; escapes at worst make six bytes of one.
const MAX_ARGV_BYTES: usize = 16 << 10;
/// Quotes and comma.
const PER_WORD: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn given(words: &[&str], ranks: u32) -> GivenProgram {
        GivenProgram {
            ranks: Some(ranks),
            words: words.iter().map(|word| word.to_string()).collect(),
            ..GivenProgram::default()
        }
    }

    fn names(programs: &Programs) -> Vec<&str> {
        programs.iter().map(|program| program.name.as_str()).collect()
    }

    #[test]
    fn ranks_are_numbered_in_the_order_of_the_programs() {
        let programs =
            Programs::new(vec![given(&["true"], 1), given(&["sh", "x"], 7)], Start::Spawn).unwrap();
        assert_eq!((programs.ranks(), names(&programs)), (8, vec!["true", "sh"]));
        let shown: Vec<String> = programs.iter().map(Program::shown_ranks).collect();
        assert_eq!(shown, ["0", "1-7"]);
        assert_eq!((programs.of(0).name.as_str(), programs.of(7).name.as_str()), ("true", "sh"));
        assert_eq!(programs.of(1).role, "sh");
        let json = programs.to_json();
        assert_eq!((&json[1]["first_rank"], &json[1]["ranks"]), (&json!(1), &json!(7)));
        assert_eq!(json[1]["argv"][1], "x");
    }

    #[test]
    fn names_are_roles_or_stems_and_differ() {
        let role = |role: &str| GivenProgram { role: Some(role.into()), ..given(&["true"], 1) };
        let of = |given| Programs::new(given, Start::Spawn).map(|all| names(&all).join(" ")).unwrap();
        assert_eq!(
            of(vec![given(&["/bin/true"], 1), given(&["true"], 1), role("actor")]),
            "true-1 true-2 actor"
        );
        // A name that somebody has is nobody else's.
        assert_eq!(
            of(vec![role("true-1"), given(&["true"], 1), given(&["true"], 1)]),
            "true-1 true-2 true-3"
        );
        assert_eq!(of(vec![role("a b|\n"), role("")]), "a_b__ true");
        let module = GivenProgram { kind: TargetKind::Module, ..given(&["pkg.train"], 1) };
        assert_eq!(of(vec![module]), "train");
    }

    #[test]
    fn a_single_program_has_torchruns_role() {
        let role = |role: Option<&str>| {
            let given = GivenProgram { role: role.map(Into::into), ..given(&["true"], 1) };
            Programs::new(vec![given], Start::Spawn).unwrap().of(0).role.clone()
        };
        assert_eq!((role(None).as_str(), role(Some("a b")).as_str()), ("default", "a b"));
    }

    #[test]
    fn what_is_read_at_the_start_of_a_process_is_not_forked() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("a.py");
        std::fs::write(&script, "").unwrap();
        let start = |name: &str| {
            let env = vec![(name.to_owned(), String::new())];
            let given = GivenProgram { env, ..given(&[script.to_str().unwrap()], 1) };
            Programs::new(vec![given], Start::ForkServer).unwrap().of(0).start
        };
        assert_eq!(start("LR"), Start::ForkServer);
        assert_eq!(start("OMP_NUM_THREADS"), Start::ForkServer);
        assert_eq!(start("PYTHONPATH"), Start::Spawn);
        assert_eq!(start("LD_PRELOAD"), Start::Spawn);
    }

    #[test]
    fn what_is_wrong_says_which_program() {
        let error = Programs::new(vec![given(&["true"], 1), given(&["nope.py"], 1)], Start::Spawn);
        assert_eq!(
            error.unwrap_err(),
            "program 2: expected a script or program, given nope.py: no such file"
        );
        let error = Programs::new(vec![given(&["true"], 65_536), given(&["true"], 1)], Start::Spawn);
        assert_eq!(error.unwrap_err(), "expected 1 to 65536 ranks in all programs together, given 65537");
    }

    #[test]
    fn an_environment_variable_can_hold_the_list() {
        let long = "\u{1}".repeat(MAX_ARGV_BYTES - 100);
        let fits = Programs::new(vec![given(&["true", &long], 1)], Start::Spawn).unwrap().to_json();
        assert!(fits[0]["argv"][1].is_string() && fits.to_string().len() < 128 << 10);
        let too_long = "x".repeat(MAX_ARGV_BYTES);
        let left_out = Programs::new(vec![given(&["true", &too_long], 1)], Start::Spawn).unwrap().to_json();
        assert_eq!(left_out[0]["argv"], json!([]));
    }

    proptest! {
        #[test]
        fn every_rank_runs_one_program(sizes in prop::collection::vec(1_u32..40, 1..12)) {
            let given = sizes.iter().map(|ranks| given(&["true"], *ranks)).collect();
            let programs = Programs::new(given, Start::Spawn).unwrap();
            prop_assert_eq!(programs.ranks(), sizes.iter().sum::<u32>());
            for rank in 0..programs.ranks() {
                let holders: Vec<&Program> =
                    programs.iter().filter(|program| program.range().contains(&rank)).collect();
                prop_assert_eq!(holders, vec![programs.of(rank)]);
            }
        }

        #[test]
        fn names_never_clash(roles in prop::collection::vec("(a|b|a-1|a-2|b-1|)", 1..9)) {
            let given: Vec<GivenProgram> = roles
                .iter()
                .map(|role| GivenProgram { role: Some(role.clone()), ..given(&["a"], 1) })
                .collect();
            let names = unique_names(&given);
            let different: HashSet<&String> = names.iter().collect();
            prop_assert_eq!(different.len(), roles.len());
        }
    }
}
