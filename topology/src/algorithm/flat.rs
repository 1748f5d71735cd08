//! Flat: through windows that all ranks of one host can read, and one meeting.
//!
//! One channel, one part. P ranks, V bytes; the bytes read and written count windows as copies (a window that
//! is the tensor itself costs nothing to publish), and a run of reducing fetches as one pass:
//!
//! - all-reduce: rank r publishes its tensor; the last to arrive folds all of them in rank order; rank r
//!   fetches the result. (5P+1)·V bytes. With two ranks, each folds both windows for itself, in rank order
//!   too: 10·V bytes instead of 11·V, and nobody waits for a fold.
//! - reduce-scatter: rank r publishes its input, then folds chunk r of the windows of ranks 0..P, in that
//!   order, its own being one of them. (3P+1)·V bytes, and on one host the same bits as the all-reduce gives.
//! - all-gather: rank r publishes its chunk and fetches those of the others. 2P·V bytes.
//! - broadcast: the root publishes its tensor, the others fetch it. 2P·V bytes.
//! - all-to-all: rank r publishes what it has for the others and fetches what they have for it. 4(P-1)·M
//!   bytes, M being what each rank has.
//!
//! A rank sleeps at most once, at the meeting. A window may be filled again once every rank has gone
//! through the meeting of the next collective: two windows for each rank, used in turn, are enough.

use super::load::{Cuts, Load, check};
use crate::schedule::{
    Action, Algorithm, Block, Collective, Schedule, ScheduleTraffic, Source, Step, Tensor,
};

/// The schedule of one rank of a host.
///
/// # Panics
/// As [`super::schedule`].
pub fn schedule(collective: Collective, ranks: u32, rank: u32) -> Schedule {
    check(collective, ranks, rank);
    let channels = if ranks == 1 { vec![] } else { vec![steps(collective, ranks, rank)] };
    Schedule { collective, algorithm: Algorithm::Flat, ranks, rank, parts: 1, channels }
}

/// Returns the traffic of all ranks: nothing goes from rank to rank, everything goes through memory.
pub fn traffic(collective: Collective, ranks: u32, tensor: Tensor) -> ScheduleTraffic {
    let mut traffic = ScheduleTraffic::default();
    if ranks == 1 {
        return traffic;
    }
    let whole = tensor.elements * tensor.element_bytes;
    let count = u64::from(ranks);
    traffic.add_memory(match collective {
        Collective::AllReduce => all_reduce_passes(ranks) * whole,
        Collective::ReduceScatter => (3 * count + 1) * whole,
        Collective::AllGather | Collective::Broadcast { .. } => 2 * count * whole,
        Collective::AllToAll => {
            let cuts = Cuts { tensor, chunks: ranks * ranks, parts: 1 };
            let own = (0..ranks).map(|rank| cuts.bytes(Block { chunk: rank * ranks + rank, part: 0 }));
            4 * (whole - own.sum::<u64>())
        }
    });
    traffic
}

/// Returns the load that a schedule puts on shared memory: one meeting, and `total` passes over the bytes
/// of the collective.
pub fn load(collective: Collective, ranks: u32) -> Load {
    if ranks == 1 {
        return Load::NONE;
    }
    let count = f64::from(ranks);
    let passes = match collective {
        Collective::AllReduce => all_reduce_passes(ranks) as f64,
        Collective::ReduceScatter => 3.0 * count + 1.0,
        Collective::AllGather | Collective::Broadcast { .. } => 2.0 * count,
        Collective::AllToAll => 4.0 * (count - 1.0),
    };
    Load { rounds: 1, busiest: 0.0, total: passes, channels: 1 }
}

/// Over the bytes of the tensor: two ranks fold for themselves, more fold together.
fn all_reduce_passes(ranks: u32) -> u64 {
    if ranks == 2 { 10 } else { 5 * u64::from(ranks) + 1 }
}

fn steps(collective: Collective, ranks: u32, rank: u32) -> Vec<Step> {
    let block = |chunk| Block { chunk, part: 0 };
    let publish = |chunk| Step::Publish { block: block(chunk) };
    let meet = |fold| Step::Meet { fold };
    let fetch = |from, chunk, action| Step::Fetch { from, block: block(chunk), action };
    let folds = |chunk| {
        (0..ranks).map(move |other| {
            let action = if other == 0 { Action::Copy } else { Action::Reduce };
            fetch(Source::Rank(other), chunk, action)
        })
    };
    let others = || (0..ranks).filter(move |&other| other != rank);
    match collective {
        Collective::AllReduce if ranks == 2 => {
            [publish(0), meet(vec![])].into_iter().chain(folds(0)).collect()
        }
        Collective::AllReduce => {
            vec![publish(0), meet(vec![block(0)]), fetch(Source::Folded, 0, Action::Copy)]
        }
        Collective::ReduceScatter => {
            (0..ranks).map(publish).chain([meet(vec![])]).chain(folds(rank)).collect()
        }
        Collective::AllGather => {
            let fetches = others().map(|other| fetch(Source::Rank(other), other, Action::Copy));
            [publish(rank), meet(vec![])].into_iter().chain(fetches).collect()
        }
        Collective::Broadcast { root } if root == rank => vec![publish(0), meet(vec![])],
        Collective::Broadcast { root } => {
            vec![meet(vec![]), fetch(Source::Rank(root), 0, Action::Copy)]
        }
        Collective::AllToAll => {
            let publishes = others().map(|other| publish(rank * ranks + other));
            let fetches =
                others().map(|other| fetch(Source::Rank(other), other * ranks + rank, Action::Copy));
            publishes.chain([meet(vec![])]).chain(fetches).collect()
        }
    }
}
