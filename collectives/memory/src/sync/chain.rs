//! The chain: ranks fold one after the other, the pieces of a tensor following each other through a few places.
//!
//! A piece lies in its place until all ranks are done with it: the first rank begins it, each one folds to
//! what the ranks before it have left there, and once the last one has folded, the piece is whole for all
//! that take it. So a place has one writer at a time, in the order of the ranks, and is read by all only once
//! it changes no more. Pieces are counted for as long as the communicator lives: no count is ever set back,
//! whatever number of places an operation uses.
//!
//! Nothing is locked and nothing needs a cleanup: a rank that dies is as far as its count says.

use super::{AtomicU64, Ordering};

/// How many pieces a rank has folded, or how often ranks have been done with some pieces. All zeroes is the first state.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct PieceCount(AtomicU64);

/// The chain as one rank sees it.
#[derive(Debug)]
pub struct Chain<'a> {
    /// The progress of the rank before this one; the first has none.
    pub before: Option<&'a PieceCount>,
    /// The progress of this rank.
    pub own: &'a PieceCount,
    /// The progress of the last rank, whose fold is whole.
    pub last: &'a PieceCount,
    /// The ranks so far before this one, and before the last one, that their turns are near once these have had
    /// theirs; where there are none they always are.
    pub near: [Option<&'a PieceCount>; 2],
    /// The progress of pieces. Pieces whose numbers leave the same remainder share one: there are at most as
    /// many as there are places.
    pub done: &'a [PieceCount],
    /// A piece is in the place of the one this many before it.
    pub places: u64,
    /// Pieces that are on their way at most: one is begun when the one this many before it is whole.
    pub most: u64,
    /// How many ranks the chain has.
    pub ranks: u32,
}

impl Chain<'_> {
    /// Whether it is this rank's turn to fold a piece.
    pub fn may_fold(&self, piece: u64) -> bool {
        match self.before {
            // Acquire pairs with `folded`: what the ranks before have left there.
            Some(before) => before.0.load(Ordering::Acquire) > piece,
            None => {
                let is_free = piece.checked_sub(self.places).is_none_or(|before| {
                    let times = before / self.done.len() as u64 + 1;
                    // Acquire pairs with `leave`: nobody reads any more what was there before.
                    self.done(before).0.load(Ordering::Acquire) >= times.wrapping_mul(self.ranks.into())
                });
                // Acquire pairs with `folded` of the last one. Others need not look: what they see this rank and those
                // after it fold comes after that.
                let may_begin = || self.last.0.load(Ordering::Acquire) + self.most > piece;
                is_free && (self.most >= self.places || may_begin())
            }
        }
    }

    /// This rank has folded a piece.
    #[inline]
    pub fn folded(&self, piece: u64) {
        // Release: what it has left there.
        self.own.0.store(piece + 1, Ordering::Release);
    }

    /// Whether all ranks have folded a piece.
    #[inline]
    pub fn is_whole(&self, piece: u64) -> bool {
        // As in `may_fold`.
        self.last.0.load(Ordering::Acquire) > piece
    }

    /// Whether it may soon be this rank's turn to fold a piece.
    #[inline]
    pub fn may_fold_soon(&self, piece: u64) -> bool {
        self.is_near(self.near[0], piece)
    }

    /// Whether a piece may soon be whole.
    #[inline]
    pub fn is_whole_soon(&self, piece: u64) -> bool {
        self.is_near(self.near[1], piece)
    }

    fn is_near(&self, near: Option<&PieceCount>, piece: u64) -> bool {
        // Nothing is read because of it.
        near.is_none_or(|near| near.0.load(Ordering::Relaxed) > piece)
    }

    /// This rank needs a piece no more; whether it is the last one to say so, after which its place is free.
    #[inline]
    pub fn leave(&self, piece: u64) -> bool {
        // Release: what it has read. The first rank acquires all of them through the chain of increments.
        let before = self.done(piece).0.fetch_add(1, Ordering::AcqRel);
        before.wrapping_add(1).is_multiple_of(self.ranks.into())
    }

    fn done(&self, piece: u64) -> &PieceCount {
        &self.done[(piece % self.done.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::model::{Arc, Bytes, model_within, spawn};
    use crate::sync::{AtomicU32, Doorbell};

    const RANKS: usize = 2;

    #[derive(Default)]
    struct Shared {
        folded: [PieceCount; RANKS],
        done: [PieceCount; RANKS],
        bells: [Doorbell; RANKS],
        // Relaxed, so that only the protocol's own orderings make the sum visible.
        places: [(Bytes, AtomicU32); 2],
    }

    impl Shared {
        fn chain(&self, rank: usize, places: usize) -> Chain<'_> {
            Chain {
                before: rank.checked_sub(1).map(|before| &self.folded[before]),
                own: &self.folded[rank],
                last: &self.folded[RANKS - 1],
                near: [None; 2],
                done: &self.done[..places],
                places: places as u64,
                most: 1,
                ranks: RANKS as u32,
            }
        }

        fn wait(&self, rank: usize, ready: impl Fn() -> bool) {
            loop {
                let seen = self.bells[rank].rings();
                if ready() {
                    return;
                }
                self.bells[rank].wait(seen, None);
            }
        }

        fn fold(&self, chain: &Chain<'_>, rank: usize, piece: u64) {
            self.wait(rank, || chain.may_fold(piece));
            let (bytes, sum) = &self.places[(piece % chain.places) as usize];
            let given = (10 * piece) as u32 + rank as u32 + 1;
            let before = if rank == 0 { 0 } else { sum.load(Ordering::Relaxed) };
            bytes.write();
            sum.store(before + given, Ordering::Relaxed);
            chain.folded(piece);
            self.bells[(rank + 1) % RANKS].ring();
        }

        fn take(&self, chain: &Chain<'_>, piece: u64) {
            let (bytes, sum) = &self.places[(piece % chain.places) as usize];
            bytes.read();
            let all = (1..=RANKS as u32).map(|rank| (10 * piece) as u32 + rank).sum::<u32>();
            assert_eq!(sum.load(Ordering::Relaxed), all, "what is taken is whole and of this piece");
            if chain.leave(piece) {
                self.bells[0].ring();
            }
        }

        fn take_each_at_once(&self, rank: usize, pieces: u64) {
            let chain = self.chain(rank, 1);
            for piece in 0..pieces {
                self.fold(&chain, rank, piece);
                self.wait(rank, || chain.is_whole(piece));
                self.take(&chain, piece);
            }
        }

        fn take_each_with_the_next(&self, rank: usize, pieces: u64) {
            let chain = self.chain(rank, 2);
            for piece in 0..pieces {
                self.fold(&chain, rank, piece);
                if let Some(before) = piece.checked_sub(chain.most) {
                    self.take(&chain, before);
                }
            }
            self.wait(rank, || chain.is_whole(pieces - 1));
            self.take(&chain, pieces - 1);
        }
    }

    fn check(run: fn(&Shared, usize)) {
        model_within(2, move || {
            let shared = Arc::new(Shared::default());
            let other = {
                let shared = shared.clone();
                spawn(move || run(&shared, 1))
            };
            run(&shared, 0);
            other.join().expect("the other rank does not panic");
        });
    }

    /// More pieces than places: each is folded by both in turn, taken by both, and only then overwritten.
    #[test]
    fn loom_pieces_follow_each_other_through_one_place() {
        check(|shared, rank| shared.take_each_at_once(rank, 2));
    }

    /// A rank that folds a piece takes the one before it, and has not looked whether that is whole.
    #[test]
    fn loom_a_piece_is_whole_when_the_next_one_comes() {
        check(|shared, rank| shared.take_each_with_the_next(rank, 3));
    }

    #[test]
    fn a_piece_is_near_once_it_has_come_so_far() {
        let shared = Shared::default();
        let far = Chain { near: [Some(&shared.folded[0]), None], ..shared.chain(1, 1) };
        assert!(!far.may_fold_soon(0));
        assert!(far.is_whole_soon(0), "nobody is so far before the last one");
        shared.chain(0, 1).folded(0);
        assert!(far.may_fold_soon(0) && !far.may_fold_soon(1));
    }
}
