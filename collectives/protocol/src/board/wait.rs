//! Blocked waits: which threads of a rank can not go on, and what each waits for.
//!
//! An entry has a token that is never used again, so a reader that sees the same token twice knows that the
//! thread has waited all the time between. That is what proofs of deadlock rest on.

use super::{Board, RankWriter, SLOT_TOKENS, now_ns, pack, slot_at, unpack, wait_at};
use tpurun_memory::sync::Ordering;

/// Threads of a rank that can be shown as waiting; more of them are not accounted for.
pub(super) const WAITS: usize = 8;

/// The event that a thread waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitKind {
    /// Collective number `seq` of the communicator.
    Collective {
        /// From 0.
        seq: u64,
    },
    /// A message to a rank of the communicator.
    Send {
        /// Its destination, a rank of the communicator.
        to: u32,
    },
    /// A message from a rank of the communicator.
    Recv {
        /// Its source, a rank of the communicator; `None` takes any.
        from: Option<u32>,
    },
    /// That the other ranks of the communicator come and create it, too.
    Creation,
}

/// The entry that a thread writes before it sleeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wait {
    /// The number of the communicator.
    pub comm_id: u64,
    /// The event that the thread waits for.
    pub kind: WaitKind,
    /// Python threads of the process when this one began to wait; 0 when it is none itself.
    pub python_threads: u32,
}

/// A wait as read from the board.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WaitView {
    /// Different for every wait of a rank: the same token means the same uninterrupted wait.
    pub token: u64,
    /// CLOCK_MONOTONIC.
    pub since_ns: u64,
    /// The entry that the thread wrote.
    pub wait: Wait,
}

/// A thread's entry; taken off the board on drop.
#[derive(Debug)]
pub struct WaitEntry {
    /// `None` when all entries were taken.
    entry: Option<(Board, usize)>,
}

impl RankWriter {
    /// Puts a wait of the calling thread on the board.
    pub fn waiting(&self, wait: Wait) -> WaitEntry {
        let board = &self.board;
        let free = (0..WAITS).map(|index| wait_at(self.rank, index)).find(|at| {
            board.word(*at).compare_exchange(FREE, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok()
        });
        let Some(at) = free else { return WaitEntry { entry: None } };
        let (code, peer, seq) = encode(wait.kind);
        board.store(at + SINCE, now_ns());
        board.store(at + COMM_ID, wait.comm_id);
        board.store(at + KIND_PEER, pack(code, peer));
        board.store(at + SEQ, seq);
        board.store(at + THREADS, u64::from(wait.python_threads));
        let tokens = board.word(slot_at(self.rank) + SLOT_TOKENS);
        // A process that has the board can have spoilt the count: the written value is a token all the same.
        let token = tokens.fetch_add(1, Ordering::Relaxed).wrapping_add(FIRST_TOKEN).max(FIRST_TOKEN);
        // Release: a reader that sees the token sees the words above.
        board.word(at).store(token, Ordering::Release);
        WaitEntry { entry: Some((board.clone(), at)) }
    }
}

impl Drop for WaitEntry {
    fn drop(&mut self) {
        if let Some((board, at)) = &self.entry {
            board.word(*at).store(FREE, Ordering::Release);
        }
    }
}

impl Board {
    #[inline]
    pub(super) fn read_waits(&self, rank: u32) -> Vec<WaitView> {
        (0..WAITS).filter_map(|index| self.read_wait(wait_at(rank, index))).collect()
    }

    fn read_wait(&self, at: usize) -> Option<WaitView> {
        let token = self.word(at).load(Ordering::Acquire);
        if token < FIRST_TOKEN {
            return None;
        }
        let (code, peer) = unpack(self.load(at + KIND_PEER));
        let view = WaitView {
            token,
            since_ns: self.load(at + SINCE),
            wait: Wait {
                comm_id: self.load(at + COMM_ID),
                kind: decode(code, peer, self.load(at + SEQ))?,
                python_threads: self.load(at + THREADS) as u32,
            },
        };
        // Pairs with the release stores: a reader of a word of a later wait sees another token.
        std::sync::atomic::fence(Ordering::Acquire);
        (self.load(at) == token).then_some(view)
    }
}

fn encode(kind: WaitKind) -> (u32, u32, u64) {
    match kind {
        WaitKind::Collective { seq } => (COLLECTIVE, NOBODY, seq),
        WaitKind::Send { to } => (SEND, to, 0),
        WaitKind::Recv { from } => (RECV, from.unwrap_or(NOBODY), 0),
        WaitKind::Creation => (CREATION, NOBODY, 0),
    }
}

fn decode(code: u32, peer: u32, seq: u64) -> Option<WaitKind> {
    Some(match code {
        COLLECTIVE => WaitKind::Collective { seq },
        SEND => WaitKind::Send { to: peer },
        RECV => WaitKind::Recv { from: Some(peer).filter(|peer| *peer != NOBODY) },
        CREATION => WaitKind::Creation,
        _ => return None,
    })
}

const COLLECTIVE: u32 = 0;
const SEND: u32 = 1;
const RECV: u32 = 2;
const CREATION: u32 = 3;
const NOBODY: u32 = u32::MAX;

pub(super) const WORDS: usize = 8;
const SINCE: usize = 1;
const COMM_ID: usize = 2;
const KIND_PEER: usize = 3;
const SEQ: usize = 4;
const THREADS: usize = 5;

const FREE: u64 = 0;
const CLAIMED: u64 = 1;
const FIRST_TOKEN: u64 = 2;
