//! Flat schedules: every rank stages into its window, all meet, every rank takes what it needs.
//!
//! A tensor larger than a window goes through in rounds, each with the next stretch of every chunk, or through a
//! pipeline (`pipeline.rs`), as `plan/strategy.rs` says. Bytes moved for an all-reduce of S bytes on N
//! ranks: (2N) to stage, (N + 1) to fold, (2N) to take the result. Two ranks each fold into their own tensor: 4 to
//! stage, 6 to fold.

use std::ops::Range;

use tpurun_topology::{Action, Block, Schedule, Source, Step};

use crate::execute::pipeline::Pipelined;
use crate::execute::rounds::{Agreed, Between, Meet, Memory, Rounds, Staging, partials};
use crate::plan::copying;
use tpurun_kernels::reduce::Copying;
use tpurun_memory::failure::Failure;
use tpurun_memory::traffic::Counter;
use tpurun_protocol::layout::{LINE, Window};
use tpurun_protocol::op::{Op, OpKind};
use tpurun_protocol::segment::Segment;
use tpurun_protocol::segment::remote::{ArenaStretch, Gathered};
use tpurun_protocol::strategy::Strategy;

/// Whether the last to arrive folds what all have staged, which nobody else reads then.
pub(crate) fn folds_together(schedule: &Schedule) -> bool {
    let folds = |step: &Step| matches!(step, Step::Meet { fold } if !fold.is_empty());
    schedule.channels.iter().flatten().any(folds)
}

/// One flat execution.
#[derive(Debug)]
pub(crate) struct Windowed<'a> {
    segment: &'a Segment,
    op: &'a Op,
    schedule: &'a Schedule,
    strategy: Strategy,
    traffic: &'a Counter,
    /// The stretch of every round but the first.
    stretch: Stretch,
    /// The stretch of the first round: close together where chunks may be small.
    first: Stretch,
    /// The data staged for each rank is folded over the ranks of a host before it is sent.
    halves_for_each: bool,
    /// How inputs are staged, and how results are taken.
    copying: (Copying, Copying),
}

impl<'a> Windowed<'a> {
    pub(crate) fn new(
        segment: &'a Segment,
        op: &'a Op,
        schedule: &'a Schedule,
        strategy: Strategy,
        traffic: &'a Counter,
    ) -> Self {
        let slots = if is_for_each(op.kind) { segment.size() as usize } else { 1 };
        // A window must hold the partial results of a stretch, too, which may be wider.
        let is_halved = strategy.is_hierarchical();
        let widening = if is_halved { op.reduction(segment.size()).widening() } else { 1 };
        let layout = segment.layout();
        let stretch = |window: Window| {
            let most = (layout.bytes_of(window) / slots / widening / LINE * LINE).max(LINE);
            Stretch { window, most }
        };
        let (near, wide) = (stretch(Window::Near), stretch(Window::Wide));
        let (first, stretch) = match op.kind {
            // All ranks know how long each chunk is: small ones then share pages.
            OpKind::ReduceScatter => {
                let longest = op.inputs.longest_chunk().next_multiple_of(LINE).max(LINE);
                let fits = if longest <= near.most { near } else { wide };
                let stretch = Stretch { most: fits.most.min(longest), ..fits };
                (stretch, stretch)
            }
            // Data that nobody reads from the caches again may be much at a time: a round costs every rank a wait.
            kind if is_for_each(kind) => (near, wide),
            // Here only the root has a window.
            OpKind::Broadcast => (wide, wide),
            _ => (near, near),
        };
        let halves_for_each = is_halved && op.kind == OpKind::ReduceScatter;
        let copying = copying::staging(segment, op);
        Self { segment, op, schedule, strategy, traffic, first, stretch, halves_for_each, copying }
    }

    /// Rounds that this rank knows to be needed.
    pub(crate) fn rounds(&self) -> u32 {
        let longest = self.op.inputs.longest_chunk().max(self.op.outputs.longest_chunk());
        1 + longest.saturating_sub(self.first.most).div_ceil(self.stretch.most) as u32
    }

    /// Returns the part that a round moves.
    fn part(&self, round: u32) -> Part {
        match round.checked_sub(1) {
            None => Part { offset: 0, stretch: self.first },
            Some(before) => {
                let offset = self.first.most + before as usize * self.stretch.most;
                Part { offset, stretch: self.stretch }
            }
        }
    }

    /// `agreed` when the keys have matched before.
    pub(crate) fn run(
        &self,
        meetings: &mut Rounds,
        meet: &mut Meet<'_>,
        agreed: Option<Agreed>,
    ) -> Result<(), Failure> {
        if self.segment.size() == 1 {
            if agreed.is_none() {
                meetings.match_keys(meet, 1)?;
            }
            self.keep_own();
            return Ok(());
        }
        if folds_together(self.schedule) && self.strategy.is_hierarchical() {
            return self.run_halved(meetings, meet);
        }
        if self.strategy == Strategy::Pipeline {
            if agreed.is_none() {
                meetings.match_keys(meet, 1)?;
            }
            // Until the next meeting nobody stages in the windows of the one before it.
            let windows = self.segment.layout().all_windows(1 - meetings.parity());
            let pipelined = Pipelined::new(self.segment, self.op, self.traffic, windows);
            return meetings.run_pipeline(meet, &pipelined);
        }
        self.run_rounds(meetings, meet, agreed)
    }

    /// Folded windows are read before a round opens, so every round may use the same ones again: half the memory to
    /// keep in cache. Windows that others fetch from are read until the next round opens. Data of other hosts may come
    /// before the previous round has been read here.
    fn folds_in_same_windows(&self) -> bool {
        folds_together(self.schedule) && !self.segment.is_bridged()
    }

    fn run_rounds(
        &self,
        meetings: &mut Rounds,
        meet: &mut Meet<'_>,
        agreed: Option<Agreed>,
    ) -> Result<(), Failure> {
        let mut rounds = agreed.map_or_else(|| self.rounds(), |agreed| agreed.rounds);
        let mut round = 0;
        let together = self.folds_in_same_windows().then(|| meetings.parity());
        while round < rounds {
            let (parity, turn) = (meetings.parity(), meetings.turn());
            let window = together.unwrap_or(parity);
            let part = self.part(round);
            for run in self.runs() {
                match &run[0] {
                    Step::Publish { block } => self.publish(*block, part, window, meetings.staged_mut()),
                    Step::Meet { fold } => {
                        meet.fold_window = window;
                        meet.fold_bytes = if fold.is_empty() { 0 } else { self.left(part.offset) };
                        meet.between.for_each = self.halves_for_each.then_some(part.stretch.most);
                        if round == 0 && agreed.is_none() {
                            let agreed = meetings.match_keys(meet, rounds)?;
                            if agreed.memory == Memory::Mixed {
                                return self.run_rounds(meetings, meet, Some(agreed));
                            }
                            rounds = agreed.rounds;
                        } else {
                            meetings.meet_again(meet)?;
                        }
                        if round == 0 {
                            self.keep_own();
                        }
                    }
                    Step::Fetch { from, block, .. } if run.len() == 1 => {
                        self.fetch(*from, *block, part, parity);
                    }
                    Step::Fetch { block, .. } => self.fold(run, *block, part, turn),
                    Step::Send { .. } | Step::Receive { .. } => {
                        unreachable!("flat schedules have no messages")
                    }
                }
            }
            round += 1;
        }
        Ok(())
    }

    /// A fold in two halves. While a round is on its way between hosts, the stretch of the next one is staged and
    /// folded over the ranks of this host, and what the round before has brought is taken: the links wait for neither.
    ///
    /// Where each host does a part of the second half, what is staged for one meeting is whole at the next, so each
    /// carries the stretches of one round to where they are folded, and those of the round before to all.
    fn run_halved(&self, meetings: &mut Rounds, meet: &mut Meet<'_>) -> Result<(), Failure> {
        let is_scattered = self.strategy == Strategy::Scattered;
        let rounds = self.rounds() + u32::from(is_scattered);
        let mut before = Gathered::default();
        // Which stretch of the result is whole, and where.
        let mut whole = None;
        let place = meetings.place(self.op);
        self.stage_half(meetings, place, 0, meetings.turn())?;
        for round in 0..rounds {
            let offset = round as usize * self.stretch.most;
            let turn = meetings.turn();
            meet.fold_bytes = self.left(offset);
            if is_scattered {
                let stretches = Gathered::among(meet.fold_bytes, self.segment.size());
                meet.between = Between {
                    scattered: (meet.fold_bytes > 0).then_some(stretches.stride),
                    for_each: None,
                    gathered: std::mem::replace(&mut before, stretches),
                };
            }
            if round == 0 {
                meetings.match_keys(meet, rounds)?;
                // Data that was staged for the operation before may be on its way until now.
                self.stage_half(meetings, place, self.stretch.most, turn + 1)?;
            } else {
                meetings.come(meet)?;
                self.stage_half(meetings, place, offset + self.stretch.most, turn + 1)?;
                self.fetch_folded(whole.take());
                meetings.await_others(meet)?;
            }
            whole = match is_scattered {
                true => offset.checked_sub(self.stretch.most),
                false => Some(offset),
            }
            .map(|offset| (offset, turn));
        }
        self.fetch_folded(whole);
        Ok(())
    }

    /// Stages a stretch for the round of this turn, if there is one and it can not be read in its `place` or folded
    /// with what the others have staged.
    fn stage_half(
        &self,
        meetings: &Rounds,
        place: Option<ArenaStretch>,
        offset: usize,
        turn: usize,
    ) -> Result<(), Failure> {
        let bytes = self.left(offset);
        if bytes == 0 {
            return Ok(());
        }
        let folds_own = place.is_none() && meetings.can_fold_own(turn);
        if place.is_none() && !folds_own {
            let at = self.segment.layout().window(self.segment.rank(), turn % 2);
            self.op.inputs.stage(self.copying.0, (0, offset), bytes, self.segment.region(), at);
            self.traffic.stage(bytes);
        }
        let stretch = |whole: ArenaStretch| {
            let (offset, bytes) = (whole.offset + offset as u64, bytes as u64);
            ArenaStretch { offset, bytes, ..whole }
        };
        self.segment.remote().set_place(turn % 2, place.map(stretch));
        meetings.staged_half(self.op, turn, bytes, folds_own.then_some(offset))
    }

    fn fetch_folded(&self, whole: Option<(usize, usize)>) {
        let Some((offset, turn)) = whole else { return };
        for run in self.runs() {
            if let Step::Fetch { block, .. } = &run[0] {
                self.fetch(Source::Folded, *block, Part { offset, stretch: self.stretch }, turn);
            }
        }
    }

    /// Keeps the data that this rank gives to itself, which goes through no window. Begins only once the keys have
    /// matched.
    fn keep_own(&self) {
        let Op { inputs, outputs, .. } = self.op;
        let me = self.segment.rank() as usize;
        if self.op.kind.reduces() {
            if self.segment.size() == 1 {
                inputs.fold_alone(self.op.reduction(1), outputs);
                self.traffic.in_place(outputs.total(), 1, 1);
            }
            return;
        }
        let (input, output) = match self.op.kind {
            OpKind::AllGather | OpKind::Gather => (0, me),
            OpKind::AllToAll => (me, me),
            OpKind::Scatter => (me, 0),
            _ => return,
        };
        if input < inputs.chunks() && output < outputs.chunks() {
            let (from, to) = (inputs.chunk(input), outputs.chunk(output));
            from.copy_to(self.copying.1, 0, &to, 0, from.total());
            self.traffic.in_place(from.total(), 1, 1);
        }
    }

    /// Its steps; a fetch and the reducing fetches behind it are one fold, in which this rank takes part or not.
    fn runs(&self) -> impl Iterator<Item = &[Step]> {
        let is_more = |_: &Step, next: &Step| matches!(next, Step::Fetch { action: Action::Reduce, .. });
        let runs = self.schedule.channels.iter().flat_map(move |channel| channel.chunk_by(is_more));
        runs.filter(|run| self.takes_part(&run[0]))
    }

    /// Rooted collectives run the symmetric schedule without what only the root needs or gives.
    fn takes_part(&self, step: &Step) -> bool {
        let me = self.op.root == Some(self.segment.rank());
        match (self.op.kind, step) {
            (OpKind::Reduce | OpKind::Gather, Step::Fetch { .. }) => me,
            (OpKind::Scatter, Step::Publish { .. }) => me,
            (OpKind::Scatter, Step::Fetch { from, .. }) => self.op.root.map(Source::Rank) == Some(*from),
            _ => true,
        }
    }

    fn input_chunk(&self, block: Block) -> usize {
        match self.op.kind {
            OpKind::ReduceScatter => block.chunk as usize,
            OpKind::AllToAll | OpKind::Scatter => self.destination(block),
            _ => 0,
        }
    }

    fn output_chunk(&self, block: Block) -> usize {
        match self.op.kind {
            OpKind::AllGather | OpKind::Gather => block.chunk as usize,
            OpKind::AllToAll => (block.chunk / self.segment.size()) as usize,
            _ => 0,
        }
    }

    /// Which of a window's chunks a block is.
    fn slot(&self, block: Block) -> usize {
        match self.op.kind {
            OpKind::ReduceScatter => block.chunk as usize,
            OpKind::AllToAll | OpKind::Scatter => self.destination(block),
            _ => 0,
        }
    }

    fn destination(&self, block: Block) -> usize {
        (block.chunk % self.segment.size()) as usize
    }

    /// Bytes of the only chunk that are folded in the round at `offset`.
    fn left(&self, offset: usize) -> usize {
        self.op.inputs.chunk_bytes(0).saturating_sub(offset).min(self.stretch.most)
    }

    fn publish(&self, block: Block, part: Part, window: usize, staged: &mut Staging) {
        let chunk = self.input_chunk(block);
        let bytes = part.of(self.op.inputs.chunk_bytes(chunk));
        let at = self.at(self.segment.rank(), window, block, part);
        self.op.inputs.stage(self.copying.0, (chunk, part.offset), bytes, self.segment.region(), at);
        self.traffic.stage(bytes);
        if self.segment.is_bridged() {
            self.note(block, part, bytes, staged);
        }
    }

    /// Notes the staged bytes that other hosts need.
    fn note(&self, block: Block, part: Part, bytes: usize, staged: &mut Staging) {
        if !is_for_each(self.op.kind) {
            staged.for_all = staged.for_all.max(self.slot(block) * part.stretch.most + bytes);
            return;
        }
        staged.stride = part.stretch.most;
        staged.each.resize(self.segment.size() as usize, 0);
        staged.each[self.slot(block)] = bytes;
    }

    fn fetch(&self, from: Source, block: Block, part: Part, turn: usize) {
        let chunk = self.output_chunk(block);
        let bytes = part.of(self.op.outputs.chunk_bytes(chunk));
        let (outputs, region) = (&self.op.outputs, self.segment.region());
        let (at, is_alone) = match from {
            Source::Rank(rank) => {
                (self.at(rank, turn % 2, block, part), is_for_each(self.op.kind) || self.segment.size() == 2)
            }
            Source::Folded => (self.segment.layout().folded(turn), false),
        };
        if is_alone {
            outputs.fetch_alone(self.copying.1, (chunk, part.offset), bytes, region, at);
        } else {
            outputs.fetch(self.copying.1, (chunk, part.offset), bytes, region, at);
        }
        self.traffic.stage(bytes);
    }

    fn fold(&self, run: &[Step], block: Block, part: Part, turn: usize) {
        let ranks = run.iter().filter_map(|step| match step {
            Step::Fetch { from: Source::Rank(rank), .. } => Some(*rank),
            _ => None,
        });
        let (offset, bytes) = (part.offset, part.of(self.op.outputs.chunk_bytes(0)));
        if self.halves_for_each {
            let second = self.op.reduction(self.segment.size()).second_half();
            let at = second.bytes_for(self.slot(block) * part.stretch.most);
            let sources = partials(self.segment, turn).map(|start| Some(start + at));
            self.traffic.fold_staged(bytes, sources.clone().count());
            self.op.outputs.fold(0, offset, bytes, second, self.segment.region(), sources);
            return;
        }
        let sources = ranks.map(|rank| (rank, self.at(rank, turn % 2, block, part)));
        fold_windows(self.segment, self.op, sources, offset..offset + bytes, self.traffic);
    }

    /// Where a block is in the window of a rank.
    fn at(&self, rank: u32, parity: usize, block: Block, part: Part) -> usize {
        let Stretch { window, most } = part.stretch;
        self.segment.layout().start_of(window, rank, parity) + self.slot(block) * most
    }
}

/// The window that chunks go through in a round, and how much of them does.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    window: Window,
    /// Bytes of each chunk at most, and the distance of a window's chunks.
    most: usize,
}

/// The part of each chunk that a round moves.
#[derive(Clone, Copy, Debug)]
struct Part {
    offset: usize,
    stretch: Stretch,
}

impl Part {
    /// Returns how many bytes of a chunk of `chunk` bytes it has.
    fn of(self, chunk: usize) -> usize {
        chunk.saturating_sub(self.offset).min(self.stretch.most)
    }
}

/// Whether a rank stages something of its own for each rank.
fn is_for_each(kind: OpKind) -> bool {
    matches!(kind, OpKind::ReduceScatter | OpKind::AllToAll | OpKind::Scatter)
}

/// Folds what these ranks have staged at these places into a stretch of the result. Nobody else reads it, but for what
/// this rank has staged: that is still in its tensor, if it is folded there. (If not, both of two ranks read it, and
/// find each other's lines away.)
pub(crate) fn fold_windows(
    segment: &Segment,
    op: &Op,
    sources: impl Iterator<Item = (u32, usize)> + Clone,
    stretch: Range<usize>,
    traffic: &Counter,
) {
    let reduction = op.reduction(segment.size());
    traffic.fold_staged(stretch.len(), sources.clone().count());
    let is_in_place = op.outputs.is_same_memory(&op.inputs);
    let sources = sources.map(|(rank, at)| (!is_in_place || rank != segment.rank()).then_some(at));
    op.outputs.fold(0, stretch.start, stretch.len(), reduction, segment.region(), sources);
}
