//! `tpurun warm`: shows the fork servers that stay, and ends them.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use serde::Deserialize;
use serde_json::json;

use super::{Answer, NoAnswer, SOCKET, ServerConnection, folder, say, unexpected};
use crate::command_line::definition::WarmOptions;

/// The status of a server, in its own words.
#[derive(Debug, Deserialize)]
pub(crate) struct Status {
    pid: i32,
    python: String,
    age_s: u64,
    idle_s: u64,
    idle_limit_s: u64,
    /// Jobs that run now; `served` counts all that the server has had.
    jobs: u32,
    served: u32,
    preload: Vec<String>,
}

/// Shows the servers of this user, or ends them.
///
/// # Errors
/// One line: their folder is not ours, or one of them does not answer.
pub(crate) fn run(options: &WarmOptions) -> Result<ExitCode, String> {
    let (mut found, mut silent) = (0, Vec::new());
    for socket in sockets()? {
        let Ok(mut connection) = ServerConnection::begin(&socket) else {
            // Nobody listens there any more.
            let _ = fs::remove_file(&socket);
            continue;
        };
        found += 1;
        let request = if options.stop { json!({"op": "stop"}) } else { json!({"op": "status"}) };
        match connection.ask(&request) {
            Ok(Answer::Status(status)) => println!("{}", shown(&status)),
            Ok(Answer::Stopped { jobs: 0 }) => println!("fork server {} has ended", connection.patience.pid),
            Ok(Answer::Stopped { jobs }) => {
                println!(
                    "fork server {} takes no more jobs, and ends with the {jobs} it has",
                    connection.patience.pid
                );
            }
            Ok(other) => say(&unexpected(&other)),
            Err(NoAnswer::Ended) => found -= 1,
            Err(why) => silent.push((connection.patience.pid, why)),
        }
    }
    if found == 0 {
        println!("no warm fork server (tpurun --warm starts one)");
    }
    let lines = silent.iter().map(|(pid, why)| format!("fork server {pid} {why} (kill -9 {pid} ends it)"));
    match lines.reduce(|one, other| format!("{one}; {other}")) {
        Some(line) => Err(line),
        None => Ok(ExitCode::SUCCESS),
    }
}

fn sockets() -> Result<Vec<PathBuf>, String> {
    let folder = folder()?;
    let entries = fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let is_socket = |path: &PathBuf| path.to_string_lossy().ends_with(SOCKET);
    let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(is_socket).collect();
    found.sort();
    Ok(found)
}

fn shown(status: &Status) -> String {
    let Status { pid, python, jobs, served, .. } = status;
    let memory = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let resident =
        memory.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse().ok());
    let now = match jobs {
        0 => format!("idle for {} s of {} s", status.idle_s, status.idle_limit_s),
        1 => "serves 1 job".into(),
        jobs => format!("serves {jobs} jobs"),
    };
    let preload = if status.preload.is_empty() {
        String::new()
    } else {
        format!(", --preload {}", status.preload.join(","))
    };
    let jobs = if *served == 1 { "job" } else { "jobs" };
    format!(
        "fork server {pid}: {now}; {served} {jobs} in {} s, {} MB, {python}{preload}",
        status.age_s,
        resident.unwrap_or(0_u64) / 1024
    )
}
