//! The survivors of a communicator: they agree on who they are, and make a communicator of a later epoch.
//!
//! Both go through the shared segment of the old one, so neither the launcher nor the store is needed, which
//! may have died with a rank. Processes that are gone, ranks that destroyed their end, and ranks that the
//! failure or a caller names as lost do not take part; all others must come.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::join::bootstrap::ControlBootstrap;
use crate::join::{Bootstrap, interrupted};
use tpurun_memory::descriptor::{FileKind, open_of_process};
use tpurun_memory::failure::{Failure, FailureKind};
use tpurun_memory::invalid_usage;
use tpurun_memory::process::Liveness;
use tpurun_memory::rank_set::SharedRankSet;
use tpurun_memory::sync::ballot::{self, Roll, Tally};
use tpurun_memory::sync::{Ordering, interrupt};
use tpurun_protocol::control::ControlClient;
use tpurun_protocol::membership::Membership;
use tpurun_protocol::segment::Segment;

/// How often a survivor looks at its share of those it waits for.
const LOOK: Duration = Duration::from_millis(20);

/// How the survivors of a communicator find each other.
#[derive(Debug)]
pub(crate) struct Survivors<'a> {
    segment: &'a Segment,
    deadline: Instant,
    timeout: Duration,
    look: Instant,
    looks: u32,
}

impl<'a> Survivors<'a> {
    /// The survivors of `segment`, who must come within `timeout`. `lost` are ranks of the world that must
    /// not be waited for.
    pub(crate) fn new(segment: &'a Segment, lost: &[u32], timeout: Duration) -> Result<Self, Failure> {
        let name = segment.members().title();
        let in_group = |rank: &u32| segment.ranks().find(|member| segment.world_rank(*member) == *rank);
        let mut given_up = vec![];
        for rank in lost {
            match in_group(rank) {
                None => return Err(invalid_usage!("shrink: expected lost ranks of {name}, given {rank}")),
                Some(own) if own == segment.rank() => {
                    return Err(invalid_usage!(
                        "shrink: expected other ranks as lost, given this rank, {rank}"
                    ));
                }
                Some(rank) => given_up.push(rank),
            }
        }
        // The failure is the same for all: so are those it names.
        if let Some(failure) = segment.failure().filter(|failure| failure.kind() == FailureKind::RankLost) {
            given_up.extend(failure.ranks().iter().filter_map(in_group));
        }
        lost_of(segment).add(&given_up);
        let now = Instant::now();
        Ok(Self { segment, deadline: now + timeout, timeout, look: now, looks: 0 })
    }

    /// The time that is left.
    pub(crate) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Agrees on the survivors of the next round: all of them return the same membership.
    pub(crate) fn agree(&mut self) -> Result<Membership, Failure> {
        let (segment, me) = (self.segment, self.segment.rank());
        let Some(round) = ballot::decided(segment.roll()).checked_add(1) else { return Err(self.corrupt()) };
        if round > 1 && !matches!(ballot::last(segment.roll()), Tally::Decided(list) if list.contains(&me)) {
            return Err(self.given_up());
        }
        ballot::wish(segment.roll(), me, round);
        loop {
            let seen = segment.bell().rings();
            let missing = match ballot::count(segment.roll(), me, round, |rank| self.is_present(rank)) {
                Tally::Decided(list) => return self.membership(round, &list),
                Tally::Missing(missing) => missing,
                Tally::Corrupt => return Err(self.corrupt()),
            };
            if interrupt::is_stopped() && ballot::retract(segment.roll(), me, round) {
                return Err(interrupted(&segment.members().title()));
            }
            let now = Instant::now();
            if now >= self.deadline {
                if ballot::retract(segment.roll(), me, round) {
                    return Err(self.late(&missing));
                }
                continue;
            }
            if now >= self.look {
                self.look = now + LOOK;
                if self.look_after(&missing) {
                    continue;
                }
            }
            segment.bell().wait(seen, Some(self.look.min(self.deadline)));
        }
    }

    /// How these survivors meet.
    pub(crate) fn bootstrap<'b>(
        &'b self,
        members: &'b Membership,
        control: Option<&'b ControlClient>,
    ) -> SegmentBootstrap<'b> {
        SegmentBootstrap { segment: self.segment, members, control }
    }

    fn is_present(&self, rank: u32) -> bool {
        let segment = self.segment;
        rank == segment.rank()
            || !(segment.roster().is_mourned(rank)
                || lost_of(segment).has(rank)
                || segment.roster().left(rank).is_some())
    }

    /// Whether any of `missing` turns out to be gone; the other survivors are told, who look at others.
    fn look_after(&mut self, missing: &[u32]) -> bool {
        let segment = self.segment;
        let has_come = |rank: &u32| missing.binary_search(rank).is_err();
        let waiting: Vec<u32> = segment.ranks().filter(has_come).collect();
        let gone = segment.roster().gone_among(missing, &waiting, self.looks);
        self.looks = self.looks.wrapping_add(1);
        gone.iter().for_each(|rank| segment.roster().mourn(*rank));
        if !gone.is_empty() {
            segment.bell().ring();
        }
        !gone.is_empty()
    }

    fn membership(&self, round: u32, list: &[u32]) -> Result<Membership, Failure> {
        let old = self.segment.members();
        let Some(rank) = list.iter().position(|rank| *rank == self.segment.rank()) else {
            return Err(self.given_up());
        };
        Ok(Membership {
            name: format!("{}~{round}", old.name),
            rank: rank as u32,
            world_ranks: self.segment.in_world(list),
            epoch: old.epoch.wrapping_add(round),
        })
    }

    fn given_up(&self) -> Failure {
        let (who, name) =
            (self.segment.roster().describe(&[self.segment.rank()]), self.segment.members().title());
        let text = format!("{who} was given up by the other ranks of {name}, which go on without it");
        Failure::new(FailureKind::RankLost, text).blaming([self.segment.world_rank(self.segment.rank())])
    }

    fn corrupt(&self) -> Failure {
        let text =
            format!("a rank of {} wrote a list of survivors that can not be", self.segment.members().title());
        Failure::new(FailureKind::Internal, text)
    }

    fn late(&self, missing: &[u32]) -> Failure {
        let segment = self.segment;
        let absent: Vec<u32> = segment.ranks().filter(|rank| !self.is_present(*rank)).collect();
        let here = segment.size() as usize - absent.len() - missing.len();
        let mut text = format!(
            "Timed out after {:?} shrinking {}: {here} of {} ranks came, missing {}",
            self.timeout,
            segment.members().title(),
            segment.size(),
            segment.roster().describe(missing)
        );
        if !absent.is_empty() {
            text += &format!("; {} lost", segment.roster().describe(&absent));
        }
        Failure::new(FailureKind::Timeout, text).blaming(segment.in_world(missing))
    }
}

fn lost_of(segment: &Segment) -> SharedRankSet<'_> {
    SharedRankSet::new(segment.region(), segment.layout().given_up(), segment.size())
}

/// Meets through the segment of the communicator that the ranks come from: their first one says there under
/// which of its descriptors the new segment is found. A launcher is told, who watches over it.
#[derive(Debug)]
pub(crate) struct SegmentBootstrap<'a> {
    segment: &'a Segment,
    members: &'a Membership,
    control: Option<&'a ControlClient>,
}

impl SegmentBootstrap<'_> {
    /// A survivor's rank in the old group.
    fn old(&self, rank: u32) -> u32 {
        let world_rank = self.members.world_ranks[rank as usize];
        let old = self.segment.ranks().find(|rank| self.segment.world_rank(*rank) == world_rank);
        old.expect("survivors are members")
    }
}

impl Bootstrap for SegmentBootstrap<'_> {
    fn offer(&self, segment: BorrowedFd<'_>) -> Result<(), Failure> {
        if let Some(client) = self.control {
            // Nobody fetches it from there, and a launcher that is gone is no reason to fail.
            let told = ControlBootstrap::watched(client, self.members).offer(segment);
            told.unwrap_or_else(|failure| tracing::warn!(%failure, "nobody watches over the survivors"));
        }
        let place = u64::from(self.members.epoch) << 32 | u64::from(segment.as_raw_fd() as u32);
        self.segment.roster().offered(self.segment.rank()).store(place, Ordering::Release);
        self.segment.bell().ring();
        Ok(())
    }

    fn fetch(&self, deadline: Instant) -> Result<OwnedFd, Failure> {
        let first = self.old(0);
        loop {
            let seen = self.segment.bell().rings();
            let place = self.segment.roster().offered(first).load(Ordering::Acquire);
            if (place >> 32) as u32 == self.members.epoch {
                return open_of_process(
                    "the shared segment of rank 0",
                    FileKind::Memory,
                    self.segment.roster().pid(first),
                    place as u32,
                );
            }
            let (who, name) = (self.segment.roster().describe(&[first]), self.members.title());
            let blamed = [self.segment.world_rank(first)];
            if self.is_gone(0) {
                let text =
                    format!("{}: {name} can not be created", self.segment.roster().describe_gone(&[first]));
                return Err(Failure::new(FailureKind::RankLost, text).blaming(blamed));
            }
            if interrupt::is_stopped() {
                return Err(interrupted(&name));
            }
            if Instant::now() >= deadline {
                let text = format!("Timed out creating {name}: {who} did not come");
                return Err(Failure::new(FailureKind::Timeout, text).blaming(blamed));
            }
            self.segment.bell().wait(seen, Some(deadline.min(Instant::now() + LOOK)));
        }
    }

    fn is_gone(&self, rank: u32) -> bool {
        self.segment.roster().liveness(self.old(rank)) == Liveness::Gone
    }
}
