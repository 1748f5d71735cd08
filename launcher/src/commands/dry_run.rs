//! `--dry-run`: what would run, where and how.

use std::fmt::Write;
use std::path::Path;

use crate::base::rank_set::RankSet;
use crate::job::Job;
use crate::job::environment;
use crate::job::program::{Program, Start};
use crate::nodes::Plan;
use crate::place::ssh_hosts::SSH;
use crate::ranks;

/// The whole text.
pub(crate) fn describe(job: &Job) -> String {
    let mut text = String::new();
    let mut field = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<10} {value}");
    };
    for (index, program) in job.programs.iter().enumerate() {
        let words = program.target.words().join(" ");
        let named = || format!("{} (ranks {}): {words}", program.name, program.shown_ranks());
        let shown = if job.programs.are_several() { named() } else { words.clone() };
        field(if index == 0 { "program" } else { "" }, shown);
        for (name, value) in &program.env {
            field("", format!("  {name}={value}"));
        }
        if let Some(cwd) = &program.cwd {
            field("", format!("  in {}", cwd.display()));
        }
    }
    if let Some(python) = &job.python {
        field("python", python.display().to_string());
    }
    for (index, program) in job.programs.iter().enumerate() {
        let how = start(job, program);
        let count = match job.programs.are_several() {
            true => format!("{} of {}", program.ranks, program.name),
            false => program.ranks.to_string(),
        };
        field(if index == 0 { "ranks" } else { "" }, format!("{count}, {how}"));
    }
    for host in job.hosts.iter() {
        let ranks: RankSet = host.ranks.clone().collect();
        field("host", format!("{} at {}: ranks {ranks}", host.name, host.address));
    }
    if let Some(remote) = &job.remote {
        for host in &remote.hosts {
            field("host", format!("{}: {} ranks", host.destination, host.ranks));
        }
        field("by", remote.ssh.as_deref().unwrap_or(SSH).to_owned());
    }
    if let Some(link) = &job.link {
        field("link", format!("{link}, of what ranks here send to other hosts"));
    }
    if let Some(connections) = job.connections {
        field("connections", format!("{connections} between each two hosts"));
    }
    if let Some(bulk) = job.bulk {
        field("bulk", format!("large tensors go over {bulk} between hosts"));
    }
    if let Some(Plan { count, node, rendezvous, .. }) = &job.nodes {
        field(
            "node",
            format!("{node} of {count}, whose ranks come first to last; node 0 is at {rendezvous}"),
        );
    }
    field("cores", job.cores.to_string());
    field(
        "threads",
        job.threads.map_or("as OMP_NUM_THREADS says".into(), |threads| format!("{threads} per rank")),
    );
    let port = if job.master_port == 0 { "a free port".into() } else { format!("port {}", job.master_port) };
    field("store", format!("{}, {port}", job.master_addr));
    if let Some(topology) = &job.topology {
        field("topology", topology.to_string());
        for line in placement(job) {
            field("", line);
        }
    }
    let mut environment = |rank: u32, variables: environment::Variables| {
        for (index, (name, value)) in variables.into_iter().enumerate() {
            let title = format!("rank {rank}");
            field(if index == 0 { &title } else { "" }, format!("{name}={value}"));
        }
    };
    for program in job.programs.iter() {
        let rank = program.first_rank;
        let error_file = format!("<run>/errors/rank-{rank:04}.json");
        let common = if rank == 0 { environment::of_job(job, "<run>", 0) } else { Vec::new() };
        let own = environment::of_rank(job, rank, Path::new(&error_file));
        environment(rank, common.into_iter().chain(own).collect());
    }
    text
}

fn start(job: &Job, program: &Program) -> String {
    match program.start {
        Start::ForkServer => {
            let also =
                if job.preload.is_empty() { String::new() } else { format!(", {}", job.preload.join(", ")) };
            format!("forked from one interpreter that has imported torch{also}")
        }
        Start::Spawn => {
            let addresses = if job.has_same_addresses() { ", all at the same addresses" } else { "" };
            let seeds = if job.has_own_hash_seeds { ", with hash seeds of their own" } else { "" };
            let how = format!("{addresses}{seeds}");
            let words = ranks::command_words(job, program);
            format!(
                "a process each{how}: {}",
                words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
            )
        }
    }
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=./,:+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn placement(job: &Job) -> Vec<String> {
    let at = |rank| format!("{rank} at ({})", job.coordinates(rank).unwrap_or_default());
    let ranks: Vec<String> = (0..job.ranks.min(MAX_PLACED)).map(at).collect();
    let mut lines: Vec<String> = ranks.chunks(4).map(|chunk| chunk.join("  ")).collect();
    if job.ranks > MAX_PLACED {
        lines.push(format!("... and so on to {}", at(job.ranks - 1)));
    }
    lines
}

const MAX_PLACED: u32 = 64;
