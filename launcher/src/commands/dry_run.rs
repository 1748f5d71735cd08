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
    let mut fields = Fields::default();
    programs(&mut fields, job);
    hosts(&mut fields, job);
    network(&mut fields, job);
    resources(&mut fields, job);
    if let Some(topology) = &job.topology {
        fields.add("topology", topology.to_string());
        fields.go_on(placement(job));
    }
    for program in job.programs.iter() {
        environment(&mut fields, job, program.first_rank);
    }
    fields.text
}

/// Lines that each have a name and a value.
#[derive(Default)]
struct Fields {
    text: String,
}

impl Fields {
    fn add(&mut self, name: &str, value: String) {
        let _ = writeln!(self.text, "{name:<10} {value}");
    }

    /// Further values of the last field.
    fn go_on(&mut self, values: impl IntoIterator<Item = String>) {
        values.into_iter().for_each(|value| self.add("", value));
    }

    /// The values of one field, each in its line.
    fn add_all(&mut self, name: &str, values: impl IntoIterator<Item = String>) {
        for (index, value) in values.into_iter().enumerate() {
            self.add(if index == 0 { name } else { "" }, value);
        }
    }
}

/// The programs, and how their ranks start.
fn programs(fields: &mut Fields, job: &Job) {
    for (index, program) in job.programs.iter().enumerate() {
        let words = program.target.words().join(" ");
        let named = || format!("{} (ranks {}): {words}", program.name, program.shown_ranks());
        let shown = if job.programs.are_several() { named() } else { words.clone() };
        fields.add(if index == 0 { "program" } else { "" }, shown);
        fields.go_on(program.env.iter().map(|(name, value)| format!("  {name}={value}")));
        fields.go_on(program.cwd.iter().map(|cwd| format!("  in {}", cwd.display())));
    }
    if let Some(python) = &job.python {
        fields.add("python", python.display().to_string());
    }
    let starts = job.programs.iter().map(|program| {
        let how = start(job, program);
        match job.programs.are_several() {
            true => format!("{} of {}, {how}", program.ranks, program.name),
            false => format!("{}, {how}", program.ranks),
        }
    });
    fields.add_all("ranks", starts);
}

fn hosts(fields: &mut Fields, job: &Job) {
    for host in job.hosts.iter() {
        let ranks: RankSet = host.ranks.clone().collect();
        fields.add("host", format!("{} at {}: ranks {ranks}", host.name, host.address));
    }
    if let Some(remote) = &job.remote {
        for host in &remote.hosts {
            fields.add("host", format!("{}: {} ranks", host.destination, host.ranks));
        }
        fields.add("by", remote.ssh.as_deref().unwrap_or(SSH).to_owned());
    }
}

fn network(fields: &mut Fields, job: &Job) {
    if let Some(link) = &job.link {
        fields.add("link", format!("{link}, of what ranks here send to other hosts"));
    }
    if let Some(connections) = job.connections {
        fields.add("connections", format!("{connections} between each two hosts"));
    }
    if let Some(bulk) = job.bulk {
        fields.add("bulk", format!("large tensors go over {bulk} between hosts"));
    }
    if let Some(Plan { count, node, rendezvous, .. }) = &job.nodes {
        fields.add(
            "node",
            format!("{node} of {count}, whose ranks come first to last; node 0 is at {rendezvous}"),
        );
    }
}

fn resources(fields: &mut Fields, job: &Job) {
    fields.add("cores", job.cores.to_string());
    let threads = job.threads.map(|threads| format!("{threads} per rank"));
    fields.add("threads", threads.unwrap_or_else(|| "as OMP_NUM_THREADS says".into()));
    let port = if job.master_port == 0 { "a free port".into() } else { format!("port {}", job.master_port) };
    fields.add("store", format!("{}, {port}", job.master_addr));
}

/// The variables that a rank gets; those of the job with rank 0.
fn environment(fields: &mut Fields, job: &Job, rank: u32) {
    let error_file = format!("<run>/errors/rank-{rank:04}.json");
    let common = if rank == 0 { environment::of_job(job, "<run>", 0) } else { Vec::new() };
    let own = environment::of_rank(job, rank, Path::new(&error_file));
    let variables = common.into_iter().chain(own);
    fields.add_all(&format!("rank {rank}"), variables.map(|(name, value)| format!("{name}={value}")));
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
