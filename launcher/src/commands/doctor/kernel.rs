//! Tries what the engine and the launcher need from the kernel and the system.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Access, MemfdFlags, SealFlags, access, fcntl_add_seals, ftruncate, memfd_create, statvfs};
use rustix::thread::futex;

use super::cgroup::Cgroups;
use super::probe::{self, ProbeError};
use super::{Finding, human_bytes};

/// c10d waits for as long as the resolver does; this is already too long.
const DNS_LIMIT: Duration = Duration::from_secs(2);

const FUTEX_ROUNDS: u32 = 200;

/// Ports for the control plane, the store and what user code opens.
const FEW_PORTS: u32 = 1000;

pub(super) fn memfd() -> Finding {
    const NAME: &str = "memfd";
    match try_memfd() {
        Ok(()) => Finding::ok(NAME, "shared memory without a name, sealed against shrinking"),
        Err(error) => Finding::fail(
            NAME,
            format!("memfd_create with sealing: {error}"),
            "allow memfd_create in the sandbox (seccomp) profile; Linux 3.17 or newer is needed",
        ),
    }
}

fn try_memfd() -> io::Result<()> {
    let fd = memfd_create("tpurun-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, 4096)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    match ftruncate(&fd, 0) {
        Err(_) => Ok(()),
        Ok(()) => Err(io::Error::other("a sealed file could still be cut")),
    }
}

pub(super) fn proc_fd() -> Finding {
    const NAME: &str = "/proc/PID/fd";
    match read_through_proc() {
        Ok(()) => Finding::ok(NAME, "ranks can open one another's memory"),
        Err(error) => Finding::fail(
            NAME,
            format!("a process of the same user can not be opened: {error}"),
            "mount /proc without hidepid, and run all ranks as one user",
        ),
    }
}

/// Opens a nameless file of a child through `/proc`, as a rank opens the memory of another.
fn read_through_proc() -> io::Result<()> {
    let mut file = File::from(memfd_create("tpurun-doctor", MemfdFlags::CLOEXEC)?);
    file.write_all(b"shared")?;
    // It waits for its input to end, which it does when `child` is dropped.
    let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(file).spawn()?;
    let mut seen = String::new();
    let result =
        File::open(format!("/proc/{}/fd/1", child.id())).and_then(|mut f| f.read_to_string(&mut seen));
    drop(child.stdin.take());
    child.wait()?;
    match result {
        Ok(_) if seen == "shared" => Ok(()),
        Ok(_) => Err(io::Error::other("it has other contents there")),
        Err(error) => Err(error),
    }
}

pub(super) fn futex() -> Finding {
    const NAME: &str = "futex";
    const SLOW: Duration = Duration::from_micros(200);
    match futex_round_trip() {
        Ok(time) if time <= SLOW => {
            Finding::ok(NAME, format!("a waiting rank wakes and answers in {} us", time.as_micros()))
        }
        Ok(time) => Finding::warn(
            NAME,
            format!("a waiting rank takes {} us to wake and answer", time.as_micros()),
            "small collectives will be slow: look for other load, or a sandbox that traps system calls",
        ),
        Err(error) => Finding::fail(NAME, error.to_string(), "allow futex in the sandbox (seccomp) profile"),
    }
}

/// The median time for two threads to wake one another in turn.
fn futex_round_trip() -> io::Result<Duration> {
    let turn = AtomicU32::new(0);
    let mut times = thread::scope(|scope| {
        let partner = scope.spawn(|| {
            (0..FUTEX_ROUNDS).try_for_each(|round| await_turn(&turn, 2 * round + 1, 2 * round + 2))
        });
        let times: io::Result<Vec<Duration>> = (0..FUTEX_ROUNDS)
            .map(|round| {
                let start = Instant::now();
                pass_turn(&turn, 2 * round + 1)?;
                await_turn(&turn, 2 * round + 2, 2 * round + 2)?;
                Ok(start.elapsed())
            })
            .collect();
        partner.join().expect("the partner does not panic").and(times)
    })?;
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

/// Waits for the turn, then passes on the next one.
fn await_turn(turn: &AtomicU32, mine: u32, next: u32) -> io::Result<()> {
    let second = futex::Timespec { tv_sec: 1, tv_nsec: 0 };
    let mut now = turn.load(Ordering::Acquire);
    while now < mine {
        match futex::wait(turn, futex::Flags::PRIVATE, now, Some(&second)) {
            Ok(()) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        now = turn.load(Ordering::Acquire);
    }
    if next > mine { pass_turn(turn, next) } else { Ok(()) }
}

fn pass_turn(turn: &AtomicU32, next: u32) -> io::Result<()> {
    turn.store(next, Ordering::Release);
    futex::wake(turn, futex::Flags::PRIVATE, 1)?;
    Ok(())
}

pub(super) fn cgroup_kill() -> Finding {
    const NAME: &str = "cgroup";
    const INSTEAD: &str = "ranks are stopped through their process groups";
    let Some(folder) = Cgroups::of_this_process().v2_folder() else {
        return Finding::ok(NAME, format!("no v2 hierarchy; {INSTEAD}"));
    };
    match try_cgroup_kill(&folder) {
        Ok(()) => {
            Finding::ok(NAME, format!("a group in {} stops ranks and their children", folder.display()))
        }
        Err(error) => Finding::ok(NAME, format!("{} takes no group ({error}); {INSTEAD}", folder.display())),
    }
}

fn try_cgroup_kill(parent: &Path) -> io::Result<()> {
    let group = parent.join(format!("tpurun-doctor-{}", std::process::id()));
    fs::create_dir(&group)?;
    let result = access(group.join("cgroup.kill"), Access::WRITE_OK);
    fs::remove_dir(&group)?;
    Ok(result?)
}

pub(super) fn shared_memory_folder() -> Finding {
    const NAME: &str = "/dev/shm";
    match statvfs("/dev/shm") {
        Ok(stat) => Finding::ok(
            NAME,
            format!(
                "{}; its size does not matter, tpurun does not use it",
                human_bytes(stat.f_blocks * stat.f_frsize)
            ),
        ),
        Err(_) => Finding::ok(NAME, "not there, and not needed"),
    }
}

pub(super) fn huge_pages() -> Finding {
    const NAME: &str = "huge pages";
    let read = |file| fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{file}")).ok();
    let choice = |file| read(file).as_deref().and_then(parse_choice).map(str::to_owned);
    match (choice("enabled"), choice("shmem_enabled")) {
        (Some(private), Some(shared)) if matches!(shared.as_str(), "never" | "deny") => Finding::ok(
            NAME,
            format!("private {private}, shared {shared}; `advise` for shared memory helps large collectives"),
        ),
        (Some(private), Some(shared)) => Finding::ok(NAME, format!("private {private}, shared {shared}")),
        _ => Finding::ok(NAME, "this kernel has none"),
    }
}

/// The chosen word of `always [madvise] never`.
fn parse_choice(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(choice, _)| choice)
}

/// c10d's store asks for the name of every client; tpurun's own rendezvous never does.
pub(super) fn reverse_dns() -> Finding {
    const NAME: &str = "reverse DNS";
    let start = Instant::now();
    let slow = ["127.0.0.1", "::ffff:127.0.0.1"].into_iter().find(|address| {
        let lookup = probe::run(Command::new("getent").args(["hosts", address]), DNS_LIMIT);
        lookup.is_err_and(|error| error == ProbeError::TooSlow)
    });
    match slow {
        None => Finding::ok(NAME, format!("local addresses resolve in {} ms", start.elapsed().as_millis())),
        Some(address) => Finding::warn(
            NAME,
            format!("no answer for {address} within {} s", DNS_LIMIT.as_secs()),
            "scripts under other launchers stall at start: put `options timeout:1 attempts:1` into \
             /etc/resolv.conf, or name the address in /etc/hosts",
        ),
    }
}

pub(super) fn ports() -> Finding {
    const NAME: &str = "ports";
    if let Err(error) = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)) {
        let advice = "bring the loopback interface up (ip link set lo up), or allow binding in the sandbox";
        return Finding::fail(NAME, format!("no port of 127.0.0.1 can be bound: {error}"), advice);
    }
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    match parse_port_range(&range) {
        Some(count) if count < FEW_PORTS => Finding::warn(
            NAME,
            format!("a free one is found, but there are only {count}"),
            "widen net.ipv4.ip_local_port_range",
        ),
        Some(count) => Finding::ok(NAME, format!("a free one of {count} is chosen for every run")),
        None => Finding::ok(NAME, "a free one is chosen for every run"),
    }
}

fn parse_port_range(text: &str) -> Option<u32> {
    let mut bounds = text.split_whitespace().map(str::parse::<u32>);
    let (first, last) = (bounds.next()?.ok()?, bounds.next()?.ok()?);
    Some((last + 1).saturating_sub(first))
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn this_kernel_has_what_is_needed() {
        for finding in [memfd(), proc_fd(), futex()] {
            assert_ne!(finding.level, Level::Fail, "{finding:?}");
        }
    }

    #[test]
    fn the_chosen_word_is_in_brackets() {
        assert_eq!(parse_choice("always [madvise] never\n"), Some("madvise"));
        assert_eq!(parse_choice(""), None);
    }

    #[test]
    fn port_ranges_include_both_ends() {
        assert_eq!(parse_port_range("32768\t60999\n"), Some(28232));
        assert_eq!(parse_port_range("1"), None);
    }
}
