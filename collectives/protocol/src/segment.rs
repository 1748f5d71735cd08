//! The shared segment of one communicator on one host: how its ranks meet, and how they fail together.

mod base;
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

use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::time::Duration;

use tpurun_memory::failure::{Failure, FailureKind};
use tpurun_memory::process;
use tpurun_memory::region::Region;
use tpurun_memory::sync::{AtomicU32, AtomicU64, Ordering};

use crate::hosts::Hosts;
use crate::layout::{LINE, Layout, MAGIC, VERSION};
use crate::membership::Membership;
use crate::tuning::Tuning;

pub use base::Base;
use bell::{Bell, Ears};
pub use failure_word::{FailureWord, Verdict};
pub use header::{Nonce, nonce_of};
use header::{SegmentHeader, refused};
pub use loans::Loans;
pub use remote::RemoteRanks;
pub use rings::Rings;
pub use roster::Roster;
use settings::MOST_WINDOW;
pub use settings::Settings;
#[cfg(test)]
pub(crate) use words::H_TUNING;
use words::*;

/// One rank's view of the segment.
#[derive(Debug)]
pub struct Segment(Base);

/// Its memory and its members.
impl Deref for Segment {
    type Target = Base;

    fn deref(&self) -> &Base {
        &self.0
    }
}

impl Segment {
    fn new(region: Region, layout: Layout, members: Membership, tuning: Tuning) -> Self {
        let hosts = Hosts::one(members.size());
        let (grace, seen_gone, seen_failed) = (Duration::ZERO, OnceLock::new(), OnceLock::new());
        Self(Base { region, layout, members, hosts, tuning, bell: None, grace, seen_gone, seen_failed })
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
        let segment = Self::new(region, layout, members, settings.tuning).on(hosts, grace);
        header::write_header(&segment, settings);
        header::write_nonce(&segment)?;
        Ok((segment, fd))
    }

    /// The same segment, of ranks on these hosts. It is left to somebody else for `grace` to say that a rank is gone.
    #[inline]
    pub fn on(self, hosts: Hosts, grace: Duration) -> Self {
        Self(Base { hosts, grace, ..self.0 })
    }

    /// Makes the bell of this host, of which all its ranks learn from the segment.
    #[inline]
    pub fn make_bell(&mut self) -> Result<Ears, Failure> {
        let (bell, ears) = Bell::new()?;
        let word = |at: usize| self.region.at::<AtomicU32>(at);
        word(H_BELL_PID).store(std::process::id(), Ordering::Relaxed);
        word(H_BELL).store(bell.descriptor(), Ordering::Relaxed);
        self.0.bell = Some(bell);
        Ok(ears)
    }

    /// Opens the bell that the first rank of this host has made.
    #[inline]
    pub fn open_bell(&mut self) -> Result<(), Failure> {
        let word = |at: usize| self.region.at::<AtomicU32>(at).load(Ordering::Relaxed);
        self.0.bell = Some(Bell::open(word(H_BELL_PID), word(H_BELL))?);
        Ok(())
    }

    /// For a reader that is none of the ranks: reads what the segment itself says about its members, of whom
    /// there are at most `most_ranks`.
    pub fn inspect(fd: &OwnedFd, most_ranks: u32) -> Result<Self, Failure> {
        let unknown =
            Membership { name: "an unknown group".to_owned(), rank: 0, world_ranks: Vec::new(), epoch: 0 };
        let header = SegmentHeader::read(&unknown, fd)?;
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
        segment.0.members.world_ranks = segment
            .ranks()
            .map(|rank| segment.member_word(rank, M_WORLD_RANK).load(Ordering::Relaxed))
            .collect();
        let name_bytes = segment.region.at::<AtomicU32>(H_NAME_BYTES).load(Ordering::Relaxed) as usize;
        let mut name = vec![0; name_bytes.min(NAME_BYTES)];
        segment.region.read(H_NAME, &mut name);
        segment.0.members.name = String::from_utf8_lossy(&name).into_owned();
        Ok(segment)
    }

    /// Rank 0's segment, whose other ranks will never come: their writes are up to the caller.
    #[cfg(any(test, fuzzing, feature = "testing"))]
    pub fn alone(name: &str, ranks: u32, window_bytes: usize) -> Self {
        let members =
            Membership { name: name.to_owned(), rank: 0, world_ranks: (0..ranks).collect(), epoch: 0 };
        let layout = Layout::new(ranks, 1, window_bytes);
        let (region, _) = Region::create("tpurun-alone", layout.total()).expect("the host has memory");
        let segment = Self::new(region, layout, members, Tuning::default());
        header::write_header(&segment, Settings { window_bytes, ..Settings::default() });
        segment
    }

    /// The same, with its ranks on these hosts.
    #[cfg(any(test, fuzzing, feature = "testing"))]
    #[inline]
    pub fn with_hosts(self, hosts: Hosts) -> Self {
        Self(Base { hosts, ..self.0 })
    }

    /// The same, as another rank has it.
    #[cfg(any(test, feature = "testing"))]
    #[inline]
    pub fn of_rank(self, rank: u32) -> Self {
        Self(Base { members: Membership { rank, ..self.0.members }, ..self.0 })
    }

    /// Maps the segment behind a descriptor.
    ///
    /// # Errors
    /// `Transport` when it is no segment of this version, of these members.
    pub fn join(members: Membership, fd: &OwnedFd) -> Result<Self, Failure> {
        let header = SegmentHeader::read(&members, fd)?;
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
        let tuning = header::tuning_of(&region, &layout).map_err(|error| {
            let text = format!("the shared segment of {} has no tuning: {error}", members.title());
            Failure::new(FailureKind::Transport, text)
        })?;
        Ok(Self::new(region, layout, members, tuning))
    }

    /// The failure of this communicator, if it has failed: what all hosts say, which takes them a moment to agree on.
    #[inline]
    pub fn failure(&self) -> Option<Failure> {
        self.failure_word().failure()
    }

    /// The ranks: who is in, how far each is, and who has left or is gone.
    #[inline]
    pub fn roster(&self) -> Roster<'_> {
        Roster(&self.0)
    }

    /// Why the communicator has failed, and how to fail it.
    #[inline]
    pub fn failure_word(&self) -> FailureWord<'_> {
        FailureWord(&self.0)
    }

    /// The words and stretches that ranks write for other hosts.
    #[inline]
    pub fn remote(&self) -> RemoteRanks<'_> {
        RemoteRanks(&self.0)
    }

    /// The byte rings between ranks.
    #[inline]
    pub fn rings(&self) -> Rings<'_> {
        Rings(&self.0)
    }

    /// The words in which survivors agree on who they are.
    #[inline]
    pub fn roll(&self) -> &Base {
        &self.0
    }

    /// Tensors of other ranks that are in use.
    #[inline]
    pub fn loans(&self) -> Loans<'_> {
        Loans(&self.0)
    }

    /// Says that this rank is in.
    pub fn attach(&self) -> Result<(), Failure> {
        // A rank that comes after the others gave up has no part in it.
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        let me = self.layout.member(self.members.rank);
        let start = process::start_time(std::process::id()).unwrap_or(0);
        self.region.at::<AtomicU64>(me + M_START).store(start, Ordering::Relaxed);
        let world = self.members.world_ranks[self.members.rank as usize];
        let pid = self.region.at::<AtomicU32>(me + M_PID);
        // Release: the words above belong to the pid.
        if let Err(other) = pid.compare_exchange(0, std::process::id(), Ordering::Release, Ordering::Relaxed)
        {
            let text =
                format!("rank {world} of {} is already attached as process {other}", self.members.title());
            return Err(Failure::new(FailureKind::Transport, text));
        }
        self.roster().attendance().count(self.size());
        self.ring_bridge();
        Ok(())
    }
}
