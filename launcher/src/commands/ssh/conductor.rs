//! The end of `--hosts` that a person has started: an ssh for each host.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::Signal;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::order::{Order, VERSION, portable_environment};
use super::{FOLLOW, exit_code};
use crate::base::signals::Signals;
use crate::job::Job;
use crate::nodes::{self, TOKEN};
use crate::place::assignment::{self, PLACE};
use crate::place::hosts::own_name;
use crate::place::schedulers;
use crate::place::ssh_hosts::{Remote, RemoteHost, SSH};

/// Runs the command line of this process and `more` arguments on all hosts, and returns the exit code of the job.
///
/// # Errors
/// One line that names what can not be started.
pub(crate) fn conduct(job: &Job, remote: &Remote, more: &[String]) -> Result<i32, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    let orders = orders(remote, more)?;
    runtime.block_on(async {
        let stopping = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2];
        let signals =
            Signals::new(stopping.map(|signal| (signal, signal))).map_err(|error| error.to_string())?;
        let mut conductor = Conductor::default();
        for (host, order) in remote.hosts.iter().zip(orders) {
            conductor.start(remote, host, order)?;
        }
        Ok(conductor.run(signals, job.stop_grace).await)
    })
}

fn orders(remote: &Remote, more: &[String]) -> Result<Vec<Vec<u8>>, String> {
    let text = |word: std::ffi::OsString| {
        word.into_string()
            .map_err(|word| format!("expected UTF-8 on the command line, given {}", word.display()))
    };
    let mut args: Vec<String> = std::env::args_os().skip(1).map(text).collect::<Result<_, _>>()?;
    args.extend_from_slice(more);
    let cwd =
        std::env::current_dir().map_err(|error| format!("cannot find the current directory: {error}"))?;
    let mut env = portable_environment();
    if !remote.has_token_file && !env.contains_key(TOKEN) {
        let mut token = Vec::new();
        nodes::print_new(&mut token)?;
        env.insert(TOKEN.into(), String::from_utf8_lossy(&token).trim().to_owned());
    }
    let rendezvous = match &remote.rendezvous {
        Some(given) => given.clone(),
        None => format!("{}:{}", first_host(remote), schedulers::any_port()),
    };
    let count = remote.hosts.len() as u32;
    let order = |(node, host): (u32, &RemoteHost)| {
        let own = [
            (PLACE, assignment::text(node, count, host.ranks, &rendezvous)),
            ("TPURUN_HOST", if host.is_here() { own_name() } else { host.name().to_owned() }),
        ];
        let own = own.map(|(name, value)| (name.to_owned(), value));
        let env: BTreeMap<String, String> = env.clone().into_iter().chain(own).collect();
        Order { version: VERSION.into(), cwd: cwd.clone(), args: args.clone(), env }.to_line()
    };
    (0..).zip(&remote.hosts).map(order).collect()
}

/// The address where the other hosts reach the first one: the one that ssh takes its name for.
fn first_host(remote: &Remote) -> String {
    let first = &remote.hosts[0];
    if first.is_here() {
        let is_alone = remote.hosts.iter().all(RemoteHost::is_here);
        return if is_alone { "127.0.0.1".into() } else { own_name() };
    }
    let words = ssh_words(remote);
    if Path::new(&words[0]).file_name().is_none_or(|name| name != "ssh") {
        return first.name().to_owned();
    }
    let asked =
        std::process::Command::new(words[0]).args(&words[1..]).args(["-G", &first.destination]).output();
    let answer = asked.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let name = answer.lines().find_map(|line| line.strip_prefix("hostname "));
    name.unwrap_or(first.name()).to_owned()
}

fn ssh_words(remote: &Remote) -> Vec<&str> {
    remote.ssh.as_deref().unwrap_or(SSH).split_whitespace().collect()
}

/// All hosts, from start to end.
#[derive(Default)]
struct Conductor {
    /// By host: the words that go to its standard input.
    words: Vec<mpsc::UnboundedSender<Vec<u8>>>,
    names: Vec<String>,
    running: BTreeSet<usize>,
    ends: JoinSet<(usize, i32)>,
    outputs: Vec<JoinHandle<()>>,
    /// By host: ends an ssh that does not end by itself.
    kills: Vec<mpsc::Sender<()>>,
}

impl Conductor {
    fn start(&mut self, remote: &Remote, host: &RemoteHost, order: Vec<u8>) -> Result<(), String> {
        let own = std::env::current_exe().map_err(|error| format!("cannot find this command: {error}"))?;
        let (program, mut child) = if host.is_here() {
            (own.display().to_string(), Command::new(&own))
        } else {
            let words = ssh_words(remote);
            let mut ssh = Command::new(words[0]);
            ssh.args(&words[1..]).arg(&host.destination).arg(format!("exec {}", quoted(&own)?));
            (words[0].to_owned(), ssh)
        };
        child.arg(FOLLOW).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C is for us to pass on, and not for ssh.
        let mut child =
            child.process_group(0).spawn().map_err(|error| format!("cannot run {program}: {error}"))?;
        let (words, waiting) = mpsc::unbounded_channel();
        let _ = words.send(order);
        let own = |error: io::Error| error.to_string();
        if let (Some(stdin), Some(out), Some(err)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        {
            tokio::spawn(write_all(waiting, stdin));
            let (out, err) = (out.into_owned_fd().map_err(own)?, err.into_owned_fd().map_err(own)?);
            self.outputs.push(std::thread::spawn(|| copy_lines(out, io::stdout)));
            self.outputs.push(std::thread::spawn(|| copy_lines(err, io::stderr)));
        }
        let (kill, killed) = mpsc::channel(1);
        self.ends.spawn(wait(self.names.len(), child, killed));
        self.running.insert(self.names.len());
        self.words.push(words);
        self.kills.push(kill);
        self.names.push(host.name().to_owned());
        Ok(())
    }

    /// Runs until all hosts are done.
    async fn run(mut self, mut signals: Signals<Signal>, stop_grace: Duration) -> i32 {
        let mut codes = Vec::new();
        let mut stop_at = None;
        let mut kill_at = None;
        loop {
            tokio::select! {
                signal = signals.next() => {
                    if ![Signal::USR1, Signal::USR2].contains(&signal) {
                        kill_at.get_or_insert_with(|| Instant::now() + stop_grace + LAST_WORDS);
                    }
                    self.tell(signal);
                }
                ended = self.ends.join_next() => match ended {
                    Some(Ok((host, code))) => {
                        if let Some(why) = did_not_run(code) {
                            eprintln!("tpurun: host {}: {why}", self.names[host]);
                        }
                        if code != 0 {
                            // The other hosts know in a moment, unless they still wait for this one.
                            stop_at.get_or_insert_with(|| Instant::now() + ALONE);
                        }
                        codes.push(code);
                        self.running.remove(&host);
                    }
                    Some(Err(_)) => {}
                    None => break,
                },
                () = at(stop_at) => {
                    stop_at = None;
                    let names: Vec<&str> = self.running.iter().map(|host| &*self.names[*host]).collect();
                    eprintln!("tpurun: stopping the job on {}", names.join(", "));
                    kill_at.get_or_insert_with(|| Instant::now() + stop_grace + LAST_WORDS);
                    self.tell(Signal::TERM);
                }
                () = at(kill_at) => {
                    kill_at = None;
                    for kill in &self.kills {
                        let _ = kill.try_send(());
                    }
                }
            }
        }
        for output in self.outputs {
            let _ = output.join();
        }
        outcome(&codes)
    }

    fn tell(&self, signal: Signal) {
        let line = format!("{}\n", signal.as_raw()).into_bytes();
        self.words.iter().for_each(|words| drop(words.send(line.clone())));
    }
}

/// The exit code of the job: all nodes that ran agree on it.
fn outcome(codes: &[i32]) -> i32 {
    let failed = || codes.iter().copied().filter(|code| *code != 0);
    failed().find(|code| did_not_run(*code).is_none()).or(failed().next()).unwrap_or(0)
}

/// Says why there was no job on a host, by the exit code of the command that was to start it.
fn did_not_run(code: i32) -> Option<String> {
    match code {
        // A rank may have ended so, too; then the report says more.
        255 => Some("ssh ended with code 255: no connection, or it was lost".into()),
        126 | 127 => {
            let own = std::env::current_exe().unwrap_or_default();
            Some(format!("expected tpurun at {}, as here, given none that can be run", own.display()))
        }
        _ => None,
    }
}

async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

async fn wait(host: usize, mut child: Child, mut killed: mpsc::Receiver<()>) -> (usize, i32) {
    loop {
        tokio::select! {
            status = child.wait() => return (host, status.map_or(255, exit_code)),
            Some(()) = killed.recv() => drop(child.start_kill()),
        }
    }
}

/// Writes until the host or this process is done: the end of its input ends the job there.
async fn write_all(mut words: mpsc::UnboundedReceiver<Vec<u8>>, mut stdin: ChildStdin) {
    while let Some(bytes) = words.recv().await {
        if stdin.write_all(&bytes).await.is_err() {
            return;
        }
    }
}

/// Passes whole lines on, so that those of several hosts do not mix.
fn copy_lines<W: Write>(from: OwnedFd, to: impl Fn() -> W) {
    let mut from = std::fs::File::from(from);
    let mut held = Vec::new();
    let mut piece = vec![0; PIECE_BYTES];
    // A reader that has gone needs nothing more; the host must not stop for that.
    let show = |bytes: &[u8]| drop(to().write_all(bytes).and_then(|()| to().flush()));
    loop {
        match from.read(&mut piece) {
            Ok(0) => break,
            Ok(count) => held.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
        let whole = held.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        // A line without an end is shown in pieces.
        let whole = if held.len() - whole > PIECE_BYTES { held.len() } else { whole };
        show(&held[..whole]);
        held.drain(..whole);
    }
    show(&held);
}

/// A word of the shell that sshd runs there.
fn quoted(path: &Path) -> Result<String, String> {
    let text = path
        .to_str()
        .ok_or_else(|| format!("expected UTF-8 in the path of tpurun, given {}", path.display()))?;
    Ok(format!("'{}'", text.replace('\'', r"'\''")))
}

/// Nodes notice by themselves in this time that one is gone.
const ALONE: Duration = Duration::from_secs(8);
/// Time after the end of the last rank until ssh is ended.
const LAST_WORDS: Duration = Duration::from_secs(5);
const PIECE_BYTES: usize = 64 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_job_ends_as_its_nodes_say() {
        assert_eq!(outcome(&[0, 0]), 0);
        assert_eq!(outcome(&[0, 3, 3]), 3);
        // The host that was lost knows less than the one that saw it.
        assert_eq!(outcome(&[255, 1]), 1);
        assert_eq!(outcome(&[0, 255]), 255);
        assert_eq!(outcome(&[127, 143]), 143);
    }

    #[test]
    fn a_path_is_one_word_of_a_shell() {
        assert_eq!(quoted(Path::new("/a b/it's")).unwrap(), r"'/a b/it'\''s'");
    }

    #[test]
    fn lines_arrive_whole() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let shown = std::sync::Mutex::new(Vec::<Vec<u8>>::new());
        struct Kept<'a>(&'a std::sync::Mutex<Vec<Vec<u8>>>);
        impl Write for Kept<'_> {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.lock().unwrap().push(bytes.to_vec());
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let long = vec![b'x'; 3 * PIECE_BYTES];
        let sent = [b"a\nb".as_slice(), b"c\n", &long, b"\nend"].concat();
        let writer = {
            let sent = sent.clone();
            std::thread::spawn(move || std::fs::File::from(write).write_all(&sent).unwrap())
        };
        copy_lines(read, || Kept(&shown));
        writer.join().unwrap();
        let shown = shown.into_inner().unwrap();
        assert_eq!(shown.concat(), sent);
        assert_eq!(shown.last().unwrap(), b"end");
    }
}
