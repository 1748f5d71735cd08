//! The two ways the ranks of a host find their segment: the launcher's control plane, or the store that
//! torch.distributed has anyway. Others may be able to write the store, so what is found through it must be memory of
//! this user, and begin with a nonce that only those know who have made it, or have read its job's store.

use std::cell::OnceCell;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::{IpAddr, Ipv4Addr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::hosts::network::{Addresses, Crossing, Network};
use crate::join::{Bootstrap, as_others_learn_it, interrupted, is_its_own};
use tpurun_memory::descriptor::{FileKind, open_of_process};
use tpurun_memory::failure::{Failure, FailureKind, INTERRUPTED};
use tpurun_memory::invalid_usage;
use tpurun_memory::text::{hex, unhex};
use tpurun_protocol::control::{ControlClient, ControlError};
use tpurun_protocol::hosts::{self, Hosts};
use tpurun_protocol::membership::Membership;
use tpurun_protocol::segment::bell::Ears;
use tpurun_protocol::segment::{Nonce, Segment, Settings, nonce_of};

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

/// Meets through the store: the ranks say where they are, and the first one of each host under which descriptor of
/// which process its segment is found.
#[derive(Debug)]
pub struct StoreBootstrap<'n, S> {
    store: S,
    rank: u32,
    /// The number of this time that the group is made.
    times: i64,
    network: &'n Network,
    /// The name of this host, and the text that all ranks which share its memory say alike.
    place: (String, String),
    hosts: OnceCell<Hosts>,
    /// The way to the agent, which watches over the group and knows what this process shows to other hosts.
    agent: Option<ControlBootstrap<'n>>,
}

impl<'n, S: Store> StoreBootstrap<'n, S> {
    /// # Errors
    /// That the store did not answer.
    pub fn new(store: S, rank: u32, network: &'n Network) -> Result<Self, Failure> {
        // A group that is destroyed and made again finds its old keys in the store: the n-th time that a
        // rank comes, it asks for the n-th segment.
        let times = store.add(&format!("tpurun/times/{rank}"), 1)?;
        let place = (hosts::shown_name(), machine());
        Ok(Self { store, rank, times, network, place, hosts: OnceCell::new(), agent: None })
    }

    /// Under a launcher.
    pub(crate) fn under(self, agent: &'n ControlClient, members: &Membership) -> Self {
        Self { agent: Some(ControlBootstrap::watched(agent, members)), ..self }
    }

    /// As if this were another host, of that name.
    pub fn on_host(mut self, name: &str) -> Self {
        self.place = (name.to_owned(), format!("{}/{name}", self.place.1));
        self
    }

    fn key(&self, what: &str, number: u32) -> String {
        format!("tpurun/{what}/{}/{number}", self.times)
    }

    fn host(&self) -> u32 {
        self.hosts.get().map_or(0, |hosts| hosts.of(self.rank))
    }
}

impl<S: Store> Bootstrap for StoreBootstrap<'_, S> {
    fn survey(&self, members: &Membership, settings: Settings) -> Result<(Hosts, Settings), Failure> {
        let (name, machine) = &self.place;
        let (own, survey) = (format!("{name}\n{machine}"), self.key("survey", 0));
        let wrong = |text: &str| {
            let text = format!("the store's entry for the hosts of {} is {text:?}", members.title());
            Failure::new(FailureKind::Transport, text)
        };
        // A rank that waits for this longer than the store allows learns whom it waits for.
        let late = |who: &str, failure: Failure| {
            let text = format!("{who} did not come to create {}: {}", members.title(), failure.text());
            Failure::new(FailureKind::Timeout, text)
        };
        if self.rank > 0 {
            self.store.set(&self.key("place", self.rank), &own)?;
            let text =
                self.store.get(&survey).map_err(|failure| late("rank 0, or who it waits for,", failure))?;
            given_up(&text).map_or(Ok(()), Err)?;
            let (first, rest) = text.split_once('\n').ok_or_else(|| wrong(&text))?;
            let settings = Settings::parse(first).ok_or_else(|| wrong(&text))?;
            let hosts = Hosts::parse(rest, members.size()).ok_or_else(|| wrong(&text))?;
            return Ok((self.hosts.get_or_init(|| hosts).clone(), settings));
        }
        let others = (1..members.size()).map(|rank| {
            let found = self.store.get(&self.key("place", rank));
            found.map_err(|failure| {
                let world_rank = members.world_ranks[rank as usize];
                late(&format!("rank {world_rank}"), failure).blaming([world_rank])
            })
        });
        let places = std::iter::once(Ok(own)).chain(others).map(|text| {
            let text = text?;
            given_up(&text).map_or(Ok(()), Err)?;
            let (name, machine) = text.split_once('\n').ok_or_else(|| wrong(&text))?;
            Ok((name.to_owned(), machine.to_owned()))
        });
        let hosts = Hosts::by_places(&places.collect::<Result<Vec<_>, Failure>>()?);
        let settings = Settings { window_bytes: settings.window_bytes_for(hosts.count()), ..settings };
        self.store.set(&survey, &format!("{settings}\n{hosts}"))?;
        Ok((self.hosts.get_or_init(|| hosts).clone(), settings))
    }

    fn offer(&self, segment: BorrowedFd<'_>) -> Result<(), Failure> {
        if let Some(agent) = &self.agent {
            agent.offer(segment)?;
        }
        let place = SegmentAddress::of(segment)?;
        self.store.set(&self.key("segment", self.host()), &place.to_string())
    }

    fn fetch(&self, _deadline: Instant) -> Result<OwnedFd, Failure> {
        let find = || {
            let value = self.store.get(&self.key("segment", self.host()))?;
            given_up(&value).map_or_else(|| value.parse::<SegmentAddress>(), Err)
        };
        // A process that has given up since, and closed the segment, has said so before.
        find()?.open(self.rank).or_else(|refused| find().and(Err(refused)))
    }

    fn connect(&self, segment: &Arc<Segment>, ears: Ears) -> Result<Crossing, Failure> {
        let (hosts, me) = (segment.hosts(), segment.host());
        let rank = |host: u32| segment.members().world_ranks[hosts.first(host) as usize];
        let network = self.network.open(own_address()?, rank(me), || {
            let agent = self.agent.as_ref();
            let given = agent.map(|agent| agent.client.identify(Instant::now() + AGENT_GRACE));
            given.transpose().map_err(|error| refused(&error))
        })?;
        self.store.set(&self.key("address", me), &network.addresses().to_string())?;
        let addresses = (0..hosts.count()).map(|host| {
            let text = self.store.get(&self.key("address", host))?;
            given_up(&text).map_or(Ok(()), Err)?;
            Addresses::parse(&text, rank(host)).ok_or_else(|| {
                let text = format!("the store's entry for host {} is {text:?}", hosts.name(host));
                Failure::new(FailureKind::Transport, text)
            })
        });
        let addresses = addresses.collect::<Result<Vec<_>, _>>()?;
        let mut hasher = DefaultHasher::new();
        (segment.members().id(), self.times).hash(&mut hasher);
        Ok(network.cross(segment, ears, hasher.finish(), &addresses))
    }

    fn give_up(&self, members: &Membership, failure: &Failure) {
        if let Some(agent) = &self.agent {
            agent.give_up(members, failure);
        }
        match self.hosts.get() {
            None => self.end_survey(members, failure),
            Some(_) => self.pass_on(&as_others_learn_it(members, failure)),
        }
    }

    fn pass_on(&self, failure: &Failure) {
        let is_first = self.hosts.get().is_some_and(|hosts| hosts.first(self.host()) == self.rank);
        for what in is_first.then_some(["segment", "address"]).into_iter().flatten() {
            // Where the store does not answer, the others learn as little as without this.
            let _ = self.store.set(&self.key(what, self.host()), &instead_of_a_place(failure));
        }
    }

    fn grace(&self) -> Duration {
        if self.agent.is_some() { AGENT_GRACE } else { Duration::ZERO }
    }
}

impl<S: Store> StoreBootstrap<'_, S> {
    /// Tells the others that the survey has failed. Rank 0 tells those who wait for it. Another rank tells rank 0, which
    /// waits for any of the places, and learns of a failure from others by itself.
    fn end_survey(&self, members: &Membership, failure: &Failure) {
        let value = instead_of_a_place(&as_others_learn_it(members, failure));
        let keys: Vec<String> = match self.rank {
            0 => vec![self.key("survey", 0)],
            _ if is_its_own(failure) => (1..members.size()).map(|rank| self.key("place", rank)).collect(),
            _ => Vec::new(),
        };
        for key in keys {
            // Where the store does not answer, the others learn as little as without this.
            let _ = self.store.set(&key, &value);
        }
    }
}

/// Begins what the store holds of a rank that has given up; no place does.
const GIVEN_UP: &str = "given up ";

/// Its kind, the ranks to blame, and its text.
fn instead_of_a_place(failure: &Failure) -> String {
    let ranks: Vec<String> = failure.ranks().iter().map(u32::to_string).collect();
    format!("{GIVEN_UP}{} {} {}", failure.kind() as u32, ranks.join(","), failure.text())
}

/// Why the rank that has written this has given up, if it has.
fn given_up(value: &str) -> Option<Failure> {
    let mut words = value.strip_prefix(GIVEN_UP)?.splitn(3, ' ');
    let (kind, ranks, text) = (words.next()?, words.next()?, words.next()?);
    let kind = kind.parse().map_or(FailureKind::Aborted, FailureKind::from_code);
    let ranks: Vec<u32> = ranks.split(',').filter_map(|rank| rank.parse().ok()).collect();
    Some(Failure::new(kind, text).blaming(ranks))
}

/// Whether the launcher says that the ranks of this job are on several hosts, if there is one.
pub(crate) fn is_of_several_hosts() -> bool {
    std::env::var_os(hosts::HOST).is_some()
}

/// The address under which other hosts reach this one: the one that is said, or that of the way to the rank that
/// holds the store, or of the way out.
fn own_address() -> Result<IpAddr, Failure> {
    let given = std::env::var(ADDRESS).ok().filter(|address| !address.is_empty());
    if let Some(given) = given {
        return given
            .parse()
            .map_err(|_| invalid_usage!("{ADDRESS}: expected an IP address of this host, given {given:?}"));
    }
    // A name is looked up as torch does to reach the store.
    let master = std::env::var("MASTER_ADDR").ok().and_then(|name| (name, 0).to_socket_addrs().ok()?.next());
    let is_pretended = std::env::var_os(hosts::HOST).is_some();
    let ways = [master.map(|master| master.ip()), (!is_pretended).then_some(FAR_AWAY)];
    let reached: Vec<IpAddr> =
        ways.into_iter().flatten().filter_map(|to| hosts::address_towards(to).ok()).collect();
    let first = reached.iter().find(|address| !address.is_loopback()).or(reached.first());
    Ok(first.copied().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)))
}

/// An address of a network for documentation (RFC 5737): whatever the way out is, it leads there.
const FAR_AWAY: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
/// The IP address under which other hosts reach this one.
const ADDRESS: &str = "TPURUN_ADDRESS";

/// Where the descriptor of a segment is: on which machine, in which process; and what the segment must begin with.
#[derive(Clone, PartialEq, Eq, Debug)]
struct SegmentAddress {
    machine: String,
    pid: u32,
    fd: i32,
    nonce: Nonce,
}

impl SegmentAddress {
    /// A segment of this process.
    fn of(segment: BorrowedFd<'_>) -> Result<Self, Failure> {
        let nonce = nonce_of(segment).map_err(|error| unreadable(&error))?;
        Ok(Self { machine: machine(), pid: std::process::id(), fd: segment.as_raw_fd(), nonce })
    }

    fn open(&self, rank: u32) -> Result<OwnedFd, Failure> {
        let here = machine();
        if self.machine != here {
            let text = format!(
                "rank {rank} of the group was told of a segment on another host (or in another pid namespace): here \
                 {here}, there {}",
                self.machine
            );
            return Err(Failure::new(FailureKind::Transport, text));
        }
        let fd = u32::try_from(self.fd).unwrap_or(u32::MAX);
        let segment = open_of_process("the shared segment of rank 0", FileKind::Memory, self.pid, fd)?;
        if nonce_of(segment.as_fd()).map_err(|error| unreadable(&error))? != self.nonce {
            let (pid, why) =
                (self.pid, "somebody else has written the store, or the process has made another");
            let text = format!(
                "rank {rank} of the group was told of memory of process {pid} that is not its segment: {why}"
            );
            return Err(Failure::new(FailureKind::Transport, text));
        }
        Ok(segment)
    }
}

fn unreadable(error: &io::Error) -> Failure {
    Failure::new(FailureKind::Transport, format!("cannot read the shared segment: {error}"))
}

impl std::fmt::Display for SegmentAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {} ", self.machine, self.pid, self.fd)?;
        hex(&self.nonce, f)
    }
}

impl std::str::FromStr for SegmentAddress {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        let mut words = text.split(' ');
        let place = (|| {
            let place = Self {
                machine: words.next()?.to_owned(),
                pid: words.next()?.parse().ok()?,
                fd: words.next()?.parse().ok()?,
                nonce: unhex(words.next()?)?.try_into().ok()?,
            };
            words.next().is_none().then_some(place)
        })();
        place.ok_or_else(|| {
            let text = format!(
                "the store's entry for a segment is {text:?}, expected machine, pid, descriptor and nonce"
            );
            Failure::new(FailureKind::Transport, text)
        })
    }
}

/// Processes with the same value see each other's /proc.
fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let namespace = namespace.to_string_lossy().replace(' ', "");
    let name = hosts::own_name().replace(' ', "");
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let network = network.to_string_lossy().replace(' ', "");
    let pretended = std::env::var(hosts::HOST).unwrap_or_default().replace(' ', "");
    format!("{name}/{}/{namespace}/{network}/{pretended}", boot.trim())
}

/// Meets through the launcher, which passes the descriptor on.
#[derive(Debug)]
pub struct ControlBootstrap<'a> {
    client: &'a ControlClient,
    key: String,
    readers: u32,
    /// The rank of the world that makes the segment.
    maker: u32,
    /// The name of the communicator in messages.
    title: String,
}

impl<'a> ControlBootstrap<'a> {
    /// For one communicator of a job's ranks.
    pub fn new(client: &'a ControlClient, members: &Membership) -> Self {
        let key = format!("{}/{:016x}", members.name, members.id());
        let (readers, maker) = (members.size() - 1, members.world_ranks[0]);
        Self { client, key, readers, maker, title: members.title() }
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
        let Self { title, maker, .. } = self;
        self.client.fetch(&self.key, *maker, deadline).map_err(|error| match error {
            ControlError::Timeout { .. } => {
                let text = format!("Timed out creating {title}: rank {maker} did not come");
                Failure::new(FailureKind::Timeout, text).blaming([*maker])
            }
            ControlError::Refused { reason, .. } => {
                Failure::new(FailureKind::Transport, format!("cannot join {title}: {reason}"))
            }
            ControlError::Interrupted => interrupted(title),
            error => refused(&error),
        })
    }

    fn give_up(&self, members: &Membership, failure: &Failure) {
        if !is_its_own(failure) {
            return;
        }
        let readers = if members.rank == 0 { self.readers } else { 0 };
        // A launcher that is gone ends the job anyway.
        let _ = self.client.give_up(&self.key, readers, as_others_learn_it(members, failure).text());
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
        ControlError::Interrupted => Failure::new(FailureKind::Aborted, INTERRUPTED),
        error => Failure::new(FailureKind::Transport, format!("the launcher's control plane: {error}")),
    }
}

/// Checks that any value of the store is a place or is none.
#[cfg(any(test, fuzzing))]
pub(crate) fn survives(value: &str) {
    if let Ok(place) = value.parse::<SegmentAddress>() {
        assert_eq!(place.to_string().parse(), Ok(place));
    }
    if let Some(failure) = given_up(value) {
        assert_eq!(given_up(&instead_of_a_place(&failure)), Some(failure));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tpurun_memory::region::Region;

    #[test]
    fn a_place_survives_the_store() {
        let (region, memory) = Region::create("tpurun-test", 4096).expect("memfds work here");
        region.write(48, b"sixteen bytes ..");
        let place = SegmentAddress::of(memory.as_fd()).expect("memory of this process");
        assert_eq!(place.to_string().parse::<SegmentAddress>(), Ok(place.clone()));
        place.open(3).expect("it is there");
        // As if the store said so: of this user, of this size, and another segment.
        let (_other, memory) = Region::create("tpurun-test", 4096).expect("memfds work here");
        let error = SegmentAddress { fd: memory.as_raw_fd(), ..place.clone() }
            .open(3)
            .expect_err("another one")
            .to_string();
        assert!(error.contains("that is not its segment"), "{error}");
        assert!("nonsense".parse::<SegmentAddress>().is_err());
        let elsewhere = SegmentAddress { machine: "other".to_owned(), ..place };
        let error = elsewhere.open(3).expect_err("another machine").to_string();
        assert!(error.starts_with("rank 3 of the group was told of a segment on another host"), "{error}");
    }

    #[test]
    fn who_has_given_up_is_no_place() {
        for ranks in [vec![], vec![3], vec![0, 12]] {
            let failure = Failure::new(FailureKind::Aborted, "no room  for\nit").blaming(ranks);
            let value = instead_of_a_place(&failure);
            assert_eq!(given_up(&value), Some(failure));
            assert!(value.parse::<SegmentAddress>().is_err());
        }
        let (_region, memory) = Region::create("tpurun-test", 4096).expect("memfds work here");
        let place = SegmentAddress::of(memory.as_fd()).expect("memory of this process");
        assert_eq!(given_up(&place.to_string()), None);
    }
}
