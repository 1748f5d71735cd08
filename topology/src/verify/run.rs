//! One run of the schedules of all ranks on symbols.

use std::collections::{BTreeMap, VecDeque};

use super::contents::{Contents, Folds};
use super::error::{Need, StepSite, StuckStep, VerifyError};
use super::proof::Proof;
use crate::schedule::{Action, Block, Schedule, ScheduleTraffic, Source, Step, Tensor};

/// The state of all ranks.
pub(super) struct SymbolicRun<'a> {
    schedules: &'a [Schedule],
    tensor: Tensor,
    channels: usize,
    lanes: Vec<Lane<'a>>,
    /// Lanes that may be able to go on.
    ready: VecDeque<usize>,
    working: Vec<BTreeMap<Block, Contents>>,
    queues: BTreeMap<QueueId, Queue>,
    windows: BTreeMap<(u32, u32, Block), Shown>,
    folded: BTreeMap<(u32, Block), Shown>,
    meetings: BTreeMap<(u32, u32), Meeting>,
    folds: Folds,
    pub(super) proof: Proof,
}

/// One channel of one rank.
struct Lane<'a> {
    rank: u32,
    channel: u32,
    steps: &'a [Step],
    next: usize,
    /// Rounds gone by for it.
    clock: u64,
    /// Meetings it has gone through.
    met: u32,
    /// Whether it waits at the next one.
    arrived: bool,
}

impl Lane<'_> {
    fn site(&self) -> StepSite {
        StepSite { rank: self.rank, channel: self.channel, step: self.next as u32 }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct QueueId {
    channel: u32,
    from: u32,
    to: u32,
}

#[derive(Default)]
struct Queue {
    message: Option<Message>,
    /// When the last message was taken.
    free_at: u64,
}

struct Message {
    block: Block,
    contents: Contents,
    sent_at: u64,
}

/// Something in shared memory, and the meeting that shows it to others.
struct Shown {
    contents: Contents,
    meeting: u32,
}

#[derive(Default)]
struct Meeting {
    fold: Vec<Block>,
    arrived: u32,
    clock: u64,
}

/// Whether a step came to its end.
enum Progress {
    Done,
    Waits,
}

impl<'a> SymbolicRun<'a> {
    pub(super) fn new(schedules: &'a [Schedule], tensor: Tensor) -> Self {
        let channels = schedules[0].channels.len();
        let lanes: Vec<Lane<'a>> = schedules
            .iter()
            .flat_map(|schedule| {
                (0..).zip(&schedule.channels).map(|(channel, steps)| Lane {
                    rank: schedule.rank,
                    channel,
                    steps,
                    next: 0,
                    clock: 0,
                    met: 0,
                    arrived: false,
                })
            })
            .collect();
        Self {
            schedules,
            tensor,
            channels,
            ready: (0..lanes.len()).collect(),
            lanes,
            working: schedules.iter().map(inputs).collect(),
            queues: BTreeMap::new(),
            windows: BTreeMap::new(),
            folded: BTreeMap::new(),
            meetings: BTreeMap::new(),
            folds: Folds::default(),
            proof: Proof { traffic: ScheduleTraffic::default(), rounds: 0, messages: 0 },
        }
    }

    /// Runs until nothing can go on; an error unless everything is done then and no message is left.
    pub(super) fn finish(mut self) -> Result<Self, VerifyError> {
        while let Some(lane) = self.ready.pop_front() {
            while let Some(step) = self.lanes[lane].steps.get(self.lanes[lane].next) {
                match self.try_step(lane, step)? {
                    Progress::Done => self.lanes[lane].next += 1,
                    Progress::Waits => break,
                }
            }
        }
        let waits: Vec<StuckStep> = (0..self.lanes.len()).filter_map(|lane| self.wait(lane)).collect();
        if !waits.is_empty() {
            return Err(VerifyError::Deadlock { circle: circle(&waits), waits });
        }
        let unread = |(id, queue): (&QueueId, &Queue)| queue.message.as_ref().map(|m| (*id, m.block));
        if let Some((QueueId { channel, from, to }, block)) = self.queues.iter().find_map(unread) {
            return Err(VerifyError::Unread { from, to, channel, block });
        }
        self.proof.rounds = self.lanes.iter().map(|lane| lane.clock).max().unwrap_or(0);
        Ok(self)
    }

    /// Returns what a rank has of a block.
    pub(super) fn working_copy(&self, rank: u32, block: Block) -> Option<&Contents> {
        self.working[rank as usize].get(&block)
    }

    fn try_step(&mut self, lane: usize, step: &Step) -> Result<Progress, VerifyError> {
        match step {
            Step::Send { to, block } => self.send(lane, *to, *block),
            Step::Receive { from, block, action } => self.receive(lane, *from, *block, *action),
            Step::Publish { block } => self.publish(lane, *block),
            Step::Meet { fold } => self.meet(lane, fold),
            Step::Fetch { from, block, action } => self.fetch(lane, *from, *block, *action),
        }
    }

    fn send(&mut self, index: usize, to: u32, block: Block) -> Result<Progress, VerifyError> {
        let lane = &mut self.lanes[index];
        let (site, rank, channel) = (lane.site(), lane.rank, lane.channel);
        let queue = self.queues.entry(QueueId { channel, from: rank, to }).or_default();
        if queue.message.is_some() {
            return Ok(Progress::Waits);
        }
        let contents = self.working[rank as usize].get(&block);
        let contents = contents.ok_or(VerifyError::Missing { site, block })?.clone();
        lane.clock = lane.clock.max(queue.free_at);
        queue.message = Some(Message { block, contents, sent_at: lane.clock });
        let bytes = self.bytes(block);
        self.proof.traffic.add(rank, to, bytes);
        self.proof.messages += 1;
        self.wake(to, channel);
        Ok(Progress::Done)
    }

    fn receive(
        &mut self,
        index: usize,
        from: u32,
        block: Block,
        action: Action,
    ) -> Result<Progress, VerifyError> {
        let lane = &mut self.lanes[index];
        let (site, channel) = (lane.site(), lane.channel);
        let queue = self.queues.entry(QueueId { channel, from, to: lane.rank }).or_default();
        let Some(message) = queue.message.take() else { return Ok(Progress::Waits) };
        if message.block != block {
            return Err(VerifyError::WrongBlock { site, from, expected: block, given: message.block });
        }
        lane.clock = lane.clock.max(message.sent_at + 1);
        queue.free_at = lane.clock;
        self.wake(from, channel);
        self.apply(site, block, message.contents, action)?;
        Ok(Progress::Done)
    }

    fn publish(&mut self, index: usize, block: Block) -> Result<Progress, VerifyError> {
        let lane = &self.lanes[index];
        let (site, rank, meeting) = (lane.site(), lane.rank, lane.met);
        if !self.schedules[rank as usize].is_input(block.chunk) {
            return Err(VerifyError::Missing { site, block });
        }
        let shown = Shown { contents: Contents::input(rank), meeting };
        if self.windows.insert((lane.channel, rank, block), shown).is_some() {
            return Err(VerifyError::PublishedTwice { site, block });
        }
        let bytes = self.bytes(block);
        self.proof.traffic.add_memory(2 * bytes);
        Ok(Progress::Done)
    }

    fn meet(&mut self, index: usize, fold: &[Block]) -> Result<Progress, VerifyError> {
        let ranks = self.schedules.len() as u32;
        let lane = &mut self.lanes[index];
        let (site, channel, number) = (lane.site(), lane.channel, lane.met);
        let meeting = self.meetings.entry((channel, number)).or_default();
        if !lane.arrived {
            if meeting.arrived == 0 {
                meeting.fold = fold.to_vec();
            } else if meeting.fold != fold {
                return Err(VerifyError::MeetingDiffers { site });
            }
            lane.arrived = true;
            meeting.arrived += 1;
            meeting.clock = meeting.clock.max(lane.clock + 1);
            if meeting.arrived == ranks {
                fold.iter().try_for_each(|&block| self.fold(site, number, block))?;
                (0..ranks).filter(|&other| other != site.rank).for_each(|other| self.wake(other, channel));
            }
        }
        let (meeting, lane) = (&self.meetings[&(channel, number)], &mut self.lanes[index]);
        if meeting.arrived < ranks {
            return Ok(Progress::Waits);
        }
        lane.arrived = false;
        lane.met += 1;
        lane.clock = meeting.clock;
        Ok(Progress::Done)
    }

    fn fold(&mut self, site: StepSite, meeting: u32, block: Block) -> Result<(), VerifyError> {
        let ranks = self.schedules.len() as u32;
        let window = |from| {
            let window = self.windows.get(&(site.channel, from, block));
            window.map(|shown| &shown.contents).ok_or(VerifyError::NotPublished { site, from, block })
        };
        let mut contents = window(0)?.clone();
        for from in 1..ranks {
            // The same order as that of fetches: what comes later is the first operand.
            let folded = self.folds.fold(window(from)?, &mut contents);
            folded.map_err(|contributor| VerifyError::ReducedTwice { site, block, contributor })?;
        }
        self.folded.insert((site.channel, block), Shown { contents, meeting });
        let bytes = self.bytes(block);
        self.proof.traffic.add_memory(u64::from(ranks + 1) * bytes);
        Ok(())
    }

    fn fetch(
        &mut self,
        index: usize,
        from: Source,
        block: Block,
        action: Action,
    ) -> Result<Progress, VerifyError> {
        let lane = &self.lanes[index];
        let (site, met) = (lane.site(), lane.met);
        let (shown, error) = match from {
            Source::Rank(from) => {
                let window = self.windows.get(&(lane.channel, from, block));
                (window, VerifyError::NotPublished { site, from, block })
            }
            Source::Folded => {
                (self.folded.get(&(lane.channel, block)), VerifyError::NotFolded { site, block })
            }
        };
        let contents = shown.filter(|shown| shown.meeting < met).ok_or(error)?.contents.clone();
        self.apply(site, block, contents, action)?;
        // A run of reducing fetches is one pass: what it writes is counted with the first.
        let passes = if action == Action::Copy { 2 } else { 1 };
        let bytes = self.bytes(block);
        self.proof.traffic.add_memory(passes * bytes);
        Ok(Progress::Done)
    }

    fn apply(
        &mut self,
        site: StepSite,
        block: Block,
        contents: Contents,
        action: Action,
    ) -> Result<(), VerifyError> {
        let working = &mut self.working[site.rank as usize];
        if action == Action::Copy {
            working.insert(block, contents);
            return Ok(());
        }
        let working = working.get_mut(&block).ok_or(VerifyError::Missing { site, block })?;
        let folded = self.folds.fold(&contents, working);
        folded.map_err(|contributor| VerifyError::ReducedTwice { site, block, contributor })
    }

    fn wait(&self, index: usize) -> Option<StuckStep> {
        let lane = &self.lanes[index];
        let (site, step) = (lane.site(), lane.steps.get(lane.next)?);
        let (on, need) = match step {
            Step::Send { to, .. } => (*to, Need::Room),
            Step::Receive { from, .. } => (*from, Need::Message),
            _ => (self.latecomer(lane)?, Need::Arrival),
        };
        Some(StuckStep { site, on, need })
    }

    /// A rank that has not come to the meeting a lane waits at.
    fn latecomer(&self, waiting: &Lane<'_>) -> Option<u32> {
        let on_channel = self.lanes.iter().filter(|lane| lane.channel == waiting.channel);
        let mut late = on_channel.filter(|lane| lane.met <= waiting.met && !lane.arrived);
        late.next().map(|lane| lane.rank)
    }

    fn wake(&mut self, rank: u32, channel: u32) {
        self.ready.push_back(rank as usize * self.channels + channel as usize);
    }

    fn bytes(&self, block: Block) -> u64 {
        let range = self.schedules[0].block_range(self.tensor.elements, block);
        (range.end - range.start) * self.tensor.element_bytes
    }
}

fn inputs(schedule: &Schedule) -> BTreeMap<Block, Contents> {
    let chunks = (0..schedule.chunks()).filter(|&chunk| schedule.is_input(chunk));
    let blocks = chunks.flat_map(|chunk| (0..schedule.parts).map(move |part| Block { chunk, part }));
    blocks.map(|block| (block, Contents::input(schedule.rank))).collect()
}

/// Ranks that wait for each other in a circle on one channel, if there are any.
fn circle(waits: &[StuckStep]) -> Vec<u32> {
    let of_lane = |wait: &StuckStep| (wait.site.channel, wait.site.rank);
    let lanes: BTreeMap<(u32, u32), &StuckStep> = waits.iter().map(|wait| (of_lane(wait), wait)).collect();
    let next = |wait: &StuckStep| lanes.get(&(wait.site.channel, wait.on)).copied();
    for first in waits {
        let chain = std::iter::successors(next(first), |wait| next(wait)).take(waits.len());
        let ranks: Vec<u32> = chain.map(|wait| wait.site.rank).collect();
        if let Some(length) = ranks.iter().position(|&rank| rank == first.site.rank) {
            return std::iter::once(first.site.rank).chain(ranks[..length].iter().copied()).collect();
        }
    }
    vec![]
}
