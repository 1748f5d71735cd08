//! Where blocks lie in the inputs and outputs of an operation.

use tpurun_topology::{Block, Collective, Schedule};

use super::ExecutionError;
use tpurun_memory::buffer::Spans;

/// The memory that one operation reads and writes, as the C ABI lays out each collective.
#[derive(Clone, Debug)]
pub struct Buffers {
    /// The data that this rank contributes.
    pub input: Spans,
    /// The data that this rank ends with; it may be in the memory of the data that it replaces.
    pub output: Spans,
}

/// One block of the schedule, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// How many elements it has.
    pub(super) count: usize,
    /// Its first element in the input, if this rank has it as input.
    pub(super) input: Option<usize>,
    /// Its first element in the output, if this rank must end with it.
    pub(super) output: Option<usize>,
}

/// Finds blocks; in elements throughout.
pub(super) struct BlockOffsets<'a> {
    schedule: &'a Schedule,
    /// Where each chunk of the input begins, and the end.
    input: Vec<usize>,
    output: Vec<usize>,
}

impl<'a> BlockOffsets<'a> {
    /// Checks that the buffers are what the collective needs.
    pub(super) fn new(
        schedule: &'a Schedule,
        buffers: &Buffers,
        element_bytes: usize,
    ) -> Result<Self, ExecutionError> {
        let pieces = || buffers.input.piece_bytes().chain(buffers.output.piece_bytes());
        if let Some(bytes) = pieces().find(|bytes| bytes % element_bytes != 0) {
            return Err(ExecutionError::Piece { bytes, element_bytes });
        }
        let starts = |spans: &Spans| {
            let ends = (0..spans.chunks()).scan(0, |end, chunk| {
                *end += spans.chunk(chunk).total() / element_bytes;
                Some(*end)
            });
            std::iter::once(0).chain(ends).collect::<Vec<_>>()
        };
        let offsets = Self { schedule, input: starts(&buffers.input), output: starts(&buffers.output) };
        offsets.check()?;
        Ok(offsets)
    }

    fn check(&self) -> Result<(), ExecutionError> {
        let (ranks, rank) = (self.schedule.ranks as usize, self.schedule.rank as usize);
        let is_root =
            matches!(self.schedule.collective, Collective::Broadcast { root } if root as usize == rank);
        let (inputs, outputs) = match self.schedule.collective {
            Collective::AllReduce => (1, 1),
            Collective::AllGather => (1, ranks),
            Collective::ReduceScatter => (ranks, 1),
            Collective::Broadcast { .. } => (usize::from(is_root), usize::from(!is_root)),
            Collective::AllToAll => (ranks, ranks),
        };
        let given = (self.input.len() - 1, self.output.len() - 1);
        if given != (inputs, outputs) {
            return Err(ExecutionError::Chunks { given, expected: (inputs, outputs) });
        }
        // The part of its own input that this rank keeps must fit where it goes.
        let own = |starts: &[usize], chunk| starts[chunk + 1] - starts[chunk];
        let (ours, room) = match self.schedule.collective {
            Collective::AllReduce => (own(&self.input, 0), own(&self.output, 0)),
            Collective::AllGather => (own(&self.input, 0), own(&self.output, rank)),
            Collective::ReduceScatter => (own(&self.input, rank), own(&self.output, 0)),
            Collective::Broadcast { .. } => (0, 0),
            Collective::AllToAll => (own(&self.input, rank), own(&self.output, rank)),
        };
        if ours == room { Ok(()) } else { Err(ExecutionError::Sizes { ours, room }) }
    }

    /// Where a block lies.
    pub(super) fn block(&self, block: Block) -> Result<Extent, ExecutionError> {
        if block.chunk >= self.schedule.chunks() || block.part >= self.schedule.parts {
            return Err(ExecutionError::Schedule { block, problem: "does not exist" });
        }
        let chunk = self.chunk(block.chunk)?;
        let part = self.schedule.part_range(chunk.count as u64, block.part);
        let at = |start: usize| start + part.start as usize;
        Ok(Extent {
            count: (part.end - part.start) as usize,
            input: chunk.input.map(at),
            output: chunk.output.map(at),
        })
    }

    fn chunk(&self, chunk: u32) -> Result<Extent, ExecutionError> {
        let Schedule { collective, ranks, rank, .. } = *self.schedule;
        let is_input = self.schedule.is_input(chunk);
        // A root has no output, and needs none.
        let is_output = self.schedule.is_output(chunk) && self.output.len() > 1;
        let input_at = |start| is_input.then_some(start);
        let output_at = |start| is_output.then_some(start);
        let of = |starts: &[usize], index: u32| (starts[index as usize], starts[index as usize + 1]);
        Ok(match collective {
            Collective::AllReduce | Collective::Broadcast { .. } => {
                let elements = self.input[self.input.len() - 1].max(self.output[self.output.len() - 1]);
                let range = self.schedule.chunk_range(elements as u64, chunk);
                let start = range.start as usize;
                let count = (range.end - range.start) as usize;
                Extent { count, input: input_at(start), output: output_at(start) }
            }
            Collective::AllGather => {
                let (start, end) = of(&self.output, chunk);
                Extent { count: end - start, input: input_at(0), output: output_at(start) }
            }
            Collective::ReduceScatter => {
                let (start, end) = of(&self.input, chunk);
                Extent { count: end - start, input: input_at(start), output: output_at(0) }
            }
            Collective::AllToAll => {
                let (from, to) = (chunk / ranks, chunk % ranks);
                let (input, input_end) = of(&self.input, to);
                let (output, output_end) = of(&self.output, from);
                let count = if from == rank {
                    input_end - input
                } else if to == rank {
                    output_end - output
                } else {
                    self.even()?
                };
                Extent { count, input: input_at(input), output: output_at(output) }
            }
        })
    }

    /// Elements of every chunk of an all-to-all: nothing else says how much passes through.
    fn even(&self) -> Result<usize, ExecutionError> {
        let mut sizes = [&self.input, &self.output].into_iter().flat_map(|starts| starts.windows(2));
        let first = self.input[1];
        if sizes.all(|ends| ends[1] - ends[0] == first) { Ok(first) } else { Err(ExecutionError::Uneven) }
    }
}
