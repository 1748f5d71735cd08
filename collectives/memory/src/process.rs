//! Reads what /proc says about another process of this host, tells whether this one is a fork, and starts programs
//! that do not outlive it.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::env;
use std::ffi::{CString, OsStr, OsString, c_char};
use std::fs;
use std::io;
use std::iter;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

/// A waiter looks this often whether those it waits for still exist, if nothing else wakes it.
pub const LOOK_PERIOD: Duration = Duration::from_millis(500);

/// Whether a process still is what it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Liveness {
    /// It still is.
    Alive,
    /// Gone, a zombie, or another process with the same number.
    Gone,
    /// /proc cannot tell.
    Unknown,
}

/// Looks at other processes so far.
static LOOKS: AtomicU64 = AtomicU64::new(0);

/// Forks that lie between the first process of the program and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process that made it: a fork has a copy of whatever its parent made, but none of the threads that serve it.
/// To ask takes one load, where to ask for the number of the process takes a call of the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner(u32);

impl Owner {
    /// The calling process.
    pub fn here() -> Self {
        extern "C" fn count() {
            FORKS.fetch_add(1, Ordering::Relaxed);
        }
        static COUNTING: Once = Once::new();
        // SAFETY: the handler is a function of this library, which is never unloaded, and adds to a number.
        COUNTING.call_once(|| unsafe {
            libc::pthread_atfork(None, None, Some(count));
        });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Whether it is the calling process, and no fork of it calls.
    pub fn is_here(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }
}

/// The time the process started, in clock ticks since boot.
pub fn start_time(pid: u32) -> Option<u64> {
    stat(pid).map(|stat| stat.start)
}

/// Whether the process that had `pid` and `start` is still there; `start` 0 is any.
pub fn liveness(pid: u32, start: u64) -> Liveness {
    if pid == 0 {
        return Liveness::Unknown;
    }
    LOOKS.fetch_add(1, Ordering::Relaxed);
    match stat(pid) {
        Some(stat) if matches!(stat.state, b'Z' | b'X' | b'x') => Liveness::Gone,
        Some(stat) if start != 0 && stat.start != start => Liveness::Gone,
        Some(_) => Liveness::Alive,
        None if fs::exists("/proc/self/stat").unwrap_or(false) => Liveness::Gone,
        None => Liveness::Unknown,
    }
}

/// How often this process has looked whether another one is still there.
pub fn looks() -> u64 {
    LOOKS.load(Ordering::Relaxed)
}

/// Starts a program that the kernel kills (SIGKILL) when the calling thread ends, also when nothing of this process is
/// left that could do it.
///
/// The program is the path that the command names, and has no other name for itself; its environment is that of this
/// process with the changes of the command. A program that changes its user or its capabilities as it starts, such as a
/// set-user-ID one, is no longer killed: the kernel takes the signal from it.
///
/// # Errors
/// The kernel's, as [`Command::spawn`]. A file of no known format is refused and not given to a shell.
pub fn spawn_bound(mut command: Command) -> io::Result<Child> {
    let program = Executable::of(&command)?;
    let parent = getpid();
    let turn_into_it = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // A parent that ended before that has sent no signal.
        if getppid() != Some(parent) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Err(program.execute())
    };
    // SAFETY: after the fork this makes system calls alone; all that it reads was there before, and it allocates nothing.
    unsafe { command.pre_exec(turn_into_it) };
    command.spawn()
}

/// A program, its words and its environment, laid out as the kernel reads them.
struct Executable {
    path: CString,
    words: Pointers,
    environment: Pointers,
}

/// Texts, and their addresses with a null behind the last one.
struct Pointers {
    addresses: Vec<AtomicPtr<c_char>>,
    _texts: Vec<CString>,
}

impl Executable {
    fn of(command: &Command) -> io::Result<Self> {
        let mut environment: BTreeMap<OsString, OsString> = env::vars_os().collect();
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => environment.insert(name.to_owned(), value.to_owned()),
                None => environment.remove(name),
            };
        }
        let words = iter::once(command.get_program()).chain(command.get_args());
        Ok(Self {
            path: text(&[command.get_program()])?,
            words: words.map(|word| text(&[word])).collect::<io::Result<_>>()?,
            environment: environment
                .iter()
                .map(|(name, value)| text(&[name, OsStr::new("="), value]))
                .collect::<io::Result<_>>()?,
        })
    }

    /// Returns only when the kernel refuses.
    fn execute(&self) -> io::Error {
        // SAFETY: the path and the texts end with a zero byte, the addresses with a null; all live as long as `self`.
        unsafe { libc::execve(self.path.as_ptr(), self.words.as_ptr(), self.environment.as_ptr()) };
        io::Error::last_os_error()
    }
}

impl Pointers {
    fn as_ptr(&self) -> *const *const c_char {
        self.addresses.as_ptr().cast()
    }
}

impl FromIterator<CString> for Pointers {
    fn from_iter<I: IntoIterator<Item = CString>>(texts: I) -> Self {
        let texts: Vec<CString> = texts.into_iter().collect();
        let addresses = texts.iter().map(|text| text.as_ptr().cast_mut()).chain([ptr::null_mut()]);
        Self { addresses: addresses.map(AtomicPtr::new).collect(), _texts: texts }
    }
}

fn text(parts: &[&OsStr]) -> io::Result<CString> {
    let bytes: Vec<&[u8]> = parts.iter().map(|part| part.as_bytes()).collect();
    CString::new(bytes.concat()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

struct Stat {
    state: u8,
    start: u64,
}

fn stat(pid: u32) -> Option<Stat> {
    parse(&fs::read(format!("/proc/{pid}/stat")).ok()?)
}

/// `pid (name) state ppid ..`: the name may hold anything, so fields count from the last parenthesis.
fn parse(stat: &[u8]) -> Option<Stat> {
    let after = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let fields: Vec<&str> = std::str::from_utf8(&stat[after..]).ok()?.split_ascii_whitespace().collect();
    let state = *fields.first()?.as_bytes().first()?;
    // proc_pid_stat(5): state is field 3, starttime field 22.
    let start = fields.get(19)?.parse().ok()?;
    Some(Stat { state, start })
}

/// Checks that any line at all is either read or not, without a panic.
#[cfg(any(test, fuzzing, feature = "testing"))]
pub fn survives(line: &[u8]) {
    if let Some(stat) = parse(line) {
        assert!(!stat.state.is_ascii_whitespace());
    }
}

#[cfg(test)]
#[cfg(not(tpurun_loom))]
mod tests {
    use super::*;

    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Stdio;

    #[test]
    fn names_with_parentheses_do_not_confuse() {
        let line = b"7 (a) b) (c) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0";
        let stat = parse(line).expect("well formed");
        assert_eq!((stat.state, stat.start), (b'S', 4242));
        assert!(parse(b"7 (a").is_none());
    }

    fn output(command: Command) -> String {
        let mut child = spawn_bound(command).expect("it starts");
        let mut text = String::new();
        child.stdout.take().expect("a pipe").read_to_string(&mut text).expect("text");
        assert!(child.wait().expect("it ends").success());
        text
    }

    #[test]
    fn a_bound_program_is_started_as_any_other() {
        let mut command = Command::new("/bin/sh");
        // Above 31 are signals of the C library, which one of the two ways leaves ignored.
        let signals = "sed -nE 's/(SigIgn|SigBlk).*(.{8})/\\1 \\2/p' /proc/self/status";
        let script = format!("echo $0 $1 $MADE ${{HOME-gone}}; pwd; {signals}");
        command.args(["-c", &script, "name", "a b"]).current_dir("/").stdout(Stdio::piped());
        command.env("MADE", "x=1").env_remove("HOME");
        let as_any_other = command.output().expect("it starts");
        assert_eq!(output(command), String::from_utf8(as_any_other.stdout).expect("text"));
    }

    #[test]
    fn a_program_that_cannot_be_executed_is_an_error() {
        let refusal = |path: &str| spawn_bound(Command::new(path)).expect_err(path).raw_os_error();
        assert_eq!(refusal("/no/such/program"), Some(libc::ENOENT));
        assert_eq!(refusal("/etc/passwd"), Some(libc::EACCES));
        let file = env::temp_dir().join(format!("no-format-{}", std::process::id()));
        fs::write(&file, "echo a shell has run this\n").expect("a file");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("a mode");
        let refused = refusal(file.to_str().expect("a path"));
        fs::remove_file(&file).expect("a file");
        assert_eq!(refused, Some(libc::ENOEXEC));
        assert!(spawn_bound(Command::new("/bin/a\0b")).is_err());
    }

    #[test]
    fn a_bound_program_ends_with_the_thread_that_started_it() {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "exec sleep 1000"]);
        let mut bound = std::thread::scope(|scope| {
            scope.spawn(|| spawn_bound(command).expect("it starts")).join().expect("no panic")
        });
        let ended = bound.wait().expect("it is a child");
        assert_eq!(ended.signal(), Some(libc::SIGKILL));
    }

    #[test]
    fn a_child_is_alive_until_it_is_not() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("cat");
        let start = start_time(child.id()).expect("the child is in /proc");
        assert_eq!(liveness(child.id(), start), Liveness::Alive);
        assert_eq!(liveness(child.id(), start + 1), Liveness::Gone);
        drop(child.stdin.take());
        child.wait().expect("cat ends with its input");
        assert_eq!(liveness(child.id(), start), Liveness::Gone);
    }
}
