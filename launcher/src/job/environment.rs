//! The environment of a rank: torchrun's contract, and what the engine reads.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};

use tpurun_protocol::board::BOARD_FD_VAR;
use tpurun_protocol::control::{CONTROL_FD_VAR, STACK_SIGNAL_VAR};

use crate::job::Job;
use crate::nodes::TOKEN;
use crate::place::assignment::PLACE;

/// Variables and their values, to be added to the launcher's own.
pub(crate) type Variables = Vec<(String, String)>;

/// The variables that the launcher is told and no rank inherits.
pub(crate) const PRIVATE: [&str; 2] = [TOKEN, PLACE];

/// The variables that are the same for all ranks of a world that was started again so many times.
pub(crate) fn of_job(job: &Job, run_id: &str, restarts: u32) -> Variables {
    let mut variables = vec![
        ("WORLD_SIZE", job.ranks.to_string()),
        ("GROUP_WORLD_SIZE", job.hosts.count().to_string()),
        ("TPURUN_PROGRAMS", job.programs.to_json().to_string()),
        ("MASTER_ADDR", job.master_addr.clone()),
        ("TORCHELASTIC_RUN_ID", job.run_id.clone().unwrap_or_else(|| run_id.to_owned())),
        ("TORCHELASTIC_RESTART_COUNT", restarts.to_string()),
        ("TORCHELASTIC_MAX_RESTARTS", job.policy.max_restarts.to_string()),
        ("TPURUN_RESTART", restarts.to_string()),
    ];
    variables.extend(job.threads.map(|threads| ("OMP_NUM_THREADS", threads.to_string())));
    variables.extend(job.topology.as_ref().map(|topology| ("TPURUN_TOPOLOGY", topology.to_string())));
    variables.extend(job.verify_results.then(|| ("TPURUN_VERIFY_RESULTS", "1".to_owned())));
    variables.extend(job.device.map(|has| ("TPURUN_DEVICE", u32::from(has).to_string())));
    variables.extend(job.serves_gloo.then(|| ("TPURUN_BACKEND_FOR", "gloo".to_owned())));
    variables.extend(job.hbm.map(|bytes| ("TPURUN_HBM", bytes.to_string())));
    variables.extend(job.link.map(|link| ("TPURUN_LINK", link.to_string())));
    variables.extend(job.connections.map(|count| ("TPURUN_CONNECTIONS", count.to_string())));
    variables.extend(job.bulk.map(|bulk| ("TPURUN_BULK", bulk.to_string())));
    variables.extend(job.algorithm.map(|algorithm| ("TPURUN_ALGORITHM", algorithm.to_string())));
    variables.extend(job.tuning.map(|tuning| ("TPURUN_TUNING", tuning.to_string())));
    variables.extend(job.timeout.map(|timeout| ("TPURUN_TIMEOUT_MS", timeout.as_millis().to_string())));
    named(variables)
}

/// The variables that modules of `--preload` may read that are imported before there is a job, for all that are like
/// this one.
pub(crate) fn of_preload(job: &Job) -> Variables {
    let of_one = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TPURUN_RESTART"];
    let all = if job.preload.is_empty() { Vec::new() } else { of_job(job, "", 0) };
    all.into_iter().filter(|(name, _)| !of_one.contains(&name.as_str())).collect()
}

/// The variables that the start of the job has decided.
pub(crate) fn of_run(run_dir: &Path) -> Variables {
    let terminal = terminal().map(|path| path.display().to_string()).unwrap_or_default();
    named(vec![("TPURUN_RUN_DIR", run_dir.display().to_string()), ("TPURUN_TERMINAL", terminal)])
}

/// Where the debugger of a rank finds the person who has started the job; `python/tpurun/launch/_debugger.py` opens it.
fn terminal() -> Option<PathBuf> {
    let streams: [(&str, bool); 3] = [
        ("/proc/self/fd/0", io::stdin().is_terminal()),
        ("/proc/self/fd/2", io::stderr().is_terminal()),
        ("/proc/self/fd/1", io::stdout().is_terminal()),
    ];
    streams
        .into_iter()
        .find(|(_, is_terminal)| *is_terminal)
        .and_then(|(path, _)| std::fs::read_link(path).ok())
}

/// Where a rank finds the board that it inherits.
pub(crate) fn of_board(fd: i32) -> Variables {
    named(vec![(BOARD_FD_VAR, fd.to_string())])
}

/// Where on the board a rank marks how far it has come, in bytes; `python/tpurun/_marks.py` knows the rest.
pub(crate) fn of_marks(offset: usize) -> Variables {
    named(vec![("TPURUN_MARKS_AT", offset.to_string())])
}

/// Which rank of how many of which job: what a program does to RANK and WORLD_SIZE does not change that.
pub(crate) fn of_place(job: &Job, rank: u32, id: &str) -> Variables {
    named(vec![("TPURUN_JOB", format!("{rank}/{} {id}", job.ranks))])
}

/// The variables that a forked rank must set again, because its server was started with [`SERVER_THREADS`].
pub(crate) fn of_threads(job: &Job) -> Variables {
    let users = |name: &str| std::env::var(name).ok().map(|value| (name.to_owned(), value));
    let ours = job.threads.map(|threads| ("OMP_NUM_THREADS".to_owned(), threads.to_string()));
    ours.or_else(|| users("OMP_NUM_THREADS")).into_iter().chain(users("OPENBLAS_NUM_THREADS")).collect()
}

/// OpenBLAS starts its threads when it is loaded, and threads do not survive a fork.
pub(crate) const SERVER_THREADS: [(&str, &str); 2] =
    [("OMP_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1")];

/// Where the ranks meet.
pub(crate) fn of_store(port: u16, is_agents: bool) -> Variables {
    let is_agents = if is_agents { "True" } else { "False" };
    named(vec![
        ("MASTER_PORT", port.to_string()),
        ("TPURUN_STORE_PORT", port.to_string()),
        ("TORCHELASTIC_USE_AGENT_STORE", is_agents.into()),
    ])
}

/// The variables that tell one rank from the others, and one program from the others.
pub(crate) fn of_rank(job: &Job, rank: u32, error_file: &Path) -> Variables {
    let program = job.programs.of(rank);
    let host = job.hosts.of(rank);
    let (number, beside) = host.map_or((0, 0..job.ranks), |(number, host)| (number, host.ranks.clone()));
    let mut own = named(vec![
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", (rank - beside.start).to_string()),
        ("LOCAL_WORLD_SIZE", beside.len().to_string()),
        ("GROUP_RANK", number.to_string()),
        ("ROLE_NAME", program.role.clone()),
        ("ROLE_RANK", (rank - program.first_rank).to_string()),
        ("ROLE_WORLD_SIZE", program.ranks.to_string()),
        ("TPURUN_PROGRAM", program.name.clone()),
        ("TORCHELASTIC_ERROR_FILE", error_file.display().to_string()),
    ]);
    if let Some((_, host)) = host {
        own.extend(named(vec![("TPURUN_HOST", host.name.clone()), ("TPURUN_ADDRESS", host.address.clone())]));
    }
    program.env.iter().cloned().chain(own).collect()
}

/// Whether a rank would not be what it is if its program chose the value of this variable.
pub(crate) fn is_ours(name: &str) -> bool {
    let prefixes = ["MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_"];
    OURS.contains(&name) || PRIVATE.contains(&name) || prefixes.iter().any(|prefix| name.starts_with(prefix))
}

const OURS: [&str; 26] = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "TPURUN_PROGRAM",
    "TPURUN_PROGRAMS",
    "TPURUN_RUN_DIR",
    "TPURUN_TERMINAL",
    "TPURUN_TOPOLOGY",
    "TPURUN_ALGORITHM",
    "TPURUN_TUNING",
    "TPURUN_TIMEOUT_MS",
    "TPURUN_RANK_PID",
    "TPURUN_JOB",
    "TPURUN_STORE_PORT",
    "TPURUN_HOST",
    "TPURUN_ADDRESS",
    "TPURUN_LINK",
    "TPURUN_CONNECTIONS",
    "TPURUN_BULK",
    "TPURUN_RESTART",
    "TPURUN_MARKS_AT",
    BOARD_FD_VAR,
    CONTROL_FD_VAR,
    "TPURUN_PYTHON",
    STACK_SIGNAL_VAR,
];

fn named(variables: Vec<(&str, String)>) -> Variables {
    variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::decide;
    use crate::command_line::words;
    use std::ffi::OsString;

    #[test]
    fn what_a_rank_gets_from_us_no_program_can_change() {
        let line = "--topology 2x2 --hosts 2 --link loss=1% --algorithm ring --tuning {} --timeout 5s true : -n 3 true x";
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        let job = decide::job(&words::read(&words).unwrap()).unwrap();
        let of_rank = of_rank(&job, 2, Path::new("e"));
        let all = [
            of_job(&job, "run", 0),
            of_run(Path::new("r")),
            of_board(3),
            of_marks(64),
            of_store(1, true),
            of_place(&job, 2, "run"),
            of_rank.clone(),
        ]
        .concat();
        let others: Vec<String> =
            all.into_iter().map(|(name, _)| name).filter(|name| !is_ours(name)).collect();
        assert!(others.iter().all(|name| name == "OMP_NUM_THREADS"), "{others:?}");
        // No program can give ranks what they do not inherit, and the launcher counts on their signal.
        assert!([TOKEN, PLACE, STACK_SIGNAL_VAR].into_iter().all(is_ours));
        let value = |name: &str| &of_rank.iter().find(|(own, _)| own == name).unwrap().1;
        assert_eq!((value("RANK").as_str(), value("ROLE_RANK").as_str()), ("2", "1"));
        assert_eq!((value("LOCAL_RANK").as_str(), value("GROUP_RANK").as_str()), ("0", "1"));
        assert_eq!((value("TPURUN_HOST").as_str(), value("TPURUN_ADDRESS").as_str()), ("h1", "127.0.0.2"));
        assert_eq!((value("ROLE_NAME").as_str(), value("ROLE_WORLD_SIZE").as_str()), ("true-2", "3"));
        assert_eq!(value("TPURUN_PROGRAM"), "true-2");
    }
}
