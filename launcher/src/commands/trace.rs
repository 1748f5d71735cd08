//! `tpurun trace`: what the ranks of a job have posted, in the formats of the tools that show it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use crate::command_line::definition::{TraceFormat, TraceOptions};
use crate::job::target::{calls_main, find_python};
use crate::observe::flight::Flight;
use crate::observe::flight::dump::{self, DOCUMENT, TRACE};
use crate::observe::flight::live::{self, Live};
use crate::observe::flight::notice::{self, Run};
use crate::observe::flight::perfetto;
use crate::observe::run_dir;

/// Writes what the options ask for, and says where.
///
/// # Errors
/// One line: no such job, not ours, nothing to write, nowhere to write to.
pub(crate) fn run(options: &TraceOptions, python: Option<&str>) -> Result<ExitCode, String> {
    let (run, others) = notice::find(options.job.as_deref(), &run_dir::automatic_root())?;
    if !others.is_empty() {
        eprintln!("tpurun: also running: {}", others.join(", "));
    }
    run.check_host()?;
    let flight = flight(&run)?;
    let bytes = |flight: &Flight| match options.format {
        TraceFormat::Perfetto => Ok(perfetto::encode(flight)),
        TraceFormat::Json | TraceFormat::Torch => {
            serde_json::to_vec(flight).map_err(|error| error.to_string())
        }
    };
    let bytes = bytes(&flight)?;
    let is_stdout = options.output.as_deref() == Some(Path::new("-"));
    match options.format {
        TraceFormat::Torch if is_stdout => {
            Err("-o: expected a directory for the files of --format torch, given -".into())
        }
        TraceFormat::Torch => {
            let dir = options.output.clone().unwrap_or_else(|| run.flight_dir().join("torch"));
            export(&bytes, &dir, python)?;
            say(&dir)
        }
        _ if is_stdout => crate::print(&bytes),
        _ => match &options.output {
            Some(path) => write(path, &bytes).and_then(|()| say(path)),
            None => keep(&run, &flight).and_then(|dir| say(&dir.join(default_name(options.format)))),
        },
    }
}

/// The document says what a running job does now; for another job it is the dump.
fn flight(run: &Run) -> Result<Flight, String> {
    if run.is_running() {
        match Live::open(run) {
            Ok(live) => {
                let (flight, silent) = live.take_all();
                if !silent.is_empty() {
                    eprintln!("tpurun: no word from {}: not in the trace, or old", live::names(&silent));
                }
                return Ok(flight);
            }
            Err(error) if run.is_running() => return Err(error),
            Err(_) => {}
        }
    }
    dump::read(&run.flight_dir())?.ok_or_else(|| {
        let name = &run.notice.job.run;
        format!("job {name} has ended and left no dump: one is written when a job fails or is stopped")
    })
}

/// In the run directory, as the dump of a failure is.
fn keep(run: &Run, flight: &Flight) -> Result<PathBuf, String> {
    let dir = run.flight_dir();
    dump::write(&dir, flight).map_err(|error| format!("cannot write to {}: {error}", dir.display()))?;
    Ok(dir)
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    dump::replace(path, bytes).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

fn default_name(format: TraceFormat) -> &'static str {
    if format == TraceFormat::Perfetto { TRACE } else { DOCUMENT }
}

/// The format is a pickle, which Python writes; nothing of ours ever reads one.
fn export(document: &[u8], dir: &Path, python: Option<&str>) -> Result<(), String> {
    let python = find_python(python)?;
    let failed = |error: std::io::Error| format!("cannot run {}: {error}", python.display());
    let mut child = Command::new(&python)
        .args(["-c", &calls_main("tpurun.flight_export")])
        .arg(dir)
        .stdin(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let fed = child.stdin.take().expect("it was asked for").write_all(document);
    let status = child.wait().map_err(failed)?;
    match (status.success(), fed) {
        (true, Ok(())) => Ok(()),
        _ => Err(format!("cannot write to {} (see above)", dir.display())),
    }
}

fn say(path: &Path) -> Result<ExitCode, String> {
    crate::print(format!("{}\n", path.display()).as_bytes())
}
