//! Ring: around all ranks in rank order, half of every chunk each way.
//!
//! Every chunk is cut into 2 parts, the first going up the ranks, the second down, on a channel each; between
//! two ranks the two ways are the same link, and one part does. P ranks, V bytes, M bytes sent by each rank:
//!
//! - reduce-scatter: in round s = 0..P-1 rank r sends chunk r-1-s to r+1 and folds in chunk r-2-s from r-1
//!   (and the mirror image of it); P-1 rounds, V(P-1)/2P bytes per directed link.
//! - all-gather: in round s rank r sends chunk r-s to r+1 and takes chunk r-1-s from r-1; the same cost.
//! - all-reduce: the one after the other; 2(P-1) rounds, V(P-1)/P bytes (Patarasuk and Yuan, "Bandwidth
//!   optimal all-reduce algorithms for clusters of workstations", JPDC 2009).
//! - broadcast: the chunks follow each other around both ways; 2(P-1) rounds, V/2 bytes.
//! - all-to-all: rank r sends to r+k and receives from r-k, k = 1..P-1; P-1 rounds, M/P bytes for each pair.
//!   Nothing is relayed: on hosts the way between any two ranks is direct.

use super::load::{Cuts, Load, check};
use super::{all_to_all, bucket};
use crate::schedule::{Algorithm, Block, Collective, Schedule, ScheduleTraffic, Tensor};
use crate::shape::Grid;

/// The schedule of one rank of a ring.
///
/// # Panics
/// As [`super::schedule`].
pub fn schedule(collective: Collective, ranks: u32, rank: u32) -> Schedule {
    if collective == Collective::AllToAll && ranks > 1 {
        check(collective, ranks, rank);
        let channels = vec![all_to_all::direct(ranks, rank)];
        return Schedule { collective, algorithm: Algorithm::Ring, ranks, rank, parts: 1, channels };
    }
    // A ring is a grid of one dimension, whose phases are the rounds above.
    Schedule { algorithm: Algorithm::Ring, ..bucket::schedule(collective, &Grid::ring(ranks), rank) }
}

/// Returns the traffic of all ranks of a ring, in closed form.
pub fn traffic(collective: Collective, ranks: u32, tensor: Tensor) -> ScheduleTraffic {
    let mut traffic = ScheduleTraffic::default();
    if ranks == 1 {
        return traffic;
    }
    if collective == Collective::AllToAll {
        let cuts = Cuts { tensor, chunks: ranks * ranks, parts: 1 };
        for chunk in (0..ranks * ranks).filter(|chunk| chunk / ranks != chunk % ranks) {
            traffic.add(chunk / ranks, chunk % ranks, cuts.bytes(Block { chunk, part: 0 }));
        }
        return traffic;
    }
    let cuts = Cuts { tensor, chunks: ranks, parts: if ranks == 2 { 1 } else { 2 } };
    for (part, step) in [(0, 1), (1, ranks - 1)].into_iter().take(cuts.parts as usize) {
        let bytes = |chunk| cuts.bytes(Block { chunk, part });
        let whole: u64 = (0..ranks).map(bytes).sum();
        for from in 0..ranks {
            let to = (from + step) % ranks;
            let sent = match collective {
                Collective::ReduceScatter => whole - bytes(from),
                Collective::AllGather => whole - bytes(to),
                Collective::AllReduce => 2 * whole - bytes(from) - bytes(to),
                Collective::Broadcast { root } if to == root => 0,
                _ => whole,
            };
            traffic.add(from, to, sent);
        }
    }
    traffic
}

/// Returns the load that a schedule puts on the links between neighbours; for all-to-all, on all links
/// between two ranks.
pub fn load(collective: Collective, ranks: u32) -> Load {
    if collective != Collective::AllToAll || ranks == 1 {
        return bucket::load(collective, &Grid::ring(ranks));
    }
    let rounds = u64::from(ranks - 1);
    Load { rounds, busiest: 1.0 / f64::from(ranks), total: rounds as f64, channels: 1 }
}
