//! The two ways the ranks of a host find their segment: the launcher's control plane, or the store that
//! torch.distributed has anyway.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};

use crate::control::{ControlClient, ControlError};
use crate::failure::{Failure, FailureKind};
use crate::segment::{Bootstrap, Membership};

/// The key-value store of a process group. Values are small; `get` waits for the key.
pub trait Store {
    /// Sets a key.
    ///
    /// # Errors
    /// That the store did not answer.
    fn set(&self, key: &str, value: &str) -> Result<(), Failure>;
    /// Waits for a key, as long as the store's own timeout.
    ///
    /// # Errors
    /// As above.
    fn get(&self, key: &str) -> Result<String, Failure>;
    /// Adds to a counter and returns the sum.
    ///
    /// # Errors
    /// As above.
    fn add(&self, key: &str, delta: i64) -> Result<i64, Failure>;
}

/// Meets through the store: rank 0 says under which descriptor of which process the segment is found.
#[derive(Debug)]
pub struct StoreBootstrap<S> {
    store: S,
    rank: u32,
    key: String,
}

impl<S: Store> StoreBootstrap<S> {
    /// # Errors
    /// That the store did not answer.
    pub fn new(store: S, rank: u32) -> Result<Self, Failure> {
        // A group that is destroyed and made again finds its old keys in the store: the n-th time that a
        // rank comes, it asks for the n-th segment.
        let times = store.add(&format!("tpurun/times/{rank}"), 1)?;
        Ok(Self { store, rank, key: format!("tpurun/segment/{times}") })
    }
}

impl<S: Store> Bootstrap for StoreBootstrap<S> {
    fn offer(&self, segment: BorrowedFd<'_>) -> Result<(), Failure> {
        let place = Place::here(segment.as_raw_fd());
        self.store.set(&self.key, &place.to_string())
    }

    fn fetch(&self, _deadline: Instant) -> Result<OwnedFd, Failure> {
        let value = self.store.get(&self.key)?;
        let place = value.parse::<Place>()?;
        place.open(self.rank)
    }
}

/// Where a descriptor is: on which machine, in which process.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Place {
    machine: String,
    pid: u32,
    fd: i32,
}

impl Place {
    fn here(fd: i32) -> Self {
        Self { machine: machine(), pid: std::process::id(), fd }
    }

    fn open(&self, rank: u32) -> Result<OwnedFd, Failure> {
        let here = machine();
        if self.machine != here {
            let text = format!(
                "rank {rank} of the group runs on another host (or in another pid namespace) than its rank 0: \
                 this version connects the ranks of one host only (here {here}, there {})",
                self.machine
            );
            return Err(Failure::new(FailureKind::Transport, text));
        }
        open_of_process("the shared segment of rank 0", self.pid, u32::try_from(self.fd).unwrap_or(u32::MAX))
    }
}

/// Opens what another process has open: `what` it says it is.
pub(crate) fn open_of_process(what: &str, pid: u32, fd: u32) -> Result<OwnedFd, Failure> {
    let path = format!("/proc/{pid}/fd/{fd}");
    // Whatever it is: opening must not wait for anybody, nor give us a terminal.
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    rustix::fs::open(&path, flags, Mode::empty()).map_err(|error| {
        let text = format!("cannot open {what} at {path}: {error}");
        // A process that is gone takes its descriptors along: the group has lost a rank.
        let kind =
            if error == rustix::io::Errno::NOENT { FailureKind::RankLost } else { FailureKind::Transport };
        Failure::new(kind, text)
    })
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {}", self.machine, self.pid, self.fd)
    }
}

impl std::str::FromStr for Place {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        let mut words = text.split(' ');
        let place = (|| {
            let place = Self {
                machine: words.next()?.to_owned(),
                pid: words.next()?.parse().ok()?,
                fd: words.next()?.parse().ok()?,
            };
            words.next().is_none().then_some(place)
        })();
        place.ok_or_else(|| {
            let text =
                format!("the store's entry for a segment is {text:?}, expected machine, pid and descriptor");
            Failure::new(FailureKind::Transport, text)
        })
    }
}

/// Processes with the same value see each other's /proc.
fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let namespace = namespace.to_string_lossy().replace(' ', "");
    let name = rustix::system::uname().nodename().to_string_lossy().replace(' ', "");
    format!("{name}/{}/{namespace}", boot.trim())
}

/// Meets through the launcher, which passes the descriptor on.
#[derive(Debug)]
pub struct ControlBootstrap<'a> {
    client: &'a ControlClient,
    key: String,
    readers: u32,
    /// The rank of the world that makes the segment.
    maker: u32,
}

impl<'a> ControlBootstrap<'a> {
    /// For one communicator of a job's ranks.
    pub fn new(client: &'a ControlClient, members: &Membership) -> Self {
        let key = format!("{}/{:016x}", members.name, members.id());
        Self { client, key, readers: members.size() - 1, maker: members.world_ranks[0] }
    }

    /// For one whose ranks meet otherwise: the launcher only watches over it.
    pub(crate) fn watched(client: &'a ControlClient, members: &Membership) -> Self {
        Self { readers: 0, ..Self::new(client, members) }
    }
}

impl Bootstrap for ControlBootstrap<'_> {
    fn offer(&self, segment: BorrowedFd<'_>) -> Result<(), Failure> {
        self.client.offer(&self.key, self.readers, segment).map_err(|error| refused(&error))
    }

    fn fetch(&self, deadline: Instant) -> Result<OwnedFd, Failure> {
        self.client.fetch(&self.key, self.maker, deadline).map_err(|error| refused(&error))
    }

    fn grace(&self) -> Duration {
        AGENT_GRACE
    }
}

/// The agent tells all ranks within milliseconds; after this long, something is wrong with it.
const AGENT_GRACE: Duration = Duration::from_secs(3);

fn refused(error: &ControlError) -> Failure {
    match error {
        ControlError::Failed(failure) => failure.clone(),
        error => Failure::new(FailureKind::Transport, format!("the launcher's control plane: {error}")),
    }
}

/// Whatever the store says, it is a place or it is not.
#[cfg(any(test, fuzzing))]
pub(crate) fn survives(value: &str) {
    if let Ok(place) = value.parse::<Place>() {
        assert_eq!(place.to_string().parse(), Ok(place));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_survives_the_store() {
        let place = Place::here(7);
        assert_eq!(place.to_string().parse::<Place>(), Ok(place.clone()));
        assert!("nonsense".parse::<Place>().is_err());
        let elsewhere = Place { machine: "other".to_owned(), ..place };
        let error = elsewhere.open(3).expect_err("another machine").to_string();
        assert!(error.starts_with("rank 3 of the group runs on another host"), "{error}");
    }
}
