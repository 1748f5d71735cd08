//! Ranks as threads of one process: each maps the segment for itself, as separate processes would.
// Every test file uses its part of this.
#![allow(dead_code, unsafe_code, unreachable_pub)]

pub mod collectives;
pub mod hosts;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use tpurun_engine::board::Board;
use tpurun_engine::dtype::{Dtype, ReduceOp};
use tpurun_engine::{
    Bootstrap, Communicator, Config, Failure, FailureKind, Membership, Mode, Op, OpKind, Shape, Spans, Work,
};

/// Hands the descriptor from the thread of rank 0 to the others.
#[derive(Default, Debug)]
pub struct Handover {
    segment: Mutex<Option<OwnedFd>>,
    offered: Condvar,
}

impl Bootstrap for Handover {
    fn offer(&self, segment: BorrowedFd<'_>) -> Result<(), Failure> {
        *self.segment.lock().unwrap() = Some(segment.try_clone_to_owned().unwrap());
        self.offered.notify_all();
        Ok(())
    }

    fn fetch(&self, deadline: Instant) -> Result<OwnedFd, Failure> {
        let mut segment = self.segment.lock().unwrap();
        loop {
            if let Some(segment) = &*segment {
                return Ok(segment.try_clone().unwrap());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::new(FailureKind::Timeout, "nobody offered a segment"));
            }
            segment = self.offered.wait_timeout(segment, left).unwrap().0;
        }
    }
}

pub fn config() -> Config {
    Config { staging_bytes: Some(256 << 10), ..Config::default() }
}

/// Runs `body` as each rank of a group, and returns what each returned.
pub fn with_ranks<T: Send>(
    ranks: u32,
    config: &Config,
    timeout: Duration,
    body: impl Fn(&Communicator) -> T + Sync,
) -> Vec<T> {
    with_ranks_on(None, ranks, config, timeout, body)
}

/// The same, on a board.
pub fn with_ranks_on<T: Send>(
    board: Option<&Board>,
    ranks: u32,
    config: &Config,
    timeout: Duration,
    body: impl Fn(&Communicator) -> T + Sync,
) -> Vec<T> {
    let handover = Handover::default();
    let (handover, body) = (&handover, &body);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let members =
                    Membership { name: "test".to_owned(), rank, world_ranks: (0..ranks).collect(), epoch: 0 };
                scope.spawn(move || {
                    let communicator =
                        Communicator::create(members, timeout, config.clone(), handover, board, 1).unwrap();
                    body(&communicator)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// An operation over vectors of i64 (one per chunk), or what lies in them, for the tests to own.
pub struct Call {
    pub kind: OpKind,
    pub dtype: Dtype,
    pub scale: f64,
    pub reduce_op: ReduceOp,
    pub root: Option<u32>,
    pub tag: i32,
    pub inputs: Vec<Vec<i64>>,
    pub outputs: Vec<Vec<i64>>,
    pub site: &'static str,
}

impl Call {
    pub fn new(kind: OpKind, inputs: Vec<Vec<i64>>, outputs: Vec<Vec<i64>>) -> Self {
        let (dtype, scale, reduce_op) = (Dtype::I64, 1.0, ReduceOp::Sum);
        Self { kind, dtype, scale, reduce_op, root: None, tag: 0, inputs, outputs, site: "test.py:1" }
    }

    pub fn op(&mut self) -> Op {
        let spans = |chunks: &mut Vec<Vec<i64>>| {
            let pieces =
                chunks.iter_mut().map(|chunk| (chunk.as_mut_ptr().cast(), size_of_val(chunk.as_slice())));
            // SAFETY: the tests keep a call until its operation is over.
            unsafe { Spans::new(pieces, 1) }
        };
        let words = self.inputs.first().or(self.outputs.first()).map_or(0, Vec::len);
        let count = words * size_of::<i64>() / self.dtype.size();
        Op {
            kind: self.kind,
            dtype: self.dtype,
            reduce_op: self.reduce_op,
            scale: self.scale,
            root: self.root,
            tag: self.tag,
            inputs: spans(&mut self.inputs),
            outputs: spans(&mut self.outputs),
            shape: Shape::new(&[count as i64]),
            shape_hash: None,
            timeout: None,
            site: self.site.into(),
            python_threads: 1,
        }
    }

    /// Runs it to its end and returns the outputs.
    pub fn run(mut self, communicator: &Communicator) -> Result<Vec<Vec<i64>>, Failure> {
        self.post_as(communicator, Mode::Blocking)?;
        Ok(self.outputs)
    }

    /// Posts it; the call must be kept until the work ended.
    pub fn post(&mut self, communicator: &Communicator) -> Result<Arc<Work>, Failure> {
        self.post_as(communicator, Mode::Async(None)).map(|work| work.expect("it is not blocking"))
    }

    /// The same; it may end as late as somebody waits for it.
    pub fn post_lazily(&mut self, communicator: &Communicator) -> Result<Arc<Work>, Failure> {
        self.post_as(communicator, Mode::Lazy(None)).map(|work| work.expect("it is not blocking"))
    }

    pub fn post_as(&mut self, communicator: &Communicator, mode: Mode) -> Result<Option<Arc<Work>>, Failure> {
        let op = self.op();
        communicator.post(op, mode)
    }
}

/// Waits for what was posted, if it was not blocking.
pub fn finish(communicator: &Communicator, posted: Option<Arc<Work>>) -> Result<(), Failure> {
    let outcome =
        |work: Arc<Work>| communicator.wait(&work, None, 1).expect("a wait without a deadline ends");
    posted.map_or(Ok(()), |work| outcome(work).map(drop))
}

/// A thread of this process, as messages name a rank.
pub fn who() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    format!("host {}, pid {}", host.trim(), std::process::id())
}
