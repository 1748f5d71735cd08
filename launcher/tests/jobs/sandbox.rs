//! A directory for one test's job, the running job, and the processes that carry its mark.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// Where a test's job runs. Dropping it fails the test when a process of the job is left.
pub(crate) struct Sandbox {
    dir: TempDir,
    mark: String,
    variables: Vec<(String, String)>,
}

/// A job that was started and not waited for.
pub(crate) struct Job {
    front: Child,
    out: BufReader<ChildStdout>,
    err: BufReader<ChildStderr>,
    err_seen: String,
    out_seen: String,
}

/// The output that a job left on the screen, and its exit code.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// 128 + signal when the front itself was killed.
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Sandbox {
    pub(crate) fn new() -> Sandbox {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let mark = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        Sandbox { dir: tempfile::tempdir().unwrap(), mark, variables: Vec::new() }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A file of the job; the directory is its working directory.
    pub(crate) fn file(&self, name: &str, text: &str) -> &Sandbox {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    pub(crate) fn variable(&mut self, name: &str, value: &str) {
        self.variables.push((name.into(), value.into()));
    }

    /// `tpurun` with these arguments.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tpurun"));
        command.args(arguments);
        self.prepare(&mut command);
        command
    }

    /// Gives a command the environment of this sandbox.
    pub(crate) fn prepare(&self, command: &mut Command) {
        let clean =
            |name: &str| ["PET_", "TPURUN_", "OMP_", "OPENBLAS_"].iter().any(|own| name.starts_with(own));
        for (name, _) in std::env::vars().filter(|(name, _)| clean(name)) {
            command.env_remove(name);
        }
        let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("../python");
        command
            .current_dir(self.path())
            .env(MARK, &self.mark)
            .env("PYTHONPATH", format!("{}:{}", self.path().join("modules").display(), python.display()))
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Outcome {
        self.start(arguments).wait()
    }

    pub(crate) fn start(&self, arguments: &[&str]) -> Job {
        Job::new(self.command(arguments).spawn().unwrap())
    }

    /// Runs it with something to read.
    pub(crate) fn run_with_input(&self, arguments: &[&str], input: &str) -> Outcome {
        let mut front = self.command(arguments).stdin(Stdio::piped()).spawn().unwrap();
        front.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        Job::new(front).wait()
    }

    /// The directory of the only run so far.
    pub(crate) fn run_dir(&self) -> PathBuf {
        let runs = fs::read_dir(self.path().join("tpurun-runs")).unwrap().flatten();
        let runs: Vec<_> = runs.filter(|entry| entry.file_type().unwrap().is_dir()).collect();
        assert_eq!(runs.len(), 1, "{runs:?}");
        runs[0].path()
    }

    pub(crate) fn events(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.run_dir().join("events.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The ending of a rank: its exit code, or minus its signal.
    pub(crate) fn ending(&self, rank: u32) -> i64 {
        let events = self.events();
        let ended = events.iter().find(|event| event["event"] == "rank ended" && event["rank"] == rank);
        let ended = ended.unwrap_or_else(|| panic!("rank {rank} did not end: {events:?}"));
        ended["code"].as_i64().unwrap_or_else(|| -ended["signal"].as_i64().unwrap())
    }

    /// The process number of the agent.
    pub(crate) fn agent(&self) -> Pid {
        let started = self.events().into_iter().find(|event| event["event"] == "started").unwrap();
        Pid::from_raw(started["agent"].as_i64().unwrap() as i32).unwrap()
    }

    /// Waits until no process carries the mark of this job.
    pub(crate) fn expect_nothing_left(&self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = self.processes();
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "processes left behind: {left:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn processes(&self) -> Vec<(i32, String)> {
        let mark = format!("{MARK}={}", self.mark);
        let pids = fs::read_dir("/proc").unwrap().flatten();
        let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let has_mark = |pid: &i32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
        };
        let name = |pid| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        pids.filter(has_mark).map(|pid| (pid, name(pid).replace('\0', " "))).collect()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for (pid, _) in self.processes() {
                let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
            }
        } else {
            self.expect_nothing_left();
        }
    }
}

impl Job {
    pub(crate) fn new(mut front: Child) -> Job {
        let out = BufReader::new(front.stdout.take().unwrap());
        let err = BufReader::new(front.stderr.take().unwrap());
        Job { front, out, err, err_seen: String::new(), out_seen: String::new() }
    }

    /// Reads what the ranks write until `count` lines contain `text`.
    pub(crate) fn wait_for_lines(&mut self, text: &str, count: usize) {
        let mut seen = 0;
        while seen < count {
            let line = read_line(&mut self.out, &mut self.out_seen);
            assert!(!line.is_empty(), "ended before {text:?}: {} {}", self.out_seen, rest(&mut self.err));
            let prefix = line.split_once('|').filter(|(_, rest)| rest.contains(text));
            seen += prefix.map_or(0, |(prefix, _)| ranks_in(prefix).len());
        }
    }

    /// Reads what the launcher says until a line contains `text`.
    pub(crate) fn wait_for_note(&mut self, text: &str) {
        loop {
            let line = read_line(&mut self.err, &mut self.err_seen);
            assert!(!line.is_empty(), "ended before {text:?}: {}", self.err_seen);
            if line.contains(text) {
                return;
            }
        }
    }

    /// The process that was started.
    pub(crate) fn front(&self) -> u32 {
        self.front.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.front), signal).unwrap();
    }

    /// Nobody reads what the ranks write any more.
    pub(crate) fn close_output(self) -> Outcome {
        let Job { mut front, out, mut err, mut err_seen, out_seen } = self;
        drop(out);
        err_seen.push_str(&rest(&mut err));
        Outcome { code: code(&mut front), out: out_seen, err: err_seen }
    }

    pub(crate) fn wait(mut self) -> Outcome {
        // Reads both pipes at once, or a full one would stop the job.
        let reader = std::thread::spawn(move || rest(&mut self.err));
        self.out_seen.push_str(&rest(&mut self.out));
        self.err_seen.push_str(&reader.join().unwrap());
        Outcome { code: code(&mut self.front), out: self.out_seen, err: self.err_seen }
    }

    /// Waits for the front alone: nobody reads what is written.
    pub(crate) fn wait_without_reading(mut self) -> i32 {
        code(&mut self.front)
    }
}

impl Outcome {
    /// Each line of each rank as `rank| line`, in the order of the ranks. The speed of the ranks decides which lines
    /// of several ranks are shown as one; this text does not depend on it.
    pub(crate) fn by_rank(&self) -> Vec<String> {
        let unfold = |line: &str| {
            let (prefix, text) = line.split_once('|').unwrap_or_else(|| panic!("no prefix in {self:?}"));
            let text = text.trim().to_owned();
            ranks_in(prefix).into_iter().map(move |rank| (rank, text.clone())).collect::<Vec<_>>()
        };
        let mut lines: Vec<(u32, String)> = self.out.lines().flat_map(unfold).collect();
        lines.sort_by_key(|(rank, _)| *rank);
        lines.into_iter().map(|(rank, text)| format!("{rank}| {text}")).collect()
    }

    /// The report of a failed job.
    pub(crate) fn report(&self) -> &str {
        let start = self.err.find("tpurun: FAILED").unwrap_or_else(|| panic!("no report in {self:?}"));
        let report = &self.err[start..];
        assert!(report.lines().count() <= 25, "{report}");
        report
    }

    pub(crate) fn expect_error(&self, line: &str) {
        assert_eq!((self.code, self.err.as_str()), (2, format!("tpurun: error: {line}\n").as_str()));
    }
}

/// The control groups of the job whose front had this number; none where the host lets nobody make one.
pub(crate) fn control_groups_of(front: u32) -> Vec<PathBuf> {
    let name = format!("tpurun-{front}");
    let (mut found, mut folders) = (Vec::new(), vec![PathBuf::from("/sys/fs/cgroup")]);
    while let Some(folder) = folders.pop() {
        let inside = fs::read_dir(&folder).into_iter().flatten().flatten();
        folders.extend(
            inside.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|e| e.path()),
        );
        if folder.ends_with(&name) {
            found.push(folder);
        }
    }
    found
}

fn read_line(stream: &mut impl BufRead, seen: &mut String) -> String {
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    seen.push_str(&line);
    line
}

fn rest(stream: &mut impl Read) -> String {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// `0-1,3` is three ranks.
fn ranks_in(prefix: &str) -> Vec<u32> {
    let range = |range: &str| {
        let (first, last) = range.trim().split_once('-').unwrap_or((range.trim(), range.trim()));
        first.parse::<u32>().unwrap()..=last.parse().unwrap()
    };
    prefix.split(',').flat_map(range).collect()
}

fn code(front: &mut Child) -> i32 {
    let status = front.wait().unwrap();
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap())
}

/// A variable in the environment of every process of a job.
const MARK: &str = "TEST_JOB_MARK";
const PATIENCE: Duration = Duration::from_secs(20);
