//! All ranks of one collective, in random order.

use std::sync::Arc;

use tpurun_topology::{Algorithm, Collective, Placement, Torus, algorithm};

use super::memory::{Tensor, fold, number};
use crate::execute::execution::{Buffers, Execution, Operation};
use crate::execute::transport::mem::{Endpoint, MemoryNetwork};
use crate::execute::transport::{DriveError, Round, Sending, Transport, drive, receive};
use tpurun_kernels::dtype::{Dtype, ReduceOp};
use tpurun_kernels::reduce::Reduction;

#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) collective: Collective,
    pub(super) algorithm: Algorithm,
    pub(super) ranks: u32,
    pub(super) shape: &'static str,
    pub(super) dtype: Dtype,
    pub(super) op: ReduceOp,
    pub(super) seed: u64,
}

pub(super) struct World {
    case: Case,
    pub(super) network: MemoryNetwork,
    pub(super) ranks: Vec<Rank>,
    inputs: Vec<Vec<Vec<u8>>>,
    /// Chunks that each rank must end with.
    expected: Vec<Vec<Vec<u8>>>,
}

pub(super) struct Rank {
    // Before the memory that it uses.
    pub(super) execution: Execution,
    pub(super) endpoint: Endpoint,
    /// None when the output is also the input.
    input: Option<Tensor>,
    output: Tensor,
}

pub(super) const OPERATION: Operation = Operation { epoch: 3, seq: 41 };

impl World {
    pub(super) fn new(case: &Case, elements: usize) -> Self {
        Self::build(case, elements, |input, output| {
            let (mut input, mut output) = (input, output);
            let spans = Buffers { input: input.spans(), output: output.spans() };
            (spans, Some(input), output)
        })
    }

    /// The input is the output.
    pub(super) fn in_place(case: &Case, elements: usize) -> Self {
        Self::build(case, elements, |mut both, _| {
            let spans = both.spans();
            (Buffers { input: spans.clone(), output: spans }, None, both)
        })
    }

    fn build(
        case: &Case,
        elements: usize,
        buffers: impl Fn(Tensor, Tensor) -> (Buffers, Option<Tensor>, Tensor),
    ) -> Self {
        let network = MemoryNetwork::new(case.seed, 1 + case.seed as usize % 3);
        let reduction = Reduction::new(case.dtype, case.op, 2.0, case.ranks).expect("cases are defined");
        let inputs = inputs(case, &network, elements);
        let expected = outputs(case, reduction, &inputs);
        let torus: Torus = case.shape.parse().expect("shapes are tori");
        let placement = Placement::new(&torus, &(0..case.ranks).collect::<Vec<_>>()).expect("it fits");
        let segment_bytes = 16 + network.random(100);
        let rank = |rank: u32| {
            let schedule = Arc::new(algorithm::schedule(case.algorithm, case.collective, &placement, rank));
            let size = case.dtype.size();
            let input = Tensor::new(&inputs[rank as usize], size);
            let blank = |chunk: &Vec<u8>| vec![0x5a; chunk.len()];
            let output = expected[rank as usize].iter().map(blank).collect::<Vec<_>>();
            let (spans, input, output) = buffers(input, Tensor::new(&output, size));
            let execution = Execution::new(&schedule, reduction, spans, OPERATION, segment_bytes);
            let execution = execution.unwrap_or_else(|error| panic!("{case:?} rank {rank}: {error}"));
            Rank { execution, endpoint: network.endpoint(rank), input, output }
        };
        let ranks = (0..case.ranks).map(rank).collect();
        Self { case: *case, network, ranks, inputs, expected }
    }

    /// Until all are done.
    pub(super) fn run(&mut self) {
        self.settle();
        assert!(self.is_done(), "{:?} stands still", self.case);
        assert_eq!(self.network.under_way(), 0, "{:?} sent too much", self.case);
    }

    /// Until nothing moves: random ranks do random things, and all do all they can when these fail.
    pub(super) fn settle(&mut self) {
        let mut failures = 0;
        loop {
            let rank = self.network.random(self.ranks.len());
            let moved = match self.network.random(3) {
                0 => self.send_one(rank),
                1 => self.receive_one(rank),
                _ => self.drive(rank).map(|round| round == Round::Moved),
            };
            failures = if self.moved(rank, moved) { 0 } else { failures + 1 };
            if failures > 2 * self.ranks.len() {
                let sweep = (0..self.ranks.len()).filter(|&rank| {
                    let round = self.drive(rank).map(|round| round == Round::Moved);
                    self.moved(rank, round)
                });
                if sweep.count() == 0 {
                    return;
                }
            }
        }
    }

    fn moved(&self, rank: usize, moved: Result<bool, DriveError>) -> bool {
        moved.unwrap_or_else(|error| panic!("{:?} rank {rank}: {error}", self.case))
    }

    pub(super) fn drive(&mut self, rank: usize) -> Result<Round, DriveError> {
        let Rank { execution, endpoint, .. } = &mut self.ranks[rank];
        drive(execution, endpoint)
    }

    fn send_one(&mut self, rank: usize) -> Result<bool, DriveError> {
        let Rank { execution, endpoint, .. } = &mut self.ranks[rank];
        execution.retry();
        let Some(transmit) = execution.poll_transmit() else { return Ok(false) };
        let sending = endpoint.try_send(transmit.to, &transmit.header, transmit.payload);
        match sending {
            Sending::Sent => execution.sent(),
            _ => execution.refused(),
        }
        Ok(sending == Sending::Sent)
    }

    fn receive_one(&mut self, rank: usize) -> Result<bool, DriveError> {
        let Rank { execution, endpoint, .. } = &mut self.ranks[rank];
        receive(execution, endpoint).map(|round| round == Round::Moved)
    }

    pub(super) fn is_done(&self) -> bool {
        self.ranks.iter().all(|rank| rank.execution.is_done())
    }

    pub(super) fn check_guards(&self) {
        self.ranks.iter().for_each(|rank| drop(rank.output.chunks()));
    }

    pub(super) fn check(&self) {
        for (index, (rank, expected)) in self.ranks.iter().zip(&self.expected).enumerate() {
            assert_eq!(rank.output.chunks(), *expected, "{:?} rank {index}", self.case);
            let input = rank.input.as_ref().map_or(self.inputs[index].clone(), Tensor::chunks);
            assert_eq!(input, self.inputs[index], "{:?} wrote to the input of rank {index}", self.case);
        }
    }
}

/// The input chunks of every rank.
fn inputs(case: &Case, network: &MemoryNetwork, elements: usize) -> Vec<Vec<Vec<u8>>> {
    let ranks = case.ranks as usize;
    let chunk = |count: usize| {
        let numbers = (0..count).map(|_| network.random(15) as i8 - 7);
        numbers.flat_map(|x| number(case.dtype, x)).collect::<Vec<u8>>()
    };
    let chunks = |rank: usize| match case.collective {
        Collective::AllReduce => vec![chunk(elements)],
        // The chunks have different sizes.
        Collective::AllGather => vec![chunk(elements + rank)],
        Collective::ReduceScatter => (0..ranks).map(|to| chunk(elements / 2 + to)).collect(),
        Collective::Broadcast { root } if root as usize != rank => vec![],
        Collective::Broadcast { .. } => vec![chunk(elements)],
        // Relayed blocks have one size.
        Collective::AllToAll if case.algorithm == Algorithm::Bucket => {
            (0..ranks).map(|_| chunk(elements)).collect()
        }
        Collective::AllToAll => (0..ranks).map(|to| chunk(elements / 3 + 2 * rank + to)).collect(),
    };
    (0..ranks).map(chunks).collect()
}

/// The output chunks of every rank.
fn outputs(case: &Case, reduction: Reduction, inputs: &[Vec<Vec<u8>>]) -> Vec<Vec<Vec<u8>>> {
    let column = |chunk: usize| inputs.iter().map(|chunks| chunks[chunk].clone()).collect::<Vec<_>>();
    let output = |rank: usize| match case.collective {
        Collective::AllReduce => vec![fold(reduction, &column(0))],
        Collective::AllGather => column(0),
        Collective::ReduceScatter => vec![fold(reduction, &column(rank))],
        Collective::Broadcast { root } if root as usize == rank => vec![],
        Collective::Broadcast { root } => inputs[root as usize].clone(),
        Collective::AllToAll => column(rank),
    };
    (0..inputs.len()).map(output).collect()
}
