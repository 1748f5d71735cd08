//! Runs another program for a check, for a bounded time.

use std::io::{self, Read as _};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};

/// Why a program gave no answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ProbeError {
    NotStarted(io::ErrorKind),
    TooSlow,
}

/// Runs a program to its end and collects what it wrote. One that takes longer is killed with its children.
pub(super) fn run(command: &mut Command, limit: Duration) -> Result<Output, ProbeError> {
    use std::os::unix::process::CommandExt as _;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let child = command.spawn().map_err(|error| ProbeError::NotStarted(error.kind()))?;
    let group = Pid::from_child(&child);
    let (tx, rx) = mpsc::channel();
    let waiter = thread::spawn(move || {
        // The receiver is gone only if nobody wants the answer any more.
        let _ = tx.send(wait_with_output(child));
    });
    let result = match rx.recv_timeout(limit) {
        Ok(output) => output.map_err(|error| ProbeError::NotStarted(error.kind())),
        Err(_) => {
            // It may have ended just now; then there is nothing to kill.
            let _ = kill_process_group(group, Signal::KILL);
            Err(ProbeError::TooSlow)
        }
    };
    waiter.join().expect("the waiting thread does not panic");
    result
}

fn wait_with_output(mut child: Child) -> io::Result<Output> {
    let mut stderr_pipe = child.stderr.take().expect("stderr is piped");
    let reader = thread::spawn(move || {
        let mut stderr = Vec::new();
        stderr_pipe.read_to_end(&mut stderr).map(|_| stderr)
    });
    let mut output = child.wait_with_output()?;
    output.stderr = reader.join().expect("the reading thread does not panic")?;
    Ok(output)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Result<Output, ProbeError> {
        run(Command::new("sh").args(["-c", script]), limit)
    }

    #[test]
    fn both_streams_come_back() {
        let output = shell("echo out; echo err >&2; exit 3", Duration::from_secs(60)).unwrap();
        assert_eq!((output.stdout, output.stderr), (b"out\n".to_vec(), b"err\n".to_vec()));
        assert_eq!(output.status.code(), Some(3));
    }

    #[test]
    fn a_program_that_hangs_is_killed_with_its_children() {
        let result = shell("sleep 1000 & sleep 1000", Duration::from_millis(50));
        assert_eq!(result.unwrap_err(), ProbeError::TooSlow);
    }

    #[test]
    fn a_program_that_is_not_there_is_said_so() {
        let result = run(&mut Command::new("/nonexistent/program"), Duration::from_secs(60));
        assert_eq!(result.unwrap_err(), ProbeError::NotStarted(io::ErrorKind::NotFound));
    }
}
