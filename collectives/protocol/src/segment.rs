//! The shared segment of one communicator on one host: how its ranks meet, and how they fail together.

pub mod bell;
pub mod crossing;
mod lending;
mod note;
mod roll;
mod settings;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use aws_lc_rs::rand::{SecureRandom, SystemRandom};

use crate::config::{Matching, Results};
use crate::hosts::Hosts;
use crate::layout::{EXPORTS_END, FAILURE_TEXT_BYTES, LINE, Layout, MAGIC, MEMBER_BYTES, PLACES, VERSION};
use crate::looks::share;
use crate::membership::Membership;
use crate::op::OpKind;
use crate::rank_list::RankList;
use tpurun_memory::failure::{Failure, FailureKind};
use tpurun_memory::process::{self, Liveness};
use tpurun_memory::rank_set::RankSet;
use tpurun_memory::region::{Region, is_plain_memory};
use tpurun_memory::sync::{
    AtomicU32, AtomicU64, Attendance, Chain, Doorbell, Meeting, Ordering, Progress, Publication, Ring, Run,
    Settled, Writer,
};
use tpurun_memory::text::head;

use bell::{Bell, Ears};
use settings::MOST_WINDOW;
pub use settings::Settings;

// Header words.
const H_MAGIC: usize = 0;
const H_VERSION: usize = 8;
const H_RANKS: usize = 12;
const H_WINDOW: usize = 16;
const H_CPUS: usize = 24;
const H_STRICT: usize = 28;
const H_VERIFY: usize = 32;
const H_EPOCH: usize = 36;
const H_ATTACHED: usize = 64;
const H_NAME_BYTES: usize = 128;
const H_NAME: usize = 136;
const NAME_BYTES: usize = 512;
const H_DEPARTURES: usize = 704;
// Where ranks are on several hosts.
const H_LOCAL: usize = 768;
const H_RUNG: usize = 832;
const H_BELL_PID: usize = 836;
const H_BELL: usize = 840;
const H_MOVES: usize = 896;
const H_DECIDED: usize = 960;
const H_READY: usize = 1024;
const H_STAGED: usize = 1088;
const H_HOSTS: usize = 40;
const H_NONCE: usize = 48;
const _: () = assert!(H_NONCE + size_of::<Nonce>() <= HEADER_BYTES);
// Member words.
const M_PID: usize = 0;
const M_START: usize = 8;
const M_WORLD_RANK: usize = 16;
const M_CLOSED: usize = 20;
const M_ARRIVED: usize = 24;
const M_LOST: usize = 32;
const M_DOORBELL: usize = 64;
/// A writer of the failure that is none of the ranks.
const OUTSIDER: u32 = u32::MAX >> 2;
const M_POSTED: usize = 128;
const M_LEFT: usize = 136;
const M_HANDS: usize = 144;
const M_WISH: usize = 192;
const M_OFFER: usize = 200;
/// Behind what there is of the rank's arenas; one of each parity.
const M_PLACE: usize = 320;
const PLACE_BYTES: usize = 24;
const _: () = assert!(EXPORTS_END <= M_PLACE && M_PLACE + 2 * PLACE_BYTES <= MEMBER_BYTES);
// Failure words, behind the word of its publication.
const F_KIND: usize = 4;
const F_BYTES: usize = 8;
const F_TEXT: usize = 64;

/// Why a communicator is to fail, and who is to blame, by rank in the group.
#[derive(Clone, Debug)]
pub struct Verdict {
    kind: FailureKind,
    text: String,
    blamed: Vec<u32>,
}

impl Verdict {
    /// Nobody in particular is to blame.
    pub fn new(kind: FailureKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into(), blamed: vec![] }
    }

    /// The same, and these ranks are to blame.
    pub fn blaming(self, ranks: impl Into<Vec<u32>>) -> Self {
        Self { blamed: ranks.into(), ..self }
    }

    #[cfg(any(test, fuzzing, feature = "testing"))]
    /// The text that all ranks will raise.
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// The header that memory of another process has, read before it is mapped.
struct Header {
    words: [u8; HEADER_BYTES],
    /// The bytes of all of it.
    bytes: usize,
}

impl Header {
    fn read(members: &Membership, fd: &OwnedFd) -> Result<Self, Failure> {
        let inspected = || {
            // Reading a descriptor that is no memory may block.
            if !is_plain_memory(fd.as_fd()) {
                return Err(io::Error::other("it is no memory of plain pages"));
            }
            let bytes = Region::size_of(fd)?;
            let mut words = [0; HEADER_BYTES];
            // If the memory is shorter, the rest is zero.
            rustix::io::pread(fd, &mut words, 0)?;
            Ok(Self { words, bytes })
        };
        inspected().map_err(|error| refused(members, "inspect", 0, &error))
    }

    fn word(&self, offset: usize) -> u32 {
        u32::from_ne_bytes(*self.words[offset..].first_chunk().expect("within the header"))
    }

    fn long(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(*self.words[offset..].first_chunk().expect("within the header"))
    }
}

/// As much as is needed to know the size.
const HEADER_BYTES: usize = 64;

/// The nonce of a segment: only those that have read the segment or been told know it.
pub type Nonce = [u8; 16];

/// Returns the nonce of the segment behind a descriptor; of other memory, whatever is there.
pub fn nonce_of(segment: BorrowedFd<'_>) -> io::Result<Nonce> {
    let mut nonce = Nonce::default();
    // If the memory is shorter, the rest is zero.
    rustix::io::pread(segment, &mut nonce, H_NONCE as u64)?;
    Ok(nonce)
}

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
        segment.write_header(settings);
        segment.write_nonce()?;
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

    fn write_header(&self, settings: Settings) {
        let header = self.layout.header();
        let word = |offset: usize| self.region.at::<AtomicU32>(header + offset);
        self.region.at::<AtomicU64>(header + H_MAGIC).store(MAGIC, Ordering::Relaxed);
        word(H_VERSION).store(VERSION, Ordering::Relaxed);
        word(H_RANKS).store(self.members.size(), Ordering::Relaxed);
        word(H_CPUS).store(settings.cpus, Ordering::Relaxed);
        word(H_STRICT).store((settings.matching == Matching::Strict).into(), Ordering::Relaxed);
        word(H_VERIFY).store((settings.results == Results::Verified).into(), Ordering::Relaxed);
        word(H_EPOCH).store(self.members.epoch, Ordering::Relaxed);
        word(H_HOSTS).store(self.hosts.count(), Ordering::Relaxed);
        let window = self.layout.wide_bytes() as u64;
        self.region.at::<AtomicU64>(header + H_WINDOW).store(window, Ordering::Relaxed);
        let name = head(&self.members.name, NAME_BYTES);
        self.region.write(header + H_NAME, name.as_bytes());
        word(H_NAME_BYTES).store(name.len() as u32, Ordering::Relaxed);
        for rank in self.ranks() {
            self.member_word(rank, M_WORLD_RANK).store(self.world_rank(rank), Ordering::Relaxed);
        }
    }

    fn write_nonce(&self) -> Result<(), Failure> {
        let mut nonce = Nonce::default();
        SystemRandom::new().fill(&mut nonce).map_err(|_| {
            let text = format!("cannot create the shared segment of {}: no randomness", self.members.title());
            Failure::new(FailureKind::Transport, text)
        })?;
        self.region.write(self.layout.header() + H_NONCE, &nonce);
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

    /// Bytes of address space that it takes.
    pub fn bytes(&self) -> usize {
        self.layout.total()
    }

    fn member_word(&self, rank: u32, word: usize) -> &AtomicU32 {
        self.region.at(self.layout.member(rank) + word)
    }

    /// Whether `rank` has destroyed its end.
    pub fn is_closed(&self, rank: u32) -> bool {
        self.member_word(rank, M_CLOSED).load(Ordering::Acquire) != 0
    }

    /// Counts a send or receive of this rank that is pending; `peer` is `None` for a receive from any rank.
    pub fn add_pending(&self, kind: OpKind, peer: Option<u32>) {
        self.ledger(kind, peer).fetch_add(1, Ordering::Release);
    }

    /// It has ended.
    pub fn remove_pending(&self, kind: OpKind, peer: Option<u32>) {
        self.ledger(kind, peer).fetch_sub(1, Ordering::Release);
    }

    fn ledger(&self, kind: OpKind, peer: Option<u32>) -> &AtomicU32 {
        let me = self.rank();
        match (kind, peer) {
            (OpKind::Send, Some(to)) => self.pending_sends(me, to),
            (_, from) => self.pending_receives(from.unwrap_or(me), me),
        }
    }

    /// Sends of `from` to `to` that are pending.
    pub fn pending_sends(&self, from: u32, to: u32) -> &AtomicU32 {
        self.region.at(self.layout.ledger(from, to))
    }

    /// Receives of `to` from `from`; from any rank where both are the same.
    pub fn pending_receives(&self, from: u32, to: u32) -> &AtomicU32 {
        self.region.at(self.layout.ledger(from, to) + 4)
    }

    /// Rank 0's segment, whose other ranks will never come: their writes are up to the caller.
    #[cfg(any(test, fuzzing, feature = "testing"))]
    pub fn alone(name: &str, ranks: u32, window_bytes: usize) -> Self {
        let members =
            Membership { name: name.to_owned(), rank: 0, world_ranks: (0..ranks).collect(), epoch: 0 };
        let layout = Layout::new(ranks, 1, window_bytes);
        let (region, _) = Region::create("tpurun-alone", layout.total()).expect("the host has memory");
        let segment = Self::new(region, layout, members);
        segment.write_header(Settings {
            window_bytes,
            matching: Matching::Normal,
            results: Results::Trusted,
            cpus: 1,
        });
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
        self.attendance().count(self.size());
        self.ring_bridge();
        Ok(())
    }

    /// The ranks that are in so far.
    pub fn attendance(&self) -> &Attendance {
        self.region.at(self.layout.header() + H_ATTACHED)
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

    /// The chain of all ranks, as this one sees it, with `places` places and at most `most` pieces on their
    /// way. Ranks that are `near` ranks away are near.
    pub fn chain(&self, places: u64, most: u64, near: u32) -> Chain<'_> {
        let progress = |rank| self.region.at::<Progress>(self.layout.chain_rank(rank));
        let done: &[Progress; PLACES] = self.region.at(self.layout.chain_places());
        let rank = self.rank();
        Chain {
            before: rank.checked_sub(1).map(progress),
            own: progress(rank),
            last: progress(self.size() - 1),
            near: [rank, self.size() - 1].map(|rank| rank.checked_sub(near).map(progress)),
            done,
            places,
            most,
            ranks: self.size(),
        }
    }

    /// The byte ring of a channel between two ranks.
    pub fn ring(&self, channel: u32, from: u32, to: u32) -> Ring<'_> {
        let counters = self.region.at(self.layout.ring_counters(channel, from, to));
        Ring::new(counters, self.layout.ring_bytes())
    }

    /// Copies bytes to the beginning of a run of the ring whose data is at `data`.
    pub fn write_run(&self, data: usize, run: Run, bytes: &[u8]) {
        let [(first, head), (second, _)] = run.first(bytes.len() as u32).pieces();
        let (head, rest) = bytes.split_at(head as usize);
        self.region.write(data + first as usize, head);
        self.region.write(data + second as usize, rest);
    }

    /// Copies the beginning of a run of the ring whose data is at `data`.
    pub fn read_run(&self, data: usize, run: Run, bytes: &mut [u8]) {
        let [(first, head), (second, _)] = run.first(bytes.len() as u32).pieces();
        let (head, rest) = bytes.split_at_mut(head as usize);
        self.region.read(data + first as usize, head);
        self.region.read(data + second as usize, rest);
    }

    /// The process of `rank` is gone: ranks that wait for it look again.
    pub fn mourn(&self, rank: u32) {
        self.lost(rank).store(1, Ordering::Release);
        self.announce_departure();
    }

    fn announce_departure(&self) {
        self.departures_word().fetch_add(1, Ordering::AcqRel);
        self.meeting().nudge();
        self.ring_all();
    }

    /// Counts a collective that this rank posts, and returns how many it had posted before.
    pub fn count_posted(&self) -> u64 {
        self.posted(self.rank()).fetch_add(1, Ordering::Relaxed)
    }

    /// Collectives that a rank has posted so far.
    pub fn posted(&self, rank: u32) -> &AtomicU64 {
        self.region.at(self.layout.member(rank) + M_POSTED)
    }

    /// The ranks that have not posted collective `seq`.
    pub fn without(&self, seq: u64) -> Vec<u32> {
        self.ranks().filter(|rank| self.posted(*rank).load(Ordering::Relaxed) <= seq).collect()
    }

    /// Says that this rank takes part in no collective from `seq` on, and in no message: it has destroyed its
    /// end. Ranks that wait for it look again.
    pub fn leave(&self, seq: u64) {
        let left: &AtomicU64 = self.region.at(self.layout.member(self.rank()) + M_LEFT);
        left.store(seq.saturating_add(1), Ordering::Release);
        self.member_word(self.rank(), M_CLOSED).store(1, Ordering::Release);
        self.announce_departure();
    }

    /// Whether the process of `rank` is gone, as far as anybody knows.
    pub fn is_gone(&self, rank: u32) -> bool {
        self.is_mourned(rank) || self.liveness(rank) == Liveness::Gone
    }

    /// Whether `rank` is gone, and it is for this rank to say so: nobody else has in time.
    pub fn is_lost(&self, rank: u32) -> bool {
        self.is_gone(rank) && self.seen_gone.get_or_init(Instant::now).elapsed() >= self.grace
    }

    /// Those of `needed` that are known to be gone, or that this rank's share of a look finds gone. Those that wait, and
    /// look as well, are `waiting`, in order.
    pub fn gone_among(&self, needed: &[u32], waiting: &[u32], look: u32) -> Vec<u32> {
        // The bridge is told of those elsewhere.
        let is_here = |rank: &u32| self.is_here(*rank);
        let here: Vec<u32> = needed.iter().copied().filter(is_here).collect();
        let fellows: Vec<u32> = waiting.iter().copied().filter(is_here).collect();
        let before = fellows.partition_point(|rank| *rank < self.rank());
        let share: Vec<u32> = share(&here, before, fellows.len(), look).collect();
        let is_gone = |rank: &u32| self.is_mourned(*rank) || share.contains(rank) && self.is_gone(*rank);
        needed.iter().copied().filter(is_gone).collect()
    }

    /// Those of them of which it is for this rank to say so. All ranks are told.
    pub fn lost_among(&self, needed: &[u32], waiting: &[u32], look: u32) -> Vec<u32> {
        let gone = self.gone_among(needed, waiting, look);
        if gone.is_empty() || self.seen_gone.get_or_init(Instant::now).elapsed() < self.grace {
            return vec![];
        }
        gone.iter().filter(|rank| !self.is_mourned(**rank)).for_each(|rank| self.mourn(*rank));
        gone
    }

    /// Whether somebody has said that the process of `rank` is gone.
    pub fn is_mourned(&self, rank: u32) -> bool {
        self.lost(rank).load(Ordering::Acquire) != 0
    }

    fn lost(&self, rank: u32) -> &AtomicU32 {
        self.region.at(self.layout.member(rank) + M_LOST)
    }

    /// The first collective that `rank` does not take part in any more, if it has left.
    pub fn left(&self, rank: u32) -> Option<u64> {
        let left: &AtomicU64 = self.region.at(self.layout.member(rank) + M_LEFT);
        left.load(Ordering::Acquire).checked_sub(1)
    }

    /// The round of the survivors that `rank` wishes for.
    pub fn wished(&self, rank: u32) -> &AtomicU32 {
        self.member_word(rank, M_WISH)
    }

    /// Where `rank` offers the segment of survivors: their epoch, and a descriptor of its process.
    pub fn offered(&self, rank: u32) -> &AtomicU64 {
        self.region.at(self.layout.member(rank) + M_OFFER)
    }

    /// How many ranks have left or are gone: a cheap look whether anything changed.
    pub fn departures(&self) -> u32 {
        self.departures_word().load(Ordering::Acquire)
    }

    fn departures_word(&self) -> &AtomicU32 {
        self.region.at(self.layout.header() + H_DEPARTURES)
    }

    /// Says that this rank is about to arrive in `round`.
    pub fn set_arrived(&self, round: u32) {
        let arrived: &AtomicU64 = self.region.at(self.layout.member(self.rank()) + M_ARRIVED);
        arrived.store(u64::from(round) + 1, Ordering::Relaxed);
    }

    /// Ranks that have not arrived in `round`.
    pub fn missing(&self, round: u32) -> Vec<u32> {
        let arrived = |rank: u32| {
            let word: &AtomicU64 = self.region.at(self.layout.member(rank) + M_ARRIVED);
            word.load(Ordering::Relaxed) as u32
        };
        self.ranks().filter(|rank| arrived(*rank) != round.wrapping_add(1)).collect()
    }

    /// The process that is `rank`; 0 before it has come.
    pub fn pid(&self, rank: u32) -> u32 {
        self.region.at::<AtomicU32>(self.layout.member(rank) + M_PID).load(Ordering::Acquire)
    }

    /// Whether the process of `rank` still is what attached.
    pub fn liveness(&self, rank: u32) -> Liveness {
        if !self.is_here(rank) {
            // The bridge is told, or hears nothing any more.
            return if self.is_mourned(rank) { Liveness::Gone } else { Liveness::Alive };
        }
        let start: &AtomicU64 = self.region.at(self.layout.member(rank) + M_START);
        process::liveness(self.pid(rank), start.load(Ordering::Relaxed))
    }

    /// Fails the communicator for all its ranks, and nobody in particular is to blame.
    pub fn fail(&self, kind: FailureKind, text: &str) -> Failure {
        self.fail_by(&Verdict::new(kind, text))
    }

    /// A verdict that blames those of its ranks that have these ranks in the world.
    pub fn verdict(&self, kind: FailureKind, text: &str, world_ranks: &[u32]) -> Verdict {
        let is_guilty = |rank: &u32| world_ranks.contains(&self.world_rank(*rank));
        let blamed: Vec<u32> = self.ranks().filter(is_guilty).collect();
        Verdict::new(kind, text).blaming(blamed)
    }

    /// Fails the communicator for all its ranks and returns the failure that stands: the first one.
    pub fn fail_by(&self, verdict: &Verdict) -> Failure {
        self.fail_here(verdict);
        let own = || Failure::new(verdict.kind, &*verdict.text).blaming(self.in_world(&verdict.blamed));
        self.failure().unwrap_or_else(own)
    }

    /// As [`fail_by`](Self::fail_by), but asks no other host what stands.
    pub fn fail_here(&self, verdict: &Verdict) {
        self.publish(verdict, || {
            self.attendance().end(self.size());
            self.meeting().poison();
            true
        });
    }

    /// As [`fail_by`](Self::fail_by), but who sleeps learns of it only from [`announce`](Self::announce).
    pub fn fail_quietly(&self, verdict: &Verdict) {
        self.settle(verdict, || {
            self.attendance().end(self.size());
            self.meeting().poison_quietly();
            true
        });
    }

    /// Wakes everybody who waits in a communicator that has failed.
    pub fn announce(&self) {
        if self.failure().is_some() {
            self.meeting().poison();
            self.ring_all();
        }
    }

    /// As [`fail_by`](Self::fail_by), unless round `round` of the meeting is open by now: then nothing happens.
    pub fn fail_round(&self, round: u32, verdict: &Verdict) -> Option<Failure> {
        self.fail_round_here(round, verdict);
        let failure = self.failure();
        if failure.is_some() {
            // Poisons the round whoever failed it: a process that only said so must not leave us waiting.
            self.meeting().poison_round(round);
        }
        failure
    }

    /// The same, and asks no other host what stands.
    pub fn fail_round_here(&self, round: u32, verdict: &Verdict) {
        self.publish(verdict, || self.meeting().poison_round(round));
    }

    fn publication(&self) -> &Publication {
        self.region.at(self.layout.failure())
    }

    /// As [`fail_by`](Self::fail_by), unless all ranks are attached by now: then nothing happens.
    pub fn fail_creation(&self, verdict: &Verdict) {
        self.publish(verdict, || {
            let ended = self.attendance().end(self.size());
            if ended {
                self.meeting().poison();
            }
            ended
        });
    }

    /// Writes the text, lets `take_effect` decide whether it stands, and tells everybody.
    fn publish(&self, verdict: &Verdict, take_effect: impl Fn() -> bool) {
        if self.settle(verdict, take_effect) == Settled::Stands {
            self.ring_all();
        }
    }

    fn settle(&self, verdict: &Verdict, take_effect: impl Fn() -> bool) -> Settled {
        let write = || self.write_failure(verdict);
        self.publication().publish(self.writer(), write, take_effect, self.look_at_writer(), |writer| {
            self.speak_for(writer)
        })
    }

    fn write_failure(&self, verdict: &Verdict) {
        let Verdict { kind, text, blamed: ranks } = verdict;
        let base = self.layout.failure();
        let text = head(text, FAILURE_TEXT_BYTES);
        self.region.write(base + F_TEXT, text.as_bytes());
        self.region.at::<AtomicU32>(base + F_KIND).store(*kind as u32, Ordering::Relaxed);
        self.region.at::<AtomicU32>(base + F_BYTES).store(text.len() as u32, Ordering::Relaxed);
        let blamed = RankSet::new(&self.region, self.layout.blamed(), self.size());
        blamed.clear();
        blamed.add(ranks);
    }

    /// Returns who we are when we write the failure: the agent is no rank, and dies with the job.
    fn writer(&self) -> u32 {
        if self.pid(self.rank()) == std::process::id() { self.rank() } else { OUTSIDER }
    }

    /// Whether who is writing the failure still may finish.
    fn look_at_writer(&self) -> impl FnMut(u32) -> Writer {
        // Longer than writing the text takes, even on a machine that is 64 times oversubscribed.
        const PATIENCE: Duration = Duration::from_millis(500);
        let mut deadline = None;
        move |writer| match deadline {
            // Nearly always it is done in a moment.
            None => {
                deadline = Some(Instant::now() + PATIENCE);
                Writer::Alive
            }
            Some(_) if writer < self.size() && self.is_gone(writer) => Writer::Gone,
            Some(deadline) if Instant::now() >= deadline => Writer::Silent,
            Some(_) => Writer::Alive,
        }
    }

    /// The failure of a communicator whose member died while it was writing what it is.
    fn speak_for(&self, writer: u32) {
        let text = format!(
            "{}: it died while it was saying why {} failed",
            self.describe_gone(&[writer]),
            self.members.title()
        );
        self.write_failure(&Verdict::new(FailureKind::RankLost, text).blaming([writer]));
        self.attendance().end(self.size());
        self.meeting().poison();
        self.ring_all();
    }

    /// Fails the communicator because `rank` wrote nonsense into it.
    pub fn corrupt(&self, rank: u32, what: &str) -> Failure {
        let text = format!("{} wrote what can not be: {what}", self.describe(&[rank]));
        self.fail_by(&Verdict::new(FailureKind::Internal, text).blaming([rank]))
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
        let own = self.own_failure()?;
        Some(if self.is_bridged() { self.agreed_failure().unwrap_or(own) } else { own })
    }

    /// As this host has it.
    pub fn own_failure(&self) -> Option<Failure> {
        let speak_for = |writer| self.speak_for(writer);
        match self.publication().settled(|| self.writer(), self.look_at_writer(), speak_for) {
            Settled::Nothing => return None,
            Settled::Stands => {}
            Settled::Silent => {
                // All that come later say the same.
                self.meeting().poison();
                self.ring_all();
                let text = format!("{} failed, and who knows why does not say it", self.members.title());
                return Some(Failure::new(FailureKind::RankLost, text));
            }
        }
        let base = self.layout.failure();
        let bytes = self.region.at::<AtomicU32>(base + F_BYTES).load(Ordering::Relaxed) as usize;
        let mut text = vec![0; bytes.min(FAILURE_TEXT_BYTES)];
        self.region.read(base + F_TEXT, &mut text);
        let kind = FailureKind::from_code(self.region.at::<AtomicU32>(base + F_KIND).load(Ordering::Relaxed));
        let blamed = RankSet::new(&self.region, self.layout.blamed(), self.size()).ranks();
        Some(Failure::new(kind, String::from_utf8_lossy(&text)).blaming(self.in_world(&blamed)))
    }

    /// The same ranks by their rank in the world.
    pub fn in_world(&self, ranks: &[u32]) -> Vec<u32> {
        ranks.iter().map(|rank| self.world_rank(*rank)).collect()
    }

    /// `ranks 3-9 (host n0, pid 4711, 4712, 4713, 4714, ..)`, for messages.
    pub fn describe(&self, ranks: &[u32]) -> String {
        const SHOWN: usize = 4;
        let host = |rank: &u32| self.hosts.of(*rank);
        let on_host = |ranks: &[u32]| {
            let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
            let pids: Vec<String> =
                ranks.iter().take(SHOWN).map(|rank| self.pid(*rank).to_string()).collect();
            let more = if ranks.len() > SHOWN { ", .." } else { "" };
            let (list, name) = (self.in_world(ranks), self.hosts.name(host(&ranks[0])));
            format!("{noun} {} (host {name}, pid {}{more})", RankList(&list), pids.join(", "))
        };
        let mut ranks = ranks.to_vec();
        ranks.sort_by_key(|rank| (host(rank), *rank));
        let texts: Vec<String> = ranks.chunk_by(|one, next| host(one) == host(next)).map(on_host).collect();
        texts.join(" and ")
    }

    /// `rank 3 (host n0, pid 4711) is gone`
    pub fn describe_gone(&self, ranks: &[u32]) -> String {
        let verb = if ranks.len() == 1 { "is" } else { "are" };
        format!("{} {verb} gone", self.describe(ranks))
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
