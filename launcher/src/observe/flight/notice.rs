//! `job.json` in the run directory: how another process of the same user finds the board of a running job
//! without asking its agent, which may be busy. Also the search for the job that a person means.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tpurun_protocol::board::Board;

use crate::base::private;
use crate::base::rank_set::RankSet;
use crate::job::program::{Program, Programs};
use crate::observe::flight::{FORMAT, JobFacts};
use crate::place::hosts::own_name;
use crate::processes::Process;

/// The contents of `job.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct JobNotice {
    pub(crate) format: u32,
    pub(crate) job: JobFacts,
    /// Start time of the agent; with its pid it names one process of this boot.
    pub(crate) agent_start_ticks: u64,
    pub(crate) boot_id: String,
    /// The agent's descriptor of the board.
    pub(crate) board_fd: i32,
    /// Roles and their ranks in a job of several programs.
    pub(crate) programs: Vec<ProgramRanks>,
    /// In a job of several nodes, the nodes by number; None stands for the node of this agent.
    #[serde(default)]
    pub(crate) others: Vec<Option<NodeRanks>>,
}

/// A node whose ranks another agent has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeRanks {
    pub(crate) host: String,
    /// As `4-7`.
    pub(crate) ranks: String,
}

/// One role of a job of several programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProgramRanks {
    pub(crate) name: String,
    /// As `0-3,7`.
    pub(crate) ranks: String,
}

/// A run directory.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) dir: PathBuf,
    pub(crate) notice: JobNotice,
}

impl JobNotice {
    /// Makes the notice of the job whose agent this process is; the job started `age` ago.
    pub(crate) fn of_this_agent(
        run: &str,
        ranks: u32,
        programs: &Programs,
        board_fd: i32,
        age: Duration,
        others: Vec<Option<NodeRanks>>,
    ) -> JobNotice {
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        let started = SystemTime::now().checked_sub(age).unwrap_or(UNIX_EPOCH);
        let since_1970 = started.duration_since(UNIX_EPOCH).unwrap_or_default();
        JobNotice {
            format: FORMAT,
            job: JobFacts {
                run: run.to_owned(),
                host: own_name(),
                agent_pid: pid,
                ranks,
                command: command(programs),
                started_unix_ms: since_1970.as_millis() as u64,
            },
            agent_start_ticks: Process::read(pid).map_or(0, |process| process.start_ticks),
            boot_id: boot_id(),
            board_fd,
            programs: if programs.are_several() { programs.iter().map(role).collect() } else { Vec::new() },
            others,
        }
    }

    /// Puts the notice into the run directory, whole or not at all.
    pub(crate) fn write(&self, run_dir: &Path) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(self)?;
        let unfinished = run_dir.join(".job.json");
        private::file(&unfinished)?.write_all(&text)?;
        fs::rename(unfinished, run_dir.join(JOB_FILE))
    }

    /// The role of a rank; None in a job of one program.
    pub(crate) fn program_of(&self, rank: u32) -> Option<&str> {
        let has = |ranks: &str| ranks.parse::<RankSet>().is_ok_and(|ranks| ranks.contains(rank));
        self.programs.iter().find(|program| has(&program.ranks)).map(|program| program.name.as_str())
    }

    /// Whether the agent still runs; a process that has its number by now is not it.
    pub(crate) fn is_running(&self) -> bool {
        self.boot_id == boot_id()
            && Process::read(self.job.agent_pid)
                .is_some_and(|agent| agent.start_ticks == self.agent_start_ticks && !agent.is_zombie())
    }

    /// Maps the board out of the running agent.
    ///
    /// # Errors
    /// One line; also when the job has ended meanwhile.
    pub(crate) fn open_board(&self) -> Result<Board, String> {
        let run = &self.job.run;
        let path = format!("/proc/{}/fd/{}", self.job.agent_pid, self.board_fd);
        let refused = |error: io::Error| match error.kind() {
            io::ErrorKind::PermissionDenied => {
                format!("cannot look into job {run}: it belongs to another user")
            }
            _ => format!("cannot look into job {run}: {error}"),
        };
        // The check is before the opening: to open another kind of file may wait, or do something.
        let target = fs::read_link(&path).map_err(refused)?;
        if !target.to_string_lossy().starts_with("/memfd:tpurun-board") {
            return Err(format!("cannot look into job {run}: {path} is not its board"));
        }
        let file = OpenOptions::new().read(true).write(true).open(&path).map_err(refused)?;
        let board = Board::open(&file).map_err(refused)?;
        match board.world() == self.job.ranks && self.is_running() {
            true => Ok(board),
            false => Err(format!("job {run} has just ended")),
        }
    }
}

/// The command line as it could be typed, without options.
fn command(programs: &Programs) -> Vec<String> {
    let words: Vec<Vec<String>> = programs.iter().map(|program| program.target.words()).collect();
    words.join(&":".to_owned())
}

fn role(program: &Program) -> ProgramRanks {
    ProgramRanks { name: program.name.clone(), ranks: program.shown_ranks() }
}

impl Run {
    /// # Errors
    /// One line: there is no job in `dir`, or it is not ours.
    pub(crate) fn open(dir: &Path) -> Result<Run, String> {
        let shown = dir.display();
        let refused = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => {
                format!("expected the directory of a run, given {shown}: no {JOB_FILE} there")
            }
            io::ErrorKind::PermissionDenied => format!("cannot read {shown}: it belongs to another user"),
            _ => format!("cannot read {shown}: {error}"),
        };
        let path = dir.join(JOB_FILE);
        let size = fs::metadata(&path).map_err(refused)?.len();
        if size > MAX_BYTES {
            return Err(format!("{}: expected at most {MAX_BYTES} bytes, given {size}", path.display()));
        }
        let text = fs::read(&path).map_err(refused)?;
        let notice: JobNotice =
            serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        if notice.format != FORMAT {
            return Err(format!("{}: expected format {FORMAT}, given {}", path.display(), notice.format));
        }
        Ok(Run { dir: dir.to_owned(), notice })
    }

    /// The folder of the run's dump.
    pub(crate) fn flight_dir(&self) -> PathBuf {
        self.dir.join(FLIGHT)
    }

    pub(crate) fn is_running(&self) -> bool {
        self.notice.is_running()
    }

    /// # Errors
    /// One line: the job runs on another host.
    pub(crate) fn check_host(&self) -> Result<(), String> {
        let (here, there) = (own_name(), &self.notice.job.host);
        if *there == here {
            return Ok(());
        }
        Err(format!("job {} ran on host {there}, this is {here}: ask there", self.notice.job.run))
    }
}

/// The job that a person means: a run directory, its name, the beginning or the end of it; by default the newest that
/// runs, else the newest. The second value names others that run, when nobody said which.
///
/// # Errors
/// One line: no such job, or several.
pub(crate) fn find(wanted: Option<&str>, root: &Path) -> Result<(Run, Vec<String>), String> {
    let Some(wanted) = wanted else { return newest(root) };
    let dir = Path::new(wanted);
    if dir.join(JOB_FILE).exists() || wanted.contains('/') {
        return Ok((Run::open(dir)?, Vec::new()));
    }
    let matching: Vec<PathBuf> = runs(root).into_iter().filter(|dir| is_meant(&name(dir), wanted)).collect();
    let exact = matching.iter().find(|dir| name(dir) == wanted);
    match (exact, matching.as_slice()) {
        (Some(dir), _) => Ok((Run::open(dir)?, Vec::new())),
        (None, [dir]) => Ok((Run::open(dir)?, Vec::new())),
        (None, []) => {
            Err(format!("no job {wanted} in {} (set TPURUN_RUNS, or name its directory)", root.display()))
        }
        (None, several) => {
            let names: Vec<String> = several.iter().map(|dir| name(dir)).collect();
            Err(format!("expected one job, given {wanted}, which may be {}", names.join(", ")))
        }
    }
}

fn newest(root: &Path) -> Result<(Run, Vec<String>), String> {
    let mut runs: Vec<Run> = runs(root).iter().filter_map(|dir| Run::open(dir).ok()).collect();
    runs.sort_by_key(|run| std::cmp::Reverse(run.notice.job.started_unix_ms));
    let (mut running, ended): (Vec<Run>, Vec<Run>) = runs.into_iter().partition(Run::is_running);
    let others = running.split_off(running.len().min(1));
    let found = running.into_iter().chain(ended).next();
    let found = found
        .ok_or_else(|| format!("no job in {} (set TPURUN_RUNS, or name its directory)", root.display()))?;
    Ok((found, others.iter().map(|run| run.notice.job.run.clone()).collect()))
}

fn runs(root: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    let mut runs: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|dir| is_run(dir)).collect();
    runs.sort();
    runs
}

/// Whether a directory is a run of this user: not one that somebody else has put there, nor a link.
fn is_run(dir: &Path) -> bool {
    let own = rustix::process::geteuid();
    let is_ours = |found: fs::Metadata| own.is_root() || found.uid() == own.as_raw();
    let is_file = || dir.join(JOB_FILE).symlink_metadata().is_ok_and(|found| found.is_file());
    dir.symlink_metadata().is_ok_and(|found| found.is_dir() && is_ours(found)) && is_file()
}

fn is_meant(name: &str, wanted: &str) -> bool {
    !wanted.is_empty() && (name.starts_with(wanted) || name.ends_with(wanted))
}

fn name(dir: &Path) -> String {
    dir.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The id of the machine's current boot.
pub(crate) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Name of the notice's file.
pub(crate) const JOB_FILE: &str = "job.json";
/// The folder of the dump, in the run directory.
pub(crate) const FLIGHT: &str = "flight";
const MAX_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, run: &str, agent_pid: i32, started_unix_ms: u64) {
        let job =
            JobFacts { run: run.into(), host: own_name(), agent_pid, started_unix_ms, ..JobFacts::default() };
        let agent_start_ticks = Process::read(agent_pid).map_or(0, |process| process.start_ticks);
        let notice = JobNotice {
            format: FORMAT,
            job,
            agent_start_ticks,
            boot_id: boot_id(),
            board_fd: 0,
            programs: vec![
                ProgramRanks { name: "learner".into(), ranks: "0".into() },
                ProgramRanks { name: "actor".into(), ranks: "1-3".into() },
            ],
            others: vec![],
        };
        fs::create_dir(root.join(run)).unwrap();
        notice.write(&root.join(run)).unwrap();
    }

    fn found(wanted: Option<&str>, root: &Path) -> Result<String, String> {
        find(wanted, root).map(|(run, _)| run.notice.job.run)
    }

    #[test]
    fn people_name_jobs_as_they_like() {
        let root = tempfile::tempdir().unwrap();
        let own = rustix::process::getpid().as_raw_nonzero().get();
        assert!(found(None, root.path()).unwrap_err().starts_with("no job in "));
        write(root.path(), "20260101-000000-aaaa", i32::MAX, 1);
        write(root.path(), "20260102-000000-bbbb", i32::MAX, 2);
        // The newest, unless another one runs.
        assert_eq!(found(None, root.path()).unwrap(), "20260102-000000-bbbb");
        write(root.path(), "20251231-000000-cccc", own, 0);
        write(root.path(), "20251230-000000-dddd", own, 0);
        let (run, others) = find(None, root.path()).unwrap();
        assert_eq!((run.is_running(), others.len()), (true, 1));
        for wanted in ["20260101-000000-aaaa", "aaaa", "20260101"] {
            assert_eq!(found(Some(wanted), root.path()).unwrap(), "20260101-000000-aaaa", "{wanted}");
        }
        let dir = root.path().join("20260102-000000-bbbb");
        assert_eq!(found(dir.to_str(), Path::new("/nowhere")).unwrap(), "20260102-000000-bbbb");
        assert_eq!(
            found(Some("2026"), root.path()).unwrap_err(),
            "expected one job, given 2026, which may be 20260101-000000-aaaa, 20260102-000000-bbbb"
        );
        assert!(found(Some("eeee"), root.path()).unwrap_err().starts_with("no job eeee in "));
        assert!(found(Some(""), root.path()).unwrap_err().starts_with("no job  in "));
    }

    #[test]
    fn a_later_process_with_the_number_of_the_agent_is_not_it() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "run", rustix::process::getpid().as_raw_nonzero().get(), 1);
        let run = Run::open(&root.path().join("run")).unwrap();
        assert!(run.is_running() && run.check_host().is_ok());
        assert!(!JobNotice { agent_start_ticks: 1, ..run.notice.clone() }.is_running());
        assert!(!JobNotice { boot_id: "another".into(), ..run.notice.clone() }.is_running());
        // Descriptor 0 of this process is no board.
        assert!(run.notice.open_board().unwrap_err().contains("is not its board"));
    }

    #[test]
    fn ranks_have_roles() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "run", 1, 1);
        let run = Run::open(&root.path().join("run")).unwrap();
        let roles: Vec<Option<&str>> = [0, 3, 4].map(|rank| run.notice.program_of(rank)).into();
        assert_eq!(roles, [Some("learner"), Some("actor"), None]);
    }
}
