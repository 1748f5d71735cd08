//! The faults that the verifier finds, and the steps they are of.

use std::fmt;

use crate::schedule::Block;

/// A step of a schedule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepSite {
    /// The rank whose schedule it is.
    pub rank: u32,
    /// Which channel.
    pub channel: u32,
    /// Which step of the channel.
    pub step: u32,
}

impl fmt::Display for StepSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} channel {} step {}", self.rank, self.channel, self.step)
    }
}

/// A step that never comes to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StuckStep {
    /// The step.
    pub site: StepSite,
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

impl fmt::Display for StuckStep {
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
        site: StepSite,
        /// The rank it names.
        given: u32,
        /// How many ranks there are.
        ranks: u32,
    },
    /// A step that names a block outside the collective.
    #[error("{site} names block {block}, expected one of {chunks} chunks in {parts} parts")]
    NoSuchBlock {
        /// The step.
        site: StepSite,
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
        site: StepSite,
        /// The block.
        block: Block,
    },
    /// A message that is not the one expected.
    #[error("{site} gets block {given} from rank {from}, expected block {expected}")]
    WrongBlock {
        /// The step.
        site: StepSite,
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
        site: StepSite,
        /// The block.
        block: Block,
        /// The rank whose contribution it is.
        contributor: u32,
    },
    /// A window block written again, maybe while others read it.
    #[error("{site} publishes block {block} a second time")]
    PublishedTwice {
        /// The step.
        site: StepSite,
        /// The block.
        block: Block,
    },
    /// A window block that is read or folded before a meeting made it visible.
    #[error("{site} reads block {block} of the window of rank {from}, which no meeting has shown")]
    NotPublished {
        /// The step.
        site: StepSite,
        /// The rank whose window it is.
        from: u32,
        /// The block.
        block: Block,
    },
    /// A folded block that is read although no meeting folded it.
    #[error("{site} reads the fold of block {block}, which no meeting has made")]
    NotFolded {
        /// The step.
        site: StepSite,
        /// The block.
        block: Block,
    },
    /// Ranks that meet to fold different blocks.
    #[error("{site} meets to fold other blocks than the first rank to arrive")]
    MeetingDiffers {
        /// The step.
        site: StepSite,
    },
    /// Steps that wait for each other, or for a rank that is done.
    #[error("deadlock: {}", deadlock_text(circle, waits))]
    Deadlock {
        /// Ranks that wait each for the next and the last for the first; empty when the end of the chain is
        /// a rank that has nothing left to do.
        circle: Vec<u32>,
        /// Every step that waits.
        waits: Vec<StuckStep>,
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

fn deadlock_text(circle: &[u32], waits: &[StuckStep]) -> String {
    /// Enough to see what goes on; the rest is in the error's fields.
    const SHOWN: usize = 2;
    let shown = waits.iter().take(SHOWN).map(StuckStep::to_string).collect::<Vec<_>>().join(", ");
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
