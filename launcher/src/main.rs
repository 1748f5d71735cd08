//! `tpurun`: runs a program as the ranks of one job, and says what went wrong when it does.

#![forbid(unsafe_code)]

mod agent;
mod cgroup;
mod cli;
mod control_server;
mod cpus;
mod dry_run;
mod environment;
mod exchange;
mod fork_server;
mod front;
mod job;
mod kill;
mod op_text;
mod output;
mod processes;
mod program;
mod rank_set;
mod ranks;
mod report;
mod run_dir;
mod screen;
mod signals;
mod verdict;
mod watch;

use std::io::{self, Write};

use clap::{CommandFactory, Parser};

use cli::{Cli, Command};
use job::Job;

fn main() {
    let code = main_code().unwrap_or_else(|error| {
        eprintln!("tpurun: error: {error}");
        2
    });
    std::process::exit(code);
}

fn main_code() -> Result<i32, String> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|first| first == front::AGENT) {
        let front = arguments.next().and_then(|pid| pid.to_str()?.parse().ok()).ok_or("expected a pid")?;
        let cli = Cli::parse_from(std::iter::once("tpurun".into()).chain(arguments));
        return agent::run(Job::new(&cli)?, front);
    }
    let cli = cli::parse();
    match cli.command {
        Some(Command::Completions { shell }) => {
            // To memory first: a reader that leaves early is no bug of ours.
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "tpurun", &mut script);
            return print(&script);
        }
        Some(Command::Man) => {
            let mut page = Vec::new();
            let man = clap_mangen::Man::new(Cli::command());
            man.render(&mut page).map_err(|error| error.to_string())?;
            return print(&page);
        }
        _ => {}
    }
    let job = Job::new(&cli)?;
    if job.dry_run { print(dry_run::describe(&job).as_bytes()) } else { front::run() }
}

fn print(bytes: &[u8]) -> Result<i32, String> {
    match io::stdout().write_all(bytes).and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(0),
        written => written.map(|()| 0).map_err(|error| error.to_string()),
    }
}
