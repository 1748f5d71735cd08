//! The directory that every run leaves: events, logs of the ranks, their errors, the report.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

pub(crate) use crate::error_record::ErrorRecord;
use crate::flight::elsewhere::ELSEWHERE;
use crate::flight::notice::{FLIGHT, JOB_FILE};
use crate::ranks::Ending;
use crate::timings;

/// One run's directory, open for writing.
#[derive(Debug)]
pub(crate) struct RunDir {
    /// Absolute.
    path: PathBuf,
    /// As shown: relative when the user can use it so.
    shown: PathBuf,
    events: File,
    started: SystemTime,
}

impl RunDir {
    /// Makes the directory: `log_dir`, else a new one in $TPURUN_RUNS or ./tpurun-runs.
    ///
    /// # Errors
    /// One line that says what to do.
    pub(crate) fn create(log_dir: Option<&Path>) -> Result<RunDir, String> {
        let started = SystemTime::now();
        let create = || match log_dir {
            Some(dir) => Ok((dir.to_owned(), open_named(dir)?)),
            None => open_automatic(started),
        };
        let (shown, path) = create().map_err(|error: io::Error| {
            let dir = log_dir.map_or_else(automatic_root, Path::to_owned);
            format!(
                "cannot make a run directory in {}: {error} (set TPURUN_RUNS or --log-dir)",
                dir.display()
            )
        })?;
        let events = private_file(&path.join("events.jsonl")).map_err(|error| error.to_string())?;
        Ok(RunDir { path, shown, events, started })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn shown(&self) -> &Path {
        &self.shown
    }

    /// The last part of the path.
    pub(crate) fn id(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    pub(crate) fn error_file(&self, rank: u32) -> PathBuf {
        error_file(&self.path, rank)
    }

    /// Where ranks write their stacks when they are asked; `python/tpurun/stacks.py` knows the names.
    pub(crate) fn stacks_dir(&self) -> PathBuf {
        self.path.join(STACKS)
    }

    /// All stacks that were asked for, equal ones merged.
    pub(crate) fn stacks_file(&self) -> PathBuf {
        self.path.join(STACKS_FILE)
    }

    /// What a rank wrote into its error file; ranks write what they like there.
    pub(crate) fn error_of(&self, rank: u32) -> Option<ErrorRecord> {
        error_in(&self.path, rank)
    }

    /// How the program of a rank has ended, once it has, also while its process is still there.
    pub(crate) fn program_end_of(&self, rank: u32) -> Option<Ending> {
        let path = self.error_file(rank).with_extension("json.ended");
        path.symlink_metadata().ok().filter(|found| found.is_file() && found.len() <= MAX_STATUS_BYTES)?;
        let status: i32 = fs::read_to_string(path).ok()?.trim().parse().ok()?;
        Some(if status < 0 { Ending::Signal(status.saturating_neg()) } else { Ending::Exit(status) })
    }

    /// The libraries of a rank that made no process group, once its program has ended well; else `None`.
    pub(crate) fn libraries_alone(&self, rank: u32) -> Option<Vec<String>> {
        let path = self.error_file(rank).with_extension("json.alone");
        path.symlink_metadata().ok().filter(|found| found.is_file() && found.len() <= MAX_ALONE_BYTES)?;
        Some(fs::read_to_string(path).ok()?.split_whitespace().map(ToOwned::to_owned).collect())
    }

    /// Keeps the report of a world that another one follows, and forgets the errors of its ranks.
    pub(crate) fn close_world(&self, restarts: u32, report: &str) {
        let _ = fs::rename(self.path.join(FLIGHT), self.path.join(format!("{FLIGHT}-{restarts}")));
        let file = private_file(&self.path.join(format!("{REPORT}-{restarts}.txt")));
        let _ = file.and_then(|mut file| file.write_all(report.as_bytes()));
        for entry in fs::read_dir(self.path.join(ERRORS)).into_iter().flatten().flatten() {
            let _ = fs::remove_file(entry.path());
        }
    }

    /// Appends one event. A full disk does not end a job.
    pub(crate) fn event(&mut self, name: &str, details: Value) {
        let mut entry =
            json!({"event": name, "ms": self.started.elapsed().unwrap_or_default().as_millis() as u64});
        if let (Some(entry), Value::Object(details)) = (entry.as_object_mut(), details) {
            entry.extend(details);
        }
        let _ = self.events.write_all(format!("{entry}\n").as_bytes());
    }

    /// Writes the report beside the logs.
    pub(crate) fn write_report(&self, text: &str) {
        let _ = private_file(&self.path.join(format!("{REPORT}.txt")))
            .and_then(|mut file| file.write_all(text.as_bytes()));
    }
}

/// What a rank wrote into its error file in this run directory.
pub(crate) fn error_in(run: &Path, rank: u32) -> Option<ErrorRecord> {
    let path = error_file(run, rank);
    let found = path.symlink_metadata().ok()?;
    if !found.is_file() || found.len() > MAX_ERROR_BYTES {
        return None;
    }
    ErrorRecord::parse(&fs::read(path).ok()?)
}

fn error_file(run: &Path, rank: u32) -> PathBuf {
    run.join(ERRORS).join(format!("rank-{rank:04}.json"))
}

fn open_named(dir: &Path) -> io::Result<PathBuf> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    // The logs are appended to; those of an earlier run of ours would be taken for this one's.
    if dir.join(MARKER).exists() {
        let _ = fs::remove_dir_all(dir.join(STACKS));
        let _ = fs::remove_file(dir.join(STACKS_FILE));
        let _ = fs::remove_dir_all(dir.join(ELSEWHERE));
        for entry in fs::read_dir(dir)?.flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let is_ours = name == JOB_FILE || name == timings::FILE;
            let is_report = name.starts_with(REPORT) && name.ends_with(".txt");
            if name == ERRORS || name.starts_with(FLIGHT) {
                let _ = fs::remove_dir_all(entry.path());
            } else if is_report || is_ours || name.starts_with("rank-") && name.ends_with(".log") {
                fs::remove_file(entry.path())?;
            }
        }
    }
    open_marked(dir)
}

fn open_automatic(started: SystemTime) -> io::Result<(PathBuf, PathBuf)> {
    let root = automatic_root();
    if !root.exists() {
        DirBuilder::new().recursive(true).mode(0o700).create(&root)?;
        // Nobody wants to commit these.
        let _ = fs::write(root.join(".gitignore"), "*\n");
    }
    remove_old(&root);
    let stamp = utc_stamp(started.duration_since(UNIX_EPOCH).unwrap_or_default());
    for attempt in 0..ATTEMPTS {
        let tag = (std::process::id() + attempt) % 0x10000;
        let shown = root.join(format!("{stamp}-{tag:04x}"));
        match DirBuilder::new().mode(0o700).create(&shown) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            made => made?,
        }
        let path = open_marked(&shown)?;
        return Ok((shown, path));
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

fn open_marked(dir: &Path) -> io::Result<PathBuf> {
    let mut marker = private_file(&dir.join(MARKER))?;
    writeln!(marker, "{}", std::process::id())?;
    for folder in [ERRORS, STACKS].map(|name| dir.join(name)).iter().filter(|folder| !folder.is_dir()) {
        DirBuilder::new().mode(0o700).create(folder)?;
    }
    dir.canonicalize()
}

/// Keeps room for one more; takes only directories that we have made and that no run uses.
fn remove_old(root: &Path) {
    let Ok(entries) = fs::read_dir(root) else { return };
    let mut runs: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .filter(|path| path.join(MARKER).is_file())
        .collect();
    runs.sort();
    let spare = (runs.len() + 1).saturating_sub(KEPT_RUNS);
    for run in runs.into_iter().take(spare).filter(|run| !is_in_use(run)) {
        let _ = fs::remove_dir_all(run);
    }
}

fn is_in_use(run: &Path) -> bool {
    let pid = fs::read_to_string(run.join(MARKER)).ok().and_then(|text| text.trim().parse().ok());
    pid.and_then(rustix::process::Pid::from_raw).is_some_and(|pid| {
        fs::read_link(format!("/proc/{}/exe", pid.as_raw_nonzero())).ok()
            == fs::read_link("/proc/self/exe").ok()
    })
}

/// Where runs are that nobody named a directory for.
pub(crate) fn automatic_root() -> PathBuf {
    std::env::var_os("TPURUN_RUNS")
        .filter(|dir| !dir.is_empty())
        .map_or_else(|| "tpurun-runs".into(), PathBuf::from)
}

fn private_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).write(true).truncate(true).mode(0o600).open(path)
}

/// `20261121-030415`; names sort by time.
fn utc_stamp(since_epoch: Duration) -> String {
    let seconds = since_epoch.as_secs();
    let (year, month, day) = civil_from_days(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

/// The Gregorian date; years begin in March, so that a leap day is the last one.
fn civil_from_days(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

const MARKER: &str = ".tpurun-run";
/// Some names.
const MAX_ALONE_BYTES: u64 = 1 << 10;
const ERRORS: &str = "errors";
const REPORT: &str = "report";
const STACKS: &str = "stacks";
const STACKS_FILE: &str = "stacks.txt";
const KEPT_RUNS: usize = 20;
const ATTEMPTS: u32 = 100;
/// An exit status in decimal.
const MAX_STATUS_BYTES: u64 = 8;
const MAX_ERROR_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_are_dates() {
        let stamp = |seconds| utc_stamp(Duration::from_secs(seconds));
        assert_eq!(stamp(0), "19700101-000000");
        assert_eq!(stamp(951_782_400), "20000229-000000");
        assert_eq!(stamp(1_795_230_255), "20261121-030415");
        assert_eq!(stamp(4_107_542_399), "21000228-235959");
        assert_eq!(stamp(4_107_542_400), "21000301-000000");
    }

    #[test]
    fn a_named_directory_is_cleared_only_of_our_own_files() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("logs");
        fs::create_dir(&target).unwrap();
        fs::write(target.join("rank-0000.log"), "of somebody else").unwrap();
        RunDir::create(Some(&target)).unwrap();
        assert!(target.join("rank-0000.log").exists());
        fs::write(target.join("notes"), "").unwrap();
        let run = RunDir::create(Some(&target)).unwrap();
        assert!(!target.join("rank-0000.log").exists() && target.join("notes").exists());
        assert_eq!(run.error_of(0), None);
    }

    #[test]
    fn only_old_runs_of_ours_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        for index in 0..30 {
            let run = dir.path().join(format!("2026010{}-{index:06}-0000", index / 10));
            fs::create_dir(&run).unwrap();
            if index != 3 {
                fs::write(run.join(MARKER), "1").unwrap();
            }
        }
        remove_old(dir.path());
        let mut left: Vec<_> =
            fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left.len(), KEPT_RUNS);
        assert!(left[0].to_string_lossy().contains("-000003-"), "{left:?}");
        assert!(left[1].to_string_lossy().contains("-000011-"), "{left:?}");
    }

    #[test]
    fn ranks_that_ran_alone_name_their_libraries() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunDir::create(Some(&dir.path().join("run"))).unwrap();
        let path = run.error_file(1).with_extension("json.alone");
        assert_eq!(run.libraries_alone(1), None);
        for (text, expected) in [
            ("", Some(vec![])),
            ("accelerate transformers", Some(vec!["accelerate".to_owned(), "transformers".to_owned()])),
            (&"x".repeat(1025), None),
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(run.libraries_alone(1), expected);
        }
    }

    #[test]
    fn errors_of_both_kinds_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunDir::create(Some(&dir.path().join("run"))).unwrap();
        let ours = r#"{"message": {"message": "ValueError: x"}, "exception": {"type": "ValueError", "message": "x",
            "file": "a.py", "line": 3, "function": "f", "source": "raise", "ranks": [2]}}"#;
        fs::write(run.error_file(1), ours).unwrap();
        let record = run.error_of(1).unwrap();
        assert_eq!((record.kind.as_str(), record.line, record.ranks), ("ValueError", 3, vec![2]));
        fs::write(run.error_file(2), r#"{"message": {"message": "KeyError: 'a'", "extraInfo": {}}}"#)
            .unwrap();
        assert_eq!(run.error_of(2).unwrap().kind, "KeyError");
        for hostile in ["", "[]", "{\"exception\": {\"line\": -1}}", "{\"message\": 3}"] {
            fs::write(run.error_file(3), hostile).unwrap();
            assert_eq!(run.error_of(3), None, "{hostile}");
        }
    }
}
