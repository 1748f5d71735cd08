//! Several tasks of a scheduler on one node, each of which started a tpurun: the first one leads and runs the ranks of
//! all, the others wait for its end and return its exit code.
//!
//! They meet at an abstract socket that is named after the job. Anybody on the host can find it, or take its name, so
//! each end looks at whose process is at the other one. A task that follows brings the CPUs it was given, which the
//! ranks may then use.

use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use rustix::process::{Uid, getuid};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::place::cluster::Cluster;

/// The others, who wait.
#[derive(Debug)]
pub(crate) struct Followers(Vec<UnixStream>);

/// Waits until all other tasks of this node are there, and takes over their CPUs.
///
/// # Errors
/// One line: how many did not come.
pub(crate) fn lead(cluster: &Cluster) -> Result<Followers, String> {
    let mut followers = vec![];
    let expected = cluster.tasks as usize - 1;
    if expected == 0 {
        return Ok(Followers(followers));
    }
    let failed = |error: io::Error| format!("cannot meet the other tasks of this node: {error}");
    let address = address(cluster).map_err(failed)?;
    let listener = UnixListener::bind_addr(&address).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => {
            failed(io::Error::other(format!("their socket is taken{}", by_whom(&address))))
        }
        _ => failed(error),
    })?;
    listener.set_nonblocking(true).map_err(failed)?;
    let mut cpus = sched_getaffinity(None).map_err(|errno| failed(errno.into()))?;
    let deadline = Instant::now() + PATIENCE;
    while followers.len() < expected {
        let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now())).ok();
        let ready = poll(&mut [PollFd::new(&listener, PollFlags::IN)], left.as_ref());
        // Strangers who keep coming hold nobody up.
        if ready == Ok(0) || Instant::now() >= deadline {
            let (came, seconds) = (followers.len(), PATIENCE.as_secs());
            return Err(format!(
                "expected {expected} more tasks of {} on this node, {came} came within {seconds} s",
                cluster.scheduler
            ));
        }
        match listener.accept() {
            Ok((stream, _)) => followers.extend(welcome(stream, &mut cpus)),
            // A signal, or one that has gone again.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(failed(error)),
        }
    }
    // Where that is not allowed, the ranks share what this task has.
    let _ = sched_setaffinity(None, &cpus);
    Ok(Followers(followers))
}

/// One that is of this user and says which CPUs it has.
fn welcome(mut stream: UnixStream, cpus: &mut CpuSet) -> Option<UnixStream> {
    check_peer(&stream, getuid()).ok()?;
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let mut mask = [0; MASK_BYTES];
    stream.read_exact(&mut mask).ok()?;
    let has = |cpu: &usize| mask[cpu / 8] >> (cpu % 8) & 1 == 1;
    (0..8 * MASK_BYTES).filter(has).for_each(|cpu| cpus.set(cpu));
    Some(stream)
}

impl Followers {
    /// Tells all how the job has ended.
    pub(crate) fn dismiss(self, code: i32) {
        for mut stream in self.0 {
            let _ = stream.write_all(&[code as u8]);
        }
    }
}

/// Waits for the end of the task that leads, and returns its exit code.
///
/// # Errors
/// One line: that it did not come, or did not say how it ended.
pub(crate) fn follow(cluster: &Cluster) -> Result<i32, String> {
    let failed = |error: io::Error| format!("cannot meet the first task of this node: {error}");
    let address = address(cluster).map_err(failed)?;
    let deadline = Instant::now() + PATIENCE;
    let mut stream = loop {
        match connect(&address) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() >= deadline => return Err(failed(error)),
            Err(_) => std::thread::sleep(AGAIN),
        }
    };
    // A stranger's word about the end of the job counts for nothing.
    check_peer(&stream, getuid()).map_err(failed)?;
    let mine = sched_getaffinity(None).map_err(|errno| failed(errno.into()))?;
    let mut mask = [0; MASK_BYTES];
    (0..8 * MASK_BYTES).filter(|cpu| mine.is_set(*cpu)).for_each(|cpu| mask[cpu / 8] |= 1 << (cpu % 8));
    stream.write_all(&mask).map_err(failed)?;
    let mut code = [0];
    stream.read_exact(&mut code).map_err(|_| "the first task of this node ended without a word")?;
    Ok(code[0].into())
}

/// # Errors
/// That the process at the other end is not one of this user.
fn check_peer(stream: &UnixStream, own: Uid) -> io::Result<()> {
    let who = socket_peercred(stream)?;
    if who.uid == own {
        return Ok(());
    }
    let (own, uid, pid) = (own.as_raw(), who.uid.as_raw(), who.pid.as_raw_nonzero());
    let text =
        format!("expected a process of this user (uid {own}) at their socket, given pid {pid} of uid {uid}");
    Err(io::Error::other(format!("{text} (end it)")))
}

/// ` by pid 77 of uid 1000`, as far as that is known.
fn by_whom(address: &SocketAddr) -> String {
    let who = connect(address).ok().and_then(|stream| socket_peercred(stream).ok());
    who.map_or_else(String::new, |who| {
        format!(" by pid {} of uid {}", who.pid.as_raw_nonzero(), who.uid.as_raw())
    })
}

/// Where nobody takes the connection up, this fails at once instead of waiting.
fn connect(address: &SocketAddr) -> io::Result<UnixStream> {
    let name = address.as_abstract_name().unwrap_or_default();
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

fn address(cluster: &Cluster) -> io::Result<SocketAddr> {
    let uid = getuid().as_raw();
    SocketAddr::from_abstract_name(format!("tpurun/{uid}/{}/{}", cluster.job, cluster.node))
}

/// Schedulers start the tasks of a node within moments of each other.
const PATIENCE: Duration = Duration::from_secs(60);
const AGAIN: Duration = Duration::from_millis(10);
/// As many CPUs as a set has.
const MASK_BYTES: usize = CpuSet::MAX_CPU / 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn tasks() -> Cluster {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Cluster {
            scheduler: "Slurm",
            variable: Some("SLURM_STEP_NUM_NODES"),
            nodes: 1,
            node: 0,
            rendezvous: "n0:1".into(),
            tasks: 2,
            task: 0,
            ranks: None,
            job: format!("test-{}-{count}", std::process::id()),
            token_file: None,
            is_one_terminal: true,
        }
    }

    #[test]
    fn tasks_of_one_user_meet() {
        let cluster = tasks();
        let other = cluster.clone();
        let follower = std::thread::spawn(move || follow(&other));
        lead(&cluster).unwrap().dismiss(7);
        assert_eq!(follower.join().unwrap(), Ok(7));
    }

    #[test]
    fn a_process_of_another_user_is_refused() {
        let (one, _other) = UnixStream::pair().unwrap();
        check_peer(&one, getuid()).unwrap();
        let stranger = Uid::from_raw(getuid().as_raw() + 1);
        let refused = check_peer(&one, stranger).unwrap_err().to_string();
        let (own, pid) = (getuid().as_raw(), std::process::id());
        let text =
            format!("expected a process of this user (uid {}) at their socket, given pid {pid}", own + 1);
        assert_eq!(refused, format!("{text} of uid {own} (end it)"));
    }

    #[test]
    fn who_has_taken_the_socket_is_named() {
        let cluster = tasks();
        let _squatter = UnixListener::bind_addr(&address(&cluster).unwrap()).unwrap();
        let refused = lead(&cluster).unwrap_err();
        let by = format!("by pid {} of uid {}", std::process::id(), getuid().as_raw());
        assert_eq!(refused, format!("cannot meet the other tasks of this node: their socket is taken {by}"));
    }
}
