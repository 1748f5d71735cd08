//! The creation of a communicator: its ranks meet in the segment of their host, which the first rank there makes.

pub mod bootstrap;
pub(crate) mod survivors;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::hosts::network::Crossing;
use tpurun_memory::failure::{Failure, FailureKind, INTERRUPTED};
use tpurun_memory::process::LOOK_PERIOD;
use tpurun_memory::sync::{Standing, interrupt};
use tpurun_protocol::hosts::{self, Hosts};
use tpurun_protocol::membership::Membership;
use tpurun_protocol::rank_list::RankList;
use tpurun_protocol::segment::bell::Ears;
use tpurun_protocol::segment::{Segment, Settings, Verdict};

/// How the ranks of a host hand each other the descriptor of their segment.
pub trait Bootstrap {
    /// Finds out which ranks share a host, and takes rank 0's settings to all of them.
    ///
    /// # Errors
    /// The failure of the store or of the control plane.
    fn survey(&self, members: &Membership, settings: Settings) -> Result<(Hosts, Settings), Failure> {
        Ok((Hosts::one(members.size()), settings))
    }

    /// The first rank of a host: offers the segment to all others there.
    ///
    /// # Errors
    /// The failure of the store or of the control plane.
    fn offer(&self, segment: BorrowedFd<'_>) -> Result<(), Failure>;
    /// The others: waits for it.
    ///
    /// # Errors
    /// As above, or that the deadline passed.
    fn fetch(&self, deadline: Instant) -> Result<OwnedFd, Failure>;
    /// The first rank of a host, where there are others: connects to them.
    ///
    /// # Errors
    /// As above, or that the host refuses a socket.
    fn connect(&self, segment: &Arc<Segment>, ears: Ears) -> Result<Crossing, Failure> {
        let (_, _) = (segment, ears);
        Err(Failure::new(FailureKind::Internal, "these ranks are on one host"))
    }

    /// This rank cannot make the segment, or cannot join it: those who wait for that learn why.
    fn give_up(&self, members: &Membership, failure: &Failure) {
        let (_, _) = (members, failure);
    }

    /// The segment of this rank has failed before all came: those who come too late to find it learn why.
    fn pass_on(&self, failure: &Failure) {
        let _ = failure;
    }

    /// Whether a rank that has not come never will; not every bootstrap can tell.
    fn is_gone(&self, rank: u32) -> bool {
        let _ = rank;
        false
    }

    /// How long to leave it to somebody else, who knows how a rank ended, to say that it is gone.
    fn grace(&self) -> Duration {
        Duration::ZERO
    }
}

/// Creates (the first rank of a host) or joins the segment, and returns when all ranks are in.
pub(crate) fn rendezvous(
    members: Membership,
    settings: Settings,
    bootstrap: &dyn Bootstrap,
    timeout: Duration,
) -> Result<(Arc<Segment>, Option<Crossing>), Failure> {
    let deadline = Instant::now() + timeout;
    let given_up = |failure: Failure| {
        let failure = unless_interrupted(failure, &members.title());
        bootstrap.give_up(&members, &failure);
        failure
    };
    let (hosts, settings) = bootstrap.survey(&members, settings).map_err(given_up)?;
    let is_first = hosts.first(hosts.of(members.rank)) == members.rank;
    if !is_first {
        let segment = fetched(&members, hosts, bootstrap, deadline).map_err(given_up)?;
        wait_for_all(&segment, bootstrap, deadline, timeout)?;
        return Ok((Arc::new(segment), None));
    }
    let (segment, fd, ears) = offered_by_us(&members, hosts, settings, bootstrap).map_err(given_up)?;
    let segment = Arc::new(segment);
    let crossing = ears.map(|ears| bootstrap.connect(&segment, ears)).transpose().map_err(|failure| {
        let failure = unless_interrupted(failure, &members.title());
        give_up_creation(&segment, &failure);
        segment.failure_word().decide_alone();
        given_up(failure)
    })?;
    wait_for_all(&segment, bootstrap, deadline, timeout).inspect_err(|why| bootstrap.pass_on(why))?;
    // Only now may the descriptor go: others may have opened it through this process.
    drop(fd);
    Ok((segment, crossing))
}

/// The segment that the first rank of this host has made.
fn fetched(
    members: &Membership,
    hosts: Hosts,
    bootstrap: &dyn Bootstrap,
    deadline: Instant,
) -> Result<Segment, Failure> {
    let maker = hosts.first(hosts.of(members.rank));
    // A segment that a process had open is gone with it.
    let blame = |failure: Failure| match failure.kind() {
        FailureKind::RankLost if failure.ranks().is_empty() => {
            failure.blaming([members.world_ranks[maker as usize]])
        }
        _ => failure,
    };
    let fd = bootstrap.fetch(deadline).map_err(blame)?;
    let mut segment = Segment::join(members.clone(), &fd)?.on(hosts, bootstrap.grace());
    if segment.is_bridged() {
        // Where that rank has given up, it has said so before it let go of its bell.
        let heard = segment.open_bell();
        heard.map_err(|none| segment.failure().unwrap_or_else(|| blame(none)))?;
    }
    segment.attach()?;
    Ok(segment)
}

/// The segment that this rank, the first of its host, has made and the others are given; its descriptor, and what
/// hears the others' bell where there are other hosts.
fn offered_by_us(
    members: &Membership,
    hosts: Hosts,
    settings: Settings,
    bootstrap: &dyn Bootstrap,
) -> Result<(Segment, OwnedFd, Option<Ears>), Failure> {
    let (mut segment, fd) = Segment::create(members.clone(), hosts, settings, bootstrap.grace())?;
    let ears = if segment.is_bridged() { Some(segment.make_bell()?) } else { None };
    segment.attach()?;
    bootstrap.offer(fd.as_fd())?;
    Ok((segment, fd, ears))
}

fn wait_for_all(
    segment: &Segment,
    bootstrap: &dyn Bootstrap,
    deadline: Instant,
    timeout: Duration,
) -> Result<(), Failure> {
    for look in 0.. {
        let until = deadline.min(Instant::now() + LOOK_PERIOD);
        let here = match segment.roster().attendance().wait(segment.size(), Some(until)) {
            Standing::Whole => return Ok(()),
            Standing::Ended => break,
            Standing::Waiting(here) => here,
        };
        if interrupt::is_stopped() {
            give_up_creation(segment, &interrupted(&segment.members().title()));
        } else if let Some(verdict) = hopeless(segment, bootstrap, look) {
            segment.failure_word().fail_creation(&verdict);
        } else if Instant::now() >= deadline {
            segment.failure_word().fail_creation(&late(segment, here, timeout));
        }
    }
    let nobody_said = || Failure::new(FailureKind::Internal, "closed without a failure");
    Err(segment.failure().unwrap_or_else(nobody_said))
}

/// Says that ranks which are needed are gone, if any are.
fn hopeless(segment: &Segment, bootstrap: &dyn Bootstrap, look: u32) -> Option<Verdict> {
    let (came, missing): (Vec<u32>, Vec<u32>) =
        segment.ranks().partition(|rank| segment.roster().pid(*rank) != 0);
    let mut lost = segment.roster().lost_among(&came, &came, look);
    lost.extend(missing.iter().copied().filter(|rank| bootstrap.is_gone(*rank)));
    if lost.is_empty() {
        return None;
    }
    lost.sort_unstable();
    let title = segment.members().title();
    let text = format!("{}: {title} can not be created", segment.roster().describe_gone(&lost));
    Some(Verdict::new(FailureKind::RankLost, text).blaming(lost))
}

/// Says that only `here` ranks came in time.
fn late(segment: &Segment, here: u32, timeout: Duration) -> Verdict {
    let missing: Vec<u32> = segment.ranks().filter(|rank| segment.roster().pid(*rank) == 0).collect();
    let text = format!(
        "Timed out after {timeout:?} creating {}: {here} of {} ranks came, missing rank {}{}",
        segment.members().title(),
        segment.size(),
        RankList(&segment.in_world(&missing)),
        segment.note()
    );
    Verdict::new(FailureKind::Timeout, text).blaming(missing)
}

/// Ends the creation for all ranks because of what has failed on this one.
fn give_up_creation(segment: &Segment, failure: &Failure) {
    let told = as_others_learn_it(segment.members(), failure);
    segment.failure_word().fail_creation(&segment.failure_word().verdict(
        told.kind(),
        told.text(),
        told.ranks(),
    ));
}

/// Whether it is this rank that cannot make a group, or cannot join it: the others know nothing of that yet.
pub(crate) fn is_its_own(failure: &Failure) -> bool {
    !matches!(failure.kind(), FailureKind::Timeout | FailureKind::RankLost) && failure.ranks().is_empty()
}

/// Returns the failure that a rank which cannot make a group, or cannot join it, tells the others.
pub(crate) fn as_others_learn_it(members: &Membership, failure: &Failure) -> Failure {
    if !is_its_own(failure) {
        return failure.clone();
    }
    let rank = members.world_ranks[members.rank as usize];
    let (host, pid) = (hosts::shown_name(), std::process::id());
    let text = format!("rank {rank} (host {host}, pid {pid}) {}", failure.text());
    Failure::new(FailureKind::Aborted, text).blaming([rank])
}

/// Returns the reason why a rank makes no group: a wait that its program has ended says only that nothing came.
fn unless_interrupted(failure: Failure, title: &str) -> Failure {
    if interrupt::is_stopped() { interrupted(title) } else { failure }
}

/// The program of this rank waits no longer for the group of this title.
pub(crate) fn interrupted(title: &str) -> Failure {
    Failure::new(FailureKind::Aborted, format!("stopped creating {title}: {INTERRUPTED}"))
}
