//! Large rounds go between two hosts over several connections, each kept by a thread of its own: encryption and the
//! handling of packets are what one core can not do fast enough. This host then has one bridge for each of them. The
//! first one says and hears everything that is small; the pieces of what is large go over all of them in turn.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Rounds that a host may have pieces of on the way at a time: it comes to one when it has seen the one before open.
const MOST_ROUNDS: usize = 2;

/// The number of connections, and which of them the pieces of large rounds go over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shares {
    All(usize),
    /// This many connections beside the first one.
    AllButFirst(usize),
}

/// One of the bridges of a host, which share what they have to send.
#[derive(Clone, Debug)]
pub(super) struct Stripe {
    index: usize,
    count: usize,
    /// Those before this one carry none of the pieces of large rounds.
    first_share: usize,
    common: Arc<Mutex<Common>>,
}

#[derive(Debug, Default)]
struct Common {
    /// By bridge: rounds whose pieces it is to send.
    striped: Vec<VecDeque<u64>>,
    /// There will be no more of them.
    is_closed: bool,
    /// By host and round: bridges that have got all pieces of theirs.
    come: BTreeMap<(u32, u32), Bridges>,
    /// By host: bridges that get nothing more from there.
    gone: BTreeMap<u32, Bridges>,
}

/// A bit for each.
type Bridges = u32;

/// The state of a round's pieces on the other connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pieces {
    Missing,
    /// All have come, which is asked no more.
    Come,
    /// Some never will.
    Lost,
}

impl Stripe {
    pub(super) fn all(shares: Shares) -> impl Iterator<Item = Self> {
        let (count, first_share) = match shares {
            Shares::All(count) => (count, 0),
            Shares::AllButFirst(count) => (1 + count, 1),
        };
        let common = Common { striped: vec![VecDeque::new(); count], ..Common::default() };
        let common = Arc::new(Mutex::new(common));
        (0..count).map(move |index| Self { index, count, first_share, common: common.clone() })
    }

    /// Speaks for its host.
    pub(super) fn is_first(&self) -> bool {
        self.index == 0
    }

    /// The number of connections that a round of `bytes` bytes goes over, be it that one says only that all others
    /// have it. One of less than `striped` bytes goes over the first alone.
    pub(super) fn of_round(&self, bytes: usize, striped: usize) -> usize {
        if bytes < striped { 1 } else { self.count }
    }

    /// Rounds that a host may have come to and that can not be counted yet: while pieces of one are on their way, it
    /// may have seen that open and come to the next.
    pub(super) fn most_ahead(&self) -> usize {
        MOST_ROUNDS.min(self.count)
    }

    /// Whether other hosts may have striped a round so.
    pub(super) fn is_possible(&self, of: usize) -> bool {
        of == 1 || of == self.count
    }

    /// Those of the pieces of a striped round that go over this connection.
    pub(super) fn own<T>(&self, pieces: impl Iterator<Item = T>) -> impl Iterator<Item = T> {
        let share = self.index.checked_sub(self.first_share);
        let pieces = pieces.skip(share.unwrap_or(0)).step_by(self.count - self.first_share);
        pieces.take(share.map_or(0, |_| usize::MAX))
    }

    /// Has the others send their pieces of a round.
    pub(super) fn announce(&self, round: u64) {
        self.common().striped.iter_mut().skip(1).for_each(|rounds| rounds.push_back(round));
    }

    /// The next round that was announced to this one.
    pub(super) fn announced(&self) -> Option<u64> {
        self.common().striped[self.index].pop_front()
    }

    /// The first one announces nothing more. Whether it had said so before.
    pub(super) fn close(&self) -> bool {
        std::mem::replace(&mut self.common().is_closed, true)
    }

    /// Whether this one has nothing more to send.
    pub(super) fn is_closed(&self) -> bool {
        let common = self.common();
        common.is_closed && common.striped[self.index].is_empty()
    }

    /// This bridge has got all that it gets from a host for a round. Whether the others have, too; `None` when that
    /// can not be.
    pub(super) fn come(&self, host: u32, round: u32) -> Option<bool> {
        let mut common = self.common();
        let come = common.come.entry((host, round)).or_default();
        *come |= self.own_bit();
        let are_all = *come == self.others();
        let rounds = common.come.range((host, 0)..=(host, u32::MAX)).count();
        (rounds <= MOST_ROUNDS).then_some(are_all)
    }

    /// This bridge gets nothing more from a host.
    pub(super) fn gone(&self, host: u32) {
        *self.common().gone.entry(host).or_default() |= self.own_bit();
    }

    /// Whether all the others have got what they get from a host for a round.
    pub(super) fn pieces(&self, host: u32, round: u32) -> Pieces {
        let mut common = self.common();
        let come = common.come.get(&(host, round)).copied().unwrap_or(0);
        if come == self.others() {
            common.come.remove(&(host, round));
            return Pieces::Come;
        }
        let gone = common.gone.get(&host).copied().unwrap_or(0);
        if gone & !come == 0 { Pieces::Missing } else { Pieces::Lost }
    }

    fn own_bit(&self) -> Bridges {
        1 << self.index
    }

    /// All but the first one.
    fn others(&self) -> Bridges {
        ((1 << self.count) - 1) & !1
    }

    fn common(&self) -> MutexGuard<'_, Common> {
        self.common.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
