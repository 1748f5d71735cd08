//! The rounds of a communicator's meeting, as one rank goes through them.
//!
//! The state machine of every operation: the caller comes to a meeting (`offer_keys`, `come`), which never waits, and
//! then waits for its end (`await_keys`, `await_others`). [`Rounds::match_keys`] and [`Rounds::meet_again`] do both.
//! The first meeting of an operation compares keys; no tensor changes before it is over. The last rank to arrive
//! does what is to be done for all (`decide`), and others that wait may help it (`fold.rs`). A wait that takes long
//! finds out why (`prospects.rs`). Between hosts each meeting has more to do (`hierarchy.rs`).
//!
//! Executions above it know nothing of queues; the queue above them decides which operation is next.

mod fold;
mod hierarchy;
mod prospects;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering as StdOrdering};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::execute::in_place::{self, InPlace, Mapping};
use crate::execute::lookout::Lookout;
use crate::execute::pipeline::Pipelined;
use crate::execute::presence::{Blocked, Presence};
use crate::matching::splits;
use crate::matching::verdict;
use crate::matching::verify;
use crate::plan::measured_choice::MeasuredChoice;
use tpurun_memory::arena::ArenaKind;
use tpurun_memory::failure::Failure;
use tpurun_memory::process::LOOK_PERIOD;
use tpurun_memory::sync::{Arrival, AtomicU64, Bound, Opened, Ordering, Patience};
use tpurun_memory::traffic::Counter;
use tpurun_protocol::board::{Recording, WaitKind};
use tpurun_protocol::config::Config;
use tpurun_protocol::layout::TURNS;
use tpurun_protocol::match_key::{self, Offer, Planned, Slot};
use tpurun_protocol::op::{Op, OpKind};
use tpurun_protocol::segment::{Segment, Verdict};
use tpurun_protocol::strategy::Strategy;

pub(crate) use hierarchy::{Between, partials};
use prospects::{Prospects, Tensors};

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
    /// How it is staged; `None` where ranks only meet.
    pub(crate) strategy: Option<Strategy>,
    /// How it is done where all tensors lie in arenas, if that is to be found out.
    pub(crate) in_place: Option<Strategy>,
    /// The fold the last to arrive does with the others' help: bytes at the start of every window.
    pub(crate) fold_bytes: usize,
    /// Which of each rank's two windows is folded.
    pub(crate) fold_window: usize,
    pub(crate) between: Between,
    /// Where this rank's tensors are, when they are to be used there.
    pub(crate) mapped: Option<InPlace>,
    /// Operations that this meeting settles, too, when all ranks have them; where their tensors are staged.
    pub(crate) behind: &'a [Staged<'a>],
    pub(crate) posted: Posting,
}

impl<'a> Meet<'a> {
    pub(crate) fn new(op: &'a Op, seq: u64, deadline: Instant, timeout: Duration, posted: Posting) -> Self {
        Self {
            op,
            seq,
            deadline,
            timeout,
            strategy: None,
            in_place: None,
            fold_bytes: 0,
            fold_window: 0,
            between: Between::default(),
            mapped: None,
            behind: &[],
            posted,
        }
    }

    /// How it is run, once all have agreed.
    fn ran(&self, agreed: Agreed) -> Option<Strategy> {
        match agreed.memory {
            Memory::Arenas => Some(Strategy::InPlace),
            Memory::Shares => Some(Strategy::InPlaceShares),
            Memory::Windows | Memory::Mixed if agreed.uneven => Some(Strategy::Windows),
            Memory::Windows | Memory::Mixed if agreed.behind > 0 => Some(Strategy::Burst),
            Memory::Windows | Memory::Mixed => self.strategy,
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

/// An operation whose tensor is at this offset of every rank's window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Staged<'a> {
    pub(crate) op: &'a Op,
    pub(crate) at: usize,
    /// Whether the last to arrive folds it for all.
    pub(crate) together: bool,
}

impl Staged<'_> {
    pub(crate) fn bytes(&self) -> usize {
        self.op.inputs.total()
    }
}

/// One rank's way through the meetings of its communicator.
#[derive(Debug)]
pub(crate) struct Rounds {
    pub(crate) segment: Arc<Segment>,
    pub(crate) presence: Arc<Presence>,
    pub(crate) shared: Arc<Shared>,
    config: Config,
    /// When all of the rank waits, and of the progress thread when the rank computes beside it.
    patience: [Patience; 2],
    mapping: Mapping,
    /// A fingerprint of everything but the operation that plans depend on.
    pub(crate) plan_print: u64,
    round: u32,
    /// Pieces that have gone through the pipeline.
    pipelined: u64,
    /// How the first rank of a pipeline writes long pieces.
    choice: MeasuredChoice,
    /// The bytes it has staged for the next meeting, for the bridge to other hosts.
    staged: Staging,
    /// Other ranks know where the tensors of the operation are, and may read and write them there.
    is_lent: bool,
    pub(crate) prospects: Prospects,
}

impl Rounds {
    pub(crate) fn new(
        segment: Arc<Segment>,
        config: Config,
        presence: Arc<Presence>,
        shared: Arc<Shared>,
        plan_print: u64,
    ) -> Self {
        let patience = [1, 2].map(|threads| Patience::new(threads * segment.size(), config.cpus));
        for kind in ArenaKind::ALL {
            if let Some(arena) = config.arenas.get(kind) {
                in_place::announce(&segment, kind, arena);
            }
        }
        let prospects = Prospects::new(segment.clone(), shared.clone());
        Self {
            segment,
            presence,
            shared,
            config,
            patience,
            mapping: Mapping::default(),
            plan_print,
            round: 0,
            pipelined: 0,
            choice: MeasuredChoice::default(),
            staged: Staging::default(),
            is_lent: false,
            prospects,
        }
    }

    /// Ends an operation that not all ranks have posted, as this rank shuts down.
    ///
    /// # Errors
    /// Then, with the ranks that have not.
    pub(crate) fn refuse_if_closing(&mut self, meet: &Meet<'_>) -> Result<(), Failure> {
        let tensors = if self.is_lent { Tensors::Lent } else { Tensors::Own };
        self.prospects.refuse_if_closing(meet, self.round, tensors)
    }

    /// Why a wait for `needed` will not end, if so; all ranks came to the meeting.
    pub(crate) fn hopeless(&self, meet: &Meet<'_>, needed: &[u32]) -> Option<Verdict> {
        self.prospects.hopeless(meet, &[], needed)
    }

    /// Meetings so far.
    pub(crate) fn count(&self) -> u32 {
        self.round
    }

    /// Whether the meeting that this rank has come to ends without any wait.
    pub(crate) fn is_ready(&self) -> bool {
        let meeting = self.segment.meeting();
        meeting.is_open(self.round) || meeting.is_poisoned() || meeting.has_duty()
    }

    /// Finds out whether the tensors of an operation can be used where they are. From then on they may be.
    pub(crate) fn lend(&mut self, op: &Op) -> Option<InPlace> {
        let parity = self.parity();
        let mapped = self.mapping.take(&self.segment, &self.config.arenas, op, parity);
        self.is_lent = mapped.is_some();
        mapped
    }

    /// The operation is over, and so its tensors are the caller's again, who may do with them what it wants.
    pub(crate) fn take_back(&mut self, result: &Result<(), Failure>) {
        if let Err(failure) = result
            && self.is_lent
        {
            self.segment.loans().take_back(failure);
        }
        self.is_lent = false;
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
    pub(crate) fn offer_keys(&mut self, meet: &Meet<'_>, rounds: u32) -> Result<Arrival, Failure> {
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
                mapped: meet.mapped.as_ref().map(InPlace::kind),
                strategy: meet.strategy,
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
    pub(crate) fn await_keys(&mut self, meet: &Meet<'_>, rounds: u32) -> Result<Agreed, Failure> {
        if cfg!(tpurun_unmatched) {
            self.wait(meet, About::Data)?;
            return Ok(Agreed { rounds, uneven: false, memory: Memory::Windows, behind: 0 });
        }
        let parity = self.parity();
        self.wait(meet, About::Keys(parity))?;
        let agreed: &AtomicU64 = self.segment.region().at(self.segment.layout().agreed(parity));
        let agreed = Agreed::decode(agreed.load(Ordering::Relaxed));
        self.presence.agreed(meet.posted.recording, meet.ran(agreed));
        Ok(agreed)
    }

    /// A later meeting of an operation.
    pub(crate) fn meet_again(&mut self, meet: &Meet<'_>) -> Result<(), Failure> {
        self.meet(meet, About::Data)
    }

    /// A fold whose keys have matched, as a pipeline. It is over when all are done with it.
    pub(crate) fn run_pipeline(&mut self, meet: &Meet<'_>, pipelined: &Pipelined<'_>) -> Result<(), Failure> {
        let first = self.pipelined;
        self.pipelined += pipelined.pieces();
        let hopeless = |needed: &[u32]| self.hopeless(meet, needed);
        let tell = || self.blocked(meet);
        let lookout = Lookout::new(&self.segment, meet.deadline, self.patience(meet), &hopeless, &tell);
        let mut choice = self.choice;
        let outcome = pipelined.run(first, &mut choice, lookout);
        self.choice = choice;
        outcome?;
        self.meet_again(meet)
    }

    pub(crate) fn blocked(&self, meet: &Meet<'_>) -> Blocked {
        self.presence.blocked(WaitKind::Collective { seq: meet.seq }, meet.posted.caller)
    }

    fn patience(&self, meet: &Meet<'_>) -> Patience {
        let computes = meet.posted.caller.is_none() && self.shared.sleepers.load(StdOrdering::Relaxed) == 0;
        self.patience[usize::from(computes)]
    }

    /// The last meeting of an operation, where results are not trusted: compares them.
    pub(crate) fn verify<'a>(&mut self, op: &Op, meet: impl FnOnce() -> Meet<'a>) -> Result<(), Failure> {
        let Some(hash) = verify::hash_of_result(&self.segment, op) else { return Ok(()) };
        let parity = self.parity();
        let (region, layout) = (self.segment.region(), self.segment.layout());
        Slot::new(region, layout.slot(self.segment.rank(), parity)).write_result(hash);
        self.meet(&meet(), About::Results(parity))
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
        self.segment.roster().set_arrived(round);
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
        // To collect them would move room for 64 of them, too.
        let mut slots = SmallVec::<[Slot<'_>; 64]>::new();
        slots.extend(segment.ranks().map(|rank| Slot::new(segment.region(), layout.slot(rank, parity))));
        if let Err(difference) = match_key::compare(&slots, segment.matching()) {
            return Err(segment.failure_word().fail_by(&verdict::mismatch(segment, meet.seq, &difference)));
        }
        if splits::needed(meet.op.kind)
            && let Err(pairs) = splits::compare(segment, parity)
        {
            return Err(segment
                .failure_word()
                .fail_by(&splits::mismatch(segment, meet.op, meet.seq, &slots, &pairs)));
        }
        let rounds = slots.iter().map(Slot::rounds).max().unwrap_or(1);
        let uneven = meet.op.kind == OpKind::AllToAll && splits::uneven(segment, parity);
        let agreed: &AtomicU64 = segment.region().at(layout.agreed(parity));
        let mapped = slots[0].mapped();
        let memory = match (slots.iter().all(|slot| slot.mapped() == mapped), mapped) {
            (true, None) => Memory::Windows,
            (true, Some(_)) if meet.in_place == Some(Strategy::InPlaceShares) => Memory::Shares,
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
            if self.segment.roster().departures() != departures {
                departures = self.segment.roster().departures();
                self.prospects.give_up_if_hopeless(meet, round);
            }
            match meeting.wait(round, self.patience(meet), bound, nudges) {
                Opened::Yes => {
                    self.round = round.wrapping_add(1);
                    break Ok(());
                }
                Opened::Poisoned => {
                    break Err(self.prospects.poisoned().expect("it stays poisoned"));
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
                    self.prospects.give_up_if_hopeless(meet, round);
                }
            }
        };
        drop(blocked);
        result
    }
}

fn turn_of(round: u32) -> usize {
    round as usize % TURNS
}
