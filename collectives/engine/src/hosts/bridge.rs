//! The bridge between the hosts of a communicator: what it decides, without moving a byte itself.
//!
//! Every host has a segment of its own with a place for every rank of the communicator. The first rank of a host
//! keeps the places of the other hosts' ranks: when all ranks here have come to a round, what they wrote goes to
//! the other hosts; when what those wrote has come, it is put where their ranks would have put it, and they
//! count as arrived. So the last to arrive compares and folds as it does on one host, on each host for itself,
//! with the same keys before it and the same text in its mouth.
//!
//! A piece of round k may be written as soon as it comes: its host has come to round k, so it has opened round
//! k - 1, and for that every rank here has come to round k - 1 and has read what was there from round k - 2; results
//! of a fold, which are read later, have places for four rounds. That its ranks have arrived is counted only once
//! round k - 1 is open here.

mod frames;
mod parcel;
mod rings;
mod stretches;
mod stripe;

use std::collections::VecDeque;
use std::sync::Arc;

pub(crate) use frames::{Frames, Wrong};
use parcel::Piece;
pub(crate) use parcel::{Outbox, Parcel};
use rings::CarriedRings;
use stretches::{WrittenBytes, area, bulk, pieces, small};
pub(crate) use stripe::Shares;
use stripe::{Pieces, Stripe};
use tpurun_memory::failure::FailureKind;
use tpurun_protocol::frame::{Failed, FrameHeader, FrameKind, MOST_BYTES, RankStatus, STRIPE_BYTES};
use tpurun_protocol::segment::{Segment, Verdict};

/// This host's end of one connection, kept by its first rank.
#[derive(Debug)]
pub(crate) struct Bridge {
    segment: Arc<Segment>,
    stripe: Stripe,
    /// This host's other bridges have something to do that they were not told of.
    calls: bool,
    /// Nothing is sent any more.
    is_stopped: bool,
    /// Rounds whose pieces the other hosts have been sent.
    sent: u64,
    /// By rank.
    ranks: Vec<TellingOf>,
    /// By host.
    peers: Vec<Peer>,
    rings: CarriedRings,
    verdict: Verdicts,
    /// Heard from the host that decides, to be told to those that it may not reach.
    heard: Option<Failed>,
}

/// The state of the communicator's failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdicts {
    None,
    /// To this host.
    Proposed(u32),
    /// All hosts say the same.
    Decided,
}

#[derive(Clone, Copy, Debug, Default)]
struct TellingOf {
    /// Was told, or heard.
    is_there: bool,
    /// As it was told, of a rank here.
    status: RankStatus,
}

#[derive(Clone, Debug, Default)]
struct Peer {
    /// Rounds that its ranks have arrived at here.
    arrived: u64,
    /// The rounds that they have come to after these, by the number of connections that their pieces come over. The
    /// round before the first of them is not open here yet, or pieces are missing.
    ahead: VecDeque<usize>,
    is_lost: bool,
}

impl Bridge {
    /// Makes the bridges of one host, one for each connection to every other host.
    pub(crate) fn all(segment: &Arc<Segment>, shares: Shares) -> Vec<Self> {
        Stripe::all(shares).map(|stripe| Self::new(segment.clone(), stripe)).collect()
    }

    fn new(segment: Arc<Segment>, stripe: Stripe) -> Self {
        let hosts = segment.hosts().count() as usize;
        let ranks = vec![TellingOf::default(); segment.size() as usize];
        let peers = vec![Peer::default(); hosts];
        Self {
            rings: CarriedRings::new(segment.clone()),
            segment,
            stripe,
            calls: false,
            is_stopped: false,
            sent: 0,
            ranks,
            peers,
            verdict: Verdicts::None,
            heard: None,
        }
    }

    pub(crate) fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Looks at what has happened here, and says what the other hosts must know of it.
    pub(crate) fn look(&mut self) -> Outbox {
        self.look_at(|now, told| (now.left, now.lost) != (told.left, told.lost))
    }

    /// The same, and how far all ranks here are: for ranks that wait for them.
    pub(crate) fn look_closely(&mut self) -> Outbox {
        self.look_at(|now, told| now != told)
    }

    fn look_at(&mut self, is_news: fn(&RankStatus, &RankStatus) -> bool) -> Outbox {
        let segment = self.segment.clone();
        let mut out: Outbox = (0..self.peers.len()).map(|_| Parcel::default()).collect();
        if !self.stripe.is_first() {
            while let Some(round) = self.stripe.announced() {
                self.send_striped(round, &bulk(&segment, round), &mut out);
                self.to_all(&mut out, arrival(&segment, round, 0), &[]);
            }
            return out;
        }
        // Before the rest: what a rank has sent before it left is there, too, then.
        let ranks: Vec<(u32, RankStatus)> =
            self.own_ranks().into_iter().map(|rank| (rank, segment.roster().status(rank))).collect();
        self.tell_members(&mut out);
        while segment.remote().local_rounds() > self.sent {
            self.send_round(&mut out);
            self.sent += 1;
        }
        for host in 0..self.peers.len() as u32 {
            self.deliver(host);
        }
        // Before anybody is said to have left: what a rank has sent stays good.
        self.rings.carry(&mut out);
        for (rank, status) in ranks {
            let told = &mut self.ranks[rank as usize].status;
            if is_news(&status, told) {
                *told = status;
                self.to_all(&mut out, about(FrameKind::Status, rank, RankStatus::BYTES), &status.encode());
            }
        }
        self.tell_failure(&mut out);
        if self.is_over() && !self.stripe.close() {
            self.calls = true;
        }
        out
    }

    /// From the next look on nothing is sent any more, whether ranks have left or not.
    pub(crate) fn stop(&mut self) {
        self.is_stopped = true;
    }

    /// Whether no rank here takes part any more, and the other hosts have been told so.
    pub(crate) fn is_over(&self) -> bool {
        if !self.stripe.is_first() {
            return self.stripe.is_closed();
        }
        let has_left = |rank: u32| {
            let told = self.ranks[rank as usize].status;
            told.left > 0 || told.lost > 0
        };
        self.is_stopped || self.own_ranks().into_iter().all(has_left)
    }

    /// Whether this host's other bridges must look, since this was asked last.
    pub(crate) fn calls(&mut self) -> bool {
        std::mem::take(&mut self.calls)
    }

    fn own_ranks(&self) -> Vec<u32> {
        self.segment.ranks_here().to_vec()
    }

    fn to_all(&self, out: &mut Outbox, header: FrameHeader, payload: &[u8]) {
        let others = (0_u32..).zip(out).filter(|(host, _)| *host != self.segment.host());
        for (_, parcel) in others {
            parcel.push(&header, payload);
        }
    }

    fn tell_members(&mut self, out: &mut Outbox) {
        for rank in self.own_ranks() {
            let pid = self.segment.roster().pid(rank);
            if pid != 0 && !self.ranks[rank as usize].is_there {
                self.ranks[rank as usize].is_there = true;
                self.to_all(out, about(FrameKind::Member, rank, 4), &pid.to_le_bytes());
            }
        }
    }

    /// One host decides why the communicator has failed: the first one that is not lost. The others propose what
    /// they have found.
    fn tell_failure(&mut self, out: &mut Outbox) {
        if let Some(failed) = self.heard.take() {
            let failed = failed.encode();
            self.to_all(out, about(FrameKind::Failed, self.segment.rank(), failed.len()), &failed);
        }
        if self.verdict == Verdicts::Decided {
            return;
        }
        let Some(failed) = self.segment.failure_word().candidate() else { return };
        let decides = self.peers.iter().position(|peer| !peer.is_lost).expect("this host is not lost") as u32;
        let rank = self.segment.rank();
        if decides == self.segment.host() {
            self.verdict = Verdicts::Decided;
            self.segment.failure_word().decide(&failed);
            let failed = failed.encode();
            self.to_all(out, about(FrameKind::Failed, rank, failed.len()), &failed);
        } else if self.verdict != Verdicts::Proposed(decides) {
            self.verdict = Verdicts::Proposed(decides);
            let failed = failed.encode();
            out[decides as usize].push(&about(FrameKind::Proposed, rank, failed.len()), &failed);
        }
    }

    /// Sends what the ranks here have written for the round that all of them have come to.
    fn send_round(&mut self, out: &mut Outbox) {
        let (segment, round) = (self.segment.clone(), self.sent);
        self.send(round, pieces(&small(&segment, round), MOST_BYTES), out);
        let bulk = bulk(&segment, round);
        let bytes = bulk.iter().map(|stretch| stretch.bytes).sum();
        let of = self.stripe.of_round(bytes, segment.tuning().striped_bytes);
        if of > 1 {
            self.stripe.announce(round);
            self.calls = true;
            self.send_striped(round, &bulk, out);
        } else {
            self.send(round, pieces(&bulk, MOST_BYTES), out);
        }
        self.to_all(out, arrival(&segment, round, of), &[]);
    }

    fn send_striped(&self, round: u64, bulk: &[WrittenBytes], out: &mut Outbox) {
        self.send(round, self.stripe.own(pieces(bulk, STRIPE_BYTES)), out);
    }

    fn send(&self, round: u64, pieces: impl Iterator<Item = WrittenBytes>, out: &mut Outbox) {
        let segment = &self.segment;
        for WrittenBytes { kind, rank, place, offset, bytes, to } in pieces {
            let header =
                FrameHeader { kind, rank, round: round as u32, offset: offset as u32, bytes: bytes as u32 };
            let piece = Piece::of(segment, place + offset, bytes);
            let hosts = (0_u32..).zip(&mut *out).filter(|(host, _)| match to {
                Some(to) => *host == to,
                None => *host != segment.host(),
            });
            hosts.for_each(|(_, parcel)| parcel.push_piece(&header, &piece));
        }
    }

    /// Takes in what `host` has sent.
    ///
    /// # Errors
    /// When that can not be.
    pub(crate) fn take(&mut self, host: u32, header: &FrameHeader, payload: &[u8]) -> Result<(), Wrong> {
        // Not cloned: an atomic count after every copy waits until that has reached the memory.
        let segment = &self.segment;
        if segment.hosts().count() <= host || host == segment.host() {
            return Err(Wrong("a frame from a host that is none"));
        }
        if header.rank >= segment.size() || segment.hosts().of(header.rank) != host {
            return Err(Wrong("a frame about a rank that is elsewhere"));
        }
        if payload.len() != header.bytes as usize {
            return Err(Wrong("a frame of another length than it says"));
        }
        match header.kind {
            FrameKind::Slot
            | FrameKind::Behind
            | FrameKind::Splits
            | FrameKind::Window
            | FrameKind::Folded => self.put(host, header, payload),
            FrameKind::Arrived => self.arrive(host, header),
            _ if !self.stripe.is_first() => Err(Wrong("a frame on a connection for pieces")),
            FrameKind::Member => self.meet_member(header.rank, payload),
            FrameKind::Ring => self.rings.fill(header, payload),
            FrameKind::Taken => self.rings.free(header, payload),
            FrameKind::Status => self.hear_status(host, header.rank, payload),
            FrameKind::Failed | FrameKind::Proposed => self.hear_failure(header.kind, payload),
        }
    }

    fn meet_member(&mut self, rank: u32, payload: &[u8]) -> Result<(), Wrong> {
        let pid = payload.try_into().map(u32::from_le_bytes).map_err(|_| Wrong("no process id"))?;
        let known = &mut self.ranks[rank as usize];
        if known.is_there || pid == 0 {
            return Err(Wrong("a rank that comes twice, or as no process"));
        }
        known.is_there = true;
        self.segment.roster().attach_remote(rank, pid);
        Ok(())
    }

    fn hear_status(&self, host: u32, rank: u32, payload: &[u8]) -> Result<(), Wrong> {
        let status = RankStatus::decode(payload).ok_or(Wrong("no status"))?;
        // It may be one round ahead of what is open here.
        let arrived = status.arrived.min(self.peers[host as usize].arrived + 1);
        self.segment.roster().put_status(rank, &RankStatus { arrived, ..status });
        Ok(())
    }

    fn hear_failure(&mut self, kind: FrameKind, payload: &[u8]) -> Result<(), Wrong> {
        let segment = &self.segment;
        let failed = Failed::decode(payload).ok_or(Wrong("no failure"))?;
        if failed.blamed.iter().any(|rank| *rank >= segment.size()) {
            return Err(Wrong("a failure that blames a rank there is not"));
        }
        if kind == FrameKind::Failed && self.verdict != Verdicts::Decided {
            self.verdict = Verdicts::Decided;
            segment.failure_word().decide(&failed);
            self.heard = Some(failed.clone());
        }
        // The communicator fails here, unless it has failed already. A proposed failure is decided on at the next look.
        let kind = FailureKind::from_code(failed.kind);
        segment.failure_word().fail_here(&Verdict::new(kind, failed.text).blaming(failed.blamed));
        Ok(())
    }

    /// Whether what a host says of this round comes in its turn. Connections for pieces skip rounds, and count those
    /// that have come.
    fn is_next(&self, host: u32, round: u32) -> bool {
        let Peer { arrived, ahead, .. } = &self.peers[host as usize];
        let is_next = round.wrapping_sub(*arrived as u32) as usize == ahead.len();
        !self.stripe.is_first() || ahead.len() < self.stripe.most_ahead() && is_next
    }

    fn arrive(&mut self, host: u32, header: &FrameHeader) -> Result<(), Wrong> {
        let FrameHeader { round, offset: of, .. } = *header;
        if !self.is_next(host, round) {
            return Err(Wrong("an arrival at another round than the next one"));
        }
        if self.stripe.is_first() {
            if !self.stripe.is_possible(of as usize) {
                return Err(Wrong("an arrival over connections there are not"));
            }
            self.peers[host as usize].ahead.push_back(of as usize);
            self.deliver(host);
        } else {
            let are_all = self.stripe.come(host, round);
            self.calls |= are_all.ok_or(Wrong("pieces of more rounds than can be"))?;
        }
        Ok(())
    }

    fn put(&self, host: u32, header: &FrameHeader, payload: &[u8]) -> Result<(), Wrong> {
        if !self.is_next(host, header.round) {
            return Err(Wrong("a piece of another round than the next one"));
        }
        let (at, room) = area(&self.segment, header.kind, header.rank, header.round.into());
        let offset = header.offset as usize;
        if offset.checked_add(payload.len()).is_none_or(|end| end > room) {
            return Err(Wrong("a piece that does not fit where it belongs"));
        }
        self.segment.region().write(at + offset, payload);
        // A window is larger than the caches of a core: a thread that only copies would wait for its lines one by
        // one.
        let next = offset + payload.len();
        self.segment.region().prefetch(at + next, payload.len().min(room - next));
        Ok(())
    }

    /// Counts the ranks of a host as arrived, if it is their turn.
    fn deliver(&mut self, host: u32) {
        let segment = &self.segment;
        let peer = &mut self.peers[host as usize];
        let is_next = |round: u64| round == 0 || segment.meeting().is_open((round - 1) as u32);
        let Some(of) = peer.ahead.front().copied() else { return };
        if !is_next(peer.arrived) {
            return;
        }
        let pieces = if of > 1 { self.stripe.pieces(host, peer.arrived as u32) } else { Pieces::Come };
        match pieces {
            Pieces::Come => {}
            Pieces::Missing => return,
            Pieces::Lost => return self.miss_pieces(host),
        }
        segment.roster().arrive_for(segment.hosts().ranks(host), peer.arrived as u32);
        peer.arrived += 1;
        peer.ahead.pop_front();
    }

    /// A host will say no more over this connection. Over the first one it has said before which ranks have left;
    /// frames that have not come by then over another one will be missed.
    pub(crate) fn end(&mut self, host: u32) {
        if self.stripe.is_first() {
            return self.lose(host);
        }
        self.stripe.gone(host);
        self.calls = true;
    }

    /// Nothing will come from a host any more: its ranks that had not left are lost.
    pub(crate) fn lose(&mut self, host: u32) {
        if !self.stripe.is_first() {
            self.end(host);
        }
        if !std::mem::replace(&mut self.peers[host as usize].is_lost, true) {
            let ranks = self.segment.hosts().ranks(host).iter();
            ranks
                .filter(|rank| self.segment.roster().left(**rank).is_none())
                .for_each(|rank| self.segment.roster().mourn(*rank));
        }
    }

    /// Ranks of a host have come to a round, and may have left since; but a part of what they had for it is lost.
    fn miss_pieces(&self, host: u32) {
        let segment = &self.segment;
        let text = format!(
            "the connection to host {} was lost before all of its data had come",
            segment.hosts().name(host)
        );
        let blamed = segment.hosts().ranks(host);
        segment.failure_word().fail_here(&Verdict::new(FailureKind::RankLost, text).blaming(blamed));
    }

    /// Fails the communicator here: large rounds can not be sent to a host.
    pub(crate) fn cut_off(&self, host: u32, why: &str) {
        let segment = &self.segment;
        let text = format!(
            "large rounds do not reach host {}: {why}; open TCP between the hosts, or set TPURUN_BULK=quic",
            segment.hosts().name(host)
        );
        let first = segment.hosts().first(host);
        segment.failure_word().fail_here(&Verdict::new(FailureKind::Transport, text).blaming([first]));
    }

    /// Fails the communicator here, as it can not go on: something that a host sent can not be.
    pub(crate) fn refuse(&self, host: u32, wrong: Wrong) {
        let segment = &self.segment;
        let first = segment.hosts().first(host);
        let text = format!("host {} sent what can not be: {wrong}", segment.hosts().name(host));
        segment.failure_word().fail_here(&Verdict::new(FailureKind::Internal, text).blaming([first]));
    }
}

/// Returns the header that says that all ranks here have come to a round, and that its pieces go over `of`
/// connections.
fn arrival(segment: &Segment, round: u64, of: usize) -> FrameHeader {
    FrameHeader { round: round as u32, offset: of as u32, ..about(FrameKind::Arrived, segment.rank(), 0) }
}

fn about(kind: FrameKind, rank: u32, bytes: usize) -> FrameHeader {
    FrameHeader { kind, rank, round: 0, offset: 0, bytes: bytes as u32 }
}
