//! The directory that every run leaves: events, logs of the ranks, their errors, the report.

mod claim;

use std::cell::OnceCell;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{Mode, OFlags};
use serde_json::{Value, json};

use claim::{Agent, Claim, MARKER};

use crate::base::private::{self, AllowedOwner};
pub(crate) use crate::observe::error_record::ErrorRecord;
use crate::observe::flight::elsewhere::ELSEWHERE;
use crate::observe::flight::notice::{FLIGHT, JOB_FILE};
use crate::observe::timings;
use crate::ranks::Ending;

/// One run's directory, open for writing.
#[derive(Debug)]
pub(crate) struct RunDir {
    /// Absolute.
    path: PathBuf,
    /// As shown: relative when the user can use it so.
    shown: PathBuf,
    events: File,
    started: SystemTime,
    /// Why something could not be written, at first.
    error: OnceCell<io::Error>,
    /// The remark on an earlier run in it.
    remark: Option<String>,
    _claim: Claim,
}

impl RunDir {
    /// Makes the directory: `log_dir`, or in it that of a node, else a new one in $TPURUN_RUNS or ./tpurun-runs.
    ///
    /// # Errors
    /// One line that says what to do.
    pub(crate) fn create(log_dir: Option<&Path>, node: Option<u32>) -> Result<RunDir, String> {
        let started = SystemTime::now();
        let create = || {
            let opened = match log_dir {
                Some(dir) => open_named(dir, node, started)?,
                None => open_automatic(started)?,
            };
            let events = private::file(&opened.path.join(EVENTS))?;
            let Opened { path, shown, claim, remark } = opened;
            Ok(RunDir { path, shown, events, started, error: OnceCell::new(), remark, _claim: claim })
        };
        create().map_err(|error: io::Error| {
            let dir = log_dir.map_or_else(automatic_root, Path::to_owned);
            format!(
                "cannot make a run directory in {}: {error} (set TPURUN_RUNS or --log-dir)",
                dir.display()
            )
        })
    }

    /// One line about what was there before, if that is worth one.
    pub(crate) fn take_remark(&mut self) -> Option<String> {
        self.remark.take()
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

    /// The record that a rank wrote into its error file; ranks write what they like there.
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
        let file = private::file(&self.path.join(format!("{REPORT}-{restarts}.txt")));
        let _ = file.and_then(|mut file| file.write_all(report.as_bytes()));
        let _ = empty(&self.path.join(ERRORS));
    }

    /// Appends one event. A full disk does not end a job.
    pub(crate) fn event(&mut self, name: &str, details: Value) {
        let mut entry =
            json!({"event": name, "ms": self.started.elapsed().unwrap_or_default().as_millis() as u64});
        if let (Some(entry), Value::Object(details)) = (entry.as_object_mut(), details) {
            entry.extend(details);
        }
        let written = self.events.write_all(format!("{entry}\n").as_bytes());
        self.note(written);
    }

    /// Writes the report beside the logs.
    pub(crate) fn write_report(&self, text: &str) {
        let file = private::file(&self.path.join(format!("{REPORT}.txt")));
        self.note(file.and_then(|mut file| file.write_all(text.as_bytes())));
    }

    /// Why events or the report are incomplete, if they are.
    pub(crate) fn error(&self) -> Option<&io::Error> {
        self.error.get()
    }

    fn note(&self, written: io::Result<()>) {
        if let Err(error) = written {
            // The first one stands.
            let _ = self.error.set(error);
        }
    }
}

/// The record that a rank wrote into its error file in this run directory.
pub(crate) fn error_in(run: &Path, rank: u32) -> Option<ErrorRecord> {
    let path = error_file(run, rank);
    let found = path.symlink_metadata().ok()?;
    if !found.is_file() || found.len() > MAX_ERROR_BYTES {
        return None;
    }
    ErrorRecord::parse(&fs::read(path).ok()?)
}

pub(crate) fn error_file(run: &Path, rank: u32) -> PathBuf {
    run.join(ERRORS).join(format!("rank-{rank:04}.json"))
}

/// A directory that is this process's.
struct Opened {
    path: PathBuf,
    shown: PathBuf,
    claim: Claim,
    remark: Option<String>,
}

fn open_named(dir: &Path, node: Option<u32>, started: SystemTime) -> io::Result<Opened> {
    private::directory(dir, AllowedOwner::User)?;
    let shown = match node {
        Some(node) => dir.join(format!("node-{node}")),
        None => dir.to_owned(),
    };
    private::directory(&shown, AllowedOwner::User)?;
    let held = holder_text(&shown);
    let (claim, before) = Claim::take(&shown)?;
    let mut remark = None;
    // The logs are appended to; those of an earlier run of ours would be taken for this one's.
    match before {
        Agent::Nobody => {}
        Agent::Ended if !has_fresh_report(&shown, started) => remove_contents(&shown)?,
        before => {
            let aside = set_aside(&shown, &held, started)?;
            if let Agent::MayRun(who) = before {
                let aside = aside.display();
                remark =
                    Some(format!("{} may still be of {who}: what was there is in {aside}", shown.display()));
            }
        }
    }
    let path = prepare(&shown)?;
    remove_old(&path, Some(ASIDE), started, &path.join(ERRORS));
    Ok(Opened { path, shown, claim, remark })
}

fn open_automatic(started: SystemTime) -> io::Result<Opened> {
    let root = automatic_root();
    let is_new = root.symlink_metadata().is_err();
    private::directory(&root, AllowedOwner::UserOrRoot)?;
    if is_new {
        // Nobody wants to commit these.
        let _ = private::file(&root.join(".gitignore")).and_then(|mut file| file.write_all(b"*\n"));
    }
    let shown = new_directory(&root, "", started)?;
    let (claim, _) = Claim::take(&shown)?;
    let path = prepare(&shown)?;
    remove_old(&root, None, started, &path);
    Ok(Opened { path, shown, claim, remark: None })
}

/// One with the time in its name.
fn new_directory(parent: &Path, prefix: &str, started: SystemTime) -> io::Result<PathBuf> {
    let stamp = utc_stamp(started.duration_since(UNIX_EPOCH).unwrap_or_default());
    for attempt in 0..ATTEMPTS {
        let tag = (std::process::id() + attempt) % 0x10000;
        let dir = parent.join(format!("{prefix}{stamp}-{tag:04x}"));
        match DirBuilder::new().mode(0o700).create(&dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            made => return made.map(|()| dir),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

fn prepare(dir: &Path) -> io::Result<PathBuf> {
    private::folder(&dir.join(ERRORS))?;
    private::folder(&dir.join(STACKS))?;
    dir.canonicalize()
}

/// Every name that a run has in its directory, but the marker.
fn is_of_a_run(name: &str) -> bool {
    let is_log = name.starts_with("rank-") && name.ends_with(".log");
    let is_report = name.starts_with(REPORT) && name.ends_with(".txt");
    let others = [ERRORS, STACKS, STACKS_FILE, ELSEWHERE, JOB_FILE, timings::FILE, EVENTS];
    is_log || is_report || name.starts_with(FLIGHT) || others.contains(&name)
}

fn contents(dir: &Path) -> io::Result<impl Iterator<Item = PathBuf>> {
    let entries = fs::read_dir(dir)?.flatten();
    Ok(entries.filter(|entry| is_of_a_run(&entry.file_name().to_string_lossy())).map(|entry| entry.path()))
}

fn remove_contents(dir: &Path) -> io::Result<()> {
    for path in contents(dir)? {
        // If the entry is a link, the link itself is meant.
        if path.symlink_metadata()?.is_dir() { fs::remove_dir_all(path)? } else { fs::remove_file(path)? }
    }
    Ok(())
}

/// Moves what an earlier run has left, which may be needed, into a directory of its own: whoever still writes its files
/// goes on with them there.
fn set_aside(dir: &Path, held: &[u8], started: SystemTime) -> io::Result<PathBuf> {
    let aside = new_directory(dir, ASIDE, started)?;
    private::file(&aside.join(MARKER))?.write_all(held)?;
    for path in contents(dir)? {
        let name = path.file_name().unwrap_or_default();
        fs::rename(&path, aside.join(name))?;
    }
    Ok(aside)
}

/// The text of the marker before it is taken.
fn holder_text(dir: &Path) -> Vec<u8> {
    use io::Read;
    let mut text = Vec::new();
    let file = private::existing(&dir.join(MARKER));
    let _ = file.and_then(|file| file.take(MAX_MARKER_BYTES).read_to_end(&mut text));
    text
}

/// Whether a person was told less than a day ago to look there.
fn has_fresh_report(dir: &Path, now: SystemTime) -> bool {
    let is_fresh = |path: &Path| {
        let written = path.symlink_metadata().and_then(|found| found.modified());
        // One of the future is fresh.
        written.is_ok_and(|written| now.duration_since(written).map_or(true, |age| age <= FRESH))
    };
    let is_report = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(REPORT) && name.ends_with(".txt")
    };
    contents(dir).is_ok_and(|mut paths| paths.any(|path| is_report(&path) && is_fresh(&path)))
}

/// Keeps the newest; takes only directories that we have made, that no run uses or may use, and of which no report was
/// shown since yesterday. With a prefix, of those alone that begin so. `made` is one that this process has made.
fn remove_old(root: &Path, prefix: Option<&str>, now: SystemTime, made: &Path) {
    let (Ok(entries), Ok(made)) = (fs::read_dir(root), made.metadata()) else { return };
    let is_own = |found: &fs::Metadata| found.uid() == made.uid();
    let is_run = |path: &PathBuf| {
        let is_named_so = prefix.is_none_or(|prefix| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
        });
        let is_ours = path.symlink_metadata().is_ok_and(|found| found.is_dir() && is_own(&found));
        is_named_so && is_ours && path.join(MARKER).symlink_metadata().is_ok_and(|found| found.is_file())
    };
    let mut runs: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(is_run).collect();
    runs.sort();
    let spare = runs.len().saturating_sub(KEPT_RUNS);
    for run in runs.into_iter().take(spare).filter(|run| !has_fresh_report(run, now)) {
        // Nobody takes it while it is removed.
        if let Some(_held) = claim::ended(&run) {
            let _ = fs::remove_dir_all(run);
        }
    }
}

/// Removes the files of a folder that is one.
fn empty(folder: &Path) -> io::Result<()> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags, Mode::empty())?;
    for entry in rustix::fs::Dir::read_from(&folder)?.flatten() {
        // Also its own name and that of the folder above, which are no files.
        let _ = rustix::fs::unlinkat(&folder, entry.file_name(), rustix::fs::AtFlags::empty());
    }
    Ok(())
}

/// Where runs are that nobody named a directory for.
pub(crate) fn automatic_root() -> PathBuf {
    std::env::var_os("TPURUN_RUNS")
        .filter(|dir| !dir.is_empty())
        .map_or_else(|| "tpurun-runs".into(), PathBuf::from)
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

/// Some names.
const MAX_ALONE_BYTES: u64 = 1 << 10;
const EVENTS: &str = "events.jsonl";
const ERRORS: &str = "errors";
const REPORT: &str = "report";
const STACKS: &str = "stacks";
const STACKS_FILE: &str = "stacks.txt";
/// The beginning of the name of a directory with what an earlier run has left in a named one.
const ASIDE: &str = "earlier-";
const KEPT_RUNS: usize = 20;
/// So long a run is kept whose report a person may still follow.
const FRESH: Duration = Duration::from_secs(24 * 3600);
const MAX_MARKER_BYTES: u64 = 4096;
const ATTEMPTS: u32 = 100;
/// An exit status in decimal.
const MAX_STATUS_BYTES: u64 = 8;
const MAX_ERROR_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    const ENDED_LINE: &str = "ended\n";

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
        create(&target);
        assert!(target.join("rank-0000.log").exists());
        fs::write(target.join("notes"), "").unwrap();
        let run = create(&target);
        assert!(!target.join("rank-0000.log").exists() && target.join("notes").exists());
        assert_eq!(run.error_of(0), None);
    }

    fn create(dir: &Path) -> RunDir {
        RunDir::create(Some(dir), None).unwrap()
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_directory_in_use_is_refused_in_one_line() {
        let dir = tempfile::tempdir().unwrap();
        let first = create(dir.path());
        let refused = RunDir::create(Some(dir.path()), None).unwrap_err();
        let start = format!("cannot make a run directory in {}: a job of pid ", dir.path().display());
        assert!(refused.starts_with(&start) && !refused.contains('\n'), "{refused}");
        drop(first);
        create(dir.path());
    }

    #[test]
    fn what_may_still_be_needed_is_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        let first = create(dir.path());
        first.write_report("look there");
        drop(first);
        let mut second = create(dir.path());
        assert_eq!(second.take_remark(), None);
        let aside = names(dir.path()).into_iter().find(|name| name.starts_with(ASIDE)).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join(&aside).join("report.txt")).unwrap(), "look there");
        assert!(!dir.path().join("report.txt").exists());
        drop(second);
        // Nobody knows of an agent on another host.
        let marker = dir.path().join(MARKER);
        let text = fs::read_to_string(&marker).unwrap().replace(ENDED_LINE, "");
        let boot = crate::observe::flight::notice::boot_id();
        fs::write(&marker, text.replace(&boot, "another")).unwrap();
        fs::write(dir.path().join("rank-0000.log"), "words").unwrap();
        let remark = create(dir.path()).take_remark().unwrap();
        assert!(remark.contains(" may still be of a job of pid ") && !remark.contains('\n'), "{remark}");
        let kept = names(dir.path()).into_iter().filter(|name| name.starts_with(ASIDE));
        assert!(kept.into_iter().any(|name| dir.path().join(name).join("rank-0000.log").exists()));
    }

    #[test]
    fn links_in_a_named_directory_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (target, outside) = (dir.path().join("logs"), dir.path().join("outside"));
        fs::create_dir(&target).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("precious"), "").unwrap();
        let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, target.join(name)).unwrap();
        link(&outside.join("precious"), EVENTS);
        drop(create(&target));
        assert_eq!(fs::metadata(outside.join("precious")).unwrap().len(), 0);
        // The files of an earlier run, which are removed, and a world that ends, are no others'.
        for name in [ERRORS, STACKS] {
            fs::remove_dir_all(target.join(name)).unwrap();
            link(&outside, name);
        }
        link(&outside, FLIGHT);
        link(&outside.join("precious"), "rank-0000.log");
        let run = create(&target);
        fs::remove_dir(target.join(ERRORS)).unwrap();
        link(&outside, ERRORS);
        run.close_world(1, "");
        assert_eq!(names(&outside), ["precious"]);
        drop(run);
        for name in [ERRORS, MARKER] {
            let other = tempfile::tempdir().unwrap();
            std::os::unix::fs::symlink(&outside, other.path().join(name)).unwrap();
            let refused = RunDir::create(Some(other.path()), None).unwrap_err();
            assert!(refused.contains("expected a ") && !refused.contains('\n'), "{refused}");
        }
        let refused = RunDir::create(Some(&dir.path().join("to")), None);
        drop(refused.unwrap());
        std::os::unix::fs::symlink(&outside, dir.path().join("base")).unwrap();
        for node in [None, Some(0)] {
            let refused = RunDir::create(Some(&dir.path().join("base")), node).unwrap_err();
            assert!(refused.contains("given a link to "), "{refused}");
        }
        assert_eq!(names(&outside), ["precious"]);
    }

    #[test]
    fn only_old_runs_of_ours_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = |index: u32| dir.path().join(format!("2026010{}-{index:06}-0000", index / 10));
        let mut running = None;
        for index in 0..30 {
            let run = create(&path(index));
            match index {
                // Nothing says that it is a run.
                1 => fs::remove_file(path(index).join(MARKER)).unwrap(),
                // Its report was just shown; that of another one is old.
                2 => run.write_report(""),
                3 => {
                    run.write_report("");
                    let old = SystemTime::now() - 2 * FRESH;
                    File::open(path(index).join("report.txt")).unwrap().set_modified(old).unwrap();
                }
                _ => {}
            }
            if index == 4 {
                running = Some(run);
            }
        }
        // Somebody else's, under a name of ours.
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("precious"), "").unwrap();
        fs::remove_dir_all(path(0)).unwrap();
        std::os::unix::fs::symlink(outside.path(), path(0)).unwrap();
        remove_old(dir.path(), None, SystemTime::now(), &path(29));
        let left = names(dir.path());
        let is_left = |index| left.contains(&path(index).file_name().unwrap().to_string_lossy().into_owned());
        assert_eq!(
            [0, 1, 2, 3, 4, 5, 9, 10].map(is_left),
            [true, true, true, false, true, false, false, true]
        );
        assert!((10..30).all(is_left) && outside.path().join("precious").exists(), "{left:?}");
        drop(running);
        remove_old(dir.path(), None, SystemTime::now(), &path(29));
        assert!(!names(dir.path()).iter().any(|name| path(4).ends_with(name)));
    }

    #[test]
    fn ranks_that_ran_alone_name_their_libraries() {
        let dir = tempfile::tempdir().unwrap();
        let run = create(&dir.path().join("run"));
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
        let run = create(&dir.path().join("run"));
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
