//! Every collective on known tensors, with the results it must have.

use tpurun_engine::{Communicator, OpKind};

use super::Call;

/// The elements of a tensor of 33 MiB: two ranks have more than an operation may count on to find in caches.
pub const LARGE: usize = (33 << 17) + 5;

pub fn value(rank: u32, chunk: usize, index: usize) -> i64 {
    i64::from(rank) * 1_000_003 + chunk as i64 * 10_007 + index as i64
}

pub fn chunk(rank: u32, chunk: usize, count: usize) -> Vec<i64> {
    (0..count).map(|index| value(rank, chunk, index)).collect()
}

pub fn summed(ranks: u32, chunk: usize, count: usize) -> Vec<i64> {
    (0..count).map(|index| (0..ranks).map(|rank| value(rank, chunk, index)).sum()).collect()
}

pub fn me(communicator: &Communicator) -> (u32, u32) {
    (communicator.members().rank, communicator.members().size())
}

/// Those that reduce; `count` elements of each result.
pub fn every_fold(communicator: &Communicator, count: usize, call: impl Fn(Call) -> Vec<Vec<i64>>) {
    let (rank, ranks) = me(communicator);
    let empty = || vec![0; count];

    let got = call(Call::new(OpKind::AllReduce, vec![chunk(rank, 0, count)], vec![empty()]));
    assert_eq!(got, [summed(ranks, 0, count)]);
    let chunks = (0..ranks as usize).map(|c| chunk(rank, c, count)).collect();
    let got = call(Call::new(OpKind::ReduceScatter, chunks, vec![empty()]));
    assert_eq!(got, [summed(ranks, rank as usize, count)]);
    for root in [0, ranks - 1] {
        let when = |chunks: Vec<Vec<i64>>| if rank == root { chunks } else { vec![] };
        let reduce = Call::new(OpKind::Reduce, vec![chunk(rank, 0, count)], when(vec![empty()]));
        let got = call(Call { root: Some(root), ..reduce });
        assert_eq!(got, when(vec![summed(ranks, 0, count)]));
    }
}

pub fn every_collective(communicator: &Communicator, count: usize, call: impl Fn(Call) -> Vec<Vec<i64>>) {
    let (rank, ranks) = me(communicator);
    let n = ranks as usize;
    let empty = || vec![0; count];
    let per_rank = |rank: u32| (0..n).map(|c| chunk(rank, c, count)).collect::<Vec<_>>();

    every_fold(communicator, count, &call);
    let got = call(Call::new(OpKind::AllGather, vec![chunk(rank, 0, count)], vec![empty(); n]));
    assert_eq!(got, (0..ranks).map(|r| chunk(r, 0, count)).collect::<Vec<_>>());
    let got = call(Call::new(OpKind::AllToAll, per_rank(rank), vec![empty(); n]));
    assert_eq!(got, (0..ranks).map(|r| chunk(r, rank as usize, count)).collect::<Vec<_>>());
    let got = call(Call::new(OpKind::Barrier, vec![], vec![]));
    assert!(got.is_empty());

    for root in [0, ranks - 1] {
        let is_root = rank == root;
        let when = |here: bool, chunks: Vec<Vec<i64>>| if here { chunks } else { vec![] };
        let rooted = |kind, inputs, outputs| {
            let mut rooted = Call::new(kind, inputs, outputs);
            rooted.root = Some(root);
            call(rooted)
        };
        let got = rooted(
            OpKind::Broadcast,
            when(is_root, vec![chunk(root, 0, count)]),
            when(!is_root, vec![empty()]),
        );
        assert_eq!(got, when(!is_root, vec![chunk(root, 0, count)]));
        let got = rooted(OpKind::Gather, vec![chunk(rank, 0, count)], when(is_root, vec![empty(); n]));
        assert_eq!(got, when(is_root, (0..ranks).map(|r| chunk(r, 0, count)).collect()));
        let got = rooted(OpKind::Scatter, when(is_root, per_rank(root)), vec![empty()]);
        assert_eq!(got, [chunk(root, rank as usize, count)]);
    }
}
