//! Tensors in arenas, which the ranks of a host use where they are.
#![allow(unsafe_code)]

mod ranks;

use std::slice::{from_raw_parts, from_raw_parts_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use ranks::collectives::{LARGE, chunk, every_collective, me, summed};
use ranks::hosts::on_hosts;
use ranks::{Call, config, finish, with_ranks};
use tpurun_engine::arena::{Arena, ArenaKind, Arenas};
use tpurun_engine::dtype::ReduceOp;
use tpurun_engine::{Communicator, Config, Failure, FailureKind, Mode, Op, OpKind, Results, Spans, Work};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Staged because they are small, and more than a window.
const COUNTS: [usize; 4] = [0, 1000, 2048, 30_011];

/// Where it begins, and how many values it has.
type Tensor = (*mut i64, usize);

/// Memory in an arena, never freed.
struct Device {
    arena: Arc<Arena>,
    used: AtomicU64,
}

impl Device {
    fn new() -> Self {
        Self { arena: Arc::new(Arena::create(1 << 30).unwrap()), used: AtomicU64::new(0) }
    }

    fn config(&self) -> Config {
        Config { arenas: Arenas::default().with(ArenaKind::Device, self.arena.clone()), ..config() }
    }

    fn tensor(&self, values: &[i64]) -> Tensor {
        let bytes = size_of_val(values) as u64;
        let offset = self.used.fetch_add(bytes.next_multiple_of(64), Ordering::Relaxed);
        let data = self.arena.pointer(offset, bytes).cast::<i64>();
        // SAFETY: nobody else gets this part of the arena.
        unsafe { from_raw_parts_mut(data, values.len()) }.copy_from_slice(values);
        (data, values.len())
    }

    /// The operation of a call with its tensors in the arena, and where the results will be.
    fn place(&self, call: &mut Call) -> (Op, Vec<Tensor>) {
        let mut op = call.op();
        let place = |chunks: &[Vec<i64>]| chunks.iter().map(|chunk| self.tensor(chunk)).collect::<Vec<_>>();
        let outputs = place(&call.outputs);
        (op.inputs, op.outputs) = (spans(&place(&call.inputs)), spans(&outputs));
        (op, outputs)
    }

    /// Runs a call with its tensors in the arena.
    fn run(&self, mut call: Call, communicator: &Communicator, mode: Mode) -> Vec<Vec<i64>> {
        let (op, outputs) = self.place(&mut call);
        let posted = communicator.post(op, mode).unwrap();
        finish(communicator, posted).unwrap();
        outputs.iter().map(|tensor| read(*tensor)).collect()
    }
}

fn spans(tensors: &[Tensor]) -> Spans {
    // SAFETY: an arena outlives all operations of its test.
    unsafe { Spans::new(tensors.iter().map(|(data, count)| (data.cast(), count * 8)), 1) }
}

fn read((data, count): Tensor) -> Vec<i64> {
    // SAFETY: as above; the operation is over.
    unsafe { from_raw_parts(data, count) }.to_vec()
}

fn fill((data, count): Tensor, value: i64) {
    // SAFETY: as above.
    unsafe { from_raw_parts_mut(data, count) }.fill(value);
}

#[test]
fn every_collective_is_right_where_tensors_are() {
    let device = Device::new();
    for ranks in [1, 2, 3, 8] {
        for mode in [|| Mode::Blocking, || Mode::Async(None)] {
            with_ranks(ranks, &device.config(), TIMEOUT, |communicator| {
                for count in COUNTS {
                    every_collective(communicator, count, |call| device.run(call, communicator, mode()));
                }
            });
        }
    }
}

/// As on one core, and with one for each: then the rank that comes last and those that help it do everything.
#[test]
fn every_rank_does_its_share() {
    let device = Device::new();
    for (ranks, cpus, count) in [(2, 1, 262_200), (3, 1, 30_011), (3, 3, 30_011)] {
        with_ranks(ranks, &Config { cpus, ..device.config() }, TIMEOUT, |communicator| {
            every_collective(communicator, count, |call| device.run(call, communicator, Mode::Blocking));
        });
    }
}

#[test]
fn copies_of_more_than_caches_hold() {
    for cpus in [1, 2] {
        let device = Device::new();
        with_ranks(2, &Config { cpus, ..device.config() }, TIMEOUT, |communicator| {
            let (rank, ranks) = me(communicator);
            let run = |call| device.run(call, communicator, Mode::Blocking);
            let count = LARGE / 2;
            let empty = || vec![vec![0; count]; 2];
            let got = run(Call::new(OpKind::AllGather, vec![chunk(rank, 0, count)], empty()));
            assert!(got == (0..ranks).map(|r| chunk(r, 0, count)).collect::<Vec<_>>());
            let own = (0..2).map(|c| chunk(rank, c, count)).collect();
            let got = run(Call::new(OpKind::AllToAll, own, empty()));
            assert!(got == (0..ranks).map(|r| chunk(r, rank as usize, count)).collect::<Vec<_>>());
            let (inputs, outputs) = match rank {
                0 => (vec![chunk(0, 0, LARGE)], vec![]),
                _ => (vec![], vec![vec![0; LARGE]]),
            };
            let got = run(Call { root: Some(0), ..Call::new(OpKind::Broadcast, inputs, outputs) });
            assert!(rank == 0 || got == [chunk(0, 0, LARGE)]);
        });
    }
}

#[test]
fn results_are_verified_where_they_are() {
    let device = Device::new();
    let config = Config { results: Results::Verified, ..device.config() };
    with_ranks(3, &config, TIMEOUT, |communicator| {
        every_collective(communicator, 5000, |call| device.run(call, communicator, Mode::Blocking));
    });
}

/// The last to arrive may be of either kind.
#[test]
fn ranks_with_tensors_elsewhere_make_all_stage() {
    let device = Device::new();
    for elsewhere in [0, 2] {
        with_ranks(3, &device.config(), TIMEOUT, |communicator| {
            for count in COUNTS {
                every_collective(communicator, count, |call| {
                    if me(communicator).0 == elsewhere {
                        return call.run(communicator).unwrap();
                    }
                    device.run(call, communicator, Mode::Blocking)
                });
            }
        });
    }
}

/// Tensors of the device on some ranks, CPU tensors on others: nobody knows where to look for all of them.
#[test]
fn arenas_of_two_kinds_make_all_stage() {
    let (device, host) = (Device::new(), Device::new());
    let arenas = Arenas::default()
        .with(ArenaKind::Device, device.arena.clone())
        .with(ArenaKind::Host, host.arena.clone());
    let config = Config { arenas, ..config() };
    for on_device in [0, 1, 3] {
        with_ranks(3, &config, TIMEOUT, |communicator| {
            let memory = if me(communicator).0 < on_device { &device } else { &host };
            every_collective(communicator, 9000, |call| memory.run(call, communicator, Mode::Blocking));
        });
    }
}

/// Over several hosts a sum is made of tensors where they are once all ranks of a host have mapped what they need for
/// it; then one of them may have its tensor elsewhere, too.
#[test]
fn sums_between_hosts_read_tensors_where_they_are() {
    let device = Device::new();
    // As with a core for each rank of a host.
    let config = Config { cpus: 2, ..device.config() };
    let count = 2 * (4 << 20) / size_of::<i64>() + 11;
    for (hosts, elsewhere, most) in
        [(&[0, 0, 1, 1][..], None, 8), (&[0, 1, 1, 2], None, 7), (&[0, 0, 1, 1], Some(1), 10)]
    {
        let taken = on_hosts(hosts, &config, TIMEOUT, |communicator| {
            let (rank, ranks) = me(communicator);
            let sum = |is_elsewhere: bool| {
                let call = Call::new(OpKind::AllReduce, vec![chunk(rank, 0, count)], vec![vec![0; count]]);
                let got = match is_elsewhere {
                    true => call.run(communicator).unwrap(),
                    false => device.run(call, communicator, Mode::Blocking),
                };
                assert!(got == [summed(ranks, 0, count)], "{hosts:?} {elsewhere:?}");
            };
            // The rank that comes first to one of these may not know yet that the others can read its tensor.
            sum(false);
            sum(false);
            let before = communicator.traffic().staged;
            sum(elsewhere == Some(rank));
            communicator.traffic().staged - before
        });
        // The sum is over all ranks, since the one that comes last works for all; staging takes as much
        // again.
        let by_all = taken.iter().sum::<u64>();
        assert_eq!(by_all, most * 8 * count as u64, "{hosts:?} {elsewhere:?}: {taken:?}");
    }
}

/// Tensors that are not where others can read them: the last rank of a host that comes with its own folds it where it is.
#[test]
fn sums_between_hosts_stage_nothing_for_who_folds() {
    let count = 2 * (4 << 20) / size_of::<i64>() + 11;
    // Bytes of a tensor each that are staged or read there, by all ranks. Those of a host may come at the same time.
    for (hosts, least, most) in [(&[0, 1, 2][..], 6, 6), (&[0, 0, 1, 1], 12, 16)] {
        let taken = on_hosts(hosts, &config(), TIMEOUT, |communicator| {
            let (rank, ranks) = me(communicator);
            let call = Call::new(OpKind::AllReduce, vec![chunk(rank, 0, count)], vec![vec![0; count]]);
            assert!(call.run(communicator).unwrap() == [summed(ranks, 0, count)], "{hosts:?}");
            communicator.traffic().staged
        });
        let by_all = taken.iter().sum::<u64>();
        let bytes = 8 * count as u64;
        assert!((least * bytes..=most * bytes).contains(&by_all), "{hosts:?}: {taken:?} of {bytes}");
    }
}

/// Where the result goes where the tensor was, a stretch is not written before all have read it.
#[test]
fn sums_between_hosts_may_be_in_place() {
    let device = Device::new();
    let config = Config { cpus: 2, ..device.config() };
    let count = 3 * (4 << 20) / size_of::<i64>() + 5;
    for hosts in [&[0, 0, 1, 1][..], &[0, 0, 1, 2]] {
        on_hosts(hosts, &config, TIMEOUT, |communicator| {
            let (rank, ranks) = me(communicator);
            for _ in 0..3 {
                let mut call = Call::new(OpKind::AllReduce, vec![chunk(rank, 0, count)], vec![]);
                let tensor = device.tensor(&call.inputs[0]);
                let mut op = call.op();
                (op.inputs, op.outputs) = (spans(&[tensor]), spans(&[tensor]));
                communicator.post(op, Mode::Blocking).unwrap();
                assert!(read(tensor) == summed(ranks, 0, count));
            }
        });
    }
}

/// If tensors differ in size, nobody reads beyond the smaller one, whoever comes last.
#[test]
fn a_mismatch_between_hosts_is_one() {
    let device = Device::new();
    let config = Config { cpus: 2, ..device.config() };
    for odd in 0..2 {
        on_hosts(&[0, 0, 1, 1], &config, TIMEOUT, |communicator| {
            let (rank, ranks) = me(communicator);
            let call = |count: usize| {
                Call::new(OpKind::AllReduce, vec![chunk(rank, 0, count)], vec![vec![0; count]])
            };
            for _ in 0..2 {
                let got = device.run(call(5000), communicator, Mode::Blocking);
                assert!(got == [summed(ranks, 0, 5000)]);
            }
            let (op, _) = device.place(&mut call(if rank == odd { 1 << 20 } else { 5000 }));
            let failure = communicator.post(op, Mode::Blocking).unwrap_err();
            assert_eq!(failure.kind(), FailureKind::Mismatch, "{failure}");
        });
    }
}

#[test]
fn ranks_without_an_arena_make_all_stage() {
    let (device, handover) = (Device::new(), ranks::Handover::default());
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let members = tpurun_engine::Membership {
                name: "some".to_owned(),
                rank,
                world_ranks: vec![0, 1, 2],
                epoch: 0,
            };
            let (device, handover) = (&device, &handover);
            scope.spawn(move || {
                let config = if rank == 1 { config() } else { device.config() };
                let communicator = Communicator::create(members, TIMEOUT, config, handover, None, 1).unwrap();
                every_collective(&communicator, 9000, |call| device.run(call, &communicator, Mode::Blocking));
            });
        }
    });
}

#[test]
fn tensors_may_be_results_too() {
    let device = Device::new();
    let count = 20_000;
    with_ranks(3, &device.config(), TIMEOUT, |communicator| {
        let (rank, ranks) = me(communicator);
        let run = |kind, inputs: Spans, outputs: Spans| {
            let mut op = Call::new(kind, vec![vec![0; count]], vec![]).op();
            (op.inputs, op.outputs) = (inputs, outputs);
            communicator.post(op, Mode::Blocking).unwrap();
        };
        let all = |rank: u32| (0..ranks as usize).map(|c| chunk(rank, c, count)).collect::<Vec<_>>();
        let tensors = || all(rank).iter().map(|values| device.tensor(values)).collect::<Vec<_>>();

        let own = tensors();
        run(OpKind::AllReduce, spans(&own[..1]), spans(&own[..1]));
        assert_eq!(read(own[0]), summed(ranks, 0, count));

        let own = tensors();
        let me = rank as usize;
        run(OpKind::AllGather, spans(&own[me..=me]), spans(&own));
        for (from, tensor) in own.iter().enumerate() {
            assert_eq!(read(*tensor), chunk(from as u32, from, count));
        }

        // Over its own part, and over one that another rank still needs.
        for shift in 0..ranks {
            let own = tensors();
            let to = ((rank + shift) % ranks) as usize;
            run(OpKind::ReduceScatter, spans(&own), spans(&own[to..=to]));
            assert_eq!(read(own[to]), summed(ranks, me, count), "{shift}");
        }

        let own = tensors();
        run(OpKind::AllToAll, spans(&own), spans(&own));
        for (from, tensor) in own.iter().enumerate() {
            assert_eq!(read(*tensor), chunk(from as u32, me, count));
        }
    });
}

#[test]
fn a_mismatch_changes_no_tensor() {
    let device = Device::new();
    let failures = with_ranks(3, &device.config(), TIMEOUT, |communicator| {
        let rank = me(communicator).0;
        let values = chunk(rank, 0, 9000);
        let tensor = [device.tensor(&values)];
        let mut call = Call::new(OpKind::AllReduce, vec![values.clone()], vec![]);
        call.reduce_op = if rank == 1 { ReduceOp::Max } else { ReduceOp::Sum };
        let mut op = call.op();
        (op.inputs, op.outputs) = (spans(&tensor), spans(&tensor));
        let failure = communicator.post(op, Mode::Blocking).unwrap_err();
        assert_eq!(read(tensor[0]), values);
        failure
    });
    assert!(failures.iter().all(|failure| failure.kind() == FailureKind::Mismatch && failure.ranks() == [1]));
}

/// A rank that fails uses its tensors for something else at once; nobody else may, to the end.
#[test]
fn nobody_writes_to_tensors_of_an_operation_that_has_failed() {
    const COUNT: usize = 1 << 20;
    const OTHERS: i64 = -7;
    // Neither before it has begun nor after it is over: each try is closer to the one it was not last.
    let (mut yields, mut failed) = (100, 0);
    for _ in 0..60 {
        let device = Device::new();
        let all_are_done = Barrier::new(2);
        // As on one core: each rank does its share of both results.
        let config = Config { cpus: 1, ..device.config() };
        let outcomes = with_ranks(2, &config, TIMEOUT, |communicator| {
            let mut reduce = Call::new(OpKind::AllReduce, vec![vec![1; COUNT]], vec![vec![0; COUNT]]);
            let (op, outputs) = device.place(&mut reduce);
            let outcome = std::thread::scope(|scope| {
                if me(communicator).0 == 0 {
                    scope.spawn(|| {
                        (0..yields).for_each(|_| std::thread::yield_now());
                        communicator.abort("a test");
                    });
                }
                communicator.post(op, Mode::Blocking).map(drop)
            });
            if outcome.is_err() {
                fill(outputs[0], OTHERS);
            }
            all_are_done.wait();
            let expected = if outcome.is_ok() { 2 } else { OTHERS };
            assert!(read(outputs[0]).iter().all(|value| *value == expected), "written to after {outcome:?}");
            outcome.is_err()
        });
        let has_failed = outcomes.contains(&true);
        failed += u32::from(has_failed);
        yields = if has_failed { yields * 5 / 4 + 1 } else { yields / 2 };
    }
    assert!(failed > 10, "{failed} were aborted in time");
}

/// And what else it has begun ends as its own decision, too.
#[test]
fn nobody_uses_tensors_of_a_rank_that_has_shut_down() {
    const COUNT: usize = 30_011;
    // The first tries shut down before the other thread has come to the meeting, the last ones after that.
    for tries in 0..40 {
        let device = Device::new();
        let is_gone = Barrier::new(2);
        let kinds = with_ranks(2, &device.config(), TIMEOUT, |communicator| {
            let reduce = || Call::new(OpKind::AllReduce, vec![vec![1; COUNT]], vec![vec![0; COUNT]]);
            assert!(device.run(reduce(), communicator, Mode::Blocking) == [vec![2; COUNT]]);
            let post = || {
                let (op, outputs) = device.place(&mut reduce());
                (communicator.post(op, Mode::Async(None)), outputs[0])
            };
            if communicator.members().rank == 0 {
                let works = [post(), post()];
                (0..tries * tries).for_each(|_| std::thread::yield_now());
                communicator.shutdown();
                is_gone.wait();
                let outcome = |(posted, _): &(Result<Option<Arc<Work>>, Failure>, _)| {
                    let work = posted.as_ref().unwrap().as_ref().expect("it is not blocking");
                    work.outcome().expect("it ended before the shutdown did").unwrap_err().kind()
                };
                return works.iter().map(outcome).collect();
            }
            is_gone.wait();
            let (posted, output) = post();
            let failure = posted.and_then(|posted| finish(communicator, posted));
            assert!(read(output) == vec![0; COUNT]);
            vec![failure.unwrap_err().kind()]
        });
        let aborted = FailureKind::Aborted;
        assert_eq!(kinds, [vec![aborted, aborted], vec![FailureKind::Deadlock]]);
    }
}

/// The operations complete however late it is heard what ranks of other hosts have posted.
#[test]
fn shutdown_completes_what_ranks_of_all_hosts_have_posted() {
    const COUNT: usize = 300_000;
    let device = Device::new();
    let config = Config { cpus: 2, ..device.config() };
    for is_mapped in [false, true] {
        let all_have_posted = Barrier::new(4);
        let outcomes = on_hosts(&[0, 0, 1, 1], &config, TIMEOUT, |communicator| {
            let reduce = || Call::new(OpKind::AllReduce, vec![vec![1; COUNT]], vec![vec![0; COUNT]]);
            for _ in 0..2 {
                device.run(reduce(), communicator, Mode::Blocking);
            }
            let mut call = reduce();
            let (op, outputs) = if is_mapped { device.place(&mut call) } else { (call.op(), vec![]) };
            let work = communicator.post(op, Mode::Async(None)).unwrap().expect("it is not blocking");
            all_have_posted.wait();
            communicator.shutdown();
            let got = outputs.first().map_or_else(|| call.outputs.remove(0), |output| read(*output));
            let outcome = work.outcome().expect("it ended before the shutdown did");
            outcome.map(|_| got == vec![4; COUNT])
        });
        assert!(outcomes.iter().all(|outcome| *outcome == Ok(true)), "mapped {is_mapped}: {outcomes:?}");
    }
}
