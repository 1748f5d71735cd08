//! The process that the user started: it starts the agent, passes signals on to it and returns its exit code. When the
//! agent is killed, everything that it leaves behind comes to this process and ends here.

use std::fs;
use std::io::{self, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use rustix::process::{Pid, Signal, getpid, kill_process, set_child_subreaper};

use crate::agent::{AGENT, Origin};
use crate::base::signals::Signals;
use crate::job::Job;
use crate::processes::Process;
use crate::processes::{cgroup, kill};
use crate::ranks::warm;

/// Runs the job of this command line, which was started at `begun_ns`, and `more` arguments, and returns its
/// exit code.
pub(crate) fn run(job: &Job, more: &[String], begun_ns: u64) -> Result<i32, String> {
    let mut origin = Origin::here(begun_ns);
    // Before this process adopts what it starts: a warm server outlives it.
    origin.warm = warm::find(job);
    // Before the agent exists, so that nothing it may leave behind is missed.
    set_child_subreaper(Some(getpid())).map_err(|errno| format!("cannot become a subreaper: {errno}"))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ended = runtime.and_then(|runtime| runtime.block_on(accompany_agent(more, &origin)));
    let (agent, status, forwarded) = ended.map_err(|error| format!("cannot run the agent: {error}"))?;
    Ok(clean_up(agent, status, forwarded))
}

/// Until the agent ends; also returns the last signal that was passed on to it.
async fn accompany_agent(more: &[String], origin: &Origin) -> io::Result<(u32, ExitStatus, Option<Signal>)> {
    let mut signals = Signals::new(handled().into_iter().map(|signal| (signal, signal)))?;
    let mut agent = start_agent(more, origin)?;
    let mut forwarded = None;
    let mut is_told = false;
    loop {
        // The kernel tells, too, when the agent is stopped or goes on.
        let is_stopped = is_stopped(&agent);
        is_told &= is_stopped;
        let signal = tokio::select! {
            signal = signals.next() => signal,
            () = tokio::time::sleep(TOLD_AFTER), if is_stopped && !is_told => {
                if self::is_stopped(&agent) {
                    is_told = true;
                    tell_stopped(agent.id());
                }
                continue;
            }
        };
        if signal != Signal::CHILD {
            forwarded = Some(signal);
            let _ = kill_process(Pid::from_child(&agent), signal);
        } else if let Some(status) = agent.try_wait()? {
            return Ok((agent.id(), status, forwarded));
        }
    }
}

fn is_stopped(agent: &Child) -> bool {
    Process::read(agent.id() as i32).is_some_and(|process| process.state == 'T')
}

fn tell_stopped(agent: u32) {
    let what = "is stopped: it shows nothing, judges nothing and passes no signal on";
    // Where nobody reads it, nobody needs it.
    let _ =
        writeln!(io::stderr(), "tpurun: the agent (pid {agent}) {what} (kill -CONT {agent} lets it go on)");
}

/// Ctrl-Z stops both at once, and fg lets both go on.
const TOLD_AFTER: Duration = Duration::from_millis(500);

fn start_agent(more: &[String], origin: &Origin) -> io::Result<Child> {
    Command::new("/proc/self/exe")
        .arg0("tpurun")
        .arg(AGENT)
        .arg(origin.to_word())
        .args(std::env::args_os().skip(1))
        .args(more)
        .spawn()
}

fn clean_up(agent: u32, status: ExitStatus, forwarded: Option<Signal>) -> i32 {
    let front = getpid().as_raw_nonzero().get();
    cgroup::kill_left_over(front);
    let are_gone = kill::end_all_descendants(None, |_, _| ());
    cgroup::remove_left_over(front, if are_gone { kill::LIMIT } else { Duration::ZERO });
    if let Some(code) = status.code() {
        return code;
    }
    let number = status.signal().unwrap_or(0);
    // A signal that came before the agent could handle it ends it before it has started anything.
    if forwarded.map(Signal::as_raw) != Some(number) {
        let what = format!("was killed by signal {number}; its ranks were ended");
        let _ = writeln!(io::stderr(), "tpurun: the agent (pid {agent}) {what}");
    }
    128 + number
}

/// A signal that we were started to ignore, as under nohup, stays ignored.
fn handled() -> Vec<Signal> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask =
        status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    let is_ignored = |signal: &Signal| mask.unwrap_or(0) >> (signal.as_raw() - 1) & 1 == 1;
    let forwarded = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2];
    forwarded.into_iter().filter(|signal| !is_ignored(signal)).chain([Signal::CHILD]).collect()
}
