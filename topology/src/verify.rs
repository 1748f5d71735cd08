//! The verifier: proves what the schedules of all ranks do together.
//!
//! It runs the schedules on symbols instead of numbers: a block is the set of ranks whose input is folded
//! into it, and the order of folding. A queue holds one block, and steps that can go on do, in any order: as
//! every queue has one sender and one receiver, and channels of a rank touch different blocks, the order
//! changes nothing, so one run stands for all of them.

mod contents;
mod run;

use std::collections::BTreeMap;
use std::fmt;

use crate::schedule::{Block, Collective, Schedule, Source, Step};
use crate::traffic::{Tensor, Traffic};
use contents::RankSet;
use run::Run;

/// Figures that the verifier found for schedules that are right.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Proof {
    /// The bytes that the ranks moved.
    pub traffic: Traffic,
    /// Messages and meetings on the longest path through all ranks, each waiting for the one before.
    pub rounds: u64,
    /// Messages sent by all ranks.
    pub messages: u64,
}

impl Proof {
    /// Checks the bytes moved against a formula.
    ///
    /// # Errors
    /// The first pair of ranks, or the shared memory, that moved something else.
    pub fn expect_traffic(&self, formula: &Traffic) -> Result<(), VerifyError> {
        let (given, expected) = (self.traffic.memory(), formula.memory());
        if given != expected {
            return Err(VerifyError::MemoryTraffic { expected, given });
        }
        let pairs = self.traffic.iter().chain(formula.iter());
        let differs =
            |&(from, to, _): &(u32, u32, u64)| self.traffic.between(from, to) != formula.between(from, to);
        match pairs.into_iter().find(differs) {
            None => Ok(()),
            Some((from, to, _)) => Err(VerifyError::LinkTraffic {
                from,
                to,
                expected: formula.between(from, to),
                given: self.traffic.between(from, to),
            }),
        }
    }
}

/// A step of a schedule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Site {
    /// The rank whose schedule it is.
    pub rank: u32,
    /// Which channel.
    pub channel: u32,
    /// Which step of the channel.
    pub step: u32,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} channel {} step {}", self.rank, self.channel, self.step)
    }
}

/// A step that never comes to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wait {
    /// The step.
    pub site: Site,
    /// The rank that would have to do something.
    pub on: u32,
    /// The thing it would have to do.
    pub need: Need,
}

/// The event that a step waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Need {
    /// A message.
    Message,
    /// Room in a queue.
    Room,
    /// Arrival at a meeting.
    Arrival,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let need = match self.need {
            Need::Message => "send",
            Need::Room => "receive",
            Need::Arrival => "arrive",
        };
        write!(f, "{} waits for rank {} to {need}", self.site, self.on)
    }
}

/// A fault in a set of schedules.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// Not one schedule for each rank.
    #[error("there are {given} schedules, expected one for each of {ranks} ranks")]
    Incomplete {
        /// Ranks the schedules speak of.
        ranks: u32,
        /// Schedules given.
        given: usize,
    },
    /// A schedule that is not of the same collective as the first.
    #[error("schedule {index} differs from schedule 0 in its {field}")]
    Differs {
        /// Its place in the list.
        index: u32,
        /// The name of the field that differs.
        field: &'static str,
    },
    /// A root that is no rank.
    #[error("broadcast root is {root}, expected a rank below {ranks}")]
    NoSuchRoot {
        /// The root.
        root: u32,
        /// How many ranks there are.
        ranks: u32,
    },
    /// A step that names no other rank.
    #[error("{site} names rank {given}, expected another rank below {ranks}")]
    NoSuchRank {
        /// The step.
        site: Site,
        /// The rank it names.
        given: u32,
        /// How many ranks there are.
        ranks: u32,
    },
    /// A step that names a block outside the collective.
    #[error("{site} names block {block}, expected one of {chunks} chunks in {parts} parts")]
    NoSuchBlock {
        /// The step.
        site: Site,
        /// The block it names.
        block: Block,
        /// How many chunks there are.
        chunks: u32,
        /// How many parts there are.
        parts: u32,
    },
    /// Two channels that touch the same block in no order.
    #[error("rank {rank} touches block {block} on channels {first} and {second}, expected one of them")]
    SharedBlock {
        /// The rank.
        rank: u32,
        /// The block.
        block: Block,
        /// One channel.
        first: u32,
        /// The other one.
        second: u32,
    },
    /// A step that needs a block the rank does not have yet.
    #[error("{site} needs block {block}, which the rank does not have")]
    Missing {
        /// The step.
        site: Site,
        /// The block.
        block: Block,
    },
    /// A message that is not the one expected.
    #[error("{site} gets block {given} from rank {from}, expected block {expected}")]
    WrongBlock {
        /// The step.
        site: Site,
        /// The sender.
        from: u32,
        /// The block the step names.
        expected: Block,
        /// The block that came.
        given: Block,
    },
    /// A contribution that is folded in a second time.
    #[error("{site} reduces the contribution of rank {contributor} to block {block} a second time")]
    ReducedTwice {
        /// The step.
        site: Site,
        /// The block.
        block: Block,
        /// The rank whose contribution it is.
        contributor: u32,
    },
    /// A window block written again, maybe while others read it.
    #[error("{site} publishes block {block} a second time")]
    PublishedTwice {
        /// The step.
        site: Site,
        /// The block.
        block: Block,
    },
    /// A window block that is read or folded before a meeting made it visible.
    #[error("{site} reads block {block} of the window of rank {from}, which no meeting has shown")]
    NotPublished {
        /// The step.
        site: Site,
        /// The rank whose window it is.
        from: u32,
        /// The block.
        block: Block,
    },
    /// A folded block that is read although no meeting folded it.
    #[error("{site} reads the fold of block {block}, which no meeting has made")]
    NotFolded {
        /// The step.
        site: Site,
        /// The block.
        block: Block,
    },
    /// Ranks that meet to fold different blocks.
    #[error("{site} meets to fold other blocks than the first rank to arrive")]
    MeetingDiffers {
        /// The step.
        site: Site,
    },
    /// Steps that wait for each other, or for a rank that is done.
    #[error("deadlock: {}", deadlock_text(circle, waits))]
    Deadlock {
        /// Ranks that wait each for the next and the last for the first; empty when the end of the chain is
        /// a rank that has nothing left to do.
        circle: Vec<u32>,
        /// Every step that waits.
        waits: Vec<Wait>,
    },
    /// A message that nobody takes.
    #[error("block {block} from rank {from} to rank {to} on channel {channel} is never received")]
    Unread {
        /// The sender.
        from: u32,
        /// The receiver.
        to: u32,
        /// The channel.
        channel: u32,
        /// The block.
        block: Block,
    },
    /// A block that ends with too little or with something else.
    #[error("rank {rank} ends with block {block} of ranks {given:?}, expected {expected:?}")]
    WrongResult {
        /// The rank.
        rank: u32,
        /// The block.
        block: Block,
        /// The ranks whose contributions it should have.
        expected: Vec<u32>,
        /// The ranks whose contributions it has.
        given: Vec<u32>,
    },
    /// Two ranks whose results are folded in different orders, and so may differ in their last bits.
    #[error("rank {rank} ends with block {block} folded in another order than rank {other}")]
    OrderDiffers {
        /// The rank.
        rank: u32,
        /// The rank it is compared with.
        other: u32,
        /// The block.
        block: Block,
    },
    /// Other bytes between two ranks than the formula says.
    #[error("rank {from} sends {given} bytes to rank {to}, expected {expected}")]
    LinkTraffic {
        /// The sender.
        from: u32,
        /// The receiver.
        to: u32,
        /// By formula.
        expected: u64,
        /// As run.
        given: u64,
    },
    /// Other bytes through memory than the formula says.
    #[error("{given} bytes go through shared memory, expected {expected}")]
    MemoryTraffic {
        /// By formula.
        expected: u64,
        /// As run.
        given: u64,
    },
}

/// Proves the schedules of all ranks, in rank order, for a tensor.
///
/// That is: every rank ends with exactly what the collective promises, each contribution folded in once, and
/// in the same order on all ranks that end with the same block; no step waits for ever with room for one
/// block in each queue; no message is left; steps name ranks and blocks that exist; channels of a rank touch
/// different blocks; what is read from a window was published before a meeting.
///
/// # Errors
/// The first thing found wrong.
pub fn verify(schedules: &[Schedule], tensor: Tensor) -> Result<Proof, VerifyError> {
    check_agreement(schedules)?;
    schedules.iter().try_for_each(check_steps)?;
    schedules.iter().try_for_each(check_channels)?;
    let run = Run::new(schedules, tensor).finish()?;
    schedules.iter().try_for_each(|schedule| check_result(schedule, &run))?;
    Ok(run.proof)
}

fn check_agreement(schedules: &[Schedule]) -> Result<(), VerifyError> {
    let given = schedules.len();
    let first = schedules.first().ok_or(VerifyError::Incomplete { ranks: 1, given })?;
    let ranks = first.ranks;
    if given != ranks as usize {
        return Err(VerifyError::Incomplete { ranks, given });
    }
    if let Collective::Broadcast { root } = first.collective
        && root >= ranks
    {
        return Err(VerifyError::NoSuchRoot { root, ranks });
    }
    for (index, schedule) in (0..).zip(schedules) {
        let differences = [
            ("rank", schedule.rank != index),
            ("ranks", schedule.ranks != ranks),
            ("collective", schedule.collective != first.collective),
            ("algorithm", schedule.algorithm != first.algorithm),
            ("parts", schedule.parts != first.parts || schedule.parts == 0),
            ("channels", schedule.channels.len() != first.channels.len()),
        ];
        if let Some((field, _)) = differences.into_iter().find(|&(_, differs)| differs) {
            return Err(VerifyError::Differs { index, field });
        }
    }
    Ok(())
}

fn sites(schedule: &Schedule) -> impl Iterator<Item = (Site, &Step)> {
    (0..).zip(&schedule.channels).flat_map(move |(channel, steps)| {
        let site = move |step| Site { rank: schedule.rank, channel, step };
        (0..).zip(steps).map(move |(step, what)| (site(step), what))
    })
}

fn check_steps(schedule: &Schedule) -> Result<(), VerifyError> {
    let (ranks, chunks, parts) = (schedule.ranks, schedule.chunks(), schedule.parts);
    for (site, step) in sites(schedule) {
        let other = match step {
            Step::Send { to, .. } => Some(*to),
            Step::Receive { from, .. } => Some(*from),
            Step::Fetch { from: Source::Rank(from), .. } => Some(*from).filter(|&from| from != site.rank),
            _ => None,
        };
        if let Some(given) = other.filter(|&other| other >= ranks || other == schedule.rank) {
            return Err(VerifyError::NoSuchRank { site, given, ranks });
        }
        if let Some(&block) = step.blocks().iter().find(|block| block.chunk >= chunks || block.part >= parts)
        {
            return Err(VerifyError::NoSuchBlock { site, block, chunks, parts });
        }
    }
    Ok(())
}

/// The way a channel touches a block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Touch {
    Read,
    Write,
}

fn check_channels(schedule: &Schedule) -> Result<(), VerifyError> {
    let mut touched: BTreeMap<Block, (u32, Touch)> = BTreeMap::new();
    for (site, step) in sites(schedule) {
        let (block, touch) = match step {
            Step::Send { block, .. } | Step::Publish { block } => (*block, Touch::Read),
            Step::Receive { block, .. } | Step::Fetch { block, .. } => (*block, Touch::Write),
            Step::Meet { .. } => continue,
        };
        let (channel, before) = touched.entry(block).or_insert((site.channel, touch));
        if *channel != site.channel && (*before).max(touch) == Touch::Write {
            let (rank, first, second) = (schedule.rank, *channel, site.channel);
            return Err(VerifyError::SharedBlock { rank, block, first, second });
        }
        *before = (*before).max(touch);
    }
    Ok(())
}

fn check_result(schedule: &Schedule, run: &Run<'_>) -> Result<(), VerifyError> {
    let Schedule { rank, ranks, .. } = *schedule;
    for chunk in (0..schedule.chunks()).filter(|&chunk| schedule.is_output(chunk)) {
        let expected = match schedule.collective {
            Collective::AllReduce | Collective::ReduceScatter => RankSet::of_all(ranks),
            Collective::AllGather => RankSet::of(chunk),
            Collective::Broadcast { root } => RankSet::of(root),
            Collective::AllToAll => RankSet::of(chunk / ranks),
        };
        for part in 0..schedule.parts {
            let block = Block { chunk, part };
            let given = run.working_copy(rank, block).filter(|given| given.ranks == expected);
            let Some(given) = given else {
                let given =
                    run.working_copy(rank, block).map_or(vec![], |given| given.ranks.iter().collect());
                let expected = expected.iter().collect();
                return Err(VerifyError::WrongResult { rank, block, expected, given });
            };
            let other = (0..rank).find(|_| schedule.collective == Collective::AllReduce);
            if let Some(other) = other
                && run.working_copy(other, block).is_some_and(|theirs| theirs.order != given.order)
            {
                return Err(VerifyError::OrderDiffers { rank, other, block });
            }
        }
    }
    Ok(())
}

fn deadlock_text(circle: &[u32], waits: &[Wait]) -> String {
    /// Enough to see what goes on; the rest is in the error's fields.
    const SHOWN: usize = 2;
    let shown = waits.iter().take(SHOWN).map(Wait::to_string).collect::<Vec<_>>().join(", ");
    let more = match waits.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    let closed = circle.iter().chain(circle.first()).map(u32::to_string).collect::<Vec<_>>().join(" -> ");
    match circle {
        [] => format!("{shown}{more}"),
        _ => format!("ranks {closed} in a circle: {shown}{more}"),
    }
}
