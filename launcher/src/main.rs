//! `tpurun`: runs a program as the ranks of one job, and says what went wrong when it does.

#![forbid(unsafe_code)]

mod agent;
mod base;
mod command_line;
mod commands;
mod control;
#[cfg(test)]
mod fuzz_smoke;
mod job;
mod judge;
mod nodes;
mod observe;
mod output;
mod place;
mod processes;
mod ranks;

use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::{self, ExitCode};

use clap::CommandFactory;
use tpurun_protocol::board::now_ns;

use agent::Origin;
use command_line::definition::{Bench, Cli, Command};
use command_line::{CommandLine, decide, words};
use commands::doctor::{self, DoctorOptions};
use commands::{dry_run, front, ssh, status, tasks_on_node, trace};
use job::{Job, target, values};
use place::{cluster, schedulers};
use ranks::warm;

fn main() -> ExitCode {
    main_code().unwrap_or_else(|error| {
        eprintln!("tpurun: error: {error}");
        ExitCode::from(2)
    })
}

fn main_code() -> Result<ExitCode, String> {
    let begun_ns = now_ns();
    let mut arguments = std::env::args_os().skip(1);
    let first = arguments.next().unwrap_or_default();
    if first == ssh::FOLLOW {
        return ssh::follow().map(exit_code);
    }
    if first == agent::AGENT {
        let origin = arguments.next().and_then(|word| Origin::parse(&word));
        let origin = origin.ok_or("expected to be started by tpurun itself")?;
        return Ok(exit_code(agent::run(decide::job(&words::parse(arguments))?, origin)?));
    }
    let cli = words::parse(std::env::args_os().skip(1));
    match &cli.command {
        Some(Command::Completions { shell }) => print(&completions(*shell)),
        Some(Command::Man) => print(&manual()?),
        Some(Command::Warm(options)) => warm::run(options),
        Some(Command::Token) => {
            let mut line = Vec::new();
            nodes::print_new(&mut line)?;
            print(&line)
        }
        Some(Command::Doctor { ranks, json }) => examine(&cli, ranks.as_deref(), *json),
        Some(Command::Status(options)) => status::run(options),
        Some(Command::Trace(options)) => {
            trace::run(options, cli.options.python.as_deref()).map_err(|error| cli.locate(error))
        }
        Some(Command::Bench(bench)) => measure(&cli, bench, begun_ns),
        None => start(&cli, &[], begun_ns),
    }
}

/// Runs one job for each number of ranks.
fn measure(cli: &CommandLine, bench: &Bench, mut begun_ns: u64) -> Result<ExitCode, String> {
    let given = bench.ranks.as_ref().or(cli.options.ranks.as_ref()).map(String::as_str);
    let given = given.unwrap_or(if bench.tune.is_some() { "8" } else { "2,8" });
    let counts: Vec<&str> = given.split(',').collect();
    let checked = counts.iter().try_for_each(|count| values::parse_ranks(count).map(drop));
    checked.map_err(|error| cli.locate(error))?;
    if bench.tune.is_some() && counts.len() > 1 {
        return Err(format!("--tune: expected one number of ranks, given --ranks {given}"));
    }
    for count in counts {
        let bench = Bench { ranks: Some(count.into()), ..bench.clone() };
        let one = CommandLine { command: Some(Command::Bench(bench)), ..cli.clone() };
        // The last `--ranks` of a command line counts.
        let code = start(&one, &["--ranks".into(), count.into()], begun_ns)?;
        if code != ExitCode::SUCCESS {
            return Ok(code);
        }
        begun_ns = now_ns();
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the job of a command line with some more arguments, or describes it.
fn start(cli: &CommandLine, more: &[String], begun_ns: u64) -> Result<ExitCode, String> {
    let job = decide::job(cli)?;
    if job.dry_run {
        print(dry_run::describe(&job).as_bytes())
    } else {
        hand_over(cli)?;
        Ok(exit_code(run(&job, more, begun_ns)?))
    }
}

/// In a batch script of several nodes this command becomes the one that starts it on all of them.
fn hand_over(cli: &CommandLine) -> Result<(), String> {
    let options = &cli.options;
    let torchrun = &options.torchrun;
    let is_placed = torchrun.standalone || torchrun.nnodes.is_some() || options.hosts.is_some();
    // Those of several programs are of all nodes.
    let gives_ranks = options.ranks.is_some() && cli.others.is_empty();
    let words = match schedulers::srun(&cluster::environment, gives_ranks) {
        Some(words) if !is_placed => words,
        _ => return Ok(()),
    };
    let own = std::env::current_exe().map_err(|error| format!("cannot find this command: {error}"))?;
    let mut command = process::Command::new(&words[0]);
    command.args(&words[1..]).arg(own).args(std::env::args_os().skip(1));
    if options.token_file.is_none() && std::env::var_os(nodes::TOKEN).is_none() {
        // Only this user sees the environment of a process, here and on the nodes.
        let mut token = Vec::new();
        nodes::print_new(&mut token)?;
        command.env(nodes::TOKEN, String::from_utf8_lossy(&token).trim());
    }
    let error = command.exec();
    Err(format!("cannot run srun, as SLURM_JOB_NUM_NODES asks for: {error}{}", schedulers::OTHERWISE))
}

/// As one of several tasks of a scheduler on this node, only the first one runs anything.
fn run(job: &Job, more: &[String], begun_ns: u64) -> Result<i32, String> {
    if let Some(remote) = &job.remote {
        return ssh::conduct(job, remote, more);
    }
    match &job.cluster {
        Some(cluster) if cluster.task > 0 => tasks_on_node::follow(cluster),
        Some(cluster) => {
            let followers = tasks_on_node::lead(cluster)?;
            let code = front::run(job, more, begun_ns);
            followers.dismiss(code.as_ref().copied().unwrap_or(2));
            code
        }
        None => front::run(job, more, begun_ns),
    }
}

fn examine(cli: &CommandLine, ranks: Option<&str>, json: bool) -> Result<ExitCode, String> {
    let options = &cli.options;
    let ranks = values::parse_ranks(ranks.or(options.ranks.as_deref()).unwrap_or("64"))
        .map_err(|error| cli.locate(error))?;
    // One that is missing is a finding, too.
    let python = target::find_python(options.python.as_deref()).map_err(|error| cli.locate(error));
    doctor::run(&DoctorOptions { ranks, python, json }).map_err(|error| format!("{error:#}"))
}

fn completions(shell: clap_complete::Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "tpurun", &mut script);
    script
}

fn manual() -> Result<Vec<u8>, String> {
    let mut page = Vec::new();
    clap_mangen::Man::new(Cli::command()).render(&mut page).map_err(|error| error.to_string())?;
    Ok(page)
}

fn print(bytes: &[u8]) -> Result<ExitCode, String> {
    match io::stdout().write_all(bytes).and_then(|()| io::stdout().flush()) {
        // A reader that leaves early is no bug of ours.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(ExitCode::SUCCESS),
        written => written.map(|()| ExitCode::SUCCESS).map_err(|error| error.to_string()),
    }
}

/// Exit codes have eight bits.
fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(code as u8)
}
