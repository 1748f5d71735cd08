//! Several tasks of a scheduler on one node, each of which started a tpurun: the first one leads and runs the ranks of
//! all, the others wait for its end and return its exit code.
//!
//! They meet at an abstract socket that is named after the job. Who follows brings the CPUs it was given, which the
//! ranks may then use.

use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::getuid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::cluster::Cluster;

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
    let listener = UnixListener::bind_addr(&address(cluster).map_err(failed)?).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let mut cpus = sched_getaffinity(None).map_err(|errno| failed(errno.into()))?;
    let deadline = Instant::now() + PATIENCE;
    while followers.len() < expected {
        let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now())).ok();
        let ready = poll(&mut [PollFd::new(&listener, PollFlags::IN)], left.as_ref());
        if ready == Ok(0) {
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
    // Anybody on the host can find the socket.
    let who = rustix::net::sockopt::socket_peercred(&stream).ok()?;
    if who.uid != getuid() {
        return None;
    }
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
        match UnixStream::connect_addr(&address) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() >= deadline => return Err(failed(error)),
            Err(_) => std::thread::sleep(AGAIN),
        }
    };
    let mine = sched_getaffinity(None).map_err(|errno| failed(errno.into()))?;
    let mut mask = [0; MASK_BYTES];
    (0..8 * MASK_BYTES).filter(|cpu| mine.is_set(*cpu)).for_each(|cpu| mask[cpu / 8] |= 1 << (cpu % 8));
    stream.write_all(&mask).map_err(failed)?;
    let mut code = [0];
    stream.read_exact(&mut code).map_err(|_| "the first task of this node ended without a word")?;
    Ok(code[0].into())
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
