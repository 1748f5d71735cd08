//! The target of a program: a Python script, a Python module, or any other program; and which interpreter.

use std::env;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// How the first word of a command is meant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TargetKind {
    /// A script or an executable, as it turns out.
    #[default]
    Guess,
    /// A Python module.
    Module,
    /// Executed as it is, even if it is a script.
    Executable,
}

/// The target that each rank of a program runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// `python script args`.
    Script { path: String, args: Vec<String> },
    /// `python -m module args`.
    Module { name: String, args: Vec<String> },
    /// Executed as it is.
    Executable { path: PathBuf, args: Vec<String> },
}

impl Target {
    /// Tells the kinds apart the way a person would, who is in `cwd` or where tpurun was started.
    pub(crate) fn new(kind: TargetKind, words: &[String], cwd: Option<&Path>) -> Result<Target, String> {
        let Some((first, args)) = words.split_first() else {
            return Err("expected a program to run, given none (see tpurun --help)".into());
        };
        let args = args.to_vec();
        if kind == TargetKind::Module {
            return Ok(Target::Module { name: first.clone(), args });
        }
        let path = cwd.map_or_else(|| PathBuf::from(first), |cwd| cwd.join(first));
        let executable = || if first.contains('/') { executable_file(&path) } else { find_executable(first) };
        if kind == TargetKind::Executable {
            let path = executable().ok_or_else(|| no_such("a program", first, &path))?;
            return Ok(Target::Executable { path, args });
        }
        if is_python(&path) {
            return Ok(Target::Script { path: first.clone(), args });
        }
        if let Some(path) = executable() {
            return Ok(Target::Executable { path, args });
        }
        // As torchrun: what exists and cannot be executed is a script, whatever its name.
        if path.is_file() {
            return Ok(Target::Script { path: first.clone(), args });
        }
        Err(no_such("a script or program", first, &path))
    }

    pub(crate) fn is_python(&self) -> bool {
        !matches!(self, Target::Executable { .. })
    }

    /// The command as it could be typed.
    pub(crate) fn words(&self) -> Vec<String> {
        let (head, args) = match self {
            Target::Script { path, args } => (vec![path.clone()], args),
            Target::Module { name, args } => (vec!["-m".into(), name.clone()], args),
            Target::Executable { path, args } => (vec![path.display().to_string()], args),
        };
        head.into_iter().chain(args.iter().cloned()).collect()
    }
}

/// The beginning of each text of ours for `python -c`.
///
/// The interpreter puts the directory that it is started in on the path of such a text, where a `json.py` would
/// be imported in the place of the library's. The directory is taken off before anything is imported.
pub(crate) const LEAVE_DIRECTORY: &str =
    r#"import sys; getattr(sys.flags, "safe_path", False) or sys.path.pop(0)"#;

/// A text for `python -c` that calls the `main` of one of our modules and exits with what it returns.
pub(crate) fn calls_main(module: &str) -> String {
    format!("{LEAVE_DIRECTORY}; from {module} import main; sys.exit(main())")
}

/// `--python`, beside tpurun, $VIRTUAL_ENV, PATH: the first that is there.
pub(crate) fn find_python(option: Option<&str>) -> Result<PathBuf, String> {
    if let Some(path) = option {
        return find_executable(path)
            .ok_or_else(|| format!("--python: {}", no_such("an interpreter", path, Path::new(path))));
    }
    let beside = env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_owned));
    let venv = env::var_os("VIRTUAL_ENV").map(|dir| Path::new(&dir).join("bin"));
    let in_dirs =
        [beside, venv].into_iter().flatten().flat_map(|dir| [dir.join("python3"), dir.join("python")]);
    let in_path = || ["python3", "python"].into_iter().find_map(find_executable);
    in_dirs.into_iter().find(|path| is_executable(path)).or_else(in_path).ok_or_else(|| {
        "expected a Python interpreter beside tpurun, in $VIRTUAL_ENV or PATH, given none (use --python)"
            .into()
    })
}

fn no_such(expected: &str, given: &str, path: &Path) -> String {
    let why = match path.exists() {
        true => "it is not executable",
        false => "no such file",
    };
    format!("expected {expected}, given {given}: {why}")
}

fn is_python(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    if matches!(extension, Some("py" | "pyc" | "pyz")) {
        return path.exists();
    }
    if path.is_dir() {
        return path.join("__main__.py").exists();
    }
    path.is_file() && has_python_shebang(path)
}

fn has_python_shebang(path: &Path) -> bool {
    let mut head = [0; 128];
    let Ok(bytes) = File::open(path).and_then(|mut file| file.read(&mut head)) else { return false };
    let line = head[..bytes].split(|byte| *byte == b'\n').next().unwrap_or_default();
    line.starts_with(b"#!") && line.windows(6).any(|part| part == b"python")
}

fn find_executable(name: &str) -> Option<PathBuf> {
    if name.contains('/') {
        return executable_file(Path::new(name));
    }
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|dir| dir.join(name)).find(|path| is_executable(path))
}

fn executable_file(path: &Path) -> Option<PathBuf> {
    is_executable(path).then(|| path.to_owned())
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(kind: TargetKind, path: &Path) -> Result<Target, String> {
        Target::new(kind, &[path.to_str().unwrap().into(), "x".into()], None)
    }

    fn write(dir: &Path, name: &str, text: &str, mode: u32) -> PathBuf {
        let path = dir.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn programs_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let script = |name, text, mode| {
            target(TargetKind::Guess, &write(dir.path(), name, text, mode)).unwrap().is_python()
        };
        assert!(script("a.py", "", 0o644));
        assert!(script("exe.py", "#!/bin/sh\n", 0o755));
        assert!(script("train", "#!/usr/bin/env python3\n", 0o755));
        assert!(script("plain", "print()", 0o644));
        assert!(!script("run.sh", "#!/bin/sh\n", 0o755));
        assert!(!Target::new(TargetKind::Guess, &["true".into()], None).unwrap().is_python());
        assert!(!target(TargetKind::Executable, &dir.path().join("exe.py")).unwrap().is_python());
    }

    #[test]
    fn names_are_looked_up_in_the_directory_of_the_program() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "a.py", "", 0o644);
        let solver = write(dir.path(), "solver", "#!/bin/sh\n", 0o755);
        let of = |word: &str| Target::new(TargetKind::Guess, &[word.into()], Some(dir.path()));
        assert_eq!(of("a.py").unwrap(), Target::Script { path: "a.py".into(), args: vec![] });
        let Target::Executable { path, .. } = of("./solver").unwrap() else { panic!("no executable") };
        assert_eq!(path.canonicalize().unwrap(), solver.canonicalize().unwrap());
        assert!(path.is_absolute());
        assert_eq!(of("b.py").unwrap_err(), "expected a script or program, given b.py: no such file");
    }

    #[test]
    fn what_is_not_there_is_named() {
        let error = Target::new(TargetKind::Guess, &["nope.py".into()], None).unwrap_err();
        assert_eq!(error, "expected a script or program, given nope.py: no such file");
        assert!(
            Target::new(TargetKind::Guess, &[], None)
                .unwrap_err()
                .starts_with("expected a program to run, given none")
        );
        let error = Target::new(TargetKind::Executable, &["/etc/passwd".into()], None).unwrap_err();
        assert_eq!(error, "expected a program, given /etc/passwd: it is not executable");
        assert!(
            find_python(Some("/nope/python")).unwrap_err().starts_with("--python: expected an interpreter")
        );
    }
}
