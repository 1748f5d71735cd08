//! One run of a schedule whose steps are sends and receives: a state machine without I/O, clock or threads.
//!
//! A driver asks what to transmit, says what it sent, and hands over what arrived. The steps of a channel
//! happen in order, with one liberty: a send is begun and left behind, so that a rank receives while its own
//! segments wait for room. At most one send to each rank is under way in a channel, and no step touches a
//! block while it is being sent.

mod layout;
mod program;
mod slots;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use tpurun_topology::{Algorithm, Block, Schedule};

pub use layout::Buffers;
use program::{Act, BlockStart, Fold, Program, Task};

use tpurun_kernels::reduce::{Copying, Reduction};
use tpurun_memory::buffer::{Scratch, Spans};
use tpurun_memory::traffic::Traffic;
use tpurun_protocol::wire::{Form, Header};

/// One run of one schedule on one rank.
#[derive(Debug)]
pub struct Execution {
    operation: Operation,
    reduction: Reduction,
    memory: Memory,
    channels: Vec<Channel>,
    /// The sum of what all channels have left; zero is done.
    unfinished: usize,
    segment_bytes: usize,
    staging: Staging,
    /// Where the search for something to transmit goes on.
    cursor: usize,
    traffic: Traffic,
}

/// Which operation of a communicator this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Membership generation of the communicator.
    pub epoch: u32,
    /// Order among the operations of the communicator.
    pub seq: u64,
}

/// A segment to be sent.
#[derive(Debug)]
pub struct Transmit<'a> {
    /// The receiver.
    pub to: u32,
    /// The header, which is sent first.
    pub header: Header,
    /// The payload, which is sent after the header.
    pub payload: &'a [u8],
}

/// The outcome for a segment that arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// It was used; take the next.
    Taken,
    /// It is for a later step, or a later operation: leave it and offer it again.
    Later,
}

/// Why an execution can not begin or go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExecutionError {
    /// The schedule needs memory that all ranks can read.
    #[error("schedule {algorithm} does not consist of sends and receives")]
    NotStepwise {
        /// How it is done.
        algorithm: Algorithm,
    },
    /// The schedule makes no sense for this rank.
    #[error("schedule is broken: block {block} {problem}")]
    Schedule {
        /// The block that the schedule is wrong about.
        block: Block,
        /// The problem with the block.
        problem: &'static str,
    },
    /// A piece of memory does not hold whole elements.
    #[error("a piece of {bytes} bytes does not hold elements of {element_bytes} bytes")]
    Piece {
        /// The size of the piece.
        bytes: usize,
        /// The size of one element.
        element_bytes: usize,
    },
    /// The numbers of input and output chunks are not those of the collective.
    #[error("{given:?} input and output chunks, expected {expected:?}")]
    Chunks {
        /// The numbers that the buffers have.
        given: (usize, usize),
        /// The numbers that the collective has.
        expected: (usize, usize),
    },
    /// The input that this rank keeps has another size than the place where it goes.
    #[error("{ours} elements of input are kept in {room} elements of output")]
    Sizes {
        /// In the input.
        ours: usize,
        /// In the output.
        room: usize,
    },
    /// Blocks of unknown size would pass through this rank.
    #[error("an all_to_all with uneven splits can not be routed through other ranks")]
    Uneven,
    /// A segment of another membership, or of an operation that is over.
    #[error("rank {from} sent a segment of epoch {epoch} seq {seq} during epoch {} seq {}", .ours.epoch, .ours.seq)]
    Stale {
        /// The sender.
        from: u32,
        /// The epoch of the segment.
        epoch: u32,
        /// The seq of the segment.
        seq: u64,
        /// The operation that is running here.
        ours: Operation,
    },
    /// A segment that no step waits for.
    #[error("rank {from} sent {found:?}, expected {}", Expected(.expected))]
    Unexpected {
        /// The sender.
        from: u32,
        /// The header that the segment came with.
        found: Header,
        /// The header that the next step that receives from this rank waits for, if there is one.
        expected: Option<Header>,
    },
    /// A header and a payload that do not belong together.
    #[error("rank {from} sent {found} bytes with a header for {expected}")]
    Length {
        /// The sender.
        from: u32,
        /// The size of the payload.
        found: usize,
        /// In the header.
        expected: u32,
    },
}

impl Execution {
    /// Prepares a run; inputs that this rank merely keeps are in the outputs when it returns.
    ///
    /// All ranks must run schedules of one plan with the same reduction. Segments hold at most
    /// `segment_bytes`, which are rounded to whole elements of any type.
    ///
    /// # Errors
    /// When the schedule can not be run here, or the buffers are not what its collective needs.
    pub fn new(
        schedule: &Arc<Schedule>,
        reduction: Reduction,
        buffers: Buffers,
        operation: Operation,
        segment_bytes: usize,
    ) -> Result<Self, ExecutionError> {
        let program = Program::new(schedule, reduction, &buffers)?;
        let traffic = program.traffic(reduction, schedule.collective.reduces());
        let Program { channels, kept, scratch_bytes } = program;
        let memory = Memory { buffers, scratch: Scratch::new(scratch_bytes) };
        for kept in kept {
            memory.keep(reduction, schedule.collective.reduces(), &kept);
        }
        let segment_bytes = (segment_bytes - segment_bytes % LARGEST_ELEMENT).max(LARGEST_ELEMENT);
        let channels: Vec<Channel> = channels.into_iter().map(Channel::new).collect();
        let longest = channels.iter().flat_map(|channel| &channel.tasks).map(|task| task.bytes).max();
        let staging = Staging { bytes: vec![0; segment_bytes.min(longest.unwrap_or(0))], holds: None };
        let unfinished = channels.iter().map(Channel::left).sum();
        let mut execution = Self {
            operation,
            reduction,
            memory,
            channels,
            unfinished,
            segment_bytes,
            staging,
            cursor: 0,
            traffic,
        };
        for channel in &mut execution.channels {
            channel.begin_sends();
        }
        Ok(execution)
    }

    /// Returns what a whole run moves.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Whether all steps are done; then the outputs are complete.
    pub fn is_done(&self) -> bool {
        self.unfinished == 0
    }

    /// The ranks that the next steps need: to send something, or to make room.
    pub fn waits_for(&self) -> Vec<u32> {
        let mut ranks: Vec<u32> = self
            .channels
            .iter()
            .flat_map(|channel| {
                let next = channel.tasks.get(channel.position).filter(|task| !task.is_send());
                let sends = channel.sends.iter().map(|send| &channel.tasks[send.task]);
                next.into_iter().chain(sends).map(|task| task.rank)
            })
            .collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// The next segment to send, if there is one that was not refused. Follow it by [`Self::sent`] or
    /// [`Self::refused`].
    pub fn poll_transmit(&mut self) -> Option<Transmit<'_>> {
        let channels = self.channels.len();
        let turn = (0..channels).map(|step| (self.cursor + step) % channels);
        let (index, sending) = turn.into_iter().find_map(|index| {
            let ready = self.channels[index].sends.iter().position(|send| !send.refused);
            ready.map(|sending| (index, sending))
        })?;
        self.cursor = index;
        let channel = &self.channels[index];
        let Sending { task, done, .. } = channel.sends[sending];
        let task = &channel.tasks[task];
        let len = (task.bytes - done).min(self.segment_bytes);
        let key = (index, task.rank, task.block, done);
        self.staging.fill(key, len, |bytes| self.memory.load(self.reduction, task, done, bytes));
        let header = header(self.operation, index, task, done, len);
        Some(Transmit { to: task.rank, header, payload: &self.staging.bytes[..len] })
    }

    /// The segment that was polled last is on its way.
    pub fn sent(&mut self) {
        let Some((index, to, ..)) = self.staging.holds.take() else { return };
        let channel = &mut self.channels[index];
        let Some(position) = channel.sends.iter().position(|send| channel.tasks[send.task].rank == to) else {
            return;
        };
        let send = &mut channel.sends[position];
        let bytes = channel.tasks[send.task].bytes;
        send.done = bytes.min(send.done + self.segment_bytes);
        if send.done == bytes {
            channel.sends.swap_remove(position);
            self.unfinished -= 1;
            channel.begin_sends();
        }
        // The next channel has its turn.
        self.cursor = (index + 1) % self.channels.len();
    }

    /// There was no room for the segment that was polled last: it is not offered again until
    /// [`Self::retry`].
    pub fn refused(&mut self) {
        let Some((index, to, ..)) = self.staging.holds else { return };
        let channel = &mut self.channels[index];
        for send in &mut channel.sends {
            send.refused |= channel.tasks[send.task].rank == to;
        }
    }

    /// There may be room again.
    pub fn retry(&mut self) {
        for send in self.channels.iter_mut().flat_map(|channel| &mut channel.sends) {
            send.refused = false;
        }
    }

    /// Takes a segment that arrived, or says that its time has not come.
    ///
    /// # Errors
    /// When it is not a segment that can come next from that rank on that channel. Nothing is changed then.
    pub fn handle_segment(
        &mut self,
        from: u32,
        header: &Header,
        bytes: &[u8],
    ) -> Result<Delivery, ExecutionError> {
        let Operation { epoch, seq } = self.operation;
        if header.epoch != epoch || header.seq < seq {
            let (epoch, seq) = (header.epoch, header.seq);
            return Err(ExecutionError::Stale { from, epoch, seq, ours: self.operation });
        }
        if header.seq > seq {
            return Ok(Delivery::Later);
        }
        if bytes.len() != header.bytes as usize {
            return Err(ExecutionError::Length { from, found: bytes.len(), expected: header.bytes });
        }
        let index = header.channel as usize;
        let unexpected = |expected| ExecutionError::Unexpected { from, found: *header, expected };
        let channel = self.channels.get_mut(index).ok_or_else(|| unexpected(None))?;
        let (position, task) = channel.next_receive(from).ok_or_else(|| unexpected(None))?;
        let done = if position == channel.position { channel.received } else { 0 };
        let left = task.bytes - done;
        let expected = self::header(self.operation, index, task, done, left.min(self.segment_bytes));
        let element_bytes = match task.form {
            Form::Whole => self.reduction.dtype().size(),
            Form::Partial => self.reduction.wide().size(),
        };
        // The header may differ from the expected one in its length only: the sender may cut its segments
        // differently.
        let fits = !bytes.is_empty() && bytes.len() <= left && bytes.len().is_multiple_of(element_bytes);
        if (Header { bytes: expected.bytes, ..*header }) != expected || !fits {
            return Err(unexpected(Some(expected)));
        }
        if position != channel.position || channel.is_sending(task.block) {
            return Ok(Delivery::Later);
        }
        self.memory.store(self.reduction, task, done, bytes);
        if bytes.len() == left {
            channel.position += 1;
            channel.received = 0;
            channel.begin_sends();
            self.unfinished -= 1;
        } else {
            channel.received += bytes.len();
        }
        Ok(Delivery::Taken)
    }
}

fn header(operation: Operation, channel: usize, task: &Task, done: usize, len: usize) -> Header {
    let Operation { epoch, seq } = operation;
    let Block { chunk, part } = task.block;
    let (offset, bytes) = (done as u64, len as u32);
    Header { form: task.form, epoch, channel: channel as u32, seq, chunk, part, offset, bytes }
}

/// Where one channel is.
#[derive(Debug)]
struct Channel {
    tasks: Vec<Task>,
    /// The first task that was not begun.
    position: usize,
    /// Bytes that have come of the task at `position`, if that is a receive.
    received: usize,
    /// Sends that were begun, at most one to each rank.
    sends: Vec<Sending>,
}

#[derive(Clone, Copy, Debug)]
struct Sending {
    task: usize,
    done: usize,
    refused: bool,
}

impl Channel {
    fn new(tasks: Vec<Task>) -> Self {
        let mut receivers: Vec<u32> =
            tasks.iter().filter(|task| task.is_send()).map(|task| task.rank).collect();
        receivers.sort_unstable();
        receivers.dedup();
        Self { sends: Vec::with_capacity(receivers.len()), tasks, position: 0, received: 0 }
    }

    fn left(&self) -> usize {
        self.tasks.len()
    }

    /// Begins sends up to the next receive, or the next send to a rank that is being sent to.
    fn begin_sends(&mut self) {
        while let Some(task) = self.tasks.get(self.position) {
            let busy = self.sends.iter().any(|send| self.tasks[send.task].rank == task.rank);
            if !task.is_send() || busy {
                return;
            }
            self.sends.push(Sending { task: self.position, done: 0, refused: false });
            self.position += 1;
        }
    }

    /// The next task that receives from a rank.
    fn next_receive(&self, from: u32) -> Option<(usize, &Task)> {
        let tasks = self.tasks.iter().enumerate().skip(self.position);
        tasks.into_iter().find(|(_, task)| !task.is_send() && task.rank == from)
    }

    fn is_sending(&self, block: Block) -> bool {
        self.sends.iter().any(|send| self.tasks[send.task].block == block)
    }
}

impl Task {
    fn is_send(&self) -> bool {
        matches!(self.act, Act::Send(_) | Act::SendWidened(_))
    }
}

/// The segment being offered, so that one that was refused is not made again.
#[derive(Debug)]
struct Staging {
    bytes: Vec<u8>,
    /// Channel, receiver, block and offset.
    holds: Option<(usize, u32, Block, usize)>,
}

impl Staging {
    fn fill(&mut self, key: (usize, u32, Block, usize), len: usize, load: impl FnOnce(&mut [u8])) {
        if self.holds != Some(key) {
            load(&mut self.bytes[..len]);
            self.holds = Some(key);
        }
    }
}

/// All that an execution reads and writes.
#[derive(Debug)]
struct Memory {
    buffers: Buffers,
    scratch: Scratch,
}

impl Memory {
    fn at(&self, place: BlockStart) -> (&Spans, usize) {
        match place {
            BlockStart::Input(offset) => (&self.buffers.input, offset),
            BlockStart::Output(offset) => (&self.buffers.output, offset),
            BlockStart::Scratch(offset) => (self.scratch.spans(), offset),
        }
    }

    fn keep(&self, reduction: Reduction, reduces: bool, kept: &program::Kept) {
        let Buffers { input, output } = &self.buffers;
        if reduces {
            let partial = Scratch::new(kept.count * reduction.wide().size());
            input.widen_to(reduction, kept.input, partial.spans(), 0, kept.count);
            partial.spans().finish_to(reduction, 0, output, kept.output, kept.count);
        } else {
            let bytes = kept.count * reduction.dtype().size();
            input.copy_to(Copying::Cached, kept.input, output, kept.output, bytes);
        }
    }

    /// Fills `bytes` with what a send sends from byte `done` on.
    fn load(&self, reduction: Reduction, task: &Task, done: usize, bytes: &mut [u8]) {
        match task.act {
            Act::Send(place) => {
                let (spans, offset) = self.at(place);
                spans.read(offset + done, bytes);
            }
            Act::SendWidened(place) => {
                let (spans, offset) = self.at(place);
                let element = done / reduction.wide().size();
                spans.read_widened(reduction, offset + element * reduction.dtype().size(), bytes);
            }
            Act::Store(_) | Act::Fold(_) => {}
        }
    }

    /// Does what a receive does with the bytes from byte `done` on.
    fn store(&self, reduction: Reduction, task: &Task, done: usize, bytes: &[u8]) {
        match &task.act {
            Act::Store(place) => {
                let (spans, offset) = self.at(*place);
                spans.write(offset + done, bytes);
            }
            Act::Fold(fold) => self.fold(reduction, fold, done, bytes),
            Act::Send(_) | Act::SendWidened(_) => {}
        }
    }

    fn fold(&self, reduction: Reduction, fold: &Fold, done: usize, bytes: &[u8]) {
        let wide = reduction.wide().size();
        let size = reduction.dtype().size();
        let (element, count) = (done / wide, bytes.len() / wide);
        let (partial, partial_offset) = self.at(fold.partial);
        let partial_offset = partial_offset + done;
        if let Some(own) = fold.own {
            let (own, offset) = self.at(own);
            own.widen_to(reduction, offset + element * size, partial, partial_offset, count);
        }
        partial.accumulate(reduction, partial_offset, bytes);
        if let Some(result) = fold.result {
            let (result, offset) = self.at(result);
            partial.finish_to(reduction, partial_offset, result, offset + element * size, count);
        }
    }
}

/// Says what was expected in a message.
struct Expected<'a>(&'a Option<Header>);

impl std::fmt::Display for Expected<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(header) => write!(f, "{header:?}"),
            None => f.write_str("nothing more on that channel"),
        }
    }
}

/// Bytes of the largest element, a complex of two doubles.
const LARGEST_ELEMENT: usize = 16;
