//! The collective lane of a communicator: its operations, one after the other, on the caller's thread or on
//! the progress thread.
//!
//! Every operation begins with a meeting of all ranks over its match keys; only then does any user tensor
//! change. The rest depends on the schedule: flat ones go on meeting over shared windows, the others stream
//! over byte rings.

mod between;
mod burst;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering as StdOrdering};
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use tpurun_topology::{Algorithm, Schedule};

use crate::communicator::presence::{Blocked, Presence};
use crate::execute::chain::Chained;
use crate::execute::flat::Flat;
use crate::execute::lookout::Lookout;
use crate::execute::mapped::{self, Mapped, Mapping};
use crate::execute::stepwise;
use crate::matching::splits;
use crate::matching::verdict;
use crate::matching::verify;
use crate::plan::planning::{Planner, Wanted};
use crate::plan::trial::Trial;
use tpurun_memory::arena::ArenaKind;
use tpurun_memory::failure::{Failure, FailureKind, bug};
use tpurun_memory::process::LOOK_PERIOD;
use tpurun_memory::sync::{Arrival, AtomicU64, Bound, Opened, Ordering, Patience};
use tpurun_memory::traffic::{Counter, Traffic};
use tpurun_protocol::board::{Recording, WaitKind};
use tpurun_protocol::config::Config;
use tpurun_protocol::layout::{LINE, TURNS};
use tpurun_protocol::match_key::{self, Offer, Planned, Posted, Slot};
use tpurun_protocol::op::{Op, OpKind};
use tpurun_protocol::segment::{Segment, Verdict};

pub(crate) use between::{Between, is_halved, is_scattered, partials};
pub(crate) use burst::{BURST, Begun, Call, Progress, Staged};

/// Executes the collectives of one communicator in order.
#[derive(Debug)]
pub(crate) struct Lane {
    segment: Arc<Segment>,
    planner: Planner,
    config: Config,
    /// When all of the rank waits, and of the progress thread when the rank computes beside it.
    patience: [Patience; 2],
    /// Few: sizes are rounded.
    plans: Vec<(Wanted, Arc<Schedule>)>,
    mapping: Mapping,
    presence: Arc<Presence>,
    shared: Arc<Shared>,
    /// A fingerprint of everything but the operation that plans depend on.
    plan_print: u64,
    round: u32,
    /// Pieces that have gone through the chain.
    chained: u64,
    /// How the first rank of a chain writes long pieces.
    trial: Trial,
    /// Whether the memory that ranks stage in lies in huge pages, where there are any.
    is_settled: bool,
    seq: u64,
    /// Looks at the processes of others so far.
    looks: AtomicU32,
    /// Queued operations that this rank has come to a meeting with, and not waited for yet.
    begun: Option<Begun>,
    /// The bytes it has staged for the next meeting, for the bridge to other hosts.
    staged: Staging,
    /// Other ranks know where the tensors of the operation are, and may read and write them there.
    is_lent: bool,
    /// Since which operation this rank takes no part any more, and why.
    given_up: Option<(u64, Failure)>,
    /// When it has seen that this rank shuts down.
    closing_since: Option<Instant>,
}

/// The state that the communicator and its lane share, each to tell the other.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Set once: this rank shuts down.
    pub(crate) closing: AtomicBool,
    /// Threads that sleep until the progress thread has done what they wait for: it may use their CPUs.
    pub(crate) sleepers: AtomicU32,
    pub(crate) traffic: Counter,
}

/// The duty of the last to arrive at a meeting, which it does for all before the meeting opens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum About {
    /// The first of an operation: compares the keys in the slots of this parity.
    Keys(usize),
    /// A later one: nothing but the fold.
    Data,
    /// The last one: compares the results in the slots of this parity.
    Results(usize),
}

/// The subject of a meeting.
pub(crate) struct Meet<'a> {
    pub(crate) op: &'a Op,
    pub(crate) seq: u64,
    pub(crate) deadline: Instant,
    pub(crate) timeout: Duration,
    pub(crate) algorithm: Option<Algorithm>,
    /// The fold the last to arrive does with the others' help: bytes at the start of every window.
    pub(crate) fold_bytes: usize,
    /// Which of each rank's two windows is folded.
    pub(crate) fold_window: usize,
    pub(crate) between: Between,
    /// Where this rank's tensors are, when they are to be used there.
    pub(crate) mapped: Option<Mapped>,
    /// Operations that this meeting settles, too, when all ranks have them; where their tensors are staged.
    pub(crate) behind: &'a [Staged<'a>],
    pub(crate) posted: Posting,
}

impl<'a> Meet<'a> {
    fn new(op: &'a Op, seq: u64, deadline: Instant, timeout: Duration, posted: Posting) -> Self {
        Self {
            op,
            seq,
            deadline,
            timeout,
            algorithm: None,
            fold_bytes: 0,
            fold_window: 0,
            between: Between::default(),
            mapped: None,
            behind: &[],
            posted,
        }
    }
}

/// The bytes that a rank has staged for the meeting it comes to next.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    /// From the beginning of its window, for all ranks alike.
    pub(crate) for_all: usize,
    /// Distance of what it has staged for each rank.
    pub(crate) stride: usize,
    /// The bytes it has staged for each rank.
    pub(crate) each: Vec<usize>,
}

/// The known properties of the program's call, beside the operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Posting {
    pub(crate) recording: Option<Recording>,
    /// Python threads of the process when the calling thread itself executes the operation; `None` when the
    /// progress thread does.
    pub(crate) caller: Option<u32>,
}

/// The findings of the last to arrive, for all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Agreed {
    /// Rounds that a flat execution takes.
    pub(crate) rounds: u32,
    /// An all-to-all of different sizes.
    pub(crate) uneven: bool,
    pub(crate) memory: Memory,
    /// How many of those behind the operation it has settled, too.
    pub(crate) behind: usize,
}

/// The memory that all ranks' tensors go through.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Memory {
    /// The windows of the segment.
    Windows,
    /// Nothing: the opening of the meeting has done it all.
    Arenas,
    /// Nothing: each does its share of it, and all meet again.
    Shares,
    /// The windows, but some thought otherwise: nothing has been done so far.
    Mixed,
}

impl Agreed {
    fn encode(self) -> u64 {
        let memory = match self.memory {
            Memory::Windows => 0,
            Memory::Arenas => 1,
            Memory::Mixed => 2,
            Memory::Shares => 3,
        };
        u64::from(self.rounds) | u64::from(self.uneven) << 32 | memory << 33 | (self.behind as u64) << 40
    }

    fn decode(word: u64) -> Self {
        let memory = match word >> 33 & 3 {
            0 => Memory::Windows,
            1 => Memory::Arenas,
            2 => Memory::Mixed,
            _ => Memory::Shares,
        };
        Self { rounds: word as u32, uneven: word >> 32 & 1 != 0, memory, behind: (word >> 40) as usize }
    }
}

impl Lane {
    pub(crate) fn new(
        segment: Arc<Segment>,
        config: Config,
        presence: Arc<Presence>,
        shared: Arc<Shared>,
    ) -> Result<Self, Failure> {
        let planner = Planner::new(segment.members(), &config, segment.planned_cpus())?;
        let plan_print = planner.fingerprint();
        let patience = [1, 2].map(|threads| Patience::new(threads * segment.size(), config.cpus));
        for kind in ArenaKind::ALL {
            if let Some(arena) = config.arenas.get(kind) {
                mapped::announce(&segment, kind, arena);
            }
        }
        Ok(Self {
            segment,
            planner,
            config,
            patience,
            plans: vec![],
            mapping: Mapping::default(),
            presence,
            shared,
            plan_print,
            round: 0,
            chained: 0,
            trial: Trial::default(),
            is_settled: false,
            seq: 0,
            begun: None,
            staged: Staging::default(),
            is_lent: false,
            looks: AtomicU32::new(0),
            given_up: None,
            closing_since: None,
        })
    }

    /// Runs one collective to its end.
    pub(crate) fn run(&mut self, op: &Op, timeout: Duration, posted: Posting) -> Result<(), Failure> {
        if let Some(failure) = self.over() {
            let result = Err(failure);
            self.presence.ended(posted.recording, &result);
            return result;
        }
        let seq = self.seq;
        self.seq += 1;
        let timeout = op.timeout.unwrap_or(timeout);
        let deadline = Instant::now() + timeout;
        let meet = || Meet::new(op, seq, deadline, timeout, posted);
        let result = self.guarded(|lane| {
            lane.refuse_if_closing(&meet())?;
            lane.execute(meet())?;
            lane.verify(&meet())
        });
        match &result {
            Ok(()) => self.presence.completed(seq),
            // The caller may do with them what it wants as soon as it knows.
            Err(failure) if self.is_lent => self.segment.take_back(failure),
            Err(_) => {}
        }
        self.is_lent = false;
        self.presence.ended(posted.recording, &result);
        self.settle();
        result
    }

    /// Has the memory that all ranks stage in lie in huge pages, for ranks that meet as often as this goes
    /// on.
    fn settle(&mut self) {
        const OFTEN: u32 = 256;
        let segment = &self.segment;
        let is_first = segment.hosts().first(segment.host()) == segment.rank();
        if self.round >= OFTEN && is_first && !self.is_settled {
            self.is_settled = true;
            for range in segment.layout().busiest() {
                if let Err(error) = segment.region().make_huge(range) {
                    tracing::debug!(%error, "the host gives no huge pages");
                    return;
                }
            }
        }
    }

    /// A bug of ours must reach the other ranks, too, which would wait for this one.
    fn guarded<T>(&mut self, run: impl FnOnce(&mut Self) -> Result<T, Failure>) -> Result<T, Failure> {
        let segment = self.segment.clone();
        catch_unwind(AssertUnwindSafe(|| run(self)))
            .unwrap_or_else(|panic| Err(segment.fail(FailureKind::Internal, &bug(&*panic))))
    }

    fn execute(&mut self, mut meet: Meet<'_>) -> Result<(), Failure> {
        let op = meet.op;
        let Some(wanted) = Wanted::by(op, self.planner.forced()) else {
            return self.match_keys(&meet, 1).map(drop);
        };
        let wanted = self.between_hosts(wanted);
        let schedule = self.plan(wanted, op.kind)?;
        meet.algorithm = Some(schedule.algorithm);
        let (segment, shared) = (self.segment.clone(), self.shared.clone());
        if schedule.algorithm == Algorithm::Flat {
            let flat = Flat::new(&segment, op, &schedule, &shared.traffic);
            let parity = self.parity();
            meet.mapped = self.mapping.take(&segment, &self.config.arenas, op, parity);
            self.is_lent = meet.mapped.is_some();
            if meet.mapped.is_none() {
                return flat.run(self, meet, None);
            }
            let agreed = self.match_keys(&meet, flat.rounds())?;
            let mapped = meet.mapped.take();
            return match (agreed.memory, mapped) {
                (Memory::Arenas, _) => Ok(()),
                (Memory::Shares, Some(mapped)) => {
                    self.in_place(|| mapped.run_share(&segment, op, &shared.traffic))?;
                    self.meet_again(&meet)
                }
                _ => flat.run(self, meet, Some(agreed)),
            };
        }
        // Whether an all-to-all is even, which routes through other ranks need, all know only afterwards.
        let flat = self.plan(wanted.flat(), op.kind)?;
        let flat = Flat::new(&segment, op, &flat, &shared.traffic);
        let agreed = self.match_keys(&meet, flat.rounds())?;
        if agreed.uneven {
            return flat.run(self, meet, Some(agreed));
        }
        let hopeless = |needed: &[u32]| self.hopeless(&meet, &[], needed);
        let tell = || self.blocked(&meet);
        let lookout = Lookout::new(&segment, meet.deadline, Patience::NONE, &hopeless, &tell);
        let moved = stepwise::run(&segment, op, &schedule, meet.seq, lookout)?;
        shared.traffic.add(moved);
        Ok(())
    }

    /// Plans so that data goes from one host to another once, whatever is cheapest on one of them.
    fn between_hosts(&self, wanted: Wanted) -> Wanted {
        if self.segment.is_bridged() && self.planner.forced().is_none() { wanted.flat() } else { wanted }
    }

    fn plan(&mut self, wanted: Wanted, op: OpKind) -> Result<Arc<Schedule>, Failure> {
        if let Some((_, plan)) = self.plans.iter().find(|(known, _)| *known == wanted) {
            return Ok(plan.clone());
        }
        let plan = Arc::new(self.planner.plan(wanted, op)?);
        self.plans.push((wanted, plan.clone()));
        Ok(plan)
    }

    /// Returns what is staged for the next meeting.
    pub(crate) fn staged_mut(&mut self) -> &mut Staging {
        &mut self.staged
    }

    /// Which of the two slots and windows the current round uses.
    pub(crate) fn parity(&self) -> usize {
        (self.round % 2) as usize
    }

    /// Which of the places for what is folded for other hosts it uses.
    pub(crate) fn turn(&self) -> usize {
        turn_of(self.round)
    }

    /// The first meeting of an operation: compares the keys.
    pub(crate) fn match_keys(&mut self, meet: &Meet<'_>, rounds: u32) -> Result<Agreed, Failure> {
        self.offer_keys(meet, rounds)?;
        self.await_keys(meet, rounds)
    }

    /// The first half of it: nothing is waited for.
    fn offer_keys(&mut self, meet: &Meet<'_>, rounds: u32) -> Result<Arrival, Failure> {
        if cfg!(tpurun_unmatched) {
            // See benches/matching.rs.
            return self.arrive(meet, About::Data);
        }
        let parity = self.parity();
        let (region, layout) = (self.segment.region(), self.segment.layout());
        let slot = Slot::new(region, layout.slot(self.segment.rank(), parity));
        slot.write(
            meet.op,
            &Planned {
                seq: meet.seq,
                epoch: self.segment.members().epoch,
                rounds,
                mapped: meet.mapped.as_ref().map(Mapped::kind),
                algorithm: meet.algorithm,
                print: self.plan_print,
                behind: meet.behind.len(),
                matching: self.segment.matching(),
            },
        );
        if splits::needed(meet.op.kind) {
            splits::write(&self.segment, meet.op, parity);
        }
        self.arrive(meet, About::Keys(parity))
    }

    /// The second half: what all ranks together have found.
    fn await_keys(&mut self, meet: &Meet<'_>, rounds: u32) -> Result<Agreed, Failure> {
        if cfg!(tpurun_unmatched) {
            self.wait(meet, About::Data)?;
            return Ok(Agreed { rounds, uneven: false, memory: Memory::Windows, behind: 0 });
        }
        let parity = self.parity();
        self.wait(meet, About::Keys(parity))?;
        self.presence.agreed(meet.posted.recording, meet.algorithm);
        let agreed: &AtomicU64 = self.segment.region().at(self.segment.layout().agreed(parity));
        Ok(Agreed::decode(agreed.load(Ordering::Relaxed)))
    }

    /// A later meeting of an operation.
    pub(crate) fn meet_again(&mut self, meet: &Meet<'_>) -> Result<(), Failure> {
        self.meet(meet, About::Data)
    }

    /// A fold whose keys have matched, as a chain. It is over when all are done with it.
    pub(crate) fn run_chain(&mut self, meet: &Meet<'_>, chained: &Chained<'_>) -> Result<(), Failure> {
        let first = self.chained;
        self.chained += chained.pieces();
        let hopeless = |needed: &[u32]| self.hopeless(meet, &[], needed);
        let tell = || self.blocked(meet);
        let lookout = Lookout::new(&self.segment, meet.deadline, self.patience(meet), &hopeless, &tell);
        let mut trial = self.trial;
        let outcome = chained.run(first, &mut trial, lookout);
        self.trial = trial;
        outcome?;
        self.meet_again(meet)
    }

    fn blocked(&self, meet: &Meet<'_>) -> Blocked {
        self.presence.blocked(WaitKind::Collective { seq: meet.seq }, meet.posted.caller)
    }

    fn patience(&self, meet: &Meet<'_>) -> Patience {
        let computes = meet.posted.caller.is_none() && self.shared.sleepers.load(StdOrdering::Relaxed) == 0;
        self.patience[usize::from(computes)]
    }

    /// The last meeting of an operation, where results are not trusted: compares them.
    fn verify(&mut self, meet: &Meet<'_>) -> Result<(), Failure> {
        let Some(hash) = verify::hash_of_result(&self.segment, meet.op) else { return Ok(()) };
        let parity = self.parity();
        let (region, layout) = (self.segment.region(), self.segment.layout());
        Slot::new(region, layout.slot(self.segment.rank(), parity)).write_result(hash);
        self.meet(meet, About::Results(parity))
    }

    fn meet(&mut self, meet: &Meet<'_>, about: About) -> Result<(), Failure> {
        self.arrive(meet, about)?;
        self.wait(meet, about)
    }

    /// The first half of a later meeting: nothing is waited for.
    pub(crate) fn come(&mut self, meet: &Meet<'_>) -> Result<(), Failure> {
        self.arrive(meet, About::Data).map(drop)
    }

    /// The second half of it.
    pub(crate) fn await_others(&mut self, meet: &Meet<'_>) -> Result<(), Failure> {
        self.wait(meet, About::Data)
    }

    /// The last to arrive does what is to be done for all.
    fn arrive(&mut self, meet: &Meet<'_>, about: About) -> Result<Arrival, Failure> {
        let round = self.round;
        self.segment.set_arrived(round);
        self.tell_bridge(meet, about);
        let arrival = self.segment.meeting().arrive(self.segment.size());
        if arrival == Arrival::Last {
            self.decide(meet, about, round)?;
        }
        Ok(arrival)
    }

    /// All have arrived: does what is to be done once.
    fn decide(&self, meet: &Meet<'_>, about: About, round: u32) -> Result<(), Failure> {
        let memory = match about {
            About::Keys(parity) => {
                let Agreed { memory, behind, .. } = self.compare(meet, parity)?;
                for tensor in meet.behind[..behind].iter().filter(|tensor| tensor.together) {
                    let stretch = tensor.at..tensor.at + tensor.bytes();
                    self.fold_stretch(tensor.op, meet.fold_window, stretch, round);
                }
                memory
            }
            About::Results(parity) => {
                verify::compare(&self.segment, meet.op, meet.seq, parity)?;
                Memory::Windows
            }
            About::Data => Memory::Windows,
        };
        self.fold_or_open(meet, round, memory)
    }

    /// The last to arrive: all keys must agree. Also decides what only all together know.
    fn compare(&self, meet: &Meet<'_>, parity: usize) -> Result<Agreed, Failure> {
        let (segment, layout) = (&self.segment, self.segment.layout());
        let slots: SmallVec<[Slot<'_>; 64]> =
            segment.ranks().map(|rank| Slot::new(segment.region(), layout.slot(rank, parity))).collect();
        if let Err(difference) = match_key::compare(&slots, segment.matching()) {
            return Err(segment.fail_by(&verdict::mismatch(segment, meet.seq, &difference)));
        }
        if splits::needed(meet.op.kind)
            && let Err(pairs) = splits::compare(segment, parity)
        {
            return Err(segment.fail_by(&splits::mismatch(segment, meet.op, meet.seq, &slots, &pairs)));
        }
        let rounds = slots.iter().map(Slot::rounds).max().unwrap_or(1);
        let uneven = meet.op.kind == OpKind::AllToAll && splits::uneven(segment, parity);
        let agreed: &AtomicU64 = segment.region().at(layout.agreed(parity));
        let mapped = slots[0].mapped();
        let memory = match (slots.iter().all(|slot| slot.mapped() == mapped), mapped) {
            (true, None) => Memory::Windows,
            (true, Some(_)) if mapped::is_for_all(meet.op, segment.size(), self.config.cpus) => {
                Memory::Shares
            }
            (true, Some(_)) => Memory::Arenas,
            (false, _) => Memory::Mixed,
        };
        let most = slots.iter().map(Slot::behind).min().unwrap_or(0).min(meet.behind.len());
        let offers = |index| {
            let offer = move |rank| Offer::new(segment.region(), layout.behind(rank, parity), index);
            segment.ranks().map(offer)
        };
        let behind = (0..most).take_while(|index| match_key::all_agree(offers(*index))).count();
        let found = Agreed { rounds, uneven, memory, behind };
        agreed.store(found.encode(), Ordering::Relaxed);
        Ok(found)
    }

    fn fold_or_open(&self, meet: &Meet<'_>, round: u32, memory: Memory) -> Result<(), Failure> {
        let meeting = self.segment.meeting();
        let work = match (&meet.mapped, memory) {
            (Some(mapped), Memory::Arenas) => mapped.work_bytes(&self.segment, meet.op)?,
            (_, Memory::Mixed | Memory::Shares) => {
                meeting.open();
                return Ok(());
            }
            _ => self.fold_work(meet),
        };
        let pieces = self.pieces(work);
        if pieces <= 1 {
            self.fold(meet, 0, 1, round)?;
            meeting.open();
            return Ok(());
        }
        meeting.share(round, pieces, self.config.cpus.min(self.segment.size()) - 1);
        while let Some((piece, of)) = meeting.claim(round) {
            self.fold(meet, piece, of, round)?;
            meeting.piece_done(of);
        }
        Ok(())
    }

    /// Pieces worth waking a helper for: a wake-up costs some microseconds, as does folding 64 KiB.
    fn pieces(&self, work: usize) -> u32 {
        const PIECE_WORK: usize = 64 << 10;
        if self.config.cpus < 2 || self.segment.size() < 2 || work < 4 * PIECE_WORK {
            return 1;
        }
        (work / (2 * PIECE_WORK)).clamp(2, 64) as u32
    }

    fn fold(&self, meet: &Meet<'_>, piece: u32, of: u32, round: u32) -> Result<(), Failure> {
        if let Some(mapped) = &meet.mapped {
            return self.in_place(|| mapped.run(&self.segment, meet.op, piece, of, &self.shared.traffic));
        }
        if meet.fold_bytes == 0 {
            return Ok(());
        }
        match self.halves(meet) {
            Some((_, second)) => self.fold_hosts(meet, second, (piece, of), round),
            None => {
                let stretch = cut(meet.fold_bytes, piece, of);
                self.fold_stretch(meet.op, meet.fold_window, stretch, round);
            }
        }
        Ok(())
    }

    /// Does something with tensors of other ranks where they are.
    fn in_place(&self, work: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
        self.segment.in_place(work).unwrap_or_else(|| Err(self.poisoned().expect("it stays poisoned")))
    }

    /// Folds a stretch of all ranks' windows.
    fn fold_stretch(&self, op: &Op, window: usize, stretch: Range<usize>, round: u32) {
        let (layout, parity) = (self.segment.layout(), (round % 2) as usize);
        let windows = self.segment.ranks().map(|rank| layout.window(rank, window));
        let reduction = op.reduction(self.segment.size());
        let (region, first) = (self.segment.region(), stretch.start);
        region.read_alone(stretch.len(), windows.clone().map(|window| window + first), |start, bytes| {
            let sources = windows.clone().map(|window| window + first + start);
            let out = layout.folded(parity) + first + start;
            region.fold(reduction, sources, out, bytes / reduction.dtype().size());
        });
        let written = stretch.len() as u64;
        let read = written * u64::from(self.segment.size());
        self.shared.traffic.add(Traffic { read, written, staged: read + written });
    }

    /// Until the meeting is over, and the next one this rank's.
    fn wait(&mut self, meet: &Meet<'_>, about: About) -> Result<(), Failure> {
        let round = self.round;
        let segment = self.segment.clone();
        let meeting = segment.meeting();
        let mut blocked = None;
        let mut departures = 0;
        let mut look = None;
        let result = loop {
            // The first try does not tell the board, nor read the clock: most waits are shorter than that is worth.
            let bound = look.map_or(Bound::Awake, |look: Instant| Bound::Until(look.min(meet.deadline)));
            let nudges = meeting.nudges();
            if matches!(about, About::Keys(_))
                && let Err(failure) = self.refuse_if_closing(meet)
            {
                break Err(failure);
            }
            if self.segment.departures() != departures {
                departures = self.segment.departures();
                self.give_up_if_hopeless(meet, round);
            }
            match meeting.wait(round, self.patience(meet), bound, nudges) {
                Opened::Yes => {
                    self.round = round.wrapping_add(1);
                    break Ok(());
                }
                Opened::Poisoned => {
                    break Err(self.poisoned().expect("it stays poisoned"));
                }
                Opened::Duty => {
                    if let Err(failure) = self.decide(meet, about, round) {
                        break Err(failure);
                    }
                }
                Opened::Help { piece, of } => {
                    if let Err(failure) = self.fold(meet, piece, of, round) {
                        break Err(failure);
                    }
                    meeting.piece_done(of);
                }
                Opened::NotYet if look.is_none() => {
                    look = Some(Instant::now() + LOOK_PERIOD / 5);
                    blocked = Some(self.blocked(meet));
                }
                // Nudged: what that announced is looked at above.
                Opened::NotYet if look.is_some_and(|look| Instant::now() < look.min(meet.deadline)) => {}
                Opened::NotYet => {
                    look = Some(Instant::now() + LOOK_PERIOD);
                    self.give_up_if_hopeless(meet, round);
                }
            }
        };
        drop(blocked);
        result
    }

    /// Fails a round that can not be opened any more; the next look at the meeting tells whether it did.
    fn give_up_if_hopeless(&self, meet: &Meet<'_>, round: u32) {
        let missing = self.segment.missing(round);
        // When all came, the last of them opens the round, with the help of any of them: they must be alive,
        // but may have left since, for what they gave is here.
        let all: Vec<u32> = self.segment.ranks().collect();
        let needed = if missing.is_empty() { &all } else { &missing };
        let verdict = self.lost(meet, &missing, needed).or_else(|| self.hopeless(meet, &missing, &missing));
        if let Some(verdict) = verdict {
            self.segment.fail_round(round, &verdict);
        }
    }

    /// Ends operations that not all ranks have posted, as this rank shuts down: it waits for those that all
    /// have posted, and for no other. They end here, and only for this rank. Where others could use its
    /// tensors in place, the communicator fails.
    fn refuse_if_closing(&mut self, meet: &Meet<'_>) -> Result<(), Failure> {
        // Acquire pairs with `shutdown`, whose nudge comes after it.
        if !self.shared.closing.load(StdOrdering::Acquire) {
            return Ok(());
        }
        let missing = self.not_posted(meet.seq);
        if missing.is_empty() {
            return Ok(());
        }
        let segment = &self.segment;
        let (who, name) = (segment.describe(&[segment.rank()]), segment.members().title());
        let text = format!("{who} shut {name} down during {}: {}", self.name(meet), self.came(&missing));
        let failure = Failure::new(FailureKind::Aborted, text).blaming([segment.world_rank(segment.rank())]);
        if self.is_lent {
            segment.fail_round(self.round, &self.destroyed(meet, &missing, &[segment.rank()]));
            if segment.meeting().is_open(self.round) || !segment.meeting().is_poisoned() {
                return Ok(());
            }
        }
        self.given_up = Some((meet.seq, failure.clone()));
        Err(failure)
    }

    /// Ranks that have not posted this operation, as far as that can be known by now.
    fn not_posted(&mut self, seq: u64) -> Vec<u32> {
        let since = *self.closing_since.get_or_insert_with(Instant::now);
        // Posts of ranks on other hosts are told now and then; that such a rank has come to a round, at once.
        let knows = |rank: &u32| self.segment.is_here(*rank) || since.elapsed() >= LOOK_PERIOD;
        let absent = self.segment.missing(self.round);
        self.segment.without(seq).into_iter().filter(|rank| knows(rank) && absent.contains(rank)).collect()
    }

    /// This rank takes no part in any later operation. Tells the others.
    pub(crate) fn leave(&mut self) {
        let segment = &self.segment;
        let text = format!("{} was shut down by this rank", segment.members().title());
        let gone = || (self.seq, Failure::new(FailureKind::Aborted, text));
        let (seq, _) = self.given_up.get_or_insert_with(gone);
        segment.leave(*seq);
    }

    /// Whether any of `needed` is dead, while all but `missing` wait. A rank that has destroyed the group and ended
    /// since is not lost.
    fn lost(&self, meet: &Meet<'_>, missing: &[u32], needed: &[u32]) -> Option<Verdict> {
        let segment = &self.segment;
        let waiting: Vec<u32> = segment.ranks().filter(|rank| missing.binary_search(rank).is_err()).collect();
        let look = self.looks.fetch_add(1, StdOrdering::Relaxed);
        // In this order: a rank leaves before it ends.
        let mut lost = segment.lost_among(needed, &waiting, look);
        lost.retain(|rank| segment.left(*rank).is_none());
        if lost.is_empty() {
            return None;
        }
        let text = format!("{}: {} can not complete", segment.describe_gone(&lost), self.name(meet));
        Some(Verdict::new(FailureKind::RankLost, text).blaming(lost))
    }

    /// Looks after a wait that takes long: did the time run out, is one of `needed` dead or has left?
    /// `missing` did not come to the meeting; none when all did.
    fn hopeless(&self, meet: &Meet<'_>, missing: &[u32], needed: &[u32]) -> Option<Verdict> {
        let segment = &self.segment;
        if let Some(verdict) = self.lost(meet, missing, needed) {
            return Some(verdict);
        }
        let has_left =
            |rank: &u32| segment.left(*rank).is_some_and(|seq| seq <= meet.seq || segment.is_gone(*rank));
        let left: Vec<u32> = needed.iter().copied().filter(has_left).collect();
        if !left.is_empty() {
            return Some(self.destroyed(meet, missing, &left));
        }
        if Instant::now() >= meet.deadline {
            let (name, came, note) = (self.name(meet), self.came(missing), segment.note());
            let text = format!("Timed out after {:?} in {name}: by the timeout {came}{note}", meet.timeout);
            return Some(Verdict::new(FailureKind::Timeout, text).blaming(missing));
        }
        None
    }

    fn destroyed(&self, meet: &Meet<'_>, missing: &[u32], left: &[u32]) -> Verdict {
        let (who, name) = (self.segment.describe(left), self.segment.members().title());
        let text = format!("{who} destroyed {name} before {}: {}", self.name(meet), self.came(missing));
        Verdict::new(FailureKind::Deadlock, text).blaming(left)
    }

    fn name(&self, meet: &Meet<'_>) -> String {
        format!("operation {} of {}, {}", meet.seq, self.segment.members().title(), Posted::of(meet.op))
    }

    fn came(&self, missing: &[u32]) -> String {
        let (ranks, here) = (self.segment.size() as usize, self.segment.size() as usize - missing.len());
        match missing {
            [] => format!("all {ranks} ranks came, not all went on"),
            _ => format!("{here} of {ranks} ranks came, missing {}", self.segment.describe(missing)),
        }
    }

    /// Why no operation begins any more, if so.
    fn over(&self) -> Option<Failure> {
        let given_up = self.given_up.as_ref().map(|(_, failure)| failure.clone());
        given_up.or_else(|| self.poisoned())
    }

    fn poisoned(&self) -> Option<Failure> {
        let segment = &self.segment;
        let unsaid = || {
            let text =
                format!("{} was poisoned by a process that did not say why", segment.members().title());
            segment.fail(FailureKind::Internal, &text)
        };
        segment.meeting().is_poisoned().then(|| segment.failure().unwrap_or_else(unsaid))
    }
}

fn turn_of(round: u32) -> usize {
    round as usize % TURNS
}

/// One of so many pieces of `bytes`, which begin at cache lines.
fn cut(bytes: usize, piece: u32, of: u32) -> Range<usize> {
    let lines = bytes.div_ceil(LINE);
    let at = |n: u32| (lines * n as usize / of as usize * LINE).min(bytes);
    at(piece)..at(piece + 1)
}
