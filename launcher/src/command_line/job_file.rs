//! A job in a TOML file: its options in `[job]`, its programs in `[[program]]` tables.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use clap::{Arg, ArgAction, CommandFactory};
use toml::{Table, Value};

use crate::command_line::definition::{Cli, OF_PROGRAM};
use crate::job::environment;
use crate::job::program::GivenProgram;
use crate::job::target::TargetKind;
use crate::job::values::ranks_from;

/// A file that was read; only what its options mean is still to be checked.
#[derive(Clone, Debug)]
pub(crate) struct JobFile {
    /// As the user gave it.
    shown: String,
    pub(crate) programs: Vec<GivenProgram>,
    options: Table,
}

impl JobFile {
    /// # Errors
    /// One line that names the file and the key, and says what was expected and what was given.
    pub(crate) fn read(path: &Path) -> Result<JobFile, String> {
        let shown = path.display().to_string();
        let wrong =
            |why: &dyn std::fmt::Display| format!("--job: expected a TOML file, given {shown}: {why}");
        // Read again by the process that runs the job, so a pipe would not do.
        let meta = path.metadata().map_err(|error| wrong(&error))?;
        if !meta.is_file() {
            return Err(wrong(&"it is no regular file"));
        }
        let text = fs::read_to_string(path).map_err(|error| wrong(&error))?;
        let absolute = std::path::absolute(path).map_err(|error| wrong(&error))?;
        JobFile::parse(shown.clone(), absolute.parent().unwrap_or(Path::new("/")), &text)
    }

    /// `dir` is what the working directories of programs are relative to.
    fn parse(shown: String, dir: &Path, text: &str) -> Result<JobFile, String> {
        let file: Table = text.parse().map_err(|error| no_toml(&shown, text, &error))?;
        let in_file = |error: String| format!("{shown}: {error}");
        known(&file, &["job", "program"]).map_err(in_file)?;
        let options = match file.get("job") {
            None => Table::new(),
            Some(Value::Table(options)) => options.clone(),
            Some(other) => return Err(in_file(format!("job: expected a table, [job], given {}", a(other)))),
        };
        let programs = programs(file.get("program"), dir).map_err(in_file)?;
        Ok(JobFile { shown, programs, options })
    }

    /// The options of `[job]` as words of a command line, and forgets those that `is_given` elsewhere.
    pub(crate) fn options(&mut self, is_given: impl Fn(&str) -> bool) -> Result<Vec<OsString>, String> {
        let command = Cli::command();
        let options: Vec<&Arg> = command.get_arguments().filter(|option| belongs_to_job(option)).collect();
        let names: Vec<&str> = options.iter().filter_map(|option| option.get_long()).collect();
        let in_job = |shown: &str, error: String| format!("{shown}: [job] {error}");
        known(&self.options, &names).map_err(|error| in_job(&self.shown, error))?;
        let of =
            |name: &str| options.iter().find(|option| option.get_long() == Some(name)).expect("it is known");
        self.options.retain(|name, _| !is_given(of(name).get_id().as_str()));
        let words = self.options.iter().map(|(name, value)| word(of(name), name, value));
        words
            .filter_map(Result::transpose)
            .collect::<Result<_, _>>()
            .map_err(|error| in_job(&self.shown, error))
    }

    /// Says of what is wrong with a value that it comes from this file, if it does.
    pub(crate) fn locate(&self, error: String) -> String {
        let Some(option) = error.strip_prefix("--") else { return format!("{}: {error}", self.shown) };
        let name = option.split([':', ' ']).next().unwrap_or_default();
        match self.options.contains_key(name) {
            true => format!("{}: [job] {option}", self.shown),
            false => error,
        }
    }
}

fn belongs_to_job(option: &Arg) -> bool {
    let id = option.get_id().as_str();
    option.get_long().is_some() && !option.is_hide_set() && !OF_PROGRAM.contains(&id) && id != "job"
}

fn word(option: &Arg, name: &str, value: &Value) -> Result<Option<OsString>, String> {
    let is_switch = matches!(option.get_action(), ArgAction::SetTrue);
    let text = match value {
        Value::Boolean(on) if is_switch => return Ok(on.then(|| format!("--{name}").into())),
        other if is_switch => return Err(format!("{name}: expected true or false, given {}", a(other))),
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Array(list) if option.get_value_delimiter().is_some() => strings(name, list)?.join(","),
        other => return Err(format!("{name}: expected a string or a number, given {}", a(other))),
    };
    Ok(Some(format!("--{name}={text}").into()))
}

fn programs(value: Option<&Value>, dir: &Path) -> Result<Vec<GivenProgram>, String> {
    let tables = match value {
        Some(Value::Array(tables)) if !tables.is_empty() => tables,
        None | Some(Value::Array(_)) => return Err("expected at least one [[program]], given none".into()),
        Some(other) => return Err(format!("program: expected tables, [[program]], given {}", a(other))),
    };
    let numbered = (1..).zip(tables);
    numbered
        .map(|(number, value)| {
            let table = value.as_table().ok_or_else(|| format!("expected a table, given {}", a(value)));
            table.and_then(|table| program(table, dir)).map_err(|error| format!("program {number}: {error}"))
        })
        .collect()
}

fn program(table: &Table, dir: &Path) -> Result<GivenProgram, String> {
    known(table, &["name", "ranks", "command", "env", "cwd"])?;
    let mut words = match table.get("command") {
        Some(Value::Array(list)) if !list.is_empty() => strings("command", list)?,
        Some(other) => return Err(format!("command: expected a list of words, given {}", a(other))),
        None => return Err("command: expected a list of words, given none".into()),
    };
    let is_module = words[0] == "-m";
    if is_module {
        words.remove(0);
    }
    Ok(GivenProgram {
        role: text(table, "name")?,
        ranks: table.get("ranks").map(ranks).transpose()?,
        kind: if is_module { TargetKind::Module } else { TargetKind::Guess },
        words,
        env: env(table.get("env"))?,
        cwd: text(table, "cwd")?.map(|cwd| directory(&cwd, dir)).transpose()?,
    })
}

fn ranks(value: &Value) -> Result<u32, String> {
    let text = match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    ranks_from(&text).map_err(|error| format!("ranks: {error}"))
}

fn env(value: Option<&Value>) -> Result<Vec<(String, String)>, String> {
    let table = match value {
        None => return Ok(Vec::new()),
        Some(Value::Table(table)) => table,
        Some(other) => return Err(format!("env: expected a table of strings, given {}", a(other))),
    };
    let pair = |(name, value): (&String, &Value)| {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(format!("env: expected the name of a variable, given {name:?}"));
        }
        if environment::is_ours(name) {
            return Err(format!(
                "env.{name}: expected a variable that tpurun does not set itself, given {name}"
            ));
        }
        string(&format!("env.{name}"), value).map(|value| (name.clone(), value))
    };
    table.iter().map(pair).collect()
}

fn directory(cwd: &str, dir: &Path) -> Result<std::path::PathBuf, String> {
    let path = dir.join(cwd);
    if path.is_dir() { Ok(path) } else { Err(format!("cwd: expected a directory, given {cwd}: no such one")) }
}

fn text(table: &Table, name: &str) -> Result<Option<String>, String> {
    table.get(name).map(|value| string(name, value)).transpose()
}

fn strings(name: &str, list: &[Value]) -> Result<Vec<String>, String> {
    let item = |(index, value): (usize, &Value)| string(&format!("{name}[{index}]"), value);
    list.iter().enumerate().map(item).collect()
}

/// A process can not be given a NUL.
fn string(name: &str, value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) if !text.contains('\0') => Ok(text.clone()),
        Value::String(_) => Err(format!("{name}: expected text without a NUL character, given one with it")),
        other => Err(format!("{name}: expected a string, given {}", a(other))),
    }
}

fn known(table: &Table, names: &[&str]) -> Result<(), String> {
    match table.keys().find(|key| !names.contains(&key.as_str())) {
        Some(key) => Err(format!("{key}: expected one of {}, given {key}", names.join(", "))),
        None => Ok(()),
    }
}

/// The kind of a value, as a phrase.
fn a(value: &Value) -> String {
    match value {
        Value::Array(list) if list.is_empty() => "an empty list".into(),
        Value::Array(_) => "a list".into(),
        Value::Table(_) => "a table".into(),
        Value::String(text) => format!("the string {text:?}"),
        other => format!("the {} {other}", other.type_str()),
    }
}

fn no_toml(shown: &str, text: &str, error: &toml::de::Error) -> String {
    let before = text.get(..error.span().unwrap_or_default().start).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    let said: Vec<&str> = error.message().lines().map(str::trim).collect();
    format!("{shown}:{line}:{column}: expected TOML, given something else: {}", said.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<JobFile, String> {
        JobFile::parse("job.toml".into(), Path::new("/usr"), text)
    }

    #[test]
    fn a_whole_file_is_read() {
        let mut file = parse(
            r#"
            [job]
            timeout = "30s"
            [[program]]
            name = "eval"
            command = ["eval.py", ":"]
            [[program]]
            ranks = 7
            command = ["-m", "pkg.train", "--lr", "1"]
            env = { LR = "0.1" }
            cwd = "lib"
            "#,
        )
        .unwrap();
        assert_eq!(file.options(|_| false).unwrap(), ["--timeout=30s"]);
        assert!(file.options(|id| id == "timeout").unwrap().is_empty());
        assert_eq!(file.locate("--timeout: x".into()), "--timeout: x");
        let [eval, train] = &file.programs[..] else { panic!("{file:?}") };
        assert_eq!((eval.role.as_deref(), eval.ranks, eval.kind), (Some("eval"), None, TargetKind::Guess));
        assert_eq!(eval.words, ["eval.py", ":"]);
        assert_eq!((train.role.as_deref(), train.ranks, train.kind), (None, Some(7), TargetKind::Module));
        assert_eq!(train.words, ["pkg.train", "--lr", "1"]);
        assert_eq!(train.env, [("LR".into(), "0.1".into())]);
        assert_eq!(train.cwd.as_deref(), Some(Path::new("/usr/lib")));
    }

    #[test]
    fn what_is_wrong_is_said_in_one_line() {
        let program = "[[program]]\ncommand = [\"true\"]\n";
        for (text, error) in [
            ("", "job.toml: expected at least one [[program]], given none"),
            ("[jobs]", "job.toml: jobs: expected one of job, program, given jobs"),
            ("job = 3", "job.toml: job: expected a table, [job], given the integer 3"),
            ("[program]", "job.toml: program: expected tables, [[program]], given a table"),
            ("program = [3]", "job.toml: program 1: expected a table, given the integer 3"),
            ("[[program]]", "job.toml: program 1: command: expected a list of words, given none"),
            (
                "[[program]]\ncommand = \"true\"",
                "job.toml: program 1: command: expected a list of words, given the string \"true\"",
            ),
            (
                "[[program]]\ncommand = [\"true\", 3]",
                "job.toml: program 1: command[1]: expected a string, given the integer 3",
            ),
            (
                "[[program]]\ncommand = []",
                "job.toml: program 1: command: expected a list of words, given an empty list",
            ),
        ] {
            assert_eq!(parse(text).unwrap_err(), error, "{text}");
        }
        for (line, error) in [
            ("rank = 3", "rank: expected one of name, ranks, command, env, cwd, given rank"),
            ("ranks = 0", "ranks: expected a number of ranks from 1 to 65536, auto or cpu, given 0"),
            ("ranks = 1.5", "ranks: expected a number of ranks from 1 to 65536, auto or cpu, given 1.5"),
            ("name = 3", "name: expected a string, given the integer 3"),
            ("env = 3", "env: expected a table of strings, given the integer 3"),
            ("env = { LR = 1 }", "env.LR: expected a string, given the integer 1"),
            (
                "env = { RANK = \"1\" }",
                "env.RANK: expected a variable that tpurun does not set itself, given RANK",
            ),
            ("env = { \"a=b\" = \"\" }", "env: expected the name of a variable, given \"a=b\""),
            ("env = { A = \"\\u0000\" }", "env.A: expected text without a NUL character, given one with it"),
            ("cwd = \"nope\"", "cwd: expected a directory, given nope: no such one"),
        ] {
            let text = format!("{program}{line}");
            assert_eq!(parse(&text).unwrap_err(), format!("job.toml: program 1: {error}"), "{line}");
        }
    }

    #[test]
    fn options_are_those_of_the_job() {
        let of = |line: &str| {
            parse(&format!("[[program]]\ncommand = [\"true\"]\n[job]\n{line}")).unwrap().options(|_| false)
        };
        assert_eq!(
            of("spawn = true\ndry-run = false\nonly-ranks = \"0\"").unwrap(),
            ["--only-ranks=0", "--spawn"]
        );
        assert_eq!(
            of("spawn = 1").unwrap_err(),
            "job.toml: [job] spawn: expected true or false, given the integer 1"
        );
        assert_eq!(
            of("timeout = []").unwrap_err(),
            "job.toml: [job] timeout: expected a string or a number, given an empty list"
        );
        for name in ["nproc-per-node", "role", "module", "job", "rdzv-backend", "timeouts", "help"] {
            let error = of(&format!("{name} = \"1\"")).unwrap_err();
            assert!(error.starts_with(&format!("job.toml: [job] {name}: expected one of ")), "{error}");
            assert!(error.contains("log-dir, ") && error.contains("topology, "), "{error}");
        }
    }

    #[test]
    fn values_that_do_not_fit_are_located() {
        let file = parse("[[program]]\ncommand = [\"true\"]\n[job]\ntimeout = \"soon\"").unwrap();
        assert_eq!(
            file.locate("--timeout: expected a time, given soon".into()),
            "job.toml: [job] timeout: expected a time, given soon"
        );
        assert_eq!(file.locate("program 1: nope".into()), "job.toml: program 1: nope");
    }

    #[test]
    fn a_file_that_is_none_is_named() {
        let error = parse("[[program]]\nranks = = 3").unwrap_err();
        assert!(error.starts_with("job.toml:2:9: expected TOML, given something else: "), "{error}");
        assert!(!error.contains('\n'));
        let error = JobFile::read(Path::new("/nope.toml")).unwrap_err();
        assert!(error.starts_with("--job: expected a TOML file, given /nope.toml: No such file"), "{error}");
        let error = JobFile::read(Path::new("/dev/null")).unwrap_err();
        assert_eq!(error, "--job: expected a TOML file, given /dev/null: it is no regular file");
    }
}
