//! The environment of a rank: torchrun's contract, and what the engine reads.

use std::path::Path;

use tpurun_collectives::board::BOARD_FD_VAR;

use crate::job::Job;

/// Variables and their values, to be added to the launcher's own.
pub(crate) type Variables = Vec<(String, String)>;

/// What is the same for all ranks of a world that was started again so many times.
pub(crate) fn of_job(job: &Job, run_id: &str, restarts: u32) -> Variables {
    let ranks = job.ranks.to_string();
    let mut variables = vec![
        ("WORLD_SIZE", ranks.clone()),
        ("LOCAL_WORLD_SIZE", ranks.clone()),
        ("GROUP_RANK", "0".into()),
        ("GROUP_WORLD_SIZE", "1".into()),
        ("ROLE_WORLD_SIZE", ranks),
        ("ROLE_NAME", job.role.clone()),
        ("MASTER_ADDR", job.master_addr.clone()),
        ("TORCHELASTIC_RUN_ID", job.run_id.clone().unwrap_or_else(|| run_id.to_owned())),
        ("TORCHELASTIC_RESTART_COUNT", restarts.to_string()),
        ("TORCHELASTIC_MAX_RESTARTS", job.policy.max_restarts.to_string()),
        ("TPURUN_RESTART", restarts.to_string()),
    ];
    variables.extend(job.threads.map(|threads| ("OMP_NUM_THREADS", threads.to_string())));
    variables.extend(job.topology.as_ref().map(|topology| ("TPURUN_TOPOLOGY", topology.to_string())));
    variables.extend(job.verify_results.then(|| ("TPURUN_VERIFY_RESULTS", "1".to_owned())));
    variables.extend(job.algorithm.map(|algorithm| ("TPURUN_ALGORITHM", algorithm.to_string())));
    variables.extend(job.timeout.map(|timeout| ("TPURUN_TIMEOUT_MS", timeout.as_millis().to_string())));
    named(variables)
}

/// What the start of the job has decided.
pub(crate) fn of_run(run_dir: &Path) -> Variables {
    named(vec![("TPURUN_RUN_DIR", run_dir.display().to_string())])
}

/// Where a rank finds the board that it inherits.
pub(crate) fn of_board(fd: i32) -> Variables {
    named(vec![(BOARD_FD_VAR, fd.to_string())])
}

/// What a forked rank must set again, because its server was started with [`SERVER_THREADS`].
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
    named(vec![("MASTER_PORT", port.to_string()), ("TORCHELASTIC_USE_AGENT_STORE", is_agents.into())])
}

/// What tells one rank from the others.
pub(crate) fn of_rank(rank: u32, error_file: &Path) -> Variables {
    let rank = rank.to_string();
    named(vec![
        ("RANK", rank.clone()),
        ("LOCAL_RANK", rank.clone()),
        ("ROLE_RANK", rank),
        ("TORCHELASTIC_ERROR_FILE", error_file.display().to_string()),
    ])
}

fn named(variables: Vec<(&str, String)>) -> Variables {
    variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
