//! Options from the environment: the variable that an option is defined with gives its value where the command line
//! does not, and in the place of what a job file says. An empty variable counts as none.

use std::ffi::{OsStr, OsString};

use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory};
use tpurun_protocol::config::{Config, parse_timeout_ms, switch};
use tpurun_protocol::control::STACK_SIGNAL_VAR;

use super::definition::{Cli, is_typed};
use crate::job::values::parse_stack_signal;
use crate::nodes::TOKEN;

/// The value of a variable.
pub(crate) type OsLookup<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The options that variables give.
#[derive(Clone, Debug, Default)]
pub(crate) struct VariableOptions {
    /// The options as a person would type them.
    pub(super) words: Vec<OsString>,
    sources: Vec<Source>,
}

#[derive(Clone, Debug)]
struct Source {
    variable: String,
    /// Its option, as people type it.
    names: Vec<String>,
    id: String,
}

impl VariableOptions {
    /// Reads the variables of options that this command uses and its line does not give.
    ///
    /// # Errors
    /// One line that names the variable.
    pub(super) fn read(line: &ArgMatches, lookup: OsLookup<'_>) -> Result<VariableOptions, String> {
        let mut given = VariableOptions::default();
        for option in Cli::command().get_arguments() {
            let id = option.get_id().as_str();
            let variable = option.get_env().and_then(OsStr::to_str);
            let variable = variable.filter(|_| uses(line.subcommand_name(), id) && !is_typed(line, id));
            let Some((variable, long)) = variable.zip(option.get_long()) else { continue };
            let Some(text) = text_of(variable, lookup)? else { continue };
            let word = word(option, variable, &text).map_err(|error| format!("{variable}: {error}"))?;
            given.words.extend(word.map(|value| OsString::from(format!("--{long}{value}"))));
            let short = option.get_short().map(|short| format!("-{short}"));
            let names = short.into_iter().chain([format!("--{long}")]).collect();
            given.sources.push(Source { variable: variable.to_owned(), names, id: id.to_owned() });
        }
        if runs_ranks(line.subcommand_name()) {
            check_others(lookup)?;
        }
        Ok(given)
    }

    /// Whether the option of this id is from a variable.
    pub(crate) fn give(&self, id: &str) -> bool {
        self.sources.iter().any(|source| source.id == id)
    }

    /// The text of an error with variables in the place of the options that they gave.
    pub(super) fn name(&self, error: &str) -> String {
        let names =
            self.sources.iter().flat_map(|source| source.names.iter().map(move |name| (name, source)));
        names.fold(error.to_owned(), |text, (name, source)| replace_word(&text, name, &source.variable))
    }
}

/// The definition without variables: they are read here alone.
pub(super) fn command() -> Command {
    Cli::command().mut_args(|option| option.env(None::<&'static str>))
}

fn text_of(variable: &str, lookup: OsLookup<'_>) -> Result<Option<String>, String> {
    let given = lookup(variable).filter(|text| !text.is_empty());
    let text = given.map(OsString::into_string).transpose();
    text.map_err(|text| format!("{variable}: expected UTF-8, given {}", text.display()))
}

/// Returns the text after the name of the option; None when the option is not to be typed.
fn word(option: &Arg, variable: &str, text: &str) -> Result<Option<String>, String> {
    let value = match variable {
        _ if matches!(option.get_action(), ArgAction::SetTrue) => {
            return Ok(switch(text)?.then(String::new));
        }
        // The token is no path, and others can read the command lines of processes.
        TOKEN => return Ok(None),
        "TPURUN_DEVICE" => if switch(text)? { "tpu" } else { "cpu" }.to_owned(),
        "TPURUN_TIMEOUT_MS" => format!("{}ms", parse_timeout_ms(text)?),
        _ => text.to_owned(),
    };
    Ok(Some(format!("={value}")))
}

/// Variables without an option that ranks will read: bad ones are refused before any rank is started.
fn check_others(lookup: OsLookup<'_>) -> Result<(), String> {
    let in_words = |variable, read: &dyn Fn(&str) -> Result<(), String>| match text_of(variable, lookup)? {
        Some(text) => read(&text).map_err(|error| format!("{variable}: {error}")),
        None => Ok(()),
    };
    in_words(STACK_SIGNAL_VAR, &|text| parse_stack_signal(text).map(drop))?;
    in_words("TPURUN_CHIP_RULES", &|text| switch(text).map(drop))?;
    let of_engine = |name: &str| match ["TPURUN_MATCH", "TPURUN_STAGING_BYTES"].contains(&name) {
        true => lookup(name).filter(|text| !text.is_empty()).map(|text| text.display().to_string()),
        false => None,
    };
    Config::read(of_engine).map(drop).map_err(|failure| failure.to_string())
}

fn runs_ranks(command: Option<&str>) -> bool {
    matches!(command, None | Some("bench"))
}

/// Whether this command of ours does something with an option.
fn uses(command: Option<&str>, id: &str) -> bool {
    match command {
        Some("doctor") => ["ranks", "python"].contains(&id),
        Some("trace") => id == "python",
        command => runs_ranks(command),
    }
}

/// Replaces only whole words, so that `--hosts` is none of `--host`.
fn replace_word(text: &str, word: &str, by: &str) -> String {
    let is_inside = |c: char| c.is_alphanumeric() || c == '-';
    let mut replaced = String::new();
    let mut from = 0;
    for (at, _) in text.match_indices(word) {
        let to = at + word.len();
        if !text[..at].ends_with(is_inside) && !text[to..].starts_with(is_inside) {
            replaced += &text[from..at];
            replaced += by;
            from = to;
        }
    }
    replaced + &text[from..]
}

#[cfg(test)]
mod tests {
    use super::super::definition::one_line;
    use super::super::words::{CommandLine, Refusal, read_with};
    use super::*;
    use crate::command_line::decide;
    use crate::job::Job;

    /// The command line, decided, where these variables are set, and this is the job file.
    fn decided(variables: &str, line: &str, file: &str) -> Result<Job, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job.toml");
        std::fs::write(&path, format!("[job]\n{file}\n[[program]]\nranks = 4\ncommand = [\"true\"]"))
            .unwrap();
        let shown = path.display().to_string();
        let cli = cli(variables, &line.replace("FILE", &shown));
        cli.and_then(|cli| decide::job(&cli)).map_err(|error| error.replace(&shown, "FILE"))
    }

    fn cli(variables: &str, line: &str) -> Result<CommandLine, String> {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        let set: Vec<(&str, &str)> =
            variables.split_whitespace().map(|pair| pair.split_once('=').unwrap()).collect();
        let value = |name: &str| set.iter().find(|(set, _)| *set == name).map(|(_, text)| text.into());
        read_with(&words, &value).map_err(|refusal| match refusal {
            Refusal::Clap(error) => one_line(&error),
            Refusal::Line(line) => line,
        })
    }

    /// A variable and an option that say the same, and how `--dry-run` shows each of two values.
    const PAIRS: [(&str, &str, &str, &str); 10] = [
        ("TPURUN_TOPOLOGY=4", "topology=2x2", "TPURUN_TOPOLOGY=4", "TPURUN_TOPOLOGY=2x2"),
        ("TPURUN_ALGORITHM=ring", "algorithm=flat", "TPURUN_ALGORITHM=ring", "TPURUN_ALGORITHM=flat"),
        (
            "TPURUN_TUNING={wake_ns=1}",
            "tuning={wake_ns=2}",
            "TPURUN_TUNING={ wake_ns = 1 }",
            "TPURUN_TUNING={ wake_ns = 2 }",
        ),
        ("TPURUN_HBM=2M", "hbm=3M", "TPURUN_HBM=2097152", "TPURUN_HBM=3145728"),
        ("TPURUN_DEVICE=off", "device=tpu", "TPURUN_DEVICE=0", "TPURUN_DEVICE=1"),
        ("TPURUN_TIMEOUT_MS=1500", "timeout=2s", "TPURUN_TIMEOUT_MS=1500", "TPURUN_TIMEOUT_MS=2000"),
        ("TPURUN_CONNECTIONS=2", "connections=3", "TPURUN_CONNECTIONS=2", "TPURUN_CONNECTIONS=3"),
        ("TPURUN_BULK=tcp", "bulk=quic", "TPURUN_BULK=tcp", "TPURUN_BULK=quic"),
        (
            "TPURUN_LINK=loss=1%",
            "link=loss=2%",
            "TPURUN_LINK=delay=0us,jitter=0us,loss=1%,duplicate=0%",
            "TPURUN_LINK=delay=0us,jitter=0us,loss=2%,duplicate=0%",
        ),
        (
            "PET_MAX_RESTARTS=1",
            "max-restarts=2",
            "TORCHELASTIC_MAX_RESTARTS=1",
            "TORCHELASTIC_MAX_RESTARTS=2",
        ),
    ];

    #[test]
    fn the_command_line_beats_variables_and_these_beat_the_job_file() {
        for (variable, option, of_variable, of_option) in PAIRS {
            let (name, value) = option.split_once('=').unwrap();
            let shows = |variables: &str, line: &str, file: &str, expected: &str| {
                let text = crate::commands::dry_run::describe(&decided(variables, line, file).unwrap());
                let is_shown = text.lines().any(|line| line.ends_with(&format!(" {expected}")));
                assert!(is_shown, "{variables} {line} {file}: no {expected} in\n{text}");
            };
            let (in_file, job) = (format!("{name} = \"{value}\""), "--hosts 2 --job FILE");
            shows(variable, &format!("-n 4 --hosts 2 --{option} true"), "", of_option);
            shows(variable, &format!("--{option} {job}"), "", of_option);
            shows(variable, job, &in_file, of_variable);
            shows(variable, "-n 4 --hosts 2 true", "", of_variable);
            // An empty variable counts as none.
            let empty = format!("{}=", variable.split_once('=').unwrap().0);
            shows(&empty, job, &in_file, of_option);
        }
    }

    #[test]
    fn switches_beat_the_job_file_whatever_they_say() {
        let table: serde_json::Value =
            serde_json::from_str(include_str!("../../../tests/variables/switches.json")).unwrap();
        let texts = |name: &str| table[name].as_array().unwrap().iter().map(|text| text.as_str().unwrap());
        for (name, is_on) in [("on", true), ("off", false)] {
            texts(name).for_each(|text| assert_eq!(switch(text), Ok(is_on), "{text:?}"));
        }
        texts("refused").for_each(|text| assert!(switch(text).is_err(), "{text:?}"));
        let verifies = |text: &str, file: &str| {
            decided(&format!("TPURUN_VERIFY_RESULTS={text}"), "--job FILE", file).unwrap().verify_results
        };
        assert!(verifies("yes", "verify-results = false") && !verifies("off", "verify-results = true"));
        assert!(verifies("", "verify-results = true") && !verifies("", ""));
        assert!(decided("PET_NO_PYTHON=1 TPURUN_TIMINGS=on", "true", "").unwrap().timings);
    }

    #[test]
    fn what_is_wrong_with_a_variable_names_it() {
        let several = "-n 4 --hosts 2 true";
        for (variables, line, error) in [
            ("TPURUN_TIMINGS=maybe", "true", "TPURUN_TIMINGS: expected 1, true, on or yes, or 0, "),
            (
                "PET_MODULE=x",
                "true",
                "PET_MODULE: expected 1, true, on or yes, or 0, false, off or no, given \"x\"",
            ),
            (
                "PET_MODULE=1",
                "--no-python true",
                "the argument 'PET_MODULE' cannot be used with '--no-python'",
            ),
            ("PET_NPROC_PER_NODE=x", "true", "PET_NPROC_PER_NODE: expected a number of ranks from 1 to "),
            ("TPURUN_TOPOLOGY=2xx2", "true", "TPURUN_TOPOLOGY 2xx2: topology dimension"),
            ("TPURUN_TOPOLOGY=3", several, "TPURUN_TOPOLOGY 3: expected -n 3, one rank per chip, given 4"),
            ("TPURUN_ALGORITHM=magic", "true", "TPURUN_ALGORITHM: expected flat, ring, bucket, given magic"),
            ("TPURUN_TUNING=/no/file", "true", "TPURUN_TUNING /no/file: cannot read the file: "),
            ("TPURUN_HBM=1", "true", "TPURUN_HBM: expected a size of 1MiB to 16TiB"),
            ("TPURUN_DEVICE=tpu", "true", "TPURUN_DEVICE: expected 1, true, on or yes, or 0, "),
            ("TPURUN_BACKEND_FOR=nccl", "true", "TPURUN_BACKEND_FOR: expected gloo, given nccl"),
            ("TPURUN_VERIFY_RESULTS=2", "true", "TPURUN_VERIFY_RESULTS: expected 1, true, on or yes, or 0, "),
            (
                "TPURUN_TIMEOUT_MS=5s",
                "true",
                "TPURUN_TIMEOUT_MS: expected a number of milliseconds from 1 to ",
            ),
            (
                "TPURUN_CONNECTIONS=0",
                several,
                "TPURUN_CONNECTIONS: expected a number from 1 to 16, given \"0\"",
            ),
            ("TPURUN_BULK=udp", several, "TPURUN_BULK: expected tcp or quic, given \"udp\""),
            ("TPURUN_LINK=loss", several, "TPURUN_LINK: expected words such as delay=2ms,"),
            (
                "TPURUN_LINK=loss=1% TPURUN_BULK=tcp",
                several,
                "TPURUN_BULK: expected quic beside TPURUN_LINK, ",
            ),
            (
                "TPURUN_BULK=tcp",
                "-n 4 --hosts 2 --link loss=1% true",
                "TPURUN_BULK: expected quic beside --link, ",
            ),
            // Variables of several hosts, on one host.
            (
                "TPURUN_CONNECTIONS=0",
                "true",
                "TPURUN_CONNECTIONS: expected a number from 1 to 16, given \"0\"",
            ),
            ("TPURUN_BULK=udp", "true", "TPURUN_BULK: expected tcp or quic, given \"udp\""),
            ("TPURUN_LINK=loss", "true", "TPURUN_LINK: expected words such as delay=2ms,"),
            (
                "TPURUN_STACK_SIGNAL=+40",
                "true",
                "TPURUN_STACK_SIGNAL: expected the number of a signal from 36 to 63",
            ),
            ("TPURUN_CHIP_RULES=strict", "true", "TPURUN_CHIP_RULES: expected 1, true, on or yes, or 0, "),
            ("TPURUN_MATCH=loose", "true", "TPURUN_MATCH: expected normal or strict, given \"loose\""),
            ("TPURUN_STAGING_BYTES=1M", "true", "TPURUN_STAGING_BYTES: expected a number from 262144 to "),
            ("TPURUN_DEVICE=x", "bench", "TPURUN_DEVICE: expected 1, true, on or yes, or 0, "),
        ] {
            let given = decided(variables, line, "").map(drop);
            let is_expected = |given: &String| given.starts_with(error) && !given.contains('\n');
            assert!(given.as_ref().is_err_and(is_expected), "{variables} {line}: {given:?}");
        }
        // The file is not to blame.
        for (variables, file, error) in [
            ("TPURUN_HBM=1", "hbm = \"1G\"", "TPURUN_HBM: expected a size"),
            ("TPURUN_HBM=1G", "hbm = \"1\"\ntimeout = \"x\"", "FILE: [job] timeout: expected a time"),
            ("TPURUN_LINK=loss=1%", "bulk = \"tcp\"", "FILE: [job] bulk: expected quic beside TPURUN_LINK, "),
            ("TPURUN_STACK_SIGNAL=64", "", "TPURUN_STACK_SIGNAL: expected the number"),
        ] {
            let given = decided(variables, "--hosts 2 --job FILE", file).map(drop);
            assert!(given.as_ref().is_err_and(|given| given.starts_with(error)), "{variables}: {given:?}");
        }
    }

    #[test]
    fn variables_of_several_hosts_mean_nothing_on_one() {
        let job = decided("TPURUN_LINK=loss=1% TPURUN_BULK=tcp TPURUN_CONNECTIONS=2", "true", "").unwrap();
        assert!(job.link.is_none() && job.bulk.is_none() && job.connections.is_none());
    }

    #[test]
    fn a_variable_that_a_command_does_not_use_is_not_read() {
        let all =
            "TPURUN_TIMINGS=x PET_MODULE=x TPURUN_HBM=x TPURUN_MATCH=x TPURUN_DEVICE=x TPURUN_STACK_SIGNAL=x";
        for command in ["status", "trace", "doctor", "token", "man", "completions bash"] {
            assert!(cli(all, command).is_ok(), "{command}");
        }
        let error = cli("TPURUN_PYTHON=/nope PET_NPROC_PER_NODE=x", "doctor").unwrap();
        assert_eq!(error.options.python.as_deref(), Some("/nope"));
        assert!(error.locate("-n: expected".into()).starts_with("PET_NPROC_PER_NODE: "));
        assert!(error.locate("--python: expected".into()).starts_with("TPURUN_PYTHON: "));
    }

    #[test]
    fn variables_speak_of_the_first_program() {
        let cli = cli("PET_NPROC_PER_NODE=3 PET_MODULE=1 PET_ROLE=eval", "a : true").unwrap();
        assert_eq!((cli.options.ranks.as_deref(), cli.options.module), (Some("3"), true));
        let other = &cli.others[0].options;
        assert!(other.ranks.is_none() && !other.module && other.torchrun.role.is_none());
    }

    #[test]
    fn the_secret_of_a_variable_is_no_word() {
        let cli = cli("TPURUN_TOKEN=secret", "true").unwrap();
        assert!(cli.variables.words.is_empty() && cli.variables.give("token_file"));
    }

    #[test]
    fn whole_words_are_replaced() {
        assert_eq!(
            replace_word("--host: --hosts, '--host' a--host", "--host", "H"),
            "H: --hosts, 'H' a--host"
        );
        assert_eq!(replace_word("-n: expected --n, -n", "-n", "N"), "N: expected --n, N");
    }
}
