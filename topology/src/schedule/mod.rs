//! Schedules as data: what one rank does in one collective, step by step.
//!
//! The ground floor: this room knows no shape, no machine and no algorithm's inside.

mod table;
mod traffic;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

pub use table::Table;
pub use traffic::{ScheduleTraffic, Tensor};

/// The most ranks an all-to-all can have: it numbers a chunk for each pair of ranks in 32 bits.
pub const MAX_ALL_TO_ALL_RANKS: u32 = u16::MAX as u32;

/// A collective that all ranks together are asked for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Collective {
    /// Every rank ends with the reduction of all inputs.
    AllReduce,
    /// Every rank ends with the inputs of all ranks side by side.
    AllGather,
    /// Rank r ends with share r of the reduction of all inputs.
    ReduceScatter,
    /// Every rank ends with the input of `root`.
    Broadcast {
        /// The rank whose input it is.
        root: u32,
    },
    /// Rank r ends with share r of the input of every rank.
    AllToAll,
}

/// How it is done.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Algorithm {
    /// Through memory that all ranks of a host can read; the last rank to arrive reduces.
    Flat,
    /// Around a ring in rank order.
    Ring,
    /// Dimension by dimension over a grid.
    Bucket,
}

/// Chunk `chunk` cut into as many parts as the schedule says; part p of a chunk of `len` elements covers
/// elements `[len*p/parts, len*(p+1)/parts)` of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Block {
    /// Which chunk; [`Schedule::chunks`] says what a chunk is.
    pub chunk: u32,
    /// Which part of it.
    pub part: u32,
}

/// The thing to do with a block that arrives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// It replaces the working copy.
    Copy,
    /// It is folded into the working copy, the arrived block as the first operand.
    Reduce,
}

/// Where a block is fetched from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// The window of this rank, the fetching one's own included.
    Rank(u32),
    /// The result that the last rank to arrive at a [`Step::Meet`] made.
    Folded,
}

/// One step of one rank.
///
/// A message belongs to its channel, its sender and its receiver: each such triple is a queue in order with
/// room for one block. A window is memory of one rank that all ranks of its host can read; what a rank
/// publishes is there for the others once they have gone through a later [`Step::Meet`] of that channel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Send this rank's working copy of the block; done when the queue has room for it.
    Send {
        /// The receiver.
        to: u32,
        /// The block that is sent.
        block: Block,
    },
    /// Take the next block of the queue.
    Receive {
        /// The sender.
        from: u32,
        /// The block that it must be.
        block: Block,
        /// The thing to do with it.
        action: Action,
    },
    /// Put this rank's input of the block into its window.
    Publish {
        /// The block that is put there.
        block: Block,
    },
    /// Wait for all ranks. The last to arrive folds these blocks of all windows, in rank order 0..P, before
    /// anybody goes on.
    Meet {
        /// The blocks to fold, the same on every rank.
        fold: Vec<Block>,
    },
    /// Read a block from a window or from what was folded. Fetches that reduce happen in the listed order.
    Fetch {
        /// Where it is read.
        from: Source,
        /// The block that is read.
        block: Block,
        /// The thing to do with it.
        action: Action,
    },
}

/// The work of one rank in one collective.
///
/// The channels run beside each other and touch different blocks; the steps of one channel run in order.
/// A rank works on its working copies: they start as [`Schedule::is_input`] says and must end as
/// [`Schedule::is_output`] says. Blocks that are neither, of an all-to-all, are scratch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Schedule {
    /// The collective that is asked.
    pub collective: Collective,
    /// How it is done.
    pub algorithm: Algorithm,
    /// How many ranks take part.
    pub ranks: u32,
    /// The rank whose schedule this is.
    pub rank: u32,
    /// Parts that each chunk is cut into.
    pub parts: u32,
    /// The steps of each channel.
    pub channels: Vec<Vec<Step>>,
}

impl Schedule {
    /// How many chunks the collective moves.
    ///
    /// - All-reduce and broadcast: the tensor is cut into P chunks, chunk c of n elements being
    ///   `[n*c/P, n*(c+1)/P)`; flat does not cut, chunk 0 is the whole tensor.
    /// - All-gather: chunk c is the contribution of rank c.
    /// - Reduce-scatter: chunk c is what rank c ends with.
    /// - All-to-all: chunk `src*P + dst` is what rank `src` has for rank `dst`.
    pub fn chunks(&self) -> u32 {
        match self.collective {
            Collective::AllReduce | Collective::Broadcast { .. } if self.algorithm == Algorithm::Flat => 1,
            Collective::AllToAll => self.ranks * self.ranks,
            _ => self.ranks,
        }
    }

    /// The elements of a chunk when all chunks together have `elements` elements and are cut evenly.
    pub fn chunk_range(&self, elements: u64, chunk: u32) -> Range<u64> {
        cut(elements, chunk, self.chunks())
    }

    /// The elements of a block within its chunk of `chunk_elements` elements.
    pub fn part_range(&self, chunk_elements: u64, part: u32) -> Range<u64> {
        cut(chunk_elements, part, self.parts)
    }

    /// The elements of a block when all chunks together have `elements` elements and are cut evenly.
    pub fn block_range(&self, elements: u64, block: Block) -> Range<u64> {
        let chunk = self.chunk_range(elements, block.chunk);
        let part = self.part_range(chunk.end - chunk.start, block.part);
        chunk.start + part.start..chunk.start + part.end
    }

    /// Whether this rank starts with a working copy of the chunk: its own input.
    pub fn is_input(&self, chunk: u32) -> bool {
        match self.collective {
            Collective::AllReduce | Collective::ReduceScatter => true,
            Collective::AllGather => chunk == self.rank,
            Collective::Broadcast { root } => root == self.rank,
            Collective::AllToAll => chunk / self.ranks == self.rank,
        }
    }

    /// Whether this rank must end with the chunk.
    pub fn is_output(&self, chunk: u32) -> bool {
        match self.collective {
            Collective::AllReduce | Collective::AllGather | Collective::Broadcast { .. } => true,
            Collective::ReduceScatter => chunk == self.rank,
            Collective::AllToAll => chunk % self.ranks == self.rank,
        }
    }
}

impl Collective {
    /// Whether blocks are folded on the way.
    pub fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter)
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllReduce => f.write_str("all_reduce"),
            Self::AllGather => f.write_str("all_gather"),
            Self::ReduceScatter => f.write_str("reduce_scatter"),
            Self::Broadcast { root } => write!(f, "broadcast from {root}"),
            Self::AllToAll => f.write_str("all_to_all"),
        }
    }
}

impl Algorithm {
    /// Every algorithm, cheapest to set up first.
    pub const ALL: [Self; 3] = [Self::Flat, Self::Ring, Self::Bucket];
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flat => "flat",
            Self::Ring => "ring",
            Self::Bucket => "bucket",
        })
    }
}

/// A name that no algorithm has.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("algorithm {given:?} is unknown, expected flat, ring or bucket")]
pub struct UnknownAlgorithm {
    /// The name as written.
    pub given: String,
}

impl FromStr for Algorithm {
    type Err = UnknownAlgorithm;

    fn from_str(text: &str) -> Result<Self, UnknownAlgorithm> {
        let known = Self::ALL.into_iter().find(|algorithm| algorithm.to_string() == text);
        known.ok_or_else(|| UnknownAlgorithm { given: text.to_owned() })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Copy => "=",
            Self::Reduce => "+",
        })
    }
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.chunk, self.part)
    }
}

impl fmt::Display for Step {
    /// `3.0>1` sends chunk 3 part 0 to rank 1, `2.0<3+` receives and reduces, `2.0<3=` receives and copies;
    /// `2.0^` publishes, `|2.0|` meets and folds, `2.0@3+` fetches from the window of rank 3, `2.0@*=`
    /// from what was folded.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.cell(|block| block.to_string()))
    }
}

impl Step {
    /// The step as a cell of a table, its blocks named by `name`.
    fn cell(&self, name: impl Fn(Block) -> String) -> String {
        match self {
            Self::Send { to, block } => format!("{}>{to}", name(*block)),
            Self::Receive { from, block, action } => format!("{}<{from}{action}", name(*block)),
            Self::Publish { block } => format!("{}^", name(*block)),
            Self::Meet { fold } => {
                let blocks: Vec<String> = fold.iter().map(|&block| name(block)).collect();
                format!("|{}|", blocks.join(","))
            }
            Self::Fetch { from: Source::Rank(rank), block, action } => {
                format!("{}@{rank}{action}", name(*block))
            }
            Self::Fetch { from: Source::Folded, block, action } => format!("{}@*{action}", name(*block)),
        }
    }

    /// The blocks it names.
    pub(crate) fn blocks(&self) -> &[Block] {
        match self {
            Self::Send { block, .. }
            | Self::Receive { block, .. }
            | Self::Publish { block }
            | Self::Fetch { block, .. } => std::slice::from_ref(block),
            Self::Meet { fold } => fold,
        }
    }
}

/// Share `index` of `count` even shares of `length`.
pub(crate) fn cut(length: u64, index: u32, count: u32) -> Range<u64> {
    // 128 bits: all-to-all has up to 2^32 chunks, which a large tensor overflows 64 bits with.
    let at = |share: u32| (u128::from(length) * u128::from(share) / u128::from(count)) as u64;
    at(index)..at(index + 1)
}
