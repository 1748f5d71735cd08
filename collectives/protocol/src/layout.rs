//! Where everything lies in a communicator's shared segment.
//!
//! ```text
//! header      sizes, settings, who attached         one page
//! meeting     the words of the rounds               one page with the failure's state
//! failure     the one text that all ranks raise     two pages
//! decided     the same, where hosts had to agree    two pages
//! members     pid, start time, doorbell             one record per rank
//! rank sets   who is to blame, who was given up,    one bit per rank each
//!             each rank's list of the survivors
//! slots       match key and details                 two per rank (round parity)
//! behind      keys of the operations behind it      two lists per rank
//! splits      element counts per peer               two per rank
//! written     what other hosts are to be sent       two per rank
//! chain       how far ranks and places are          one line per place and per rank
//! windows     staged bytes of this rank             two per rank, near or wide
//! folded      the result of a fold                  four (two where no other host is)
//! partial     what a host's ranks make together     four
//! ledger      messages pending, (from, to)
//! rings       byte rings, (channel, from, to)
//! ```
//!
//! All of it is a pure function of three numbers, so every rank computes the same offsets and checks them
//! against the header once.

use std::ops::Range;

use crate::match_key::{OFFERS_BYTES, SLOT_BYTES};
use tpurun_memory::arena::{ArenaKind, Export};

/// Version of this layout; ranks with different versions refuse each other.
pub const VERSION: u32 = 12;
/// "tpurun-s", little endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"tpurun-s");

pub use tpurun_memory::region::{HUGE_PAGE, LINE, PAGE};
/// Words that say what a rank has written, before one for each rank.
pub const WRITTEN_WORDS: usize = 9;
const LEDGER_BYTES: usize = 8;
/// Bytes of the record of one member.
pub const MEMBER_BYTES: usize = 384;
/// Within a member, between words of segment.rs.
const EXPORT: usize = 208;
const EXPORT_BYTES: usize = 48;
/// Where the arenas of a member end in its record.
pub const EXPORTS_END: usize = EXPORT + ArenaKind::ALL.len() * EXPORT_BYTES;
const _: () = assert!(8 + Export::BYTES <= EXPORT_BYTES);
/// Rings carry schedules on the channels below this one, and `send` and `recv` on this one.
pub const P2P_CHANNEL: u32 = 6;
/// Channels of the byte rings.
pub const CHANNELS: u32 = P2P_CHANNEL + 1;
/// Pieces of a chain that may be on their way at once.
pub const PLACES: usize = 64;
const PROGRESS_BYTES: usize = LINE;
/// Rounds for which what is folded for other hosts has places of its own.
pub const TURNS: usize = 4;
/// All rings of a segment may take this much address space (not memory: untouched pages cost nothing).
const RINGS_BUDGET: usize = 1 << 31;
/// The text all ranks raise is cut to this.
pub const FAILURE_TEXT_BYTES: usize = PAGE * 2 - 64;

/// The offsets of one communicator's segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    ranks: usize,
    near_bytes: usize,
    wide_bytes: usize,
    ring_bytes: usize,
    starts: Starts,
}

/// Where each area begins whose place depends on the sizes of those before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Starts {
    slots: usize,
    behind: usize,
    splits: usize,
    written: usize,
    chain: usize,
    windows: usize,
    folded: usize,
    ledger: usize,
    rings: usize,
    ring_data: usize,
    end: usize,
}

impl Starts {
    fn new(ranks: usize, wide_bytes: usize, ring_bytes: usize) -> Self {
        let rank_sets = 6 * PAGE + ranks * MEMBER_BYTES;
        let slots = page(rank_sets + (2 + ranks) * ranks.div_ceil(64) * 8);
        let behind = page(slots + 2 * ranks * SLOT_BYTES);
        let splits = page(behind + 2 * ranks * OFFERS_BYTES);
        let written = page(splits + 2 * ranks * splits_bytes(ranks));
        let chain = page(written + 2 * ranks * written_bytes(ranks));
        let windows = chain + (PLACES + ranks) * PROGRESS_BYTES;
        // A large area begins where the processor can map it as one.
        let windows = windows.next_multiple_of(if ranks * wide_bytes < HUGE_PAGE { PAGE } else { HUGE_PAGE });
        let folded = windows + 2 * ranks * wide_bytes;
        let ledger = folded + 2 * TURNS * wide_bytes;
        let rings = page(ledger + ranks * ranks * LEDGER_BYTES);
        let count = CHANNELS as usize * ranks * ranks;
        let ring_data = page(rings + count * RING_COUNTER_BYTES);
        let end = ring_data + count * ring_bytes;
        Self { slots, behind, splits, written, chain, windows, folded, ledger, rings, ring_data, end }
    }
}

/// Bytes of the counts that a rank gives its peers.
fn splits_bytes(ranks: usize) -> usize {
    2 * ranks * 8
}

/// Bytes that say what a rank has written for a round.
fn written_bytes(ranks: usize) -> usize {
    (WRITTEN_WORDS + ranks) * 8
}

/// Two ways to use the memory that all ranks stage in, of which an operation has one in a round: what is near lies
/// close together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Window {
    /// As much as caches keep of all ranks.
    Near,
    /// As much as there is.
    Wide,
}

impl Layout {
    /// For `ranks` ranks on `hosts` hosts that stage at most `wide_bytes` per round each.
    pub fn new(ranks: u32, hosts: u32, wide_bytes: usize) -> Self {
        let ranks = ranks as usize;
        let rings = CHANNELS as usize * ranks * ranks;
        let ring_bytes = prev_power_of_two(RINGS_BUDGET / rings).clamp(4 * 1024, 256 * 1024);
        let wide_bytes = wide_bytes.next_multiple_of(PAGE);
        // A round between hosts costs the way there and back.
        let near_bytes = if hosts > 1 { wide_bytes } else { wide_bytes.min(cached_bytes(ranks)) };
        let starts = Starts::new(ranks, wide_bytes, ring_bytes);
        Self { ranks, near_bytes, wide_bytes, ring_bytes, starts }
    }

    /// Bytes of a near window.
    #[inline]
    pub fn window_bytes(&self) -> usize {
        self.near_bytes
    }

    /// Bytes of a wide window.
    #[inline]
    pub fn wide_bytes(&self) -> usize {
        self.wide_bytes
    }

    /// Bytes of a window of this kind.
    #[inline]
    pub fn bytes_of(&self, window: Window) -> usize {
        match window {
            Window::Near => self.near_bytes,
            Window::Wide => self.wide_bytes,
        }
    }

    /// Bytes of one ring.
    #[inline]
    pub fn ring_bytes(&self) -> u32 {
        self.ring_bytes as u32
    }

    /// Where the header is.
    #[inline]
    pub fn header(&self) -> usize {
        0
    }

    /// Where the words of the rounds are.
    #[inline]
    pub fn meeting(&self) -> usize {
        PAGE
    }

    /// Returns where the findings of the last to arrive are, by the parity of an operation's first round.
    #[inline]
    pub fn agreed(&self, parity: usize) -> usize {
        self.meeting() + PAGE / 2 + parity * 64
    }

    /// The state and the doorbell of the agreement on who survives.
    #[inline]
    pub fn ballot(&self) -> usize {
        self.meeting() + PAGE / 2 + 128
    }

    /// Where the text is that all ranks raise.
    #[inline]
    pub fn failure(&self) -> usize {
        2 * PAGE
    }

    /// Returns where the failure is that the hosts have agreed on, where there are several.
    #[inline]
    pub fn decided(&self) -> usize {
        4 * PAGE
    }

    /// The ranks that the failure blames.
    #[inline]
    pub fn blamed(&self) -> usize {
        self.rank_sets()
    }

    /// The ranks that others have given up.
    #[inline]
    pub fn given_up(&self) -> usize {
        self.rank_sets() + self.rank_set_bytes()
    }

    /// The survivors as `rank` sees them.
    #[inline]
    pub fn survivors(&self, rank: u32) -> usize {
        self.rank_sets() + (2 + self.nth(rank)) * self.rank_set_bytes()
    }

    /// Words of one set of ranks, a bit for each.
    #[inline]
    pub fn rank_set_words(&self) -> usize {
        self.ranks.div_ceil(64)
    }

    /// Where the record of a member is.
    #[inline]
    pub fn member(&self, rank: u32) -> usize {
        6 * PAGE + self.nth(rank) * MEMBER_BYTES
    }

    /// A word that is not zero when `rank` has said where its arena of this kind is, which follows.
    #[inline]
    pub fn export(&self, rank: u32, kind: ArenaKind) -> usize {
        self.member(rank) + EXPORT + kind as usize * EXPORT_BYTES
    }

    /// Where the slot of a rank is for rounds of this parity.
    #[inline]
    pub fn slot(&self, rank: u32, parity: usize) -> usize {
        self.starts.slots + (parity * self.ranks + self.nth(rank)) * SLOT_BYTES
    }

    /// The keys of the operations that `rank` has queued behind the one in its slot.
    #[inline]
    pub fn behind(&self, rank: u32, parity: usize) -> usize {
        self.starts.behind + (parity * self.ranks + self.nth(rank)) * OFFERS_BYTES
    }

    /// The counts of `rank`: `ranks` of its inputs, then `ranks` of its outputs, 8 bytes each.
    #[inline]
    pub fn splits(&self, rank: u32, parity: usize) -> usize {
        self.starts.splits + (parity * self.ranks + self.nth(rank)) * self.splits_bytes()
    }

    /// How much `rank` has written for a round, and how much of that for each rank, 8 bytes each.
    #[inline]
    pub fn written(&self, rank: u32, parity: usize) -> usize {
        self.starts.written + (parity * self.ranks + self.nth(rank)) * written_bytes(self.ranks)
    }

    /// How often ranks were done with each place of a chain, [`PLACES`] counts.
    #[inline]
    pub fn chain_places(&self) -> usize {
        self.starts.chain
    }

    /// How much of chains `rank` has folded.
    #[inline]
    pub fn chain_rank(&self, rank: u32) -> usize {
        self.chain_places() + (PLACES + self.nth(rank)) * PROGRESS_BYTES
    }

    /// The near window of a rank.
    #[inline]
    pub fn window(&self, rank: u32, parity: usize) -> usize {
        self.start_of(Window::Near, rank, parity)
    }

    /// Returns where a window of a rank begins. The windows of all ranks of one parity are the same memory,
    /// in either way.
    #[inline]
    pub fn start_of(&self, window: Window, rank: u32, parity: usize) -> usize {
        self.all_windows(parity).start + self.nth(rank) * self.bytes_of(window)
    }

    /// The windows of all ranks of one parity, as one.
    #[inline]
    pub fn all_windows(&self, parity: usize) -> Range<usize> {
        let bytes = self.ranks * self.wide_bytes;
        let start = self.starts.windows + parity * bytes;
        start..start + bytes
    }

    /// Returns the memory that ranks of one host use most, in whole huge pages: keys and the words of
    /// meetings, near windows, and the results of folds. None where all windows are less than one.
    pub fn busiest(&self) -> impl Iterator<Item = Range<usize>> {
        let near = self.ranks * self.near_bytes;
        let windows = |parity| (self.all_windows(parity).start, near);
        let places = [(0, self.starts.splits), windows(0), windows(1)];
        let places = places.into_iter().chain([(self.folded(0), 2 * self.wide_bytes)]);
        let ranges = places.map(|(at, bytes)| {
            at / HUGE_PAGE * HUGE_PAGE..(at + bytes).next_multiple_of(HUGE_PAGE).min(self.total())
        });
        ranges.filter(|_| self.ranks * self.wide_bytes >= HUGE_PAGE)
    }

    /// Results, of rounds in [`TURNS`] turns; on one host of two parities.
    #[inline]
    pub fn folded(&self, turn: usize) -> usize {
        self.starts.folded + turn % TURNS * self.wide_bytes
    }

    /// Returns where the partial result of all ranks of this host is, for the other hosts.
    #[inline]
    pub fn partial(&self, turn: usize) -> usize {
        self.folded(0) + (TURNS + turn % TURNS) * self.wide_bytes
    }

    /// The counters of the ring from `from` to `to` on `channel`; its bytes follow at [`ring_data`](Self::ring_data).
    #[inline]
    pub fn ring_counters(&self, channel: u32, from: u32, to: u32) -> usize {
        self.starts.rings + self.ring_index(channel, from, to) * RING_COUNTER_BYTES
    }

    /// Where the bytes of a ring are.
    #[inline]
    pub fn ring_data(&self, channel: u32, from: u32, to: u32) -> usize {
        self.starts.ring_data + self.ring_index(channel, from, to) * self.ring_bytes
    }

    /// The size of the segment.
    #[inline]
    pub fn total(&self) -> usize {
        self.starts.end
    }

    fn nth(&self, rank: u32) -> usize {
        let rank = rank as usize;
        assert!(rank < self.ranks, "rank {rank} is not one of {}", self.ranks);
        rank
    }

    fn rank_sets(&self) -> usize {
        6 * PAGE + self.ranks * MEMBER_BYTES
    }

    fn rank_set_bytes(&self) -> usize {
        self.rank_set_words() * 8
    }

    /// Bytes of the counts that a rank gives its peers.
    #[inline]
    pub fn splits_bytes(&self) -> usize {
        splits_bytes(self.ranks)
    }

    /// Two words: sends pending from `from` to `to`, and receives of `to` pending from `from`. Where both are
    /// one rank, the second counts receives from any rank.
    #[inline]
    pub fn ledger(&self, from: u32, to: u32) -> usize {
        self.starts.ledger + (self.nth(from) * self.ranks + self.nth(to)) * LEDGER_BYTES
    }

    fn ring_index(&self, channel: u32, from: u32, to: u32) -> usize {
        assert!(channel < CHANNELS, "channel {channel} is not one of {CHANNELS}");
        (channel as usize * self.ranks + self.nth(from)) * self.ranks + self.nth(to)
    }
}

/// Bytes of one [`RingCounters`](tpurun_memory::sync::RingCounters).
const RING_COUNTER_BYTES: usize = 128;
const _: () =
    assert!(size_of::<tpurun_memory::sync::RingCounters>() == RING_COUNTER_BYTES || cfg!(tpurun_loom));
const _: () = assert!(size_of::<tpurun_memory::sync::PieceCount>() == PROGRESS_BYTES || cfg!(tpurun_loom));
const _: () = assert!(size_of::<tpurun_memory::sync::Meeting>() <= PAGE / 2 || cfg!(tpurun_loom));

/// Returns how much each of `ranks` ranks stages in a round that all read soon: all of it fits a large level
/// 2 cache, so that it is still there. Measured on 2 cores with 2 to 64 ranks, as are the bounds.
fn cached_bytes(ranks: usize) -> usize {
    const ALL: usize = 2 << 20;
    const MOST: usize = 512 << 10;
    // Below, rounds cost more than they move.
    const LEAST: usize = 64 << 10;
    // Every peer needs a cache line, for the collectives that address each of them.
    (ALL / ranks).clamp(LEAST, MOST).max(LINE * ranks).next_multiple_of(PAGE)
}

fn page(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE)
}

fn prev_power_of_two(n: usize) -> usize {
    if n == 0 { 0 } else { 1 << n.ilog2() }
}

#[cfg(test)]
#[cfg(not(tpurun_loom))]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        for ranks in [1, 2, 3, 17, 64, 65] {
            let layout = Layout::new(ranks, 1, 100_000);
            let mut areas = vec![
                (layout.header(), PAGE),
                (layout.meeting(), PAGE / 2),
                (layout.agreed(0), 64),
                (layout.agreed(1), 64),
                (layout.ballot(), 128),
                (layout.failure(), 2 * PAGE),
                (layout.decided(), 2 * PAGE),
                (layout.blamed(), layout.rank_set_bytes()),
                (layout.given_up(), layout.rank_set_bytes()),
            ];
            areas.push((layout.chain_places(), PLACES * PROGRESS_BYTES));
            for rank in 0..ranks {
                areas.push((layout.chain_rank(rank), PROGRESS_BYTES));
                areas.push((layout.member(rank), MEMBER_BYTES));
                areas.push((layout.survivors(rank), layout.rank_set_bytes()));
                for parity in 0..2 {
                    areas.push((layout.slot(rank, parity), SLOT_BYTES));
                    areas.push((layout.behind(rank, parity), OFFERS_BYTES));
                    areas.push((layout.splits(rank, parity), layout.splits_bytes()));
                    areas.push((layout.written(rank, parity), written_bytes(layout.ranks)));
                    areas.push((layout.start_of(Window::Wide, rank, parity), layout.wide_bytes()));
                }
                for to in 0..ranks {
                    areas.push((layout.ledger(rank, to), LEDGER_BYTES));
                    for channel in 0..CHANNELS {
                        areas.push((layout.ring_counters(channel, rank, to), RING_COUNTER_BYTES));
                        areas.push((layout.ring_data(channel, rank, to), layout.ring_bytes));
                    }
                }
            }
            areas.extend((0..TURNS).map(|turn| (layout.folded(turn), layout.wide_bytes())));
            areas.extend((0..TURNS).map(|turn| (layout.partial(turn), layout.wide_bytes())));
            areas.sort_unstable();
            for pair in areas.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?} overlap with {ranks} ranks");
            }
            let last = areas.last().expect("there are areas");
            assert_eq!(last.0 + last.1, layout.total());
        }
    }

    #[test]
    fn near_windows_are_among_the_wide_ones_of_their_parity() {
        for ranks in [1, 2, 8, 65] {
            let layout = Layout::new(ranks, 1, 512 << 10);
            for parity in 0..2 {
                let near = |rank| layout.window(rank, parity);
                let wide = |rank| layout.start_of(Window::Wide, rank, parity);
                assert_eq!(near(0), wide(0));
                assert!(near(ranks - 1) + layout.window_bytes() <= wide(ranks - 1) + layout.wide_bytes());
                (1..ranks).for_each(|rank| assert_eq!(near(rank - 1) + layout.window_bytes(), near(rank)));
            }
            let several = Layout::new(ranks, 2, 512 << 10);
            assert_eq!(several.window_bytes(), several.wide_bytes());
        }
    }

    #[test]
    fn rings_stay_within_their_budget() {
        for ranks in [2, 64, 256] {
            let layout = Layout::new(ranks, 1, 1 << 20);
            assert!(layout.total() - layout.starts.rings <= 2 * RINGS_BUDGET, "{ranks} ranks");
        }
    }
}
