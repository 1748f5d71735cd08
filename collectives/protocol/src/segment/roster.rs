//! The ranks of a communicator: who is in, how far each is, and who has left or is gone.

use std::time::Instant;

use tpurun_memory::process::{self, Liveness};
use tpurun_memory::sync::{AtomicU32, AtomicU64, Attendance, Ordering};

use crate::frame::RankStatus;
use crate::looks::share;
use crate::rank_list::RankList;

use super::base::Base;
use super::words::*;

/// The ranks, as the segment shows them.
#[derive(Clone, Copy, Debug)]
pub struct Roster<'a>(pub(super) &'a Base);

impl<'a> Roster<'a> {
    /// Whether `rank` has destroyed its end.
    #[inline]
    pub fn is_closed(self, rank: u32) -> bool {
        self.0.member_word(rank, M_CLOSED).load(Ordering::Acquire) != 0
    }

    /// The ranks that are in so far.
    #[inline]
    pub fn attendance(self) -> &'a Attendance {
        self.0.region.at(self.0.layout.header() + H_ATTACHED)
    }

    /// The process of `rank` is gone: ranks that wait for it look again.
    #[inline]
    pub fn mourn(self, rank: u32) {
        self.lost(rank).store(1, Ordering::Release);
        self.announce_departure();
    }

    fn announce_departure(self) {
        self.departures_word().fetch_add(1, Ordering::AcqRel);
        self.0.meeting().nudge();
        self.0.ring_all();
    }

    /// Counts a collective that this rank posts, and returns how many it had posted before.
    #[inline]
    pub fn count_posted(self) -> u64 {
        self.posted(self.0.rank()).fetch_add(1, Ordering::Relaxed)
    }

    /// Collectives that a rank has posted so far.
    #[inline]
    pub fn posted(self, rank: u32) -> &'a AtomicU64 {
        self.0.region.at(self.0.layout.member(rank) + M_POSTED)
    }

    /// The ranks that have not posted collective `seq`.
    #[inline]
    pub fn without(self, seq: u64) -> Vec<u32> {
        self.0.ranks().filter(|rank| self.posted(*rank).load(Ordering::Relaxed) <= seq).collect()
    }

    /// Says that this rank takes part in no collective from `seq` on, and in no message: it has destroyed its
    /// end. Ranks that wait for it look again.
    #[inline]
    pub fn leave(self, seq: u64) {
        self.note_left(self.0.rank(), seq.saturating_add(1));
    }

    /// Whether the process of `rank` is gone, as far as anybody knows.
    #[inline]
    pub fn is_gone(self, rank: u32) -> bool {
        self.is_mourned(rank) || self.liveness(rank) == Liveness::Gone
    }

    /// Whether `rank` is gone, and it is for this rank to say so: nobody else has in time.
    #[inline]
    pub fn is_lost(self, rank: u32) -> bool {
        self.is_gone(rank) && self.0.seen_gone.get_or_init(Instant::now).elapsed() >= self.0.grace
    }

    /// Those of `needed` that are known to be gone, or that this rank's share of a look finds gone. Those that wait, and
    /// look as well, are `waiting`, in order.
    pub fn gone_among(self, needed: &[u32], waiting: &[u32], look: u32) -> Vec<u32> {
        // The bridge is told of those elsewhere.
        let is_here = |rank: &u32| self.0.is_here(*rank);
        let here: Vec<u32> = needed.iter().copied().filter(is_here).collect();
        let fellows: Vec<u32> = waiting.iter().copied().filter(is_here).collect();
        let before = fellows.partition_point(|rank| *rank < self.0.rank());
        let share: Vec<u32> = share(&here, before, fellows.len(), look).collect();
        let is_gone = |rank: &u32| self.is_mourned(*rank) || share.contains(rank) && self.is_gone(*rank);
        needed.iter().copied().filter(is_gone).collect()
    }

    /// Those of them of which it is for this rank to say so. All ranks are told.
    #[inline]
    pub fn lost_among(self, needed: &[u32], waiting: &[u32], look: u32) -> Vec<u32> {
        let gone = self.gone_among(needed, waiting, look);
        if gone.is_empty() || self.0.seen_gone.get_or_init(Instant::now).elapsed() < self.0.grace {
            return vec![];
        }
        gone.iter().filter(|rank| !self.is_mourned(**rank)).for_each(|rank| self.mourn(*rank));
        gone
    }

    /// Whether somebody has said that the process of `rank` is gone.
    #[inline]
    pub fn is_mourned(self, rank: u32) -> bool {
        self.lost(rank).load(Ordering::Acquire) != 0
    }

    fn lost(self, rank: u32) -> &'a AtomicU32 {
        self.0.member_word(rank, M_LOST)
    }

    /// The first collective that `rank` does not take part in any more, if it has left.
    #[inline]
    pub fn left(self, rank: u32) -> Option<u64> {
        self.left_word(rank).load(Ordering::Acquire).checked_sub(1)
    }

    /// The round of the survivors that `rank` wishes for.
    #[inline]
    pub fn wished(self, rank: u32) -> &'a AtomicU32 {
        self.0.member_word(rank, M_WISH)
    }

    /// Where `rank` offers the segment of survivors: their epoch, and a descriptor of its process.
    #[inline]
    pub fn offered(self, rank: u32) -> &'a AtomicU64 {
        self.0.region.at(self.0.layout.member(rank) + M_OFFER)
    }

    /// How many ranks have left or are gone: a cheap look whether anything changed.
    #[inline]
    pub fn departures(self) -> u32 {
        self.departures_word().load(Ordering::Acquire)
    }

    fn departures_word(self) -> &'a AtomicU32 {
        self.0.region.at(self.0.layout.header() + H_DEPARTURES)
    }

    /// Says that this rank is about to arrive in `round`.
    #[inline]
    pub fn set_arrived(self, round: u32) {
        self.arrived(self.0.rank()).store(u64::from(round) + 1, Ordering::Relaxed);
    }

    /// Ranks that have not arrived in `round`.
    #[inline]
    pub fn missing(self, round: u32) -> Vec<u32> {
        let arrived = |rank: u32| self.arrived(rank).load(Ordering::Relaxed) as u32;
        self.0.ranks().filter(|rank| arrived(*rank) != round.wrapping_add(1)).collect()
    }

    /// The process that is `rank`; 0 before it has come.
    #[inline]
    pub fn pid(self, rank: u32) -> u32 {
        self.0.member_word(rank, M_PID).load(Ordering::Acquire)
    }

    /// Whether the process of `rank` still is what attached.
    #[inline]
    pub fn liveness(self, rank: u32) -> Liveness {
        if !self.0.is_here(rank) {
            // The bridge is told, or hears nothing any more.
            return if self.is_mourned(rank) { Liveness::Gone } else { Liveness::Alive };
        }
        let start: &AtomicU64 = self.0.region.at(self.0.layout.member(rank) + M_START);
        process::liveness(self.pid(rank), start.load(Ordering::Relaxed))
    }

    /// `ranks 3-9 (host n0, pid 4711, 4712, 4713, 4714, ..)`, for messages.
    pub fn describe(self, ranks: &[u32]) -> String {
        const SHOWN: usize = 4;
        let host = |rank: &u32| self.0.hosts.of(*rank);
        let on_host = |ranks: &[u32]| {
            let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
            let pids: Vec<String> =
                ranks.iter().take(SHOWN).map(|rank| self.pid(*rank).to_string()).collect();
            let more = if ranks.len() > SHOWN { ", .." } else { "" };
            let (list, name) = (self.0.in_world(ranks), self.0.hosts.name(host(&ranks[0])));
            format!("{noun} {} (host {name}, pid {}{more})", RankList(&list), pids.join(", "))
        };
        let mut ranks = ranks.to_vec();
        ranks.sort_by_key(|rank| (host(rank), *rank));
        let texts: Vec<String> = ranks.chunk_by(|one, next| host(one) == host(next)).map(on_host).collect();
        texts.join(" and ")
    }

    /// `rank 3 (host n0, pid 4711) is gone`
    pub fn describe_gone(self, ranks: &[u32]) -> String {
        let verb = if ranks.len() == 1 { "is" } else { "are" };
        format!("{} {verb} gone", self.describe(ranks))
    }

    /// A rank of another host is there.
    #[inline]
    pub fn attach_remote(self, rank: u32, pid: u32) {
        self.0.member_word(rank, M_PID).store(pid, Ordering::Release);
        self.attendance().count(self.0.size());
    }

    /// Ranks of another host have come to a round, and what they wrote for it is here.
    #[inline]
    pub fn arrive_for(self, ranks: &[u32], round: u32) {
        for rank in ranks {
            self.arrived(*rank).store(u64::from(round) + 1, Ordering::Relaxed);
        }
        self.0.meeting().arrive_for(ranks.len() as u32, self.0.size());
    }

    /// How far a rank here is.
    #[inline]
    pub fn status(self, rank: u32) -> RankStatus {
        RankStatus {
            arrived: self.arrived(rank).load(Ordering::Relaxed),
            posted: self.posted(rank).load(Ordering::Relaxed),
            left: self.left(rank).map_or(0, |seq| seq.saturating_add(1)),
            lost: self.lost(rank).load(Ordering::Acquire).into(),
        }
    }

    /// How far a rank of another host is.
    pub fn put_status(self, rank: u32, status: &RankStatus) {
        self.arrived(rank).fetch_max(status.arrived, Ordering::Relaxed);
        self.posted(rank).fetch_max(status.posted, Ordering::Relaxed);
        if status.left > 0 && self.left(rank).is_none() {
            self.note_left(rank, status.left);
        }
        if status.lost > 0 && self.lost(rank).load(Ordering::Acquire) == 0 {
            self.mourn(rank);
        }
    }

    fn left_word(self, rank: u32) -> &'a AtomicU64 {
        self.0.region.at(self.0.layout.member(rank) + M_LEFT)
    }

    /// Ranks that wait for `rank` look again. `word` is one more than the first collective without it.
    fn note_left(self, rank: u32, word: u64) {
        self.left_word(rank).store(word, Ordering::Release);
        self.0.member_word(rank, M_CLOSED).store(1, Ordering::Release);
        self.announce_departure();
    }

    fn arrived(self, rank: u32) -> &'a AtomicU64 {
        self.0.region.at(self.0.layout.member(rank) + M_ARRIVED)
    }
}
