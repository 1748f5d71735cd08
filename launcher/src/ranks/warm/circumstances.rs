//! The circumstances that a process cannot change of itself: user, limits, namespaces, control group and environment;
//! and the interpreter and the tpurun that were there when it started. A job gets a fork only of a process that has
//! the same ones.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::job::Job;
use crate::job::environment::{self, PRIVATE};

/// A text that is the same for two jobs when one process can serve both.
///
/// # Errors
/// One line: a variable that no JSON can carry to a server.
pub(super) fn of(job: &Job) -> Result<String, String> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let python = job.python.as_deref().expect("only Python programs are forked");
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let environment = environment(job)?;
    let mut lines = vec![
        format!("tpurun {} {}", env!("CARGO_PKG_VERSION"), identity(&own)),
        format!("python {}", identity(python)),
        format!("preload {:?}", job.preload),
        format!("cgroup {:?}", read("/proc/self/cgroup")),
        format!("root {:?}", fs::read_link("/proc/self/root").ok()),
        format!("label {:?}", read("/proc/self/attr/current")),
        of_scheduler(&read("/proc/self/stat")),
    ];
    // A relative place of modules depends on the directory that the interpreter is started in.
    let path = environment.get("PYTHONPATH").map_or("", String::as_str);
    if path.split(':').any(|place| !place.starts_with('/')) && !path.is_empty() {
        lines.push(format!("directory {:?}", std::env::current_dir().ok()));
    }
    lines.extend(["oom_score_adj", "personality", "timerslack_ns"].map(|name| {
        let value = read(&format!("/proc/self/{name}"));
        format!("{name} {}", value.trim())
    }));
    lines.extend(of_status(&read("/proc/self/status")));
    lines.extend(of_limits(&read("/proc/self/limits")));
    lines.extend(namespaces());
    lines.extend(environment.iter().map(|(name, value)| format!("{name}={value:?}")));
    Ok(lines.join("\n"))
}

/// A hash that only names the socket; a server compares the whole text.
pub(super) fn hash(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// A file, with the numbers that change when it is replaced.
fn identity(path: &Path) -> String {
    let found = fs::metadata(path);
    let found = found.map(|meta| (meta.dev(), meta.ino(), meta.size(), meta.mtime(), meta.mtime_nsec()));
    format!("{} {:?}", path.display(), found.ok())
}

fn environment(job: &Job) -> Result<BTreeMap<String, String>, String> {
    let utf8 = |name: &str| format!("the variable {name} is not UTF-8");
    let mut variables = BTreeMap::new();
    for (name, value) in std::env::vars_os() {
        let name = name.into_string().map_err(|name| utf8(&name.to_string_lossy()))?;
        if !PRIVATE.contains(&&*name) && !READ_BY_NO_IMPORT.contains(&&*name) {
            let value = value.into_string().map_err(|_| utf8(&name))?;
            variables.insert(name, value);
        }
    }
    variables.extend(environment::of_preload(job));
    Ok(variables)
}

/// Users, rights and processors.
fn of_status(text: &str) -> impl Iterator<Item = String> {
    text.lines()
        .filter(|line| STATUS.iter().any(|name| line.split(':').next() == Some(name)))
        .map(str::to_owned)
}

/// The soft limit of open files is one that a process sets for itself, as the agent does.
fn of_limits(text: &str) -> impl Iterator<Item = String> {
    text.lines().map(|line| match line.strip_prefix("Max open files") {
        Some(rest) => format!("Max open files {}", rest.split_whitespace().nth(1).unwrap_or_default()),
        None => line.to_owned(),
    })
}

/// Fields 19, 40 and 41 of proc_pid_stat(5): how nice it is, and its class and priority.
fn of_scheduler(line: &str) -> String {
    let fields: Vec<&str> = line.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
    let field = |number: usize| fields.get(number - 3).copied().unwrap_or_default();
    format!("scheduler {} {} {}", field(19), field(40), field(41))
}

fn namespaces() -> Vec<String> {
    let entries = fs::read_dir("/proc/self/ns").into_iter().flatten().flatten();
    let mut all: Vec<String> =
        entries.filter_map(|entry| Some(fs::read_link(entry.path()).ok()?.display().to_string())).collect();
    all.sort();
    all
}

/// Variables that differ between two commands of one person, and that decide nothing while modules are imported: a job
/// has its own values of them.
const READ_BY_NO_IMPORT: [&str; 11] = [
    "_",
    "COLUMNS",
    "LINES",
    "OLDPWD",
    "PWD",
    "PYTEST_CURRENT_TEST",
    "SHLVL",
    "TPURUN_RUNS",
    "TPURUN_TIMINGS",
    "TPURUN_WARM",
    "TPURUN_WARM_IDLE",
];

const STATUS: [&str; 16] = [
    "Umask",
    "Uid",
    "Gid",
    "Groups",
    "SigBlk",
    "SigIgn",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
    "Cpus_allowed_list",
    "Mems_allowed_list",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_can_change_of_itself_does_not_count() {
        let limits = |soft: u32| {
            format!(
                "Limit Soft Hard Units\nMax stack size 8388608 unlimited bytes\nMax open files {soft} 4096 files\n"
            )
        };
        let read: Vec<String> = of_limits(&limits(1024)).collect();
        assert_eq!(read, of_limits(&limits(64)).collect::<Vec<_>>());
        assert_eq!(read[1..], ["Max stack size 8388608 unlimited bytes", "Max open files 4096"]);
        let status =
            "Name:\tx\nUmask:\t0022\nPid:\t7\nUid:\t1\t1\t1\t1\nCpus_allowed:\t3\nCpus_allowed_list:\t0-1\n";
        let read: Vec<String> = of_status(status).collect();
        assert_eq!(read, ["Umask:\t0022", "Uid:\t1\t1\t1\t1", "Cpus_allowed_list:\t0-1"]);
        assert_ne!(hash("a"), hash("b"));
    }

    #[test]
    fn niceness_and_class_count() {
        let line = "7 (a b) c) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 5 1 0 99 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 17 1 0 3 2";
        assert!(of_scheduler(line).starts_with("scheduler 5 "), "{}", of_scheduler(line));
        assert_eq!(of_scheduler(""), "scheduler   ");
    }
}
