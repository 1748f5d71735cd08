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

mod parcel;
mod stripe;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

pub(crate) use parcel::Parcel;
use parcel::Piece;
pub(crate) use stripe::Shares;
use stripe::{Pieces, Stripe};
use tpurun_memory::failure::FailureKind;
use tpurun_memory::sync::{Ordering, RingError};
use tpurun_protocol::frame::{
    Failed, FrameHeader, FrameKind, HEADER_BYTES, MOST_BYTES, RankStatus, STRIPE_BYTES,
};
use tpurun_protocol::layout::{CHANNELS, TURNS};
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
    /// Rings between a rank here and one elsewhere that something has gone through, by channel, sender and receiver.
    rings: BTreeMap<(u32, u32, u32), Carried>,
    /// How often something had happened on rings at the last look.
    moves: u32,
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

/// Bytes of a ring in all. Each host has a copy of the ring, as large as the other: what the sender's copy holds
/// fits the receiver's, and is freed when the receiver has taken it.
#[derive(Clone, Copy, Debug, Default)]
struct Carried {
    /// To or from the other host.
    moved: u64,
    /// By the receiver, as far as the sender's host has been told.
    taken: u64,
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

/// The frames that are to be sent, by host.
pub(crate) type Outbox = Vec<Parcel>;

/// Says why something that another host sent can not be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Wrong(&'static str);

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
            segment,
            stripe,
            calls: false,
            is_stopped: false,
            sent: 0,
            ranks,
            peers,
            rings: BTreeMap::new(),
            moves: 0,
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
        self.carry_rings(&mut out);
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

    fn carry_rings(&mut self, out: &mut Outbox) {
        let segment = self.segment.clone();
        // Acquire: then what has moved is seen below.
        let moves = segment.rings().moves().load(Ordering::Acquire);
        if std::mem::replace(&mut self.moves, moves) == moves {
            return;
        }
        for channel in 0..CHANNELS {
            for here in self.own_ranks() {
                for there in segment.ranks().filter(|rank| !segment.is_here(*rank)) {
                    let carried = self
                        .carry_out(channel, here, there, out)
                        .and_then(|()| self.tell_taken(channel, there, here, out));
                    if let Err(error) = carried {
                        let text =
                            format!("{} wrote what can not be: {error}", segment.roster().describe(&[here]));
                        segment
                            .failure_word()
                            .fail_here(&Verdict::new(FailureKind::Internal, text).blaming([here]));
                        return;
                    }
                }
            }
        }
    }

    /// Sends the bytes that `from` has put into its ring since the last look.
    fn carry_out(&mut self, channel: u32, from: u32, to: u32, out: &mut Outbox) -> Result<(), RingError> {
        let segment = &self.segment;
        let filled = segment.rings().ring(channel, from, to).readable()?;
        let Carried { moved, taken } = self.rings.get(&(channel, from, to)).copied().unwrap_or_default();
        let mut fresh = filled.after((moved - taken) as u32);
        if fresh.bytes == 0 {
            return Ok(());
        }
        let data = segment.layout().ring_data(channel, from, to);
        let frames = &mut out[segment.hosts().of(to) as usize];
        self.rings.entry((channel, from, to)).or_default().moved += u64::from(fresh.bytes);
        while fresh.bytes > 0 {
            let bytes = fresh.bytes.min(MOST_BYTES as u32);
            let header = FrameHeader { kind: FrameKind::Ring, rank: from, round: channel, offset: to, bytes };
            frames.push_with(&header, |payload| segment.rings().read_run(data, fresh, payload));
            fresh = fresh.after(bytes);
        }
        Ok(())
    }

    /// Tells how much `to` has taken out of the ring since the last look.
    fn tell_taken(&mut self, channel: u32, from: u32, to: u32, out: &mut Outbox) -> Result<(), RingError> {
        let Some(carried) = self.rings.get_mut(&(channel, from, to)) else { return Ok(()) };
        let left = self.segment.rings().ring(channel, from, to).readable()?.bytes;
        let taken = carried.moved - u64::from(left).min(carried.moved);
        if taken > carried.taken {
            carried.taken = taken;
            let frames = &mut out[self.segment.hosts().of(from) as usize];
            let header =
                FrameHeader { kind: FrameKind::Taken, rank: to, round: channel, offset: from, bytes: 8 };
            frames.push(&header, &taken.to_le_bytes());
        }
        Ok(())
    }

    /// Bytes for a ring to a rank here.
    fn fill_ring(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), Wrong> {
        let (channel, from, to) = (header.round, header.rank, header.offset);
        self.check_ring(channel, to)?;
        let segment = &self.segment;
        let ring = segment.rings().ring(channel, from, to);
        let room = ring.writable().map_err(|_| Wrong("bytes for a ring that can not be used"))?;
        if (room.bytes as usize) < payload.len() {
            return Err(Wrong("more bytes for a ring than fit"));
        }
        segment.rings().write_run(segment.layout().ring_data(channel, from, to), room, payload);
        ring.publish(payload.len() as u32);
        self.rings.entry((channel, from, to)).or_default().moved += payload.len() as u64;
        segment.doorbell(to).ring();
        Ok(())
    }

    /// Room in a ring of a rank here.
    fn free_ring(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<(), Wrong> {
        let (channel, from, to) = (header.round, header.offset, header.rank);
        self.check_ring(channel, from)?;
        let taken = payload.try_into().map(u64::from_le_bytes).map_err(|_| Wrong("no count of bytes"))?;
        let carried = self.rings.entry((channel, from, to)).or_default();
        if taken < carried.taken || taken > carried.moved {
            return Err(Wrong("a count of bytes that were not sent"));
        }
        self.segment.rings().ring(channel, from, to).consume((taken - carried.taken) as u32);
        carried.taken = taken;
        self.segment.doorbell(from).ring();
        Ok(())
    }

    fn check_ring(&self, channel: u32, here: u32) -> Result<(), Wrong> {
        let is_ring = channel < CHANNELS && here < self.segment.size() && self.segment.is_here(here);
        if is_ring { Ok(()) } else { Err(Wrong("a ring that is none")) }
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

    fn send_striped(&self, round: u64, bulk: &[Stretch], out: &mut Outbox) {
        self.send(round, self.stripe.own(pieces(bulk, STRIPE_BYTES)), out);
    }

    fn send(&self, round: u64, pieces: impl Iterator<Item = Stretch>, out: &mut Outbox) {
        let segment = &self.segment;
        for Stretch { kind, rank, place, offset, bytes, to } in pieces {
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
            FrameKind::Member => {
                let pid = payload.try_into().map(u32::from_le_bytes).map_err(|_| Wrong("no process id"))?;
                let known = &mut self.ranks[header.rank as usize];
                if known.is_there || pid == 0 {
                    return Err(Wrong("a rank that comes twice, or as no process"));
                }
                known.is_there = true;
                segment.roster().attach_remote(header.rank, pid);
                Ok(())
            }
            FrameKind::Ring => self.fill_ring(header, payload),
            FrameKind::Taken => self.free_ring(header, payload),
            FrameKind::Status => {
                let status = RankStatus::decode(payload).ok_or(Wrong("no status"))?;
                // It may be one round ahead of what is open here.
                let arrived = status.arrived.min(self.peers[host as usize].arrived + 1);
                let status = RankStatus { arrived, ..status };
                segment.roster().put_status(header.rank, &status);
                Ok(())
            }
            FrameKind::Failed | FrameKind::Proposed => {
                let failed = Failed::decode(payload).ok_or(Wrong("no failure"))?;
                if failed.blamed.iter().any(|rank| *rank >= segment.size()) {
                    return Err(Wrong("a failure that blames a rank there is not"));
                }
                if header.kind == FrameKind::Failed && self.verdict != Verdicts::Decided {
                    self.verdict = Verdicts::Decided;
                    segment.failure_word().decide(&failed);
                    self.heard = Some(failed.clone());
                }
                // The communicator fails here, unless it has failed already. A proposed failure is decided on at the
                // next look.
                let kind = FailureKind::from_code(failed.kind);
                segment.failure_word().fail_here(&Verdict::new(kind, failed.text).blaming(failed.blamed));
                Ok(())
            }
        }
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

/// Bytes that a rank has written somewhere, for other hosts.
#[derive(Clone, Copy)]
struct Stretch {
    kind: FrameKind,
    rank: u32,
    /// Where its pieces of this kind begin here.
    place: usize,
    offset: usize,
    bytes: usize,
    /// The only host that needs it.
    to: Option<u32>,
}

/// Returns the stretches that come with every round.
fn small(segment: &Segment, round: u64) -> Vec<Stretch> {
    let parity = (round % 2) as usize;
    let of_rank = |rank: &u32| {
        let (rank, written) = (*rank, segment.remote().written(*rank, parity));
        let kinds = [
            (FrameKind::Slot, written.slot),
            (FrameKind::Behind, written.behind),
            (FrameKind::Splits, written.splits),
        ];
        kinds.map(|(kind, bytes)| {
            let place = area(segment, kind, rank, round).0;
            Stretch { kind, rank, place, offset: 0, bytes, to: None }
        })
    };
    segment.ranks_here().iter().flat_map(of_rank).collect()
}

/// Returns the stretches that have been staged and folded for a round.
fn bulk(segment: &Segment, round: u64) -> Vec<Stretch> {
    let (parity, layout) = ((round % 2) as usize, segment.layout());
    let own_ranks = segment.ranks_here();
    let mut bulk = vec![];
    for rank in own_ranks.iter().copied() {
        let written = segment.remote().written(rank, parity);
        let mut add = |kind, place, offset, bytes, to| {
            bulk.push(Stretch { kind, rank, place, offset, bytes, to });
        };
        let window = layout.window(rank, parity);
        add(FrameKind::Window, window, 0, written.for_all, None);
        let partial = layout.partial(turn(round));
        add(FrameKind::Window, partial, 0, written.partial, None);
        let for_each = if written.is_partial { partial } else { window };
        if written.stride > 0 {
            for to in segment.ranks().filter(|to| !segment.is_here(*to)) {
                let bytes = segment.remote().written_for(rank, parity, to).min(written.stride);
                let offset = written.stride * to as usize;
                if offset + bytes <= layout.window_bytes() {
                    add(FrameKind::Window, for_each, offset, bytes, Some(segment.hosts().of(to)));
                }
            }
        }
        for own in own_ranks {
            let stretch = written.folded.of(*own);
            add(FrameKind::Folded, layout.folded(turn(round)), stretch.start, stretch.len(), None);
        }
    }
    bulk
}

fn pieces(stretches: &[Stretch], most: usize) -> impl Iterator<Item = Stretch> {
    stretches.iter().flat_map(move |whole| {
        (0..whole.bytes).step_by(most).map(move |start| Stretch {
            offset: whole.offset + start,
            bytes: (whole.bytes - start).min(most),
            ..*whole
        })
    })
}

fn turn(round: u64) -> usize {
    (round % TURNS as u64) as usize
}

/// Returns the header that says that all ranks here have come to a round, and that its pieces go over `of`
/// connections.
fn arrival(segment: &Segment, round: u64, of: usize) -> FrameHeader {
    FrameHeader { round: round as u32, offset: of as u32, ..about(FrameKind::Arrived, segment.rank(), 0) }
}

fn about(kind: FrameKind, rank: u32, bytes: usize) -> FrameHeader {
    FrameHeader { kind, rank, round: 0, offset: 0, bytes: bytes as u32 }
}

/// Where a rank's pieces of this kind lie, and how much room they have.
fn area(segment: &Segment, kind: FrameKind, rank: u32, round: u64) -> (usize, usize) {
    let (parity, layout) = ((round % 2) as usize, segment.layout());
    match kind {
        FrameKind::Slot => (layout.slot(rank, parity), tpurun_protocol::match_key::SLOT_BYTES),
        FrameKind::Behind => (layout.behind(rank, parity), tpurun_protocol::match_key::OFFERS_BYTES),
        FrameKind::Splits => (layout.splits(rank, parity), layout.splits_bytes()),
        FrameKind::Folded => (layout.folded(turn(round)), layout.window_bytes()),
        _ => (layout.window(rank, parity), layout.window_bytes()),
    }
}

/// Finds the frames in a stream of bytes. Pieces of what ranks have written are handed on as they come, so that
/// nothing large is kept here.
#[derive(Debug, Default)]
pub(crate) struct Frames {
    /// The beginning of a frame that is not whole yet.
    begun: Vec<u8>,
    /// The rest of a piece that has not come yet.
    piece: Option<FrameHeader>,
}

impl Frames {
    /// # Errors
    /// When the bytes are no frames, and what `take` says of them.
    pub(crate) fn feed(
        &mut self,
        mut bytes: &[u8],
        mut take: impl FnMut(&FrameHeader, &[u8]) -> Result<(), Wrong>,
    ) -> Result<(), Wrong> {
        while !bytes.is_empty() {
            if let Some(piece) = &mut self.piece {
                let (now, rest) = bytes.split_at(bytes.len().min(piece.bytes as usize));
                take(&FrameHeader { bytes: now.len() as u32, ..*piece }, now)?;
                bytes = rest;
                piece.offset = piece.offset.saturating_add(now.len() as u32);
                piece.bytes -= now.len() as u32;
                if piece.bytes == 0 {
                    self.piece = None;
                }
                continue;
            }
            let wanted = match self.begun.len() < HEADER_BYTES {
                true => HEADER_BYTES,
                false => HEADER_BYTES + self.header()?.bytes as usize,
            };
            let (now, rest) = bytes.split_at(bytes.len().min(wanted - self.begun.len()));
            self.begun.extend_from_slice(now);
            bytes = rest;
            if self.begun.len() < HEADER_BYTES {
                continue;
            }
            let header = self.header()?;
            if header.kind.is_piece() && header.bytes > 0 {
                self.begun.clear();
                self.piece = Some(header);
            } else if self.begun.len() == HEADER_BYTES + header.bytes as usize {
                take(&header, &self.begun[HEADER_BYTES..])?;
                self.begun.clear();
            }
        }
        Ok(())
    }

    fn header(&self) -> Result<FrameHeader, Wrong> {
        let header = self.begun.first_chunk().and_then(FrameHeader::decode);
        header.ok_or(Wrong("bytes that are no frame"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// However a stream is cut, the same comes out of it.
        #[test]
        fn frames_are_found_however_they_come(
            frames in proptest::collection::vec((1_u8..=12, proptest::collection::vec(any::<u8>(), 0..50)), 0..9),
            cuts in proptest::collection::vec(1_usize..40, 1..99),
        ) {
            let mut stream = vec![];
            let mut expected: Vec<(u8, u32, u8)> = vec![];
            for (kind, payload) in &frames {
                let mut header = [0; HEADER_BYTES];
                header[0] = *kind;
                header[16..].copy_from_slice(&(payload.len() as u32).to_le_bytes());
                stream.extend(header);
                stream.extend(payload);
                expected.extend((0_u32..).zip(payload).map(|(at, byte)| (*kind, at, *byte)));
            }
            let (mut found, mut rest, mut parser) = (vec![], &stream[..], Frames::default());
            let mut cuts = cuts.iter().cycle();
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rest.len().min(*cuts.next().expect("for ever")));
                rest = later;
                let took = parser.feed(now, |header, payload| {
                    assert_eq!(header.bytes as usize, payload.len());
                    let bytes = (header.offset..).zip(payload);
                    found.extend(bytes.map(|(at, byte)| (header.kind as u8, at, *byte)));
                    Ok(())
                });
                prop_assert_eq!(took, Ok(()));
            }
            prop_assert_eq!(found, expected);
        }
    }
}
