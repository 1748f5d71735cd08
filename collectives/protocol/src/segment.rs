//! The shared segment of one communicator on one host: how its ranks meet, and how they fail together.

pub mod bell;
mod failure_word;
mod header;
mod loans;
mod note;
pub mod remote;
mod rings;
mod roll;
mod roster;
mod settings;
mod words;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tpurun_memory::failure::{Failure, FailureKind};
use tpurun_memory::region::Region;
use tpurun_memory::sync::{AtomicU32, Doorbell, Meeting, Ordering};

use crate::config::{Matching, Results};
use crate::hosts::Hosts;
use crate::layout::{LINE, Layout, MAGIC, VERSION};
use crate::membership::Membership;

use bell::{Bell, Ears};
pub use failure_word::{FailureWord, Verdict};
use header::Header;
pub use header::{Nonce, nonce_of};
pub use loans::Loans;
pub use remote::Remote;
pub use rings::Rings;
pub use roster::Roster;
use settings::MOST_WINDOW;
pub use settings::Settings;
use words::*;

/// One rank's view of the segment.
#[derive(Debug)]
pub struct Segment {
    region: Region,
    layout: Layout,
    members: Membership,
    hosts: Hosts,
    /// Rung for the bridge to other hosts, where there are any.
    bell: Option<Bell>,
    /// The time for which it is left to somebody else to say that a rank is gone.
    grace: Duration,
    /// When this rank first saw that another one was gone.
    seen_gone: OnceLock<Instant>,
    /// When it first saw that the communicator had failed.
    seen_failed: OnceLock<Instant>,
}

impl Segment {
    fn new(region: Region, layout: Layout, members: Membership) -> Self {
        let hosts = Hosts::one(members.size());
        let (grace, seen_gone, seen_failed) = (Duration::ZERO, OnceLock::new(), OnceLock::new());
        Self { region, layout, members, hosts, bell: None, grace, seen_gone, seen_failed }
    }

    /// Makes the segment of a communicator whose ranks are on `hosts`; its descriptor, too.
    pub fn create(
        members: Membership,
        hosts: Hosts,
        settings: Settings,
        grace: Duration,
    ) -> Result<(Self, OwnedFd), Failure> {
        let layout = Layout::new(members.size(), hosts.count(), settings.window_bytes);
        let (region, fd) = Region::create("tpurun-communicator", layout.total())
            .map_err(|error| refused(&members, "create", layout.total(), &error))?;
        let segment = Self::new(region, layout, members).on(hosts, grace);
        header::write_header(&segment, settings);
        header::write_nonce(&segment)?;
        Ok((segment, fd))
    }

    /// The same segment, of ranks on these hosts. It is left to somebody else for `grace` to say that a rank is gone.
    pub fn on(self, hosts: Hosts, grace: Duration) -> Self {
        Self { hosts, grace, ..self }
    }

    /// Makes the bell of this host, of which all its ranks learn from the segment.
    pub fn make_bell(&mut self) -> Result<Ears, Failure> {
        let (bell, ears) = Bell::new()?;
        let word = |at: usize| self.region.at::<AtomicU32>(at);
        word(H_BELL_PID).store(std::process::id(), Ordering::Relaxed);
        word(H_BELL).store(bell.descriptor(), Ordering::Relaxed);
        self.bell = Some(bell);
        Ok(ears)
    }

    /// Opens the bell that the first rank of this host has made.
    pub fn open_bell(&mut self) -> Result<(), Failure> {
        let word = |at: usize| self.region.at::<AtomicU32>(at).load(Ordering::Relaxed);
        self.bell = Some(Bell::open(word(H_BELL_PID), word(H_BELL))?);
        Ok(())
    }

    /// For a reader that is none of the ranks: reads what the segment itself says about its members, of whom
    /// there are at most `most_ranks`.
    pub fn inspect(fd: &OwnedFd, most_ranks: u32) -> Result<Self, Failure> {
        let unknown =
            Membership { name: "an unknown group".to_owned(), rank: 0, world_ranks: Vec::new(), epoch: 0 };
        let header = Header::read(&unknown, fd)?;
        let (ranks, epoch) = (header.word(H_RANKS), header.word(H_EPOCH));
        // Before anything of that length is made.
        if ranks == 0 || ranks > most_ranks {
            let text = format!(
                "the shared segment of {} has {ranks} ranks, expected 1 to {most_ranks}",
                unknown.name
            );
            return Err(Failure::new(FailureKind::Transport, text));
        }
        let mut segment = Self::join(Membership { epoch, world_ranks: (0..ranks).collect(), ..unknown }, fd)?;
        segment.members.world_ranks = segment
            .ranks()
            .map(|rank| segment.member_word(rank, M_WORLD_RANK).load(Ordering::Relaxed))
            .collect();
        let name_bytes = segment.region.at::<AtomicU32>(H_NAME_BYTES).load(Ordering::Relaxed) as usize;
        let mut name = vec![0; name_bytes.min(NAME_BYTES)];
        segment.region.read(H_NAME, &mut name);
        segment.members.name = String::from_utf8_lossy(&name).into_owned();
        Ok(segment)
    }

    fn member_word(&self, rank: u32, word: usize) -> &AtomicU32 {
        self.region.at(self.layout.member(rank) + word)
    }

    /// Rank 0's segment, whose other ranks will never come: their writes are up to the caller.
    #[cfg(any(test, fuzzing, feature = "testing"))]
    pub fn alone(name: &str, ranks: u32, window_bytes: usize) -> Self {
        let members =
            Membership { name: name.to_owned(), rank: 0, world_ranks: (0..ranks).collect(), epoch: 0 };
        let layout = Layout::new(ranks, 1, window_bytes);
        let (region, _) = Region::create("tpurun-alone", layout.total()).expect("the host has memory");
        let segment = Self::new(region, layout, members);
        header::write_header(
            &segment,
            Settings { window_bytes, matching: Matching::Normal, results: Results::Trusted, cpus: 1 },
        );
        segment
    }

    /// The same, with its ranks on these hosts.
    #[cfg(any(test, fuzzing, feature = "testing"))]
    pub fn with_hosts(self, hosts: Hosts) -> Self {
        Self { hosts, ..self }
    }

    /// The same, as another rank has it.
    #[cfg(any(test, feature = "testing"))]
    pub fn of_rank(self, rank: u32) -> Self {
        Self { members: Membership { rank, ..self.members }, ..self }
    }

    /// Maps the segment behind a descriptor.
    ///
    /// # Errors
    /// `Transport` when it is no segment of this version, of these members.
    pub fn join(members: Membership, fd: &OwnedFd) -> Result<Self, Failure> {
        let header = Header::read(&members, fd)?;
        let foreign = |what: &str, expected: u64, given: u64| {
            let text =
                format!("the shared segment of {} has {what} {given}, expected {expected}", members.title());
            Err(Failure::new(FailureKind::Transport, text))
        };
        if header.long(H_MAGIC) != MAGIC {
            return foreign("magic", MAGIC, header.long(H_MAGIC));
        }
        if header.word(H_VERSION) != VERSION {
            return foreign("layout version", VERSION.into(), header.word(H_VERSION).into());
        }
        if header.word(H_RANKS) != members.size() {
            return foreign("ranks", members.size().into(), header.word(H_RANKS).into());
        }
        if header.word(H_EPOCH) != members.epoch {
            return foreign("epoch", members.epoch.into(), header.word(H_EPOCH).into());
        }
        // No sum of a larger one is sure to be a number.
        let window = usize::try_from(header.long(H_WINDOW)).unwrap_or(usize::MAX);
        if window > MOST_WINDOW {
            return foreign("a window of bytes", MOST_WINDOW as u64, window as u64);
        }
        let layout = Layout::new(members.size(), header.word(H_HOSTS), window);
        // An operation that addresses each rank apart puts a line for each of them into a window.
        let least = LINE * members.size() as usize;
        if layout.wide_bytes() < least {
            return foreign("a window of bytes", least as u64, window as u64);
        }
        if layout.total() != header.bytes {
            return foreign("bytes", layout.total() as u64, header.bytes as u64);
        }
        let region =
            Region::open(fd, header.bytes).map_err(|error| refused(&members, "map", header.bytes, &error))?;
        Ok(Self::new(region, layout, members))
    }

    /// The memory itself.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Where everything lies in it.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The members of the communicator.
    pub fn members(&self) -> &Membership {
        &self.members
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.members.rank
    }

    /// Returns the fields that are compared, the same on every rank.
    pub fn matching(&self) -> Matching {
        let strict: &AtomicU32 = self.region.at(self.layout.header() + H_STRICT);
        if strict.load(Ordering::Relaxed) == 0 { Matching::Normal } else { Matching::Strict }
    }

    /// Whether results are compared, the same on every rank.
    pub fn results(&self) -> Results {
        let verify: &AtomicU32 = self.region.at(self.layout.header() + H_VERIFY);
        if verify.load(Ordering::Relaxed) == 0 { Results::Trusted } else { Results::Verified }
    }

    /// The CPUs that plans count on, the same on every rank.
    pub fn planned_cpus(&self) -> u32 {
        self.region.at::<AtomicU32>(self.layout.header() + H_CPUS).load(Ordering::Relaxed).max(1)
    }

    /// How many ranks there are.
    pub fn size(&self) -> u32 {
        self.members.size()
    }

    /// All ranks.
    pub fn ranks(&self) -> std::ops::Range<u32> {
        0..self.size()
    }

    /// The rank in the world of `rank`.
    pub fn world_rank(&self, rank: u32) -> u32 {
        self.members.world_ranks[rank as usize]
    }

    /// The words of the rounds.
    pub fn meeting(&self) -> &Meeting {
        self.region.at(self.layout.meeting())
    }

    /// Rung whenever something happened on a byte ring of `rank`.
    pub fn doorbell(&self, rank: u32) -> &Doorbell {
        self.region.at(self.layout.member(rank) + M_DOORBELL)
    }

    /// Wakes all ranks that sleep on their doorbells, and the bridge.
    pub fn ring_all(&self) {
        for rank in self.ranks() {
            self.doorbell(rank).ring();
        }
        self.ring_bridge();
    }

    /// The failure of this communicator, if it has failed: what all hosts say, which takes them a moment to agree
    /// on.
    pub fn failure(&self) -> Option<Failure> {
        let own = self.failure_word().own_failure()?;
        Some(if self.is_bridged() { self.failure_word().agreed_failure().unwrap_or(own) } else { own })
    }

    /// The same ranks by their rank in the world.
    pub fn in_world(&self, ranks: &[u32]) -> Vec<u32> {
        ranks.iter().map(|rank| self.world_rank(*rank)).collect()
    }

    /// The hosts of the ranks.
    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Where this rank is.
    pub fn host(&self) -> u32 {
        self.hosts.of(self.rank())
    }

    /// Whether `rank` is on the host of this rank.
    pub fn is_here(&self, rank: u32) -> bool {
        self.hosts.of(rank) == self.host()
    }

    /// The ranks of this host, in order.
    pub fn ranks_here(&self) -> &[u32] {
        self.hosts.ranks(self.host())
    }

    /// Whether ranks are on other hosts, too.
    pub fn is_bridged(&self) -> bool {
        self.hosts.count() > 1
    }

    /// Has the bridge look.
    pub fn ring_bridge(&self) {
        if let Some(bell) = &self.bell {
            bell.ring(self.remote().rung());
        }
    }

    /// The ranks: who is in, how far each is, and who has left or is gone.
    pub fn roster(&self) -> Roster<'_> {
        Roster(self)
    }

    /// Why the communicator has failed, and how to fail it.
    pub fn failure_word(&self) -> FailureWord<'_> {
        FailureWord(self)
    }

    /// The words and stretches that ranks write for other hosts.
    pub fn remote(&self) -> Remote<'_> {
        Remote(self)
    }

    /// The byte rings between ranks.
    pub fn rings(&self) -> Rings<'_> {
        Rings(self)
    }

    /// Tensors of other ranks that are in use.
    pub fn loans(&self) -> Loans<'_> {
        Loans(self)
    }
}

fn refused(members: &Membership, verb: &str, bytes: usize, error: &io::Error) -> Failure {
    let hint = match error.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
        Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => "; raise the limit with `ulimit -n`",
        Some(rustix::io::Errno::NOMEM) => "; lower TPURUN_STAGING_BYTES or raise the limit with `ulimit -v`",
        _ => "",
    };
    let text =
        format!("cannot {verb} the shared segment of {} ({bytes} bytes): {error}{hint}", members.title());
    Failure::new(FailureKind::Transport, text)
}
