//! Makes programs of the words of a command line: cuts them at each lone `:`, and puts in the job file's options.

use std::ffi::OsString;

use clap::{ArgMatches, CommandFactory, FromArgMatches};

use super::definition::{Cli, Command, OF_PROGRAM, Options, is_typed, one_line};
use super::variables::{OsLookup, VariableOptions, command};
use crate::command_line::job_file::JobFile;

/// A whole command line, with all that it has taken in from elsewhere.
#[derive(Clone, Debug)]
pub(crate) struct CommandLine {
    pub(crate) options: Options,
    pub(crate) command: Option<Command>,
    /// The words of the first program, if there is one.
    pub(crate) program: Vec<String>,
    /// The programs after the first one.
    pub(crate) others: Vec<Cli>,
    /// The file that `--job` names.
    pub(crate) job_file: Option<JobFile>,
    /// The options that the environment gave.
    pub(crate) variables: VariableOptions,
}

impl CommandLine {
    /// Says of what is wrong with an option where it comes from, if that is not the command line.
    pub(crate) fn locate(&self, error: String) -> String {
        let named = self.variables.name(&error);
        let is_variables = named.split(' ').next() != error.split(' ').next();
        match &self.job_file {
            Some(file) if !is_variables => file.locate(named),
            _ => named,
        }
    }

    fn new(first: Cli, variables: VariableOptions) -> CommandLine {
        let Cli { options, command, program } = first;
        CommandLine { options, command, program, others: Vec::new(), job_file: None, variables }
    }
}

/// Why there is nothing to run.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Help and version are among them.
    Clap(clap::Error),
    Line(String),
}

/// One line for every way to get the command line wrong; help and version come out as they are.
pub(crate) fn parse(words: impl Iterator<Item = OsString>) -> CommandLine {
    let line = match read(&words.collect::<Vec<_>>()) {
        Ok(cli) => return cli,
        Err(Refusal::Clap(error)) if !error.use_stderr() => error.exit(),
        Err(Refusal::Clap(error)) => one_line(&error),
        Err(Refusal::Line(line)) => line,
    };
    eprintln!("tpurun: error: {line}");
    std::process::exit(2);
}

/// The command line without its first word, the name of the command.
///
/// # Errors
/// A line that clap refuses, or one that only the combination of several programs makes wrong.
pub(crate) fn read(words: &[OsString]) -> Result<CommandLine, Refusal> {
    read_with(words, &|variable| std::env::var_os(variable))
}

/// The same where variables have other values.
pub(crate) fn read_with(words: &[OsString], lookup: OsLookup<'_>) -> Result<CommandLine, Refusal> {
    let mut programs = words.split(|word| word == SEPARATOR);
    let first = programs.next().unwrap_or_default();
    let line = matches(&[], first).map_err(Refusal::Clap)?;
    let typed = Cli::from_arg_matches(&line).map_err(Refusal::Clap)?;
    let others: Vec<&[OsString]> = programs.collect();
    if let (false, Some(command)) = (others.is_empty(), line.subcommand_name()) {
        return Err(Refusal::Line(not_a_program(1, command)));
    }
    let variables = VariableOptions::read(&line, lookup).map_err(Refusal::Line)?;
    if typed.options.job.is_some() {
        return with_job_file(&typed, &line, first, others.first().copied(), variables);
    }
    let cli = with_more(&variables.words, first)
        .map_err(|error| Refusal::Line(variables.name(&one_line(&error))))?;
    let mut cli = CommandLine::new(cli, variables);
    cli.others = (2..).zip(others).map(|(number, words)| later(number, words)).collect::<Result<_, _>>()?;
    Ok(cli)
}

fn matches(before: &[OsString], words: &[OsString]) -> Result<ArgMatches, clap::Error> {
    let name = [OsString::from("tpurun")];
    command().try_get_matches_from(name.iter().chain(before).chain(words))
}

/// A command line that was fine by itself, with words before it that were not typed.
fn with_more(before: &[OsString], words: &[OsString]) -> Result<Cli, clap::Error> {
    Cli::from_arg_matches(&matches(before, words)?)
}

/// A program after a `:`; variables speak of the first one.
fn later(number: usize, words: &[OsString]) -> Result<Cli, Refusal> {
    let refused = |line: String| Refusal::Line(format!("program {number}: {line}"));
    let matches = matches(&[], words).map_err(|error| match error.use_stderr() {
        true => refused(one_line(&error)),
        false => Refusal::Clap(error),
    })?;
    if let Some(command) = matches.subcommand_name() {
        return Err(Refusal::Line(not_a_program(number, command)));
    }
    let of_job = |id: &str| !OF_PROGRAM.contains(&id) && id != PROGRAM;
    if let Some(option) = typed(&matches, of_job) {
        return Err(refused(format!(
            "{option}: expected before the first program, as an option of the whole job, given after `:`"
        )));
    }
    Cli::from_arg_matches(&matches).map_err(Refusal::Clap)
}

/// The command line overrides variables, and these override the file.
fn with_job_file(
    cli: &Cli,
    line: &ArgMatches,
    words: &[OsString],
    other: Option<&[OsString]>,
    variables: VariableOptions,
) -> Result<CommandLine, Refusal> {
    let path = cli.options.job.as_deref().expect("only called with one");
    let shown = path.display();
    let given =
        other.map(|_| SEPARATOR).or(line.subcommand_name()).or(cli.program.first().map(|word| &**word));
    if let Some(given) = given {
        let line = format!("--job: expected no program beside those of {shown}, given {given}");
        return Err(Refusal::Line(line));
    }
    if let Some(option) = typed(line, |id| OF_PROGRAM.contains(&id)) {
        let line = format!("{option}: expected in a [[program]] of {shown}, given on the command line");
        return Err(Refusal::Line(line));
    }
    let mut file = JobFile::read(path).map_err(Refusal::Line)?;
    let options = file.options(|id| is_typed(line, id) || variables.give(id)).map_err(Refusal::Line)?;
    let cli = with_more(&[&variables.words[..], &options].concat(), words)
        .map_err(|error| Refusal::Line(format!("{shown}: [job]: {}", variables.name(&one_line(&error)))))?;
    Ok(CommandLine { job_file: Some(file), ..CommandLine::new(cli, variables) })
}

/// The first option on the command line whose id is `wanted`, as people type it.
fn typed(matches: &ArgMatches, wanted: impl Fn(&str) -> bool) -> Option<String> {
    let command = Cli::command();
    let mut options = command.get_arguments().filter(|option| wanted(option.get_id().as_str()));
    let option = options.find(|option| is_typed(matches, option.get_id().as_str()))?;
    Some(option.get_long().map_or_else(|| option.get_id().to_string(), |long| format!("--{long}")))
}

fn not_a_program(number: usize, command: &str) -> String {
    format!(
        "program {number}: expected a program, given the command {command} (a program is run with its path: ./{command})"
    )
}

/// The word that stands between programs.
const SEPARATOR: &str = ":";
const PROGRAM: &str = "program";

#[cfg(test)]
mod tests {
    use super::*;

    fn cli(line: &str) -> Result<CommandLine, String> {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        read(&words).map_err(|refusal| match refusal {
            Refusal::Clap(error) => one_line(&error),
            Refusal::Line(line) => line,
        })
    }

    #[test]
    fn a_lone_colon_separates_programs() {
        let cli = cli("--timeout 5s eval.py --x : -n 7 --role trainer train.py a:b :: : -m pkg.log").unwrap();
        assert_eq!(cli.program, ["eval.py", "--x"]);
        assert_eq!(cli.others.len(), 2);
        let train = &cli.others[0];
        assert_eq!(train.program, ["train.py", "a:b", "::"]);
        assert_eq!(train.options.ranks.as_deref(), Some("7"));
        assert_eq!(train.options.torchrun.role.as_deref(), Some("trainer"));
        assert!(cli.others[1].options.module && !train.options.module);
    }

    #[test]
    fn options_of_the_job_stand_before_the_first_program() {
        for (option, shown) in [
            ("--timeout 5s", "--timeout"),
            ("--topology 2x2", "--topology"),
            ("--log-dir x", "--log-dir"),
            ("--max_restarts 1", "--max-restarts"),
            ("--spawn", "--spawn"),
            ("--dry-run", "--dry-run"),
            ("--job x.toml", "--job"),
            ("--rdzv_backend c10d", "--rdzv-backend"),
        ] {
            assert_eq!(
                cli(&format!("true : -n 2 {option} true")).unwrap_err(),
                format!(
                    "program 2: {shown}: expected before the first program, as an option of the whole job, given after `:`"
                )
            );
        }
    }

    #[test]
    fn commands_are_no_programs() {
        let said = "expected a program, given the command bench (a program is run with its path: ./bench)";
        assert_eq!(cli("bench --json : true").unwrap_err(), format!("program 1: {said}"));
        assert_eq!(cli("true : bench").unwrap_err(), format!("program 2: {said}"));
        assert_eq!(cli("true : ./bench").unwrap().others[0].program, ["./bench"]);
        let unknown = cli("true : --frobnicate true").unwrap_err();
        assert!(unknown.starts_with("program 2: unexpected argument '--frobnicate'"), "{unknown}");
    }

    fn with_file(text: &str, line: &str) -> Result<CommandLine, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job.toml");
        std::fs::write(&path, text).unwrap();
        let path = path.display().to_string();
        cli(&line.replace("FILE", &path)).map_err(|error| error.replace(&path, "FILE"))
    }

    const PROGRAM: &str = "[[program]]\ncommand = [\"true\", \":\"]\n";

    #[test]
    fn the_command_line_overrides_the_file() {
        let file = format!("[job]\ntimeout = 5\ndry-run = true\npreload = [\"a\", \"b\"]\n{PROGRAM}");
        let from_file = with_file(&file, "--job FILE").unwrap();
        assert_eq!(from_file.options.timeout.as_deref(), Some("5"));
        assert_eq!(from_file.options.preload, ["a", "b"]);
        assert!(from_file.options.dry_run);
        assert_eq!(from_file.job_file.unwrap().programs[0].words, ["true", ":"]);
        let typed = with_file(&file, "--timeout 7s --job FILE").unwrap();
        assert_eq!(typed.options.timeout.as_deref(), Some("7s"));
    }

    #[test]
    fn programs_come_from_one_place() {
        for (line, error) in [
            ("--job FILE true", "--job: expected no program beside those of FILE, given true"),
            ("--job FILE : true", "--job: expected no program beside those of FILE, given :"),
            ("--job FILE bench", "--job: expected no program beside those of FILE, given bench"),
            (
                "-n 3 --job FILE",
                "--nproc-per-node: expected in a [[program]] of FILE, given on the command line",
            ),
            ("--role x --job FILE", "--role: expected in a [[program]] of FILE, given on the command line"),
        ] {
            assert_eq!(with_file(PROGRAM, line).unwrap_err(), error, "{line}");
        }
        let conflict = with_file(&format!("[job]\nspawn = true\npreload = \"a\"\n{PROGRAM}"), "--job FILE");
        assert!(
            conflict.as_ref().is_err_and(|error| error.starts_with("FILE: [job]: the argument '--")),
            "{conflict:?}"
        );
    }
}
