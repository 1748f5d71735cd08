//! Communicators of ranks on several hosts, which are pretended: each has a segment and a network of its own.

mod ranks;

use std::cell::Cell;
use std::sync::Barrier;
use std::time::Duration;

use ranks::collectives::{chunk, every_collective, me, summed};
use ranks::hosts::{Memory, on_hosts, on_hosts_over, some_on_hosts};
use ranks::{Call, config};
use tpurun_engine::bootstrap::{Store, StoreBootstrap};
use tpurun_engine::dtype::{Dtype, ReduceOp};
use tpurun_engine::network::Network;
use tpurun_engine::{Communicator, Config, Failure, FailureKind, Membership, OpKind, Results};
use tpurun_memory::sync::interrupt;
use tpurun_protocol::network::Bulk;
use tpurun_topology::Algorithm;

const TIMEOUT: Duration = Duration::from_secs(60);

const PLACEMENTS: [&[usize]; 5] =
    [&[0, 1], &[0, 0, 1, 1], &[0, 1, 0, 1, 1], &[0, 1, 2], &[0, 0, 1, 1, 2, 2, 3, 3]];

#[test]
fn every_collective_of_all_sizes() {
    for hosts in PLACEMENTS {
        on_hosts(hosts, &config(), TIMEOUT, |communicator| {
            // The largest ones go through the windows in several rounds.
            for count in [1, 7, 1000, 600_000] {
                every_collective(communicator, count, |call| call.run(communicator).unwrap());
            }
        });
    }
}

/// Large rounds go over all connections that every host takes, small ones over the first.
#[test]
fn every_collective_over_several_connections() {
    let counts: [(&[usize], &[usize]); 2] = [(&[0, 0, 1, 1], &[3, 1, 3, 1]), (&[0, 1, 1, 2], &[2, 4, 1, 3])];
    // Where one host takes no TCP, none does.
    for bulk in [[Bulk::Quic, Bulk::Quic], [Bulk::Tcp, Bulk::Tcp], [Bulk::Tcp, Bulk::Quic]] {
        for (hosts, counts) in counts {
            let connections: Vec<_> = counts.iter().copied().zip(bulk.into_iter().cycle()).collect();
            on_hosts_over(&connections, hosts, &config(), TIMEOUT, |communicator| {
                for count in [7, 40_000, 600_000] {
                    every_collective(communicator, count, |call| call.run(communicator).unwrap());
                }
            });
        }
    }
}

/// If there are three hosts or more, each folds a part: the part that is left at the end of a window, of
/// another and of a tensor may be nothing for some.
#[test]
fn large_folds_are_shared_among_hosts() {
    let window = (4 << 20) / size_of::<i64>();
    for hosts in [&[0, 1, 2][..], &[0, 1, 1, 2, 0, 3]] {
        on_hosts(hosts, &config(), TIMEOUT, |communicator| {
            let (rank, ranks) = me(communicator);
            for count in [16 << 10, 100_001, window, window + 1, 2 * window - 17] {
                let sum = Call::new(OpKind::AllReduce, vec![chunk(rank, 0, count)], vec![vec![0; count]]);
                assert!(sum.run(communicator).unwrap() == [summed(ranks, 0, count)], "{count} on {hosts:?}");
                let is_root = rank == 1;
                let outputs = if is_root { vec![vec![0; count]] } else { vec![] };
                let mut sum = Call::new(OpKind::Reduce, vec![chunk(rank, 0, count)], outputs);
                sum.root = Some(1);
                let expected = if is_root { vec![summed(ranks, 0, count)] } else { vec![] };
                assert!(sum.run(communicator).unwrap() == expected, "{count} on {hosts:?}");
            }
        });
    }
}

/// Folds stage ahead, and take what is whole later than other operations: neither may touch what those before or
/// behind still need.
#[test]
fn large_operations_follow_each_other() {
    let window = (4 << 20) / size_of::<i64>();
    for hosts in [&[0, 0, 1, 1][..], &[0, 1, 1, 2]] {
        on_hosts(hosts, &config(), TIMEOUT, |communicator| {
            let (rank, ranks) = me(communicator);
            let one = window + 9;
            for count in [4 * window + 5, 3 * window, window + 1, 2 * window] {
                let sum = Call::new(OpKind::AllReduce, vec![chunk(rank, 0, count)], vec![vec![0; count]]);
                assert!(sum.run(communicator).unwrap() == [summed(ranks, 0, count)], "{count} on {hosts:?}");
                let outputs = vec![vec![0; one]; ranks as usize];
                let all = Call::new(OpKind::AllGather, vec![chunk(rank, count, one)], outputs);
                let expected: Vec<_> = (0..ranks).map(|rank| chunk(rank, count, one)).collect();
                assert!(all.run(communicator).unwrap() == expected, "{count} on {hosts:?}");
            }
        });
    }
}

/// Floats are not associative: each order of a sum has bits of its own. Small tensors are summed in the order of ranks,
/// large ones over the ranks of each host first, on every host alike and whoever comes last.
#[test]
fn floats_are_summed_in_one_order() {
    let value = |rank: u32, index: usize| {
        let mixed = (index as u32).wrapping_mul(0x9e37_79b9).wrapping_add(rank.wrapping_mul(0x85eb_ca6b));
        (mixed >> 8) as f32 / 3.0 * [1.0, -1000.0, 1e-3][rank as usize % 3]
    };
    let words = |values: &dyn Fn(usize) -> f32, count: usize| -> Vec<i64> {
        let bits = |index| u64::from(values(index).to_bits());
        (0..count).map(|word| (bits(2 * word) | bits(2 * word + 1) << 32).cast_signed()).collect()
    };
    let hosts = [0, 1, 1, 2, 0, 2];
    let on_host = |host: usize| (0_u32..).zip(hosts).filter(move |(_, of)| *of == host).map(|(rank, _)| rank);
    let in_order = |ranks: &mut dyn Iterator<Item = f32>| ranks.reduce(|sum, next| sum + next).expect("some");
    let of_ranks = |index| in_order(&mut (0..6).map(|rank| value(rank, index)));
    let of_host = |host, index| in_order(&mut on_host(host).map(|rank| value(rank, index)));
    let of_hosts = |index| in_order(&mut (0..3).map(|host| of_host(host, index)));
    assert!((0..99).any(|index| of_ranks(index) != of_hosts(index)), "the two orders can be told apart");
    // The last one is more than a window.
    let orders: [(usize, &dyn Fn(usize) -> f32); 4] =
        [(9, &of_ranks), (1000, &of_ranks), (3000, &of_hosts), (530_001, &of_hosts)];
    let expected = orders.map(|(count, sum)| words(sum, count));
    on_hosts(&hosts, &config(), TIMEOUT, |communicator| {
        let (rank, _) = me(communicator);
        for expected in &expected {
            let own = words(&|index| value(rank, index), expected.len());
            let sum = Call::new(OpKind::AllReduce, vec![own], vec![vec![0; expected.len()]]);
            let got = Call { dtype: Dtype::F32, ..sum }.run(communicator).unwrap();
            assert!(got == std::slice::from_ref(expected), "{} words", expected.len());
        }
    });
}

/// Partial results of small floats are wider than these on their way between hosts, so that a result is
/// rounded once.
#[test]
fn small_floats_are_rounded_once() {
    let value = |rank: u32, index: usize| ((index * 31 + rank as usize * 17) % 255) as f32 - 127.0;
    let bf16s = |values: &mut dyn Iterator<Item = f32>| -> Vec<i64> {
        let bits: Vec<u16> = values.map(|value| half::bf16::from_f32(value).to_bits()).collect();
        let word = |four: &[u16]| four.iter().rev().fold(0_u64, |word, bits| word << 16 | u64::from(*bits));
        bits.chunks_exact(4).map(|four| word(four).cast_signed()).collect()
    };
    // Folded in halves by all hosts, in halves by one each, and at once.
    for hosts in [&[0, 0, 0, 1, 1, 1][..], &[0, 1, 1, 2, 0, 2], &[0, 0, 1, 1]] {
        on_hosts(hosts, &config(), TIMEOUT, |communicator| {
            let (rank, ranks) = me(communicator);
            for (reduce_op, lift, divisor) in [
                (ReduceOp::Sum, 1.0, 1.0),
                (ReduceOp::Avg, 1.0, ranks as f32),
                (ReduceOp::PremulSum, 0.5, 1.0),
            ] {
                for words in [4096, 300_000, (4 << 20) / 8 + 9] {
                    let count = 4 * words;
                    let own =
                        |chunk: usize| bf16s(&mut (0..count).map(|index| value(rank, chunk * count + index)));
                    // These sums are exact in f32, in any order.
                    let sum = |index: usize| (0..ranks).map(|rank| value(rank, index) * lift).sum::<f32>();
                    let total = |chunk: usize| {
                        bf16s(&mut (0..count).map(|index| sum(chunk * count + index) / divisor))
                    };
                    let run = |call: Call| {
                        let (dtype, scale) = (Dtype::Bf16, f64::from(lift));
                        Call { dtype, scale, reduce_op, ..call }.run(communicator).unwrap()
                    };
                    let got = run(Call::new(OpKind::AllReduce, vec![own(0)], vec![vec![0; words]]));
                    assert!(got == [total(0)], "all-reduce {reduce_op} of {count} on {hosts:?}");
                    if words > 300_000 {
                        continue;
                    }
                    let chunks = (0..ranks as usize).map(own).collect();
                    let got = run(Call::new(OpKind::ReduceScatter, chunks, vec![vec![0; words]]));
                    let expected = [total(rank as usize)];
                    assert!(got == expected, "reduce-scatter {reduce_op} of {count} on {hosts:?}");
                }
            }
        });
    }
}

/// Four times as wide between the halves of a fold; up to eleven values, each of which is one of the format.
#[test]
fn partial_results_of_8_bits() {
    const SUMS: [u8; 11] = [0, 0x38, 0x40, 0x44, 0x48, 0x4a, 0x4c, 0x4e, 0x50, 0x51, 0x52];
    let words = 70_000;
    let value = |rank: u32, index: usize| (index + rank as usize).is_multiple_of(3);
    let fp8s = |of: &dyn Fn(usize) -> usize| -> Vec<i64> {
        let word = |word: usize| i64::from_le_bytes(std::array::from_fn(|byte| SUMS[of(8 * word + byte)]));
        (0..words).map(word).collect()
    };
    // In halves by all hosts, and by one each.
    for hosts in [&[0, 0, 0, 0, 0, 1, 1, 1, 1, 1][..], &[0, 1, 2, 0, 1, 2]] {
        on_hosts(hosts, &config(), TIMEOUT, |communicator| {
            let (rank, ranks) = me(communicator);
            let own = |chunk: usize| fp8s(&|index| usize::from(value(rank, chunk + index)));
            let sum =
                |chunk: usize| fp8s(&|index| (0..ranks).filter(|rank| value(*rank, chunk + index)).count());
            let run = |call: Call| Call { dtype: Dtype::F8E4M3Fn, ..call }.run(communicator).unwrap();
            let got = run(Call::new(OpKind::AllReduce, vec![own(0)], vec![vec![0; words]]));
            assert!(got == [sum(0)], "{hosts:?}");
            let chunks = (0..ranks as usize).map(own).collect();
            let got = run(Call::new(OpKind::ReduceScatter, chunks, vec![vec![0; words]]));
            assert!(got == [sum(rank as usize)], "{hosts:?}");
        });
    }
}

#[test]
fn chunks_of_several_lengths_are_summed() {
    on_hosts(&[0, 0, 0, 1, 1, 1], &config(), TIMEOUT, |communicator| {
        let (rank, ranks) = me(communicator);
        for least in [0, 1000, 200_000] {
            let count = |to: usize| least + 1017 * to;
            let chunks = (0..ranks as usize).map(|to| chunk(rank, to, count(to))).collect();
            let own = rank as usize;
            let sum = Call::new(OpKind::ReduceScatter, chunks, vec![vec![0; count(own)]]);
            assert!(sum.run(communicator).unwrap() == [summed(ranks, own, count(own))], "{least}");
        }
    });
}

#[test]
fn schedules_of_sends_and_receives() {
    for algorithm in [Algorithm::Ring, Algorithm::Bucket] {
        let config = Config { algorithm: Some(algorithm), ..config() };
        on_hosts(&[0, 1, 0, 1], &config, TIMEOUT, |communicator| {
            for count in [1, 100_000] {
                every_collective(communicator, count, |call| call.run(communicator).unwrap());
            }
        });
    }
}

#[test]
fn results_that_are_compared() {
    let config = Config { results: Results::Verified, ..config() };
    on_hosts(&[0, 0, 1, 1], &config, TIMEOUT, |communicator| {
        every_collective(communicator, 1000, |call| call.run(communicator).unwrap());
    });
}

/// Blocking ones, and small ones that are begun and left to be settled together.
#[test]
fn bursts() {
    on_hosts(&[0, 0, 1, 1], &config(), TIMEOUT, |communicator| {
        let (rank, ranks) = me(communicator);
        let sum = |c: usize| Call::new(OpKind::AllReduce, vec![chunk(rank, c, 9)], vec![vec![0; 9]]);
        for round in 0..20 {
            // How many are queued at a time differs from rank to rank.
            let mut calls: Vec<Call> = (0..50).map(sum).collect();
            let mut works = vec![];
            for (c, call) in calls.iter_mut().enumerate() {
                works.push(call.post_lazily(communicator).unwrap());
                if c % (7 + rank as usize) == round % 7 {
                    communicator.wait(&works[c], None, 1).unwrap().unwrap();
                }
            }
            assert_eq!(sum(0).run(communicator).unwrap(), [summed(ranks, 0, 9)]);
            for (c, call) in calls.iter().enumerate() {
                assert_eq!(call.outputs, [summed(ranks, c, 9)]);
            }
        }
    });
}

#[test]
fn messages_of_all_sizes() {
    on_hosts(&[0, 1, 1, 0], &config(), TIMEOUT, |communicator| {
        let (rank, ranks) = me(communicator);
        for count in [1, 1000, 300_000] {
            let (next, last) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            let of = |peer| Some(peer);
            let mut receive =
                Call { root: of(last), ..Call::new(OpKind::Recv, vec![], vec![vec![0; count]]) };
            let work = receive.post(communicator).unwrap();
            let send =
                Call { root: of(next), ..Call::new(OpKind::Send, vec![chunk(rank, 5, count)], vec![]) };
            send.run(communicator).unwrap();
            communicator.wait(&work, None, 1).unwrap().unwrap();
            assert_eq!(receive.outputs, [chunk(last, 5, count)]);
        }
    });
}

/// A rank that leaves at once after sending has sent: a message on its way arrives.
#[test]
fn the_last_message_arrives() {
    on_hosts(&[0, 1], &config(), TIMEOUT, |communicator| {
        let (rank, _) = me(communicator);
        if rank == 0 {
            let send = Call { root: Some(1), ..Call::new(OpKind::Send, vec![chunk(0, 0, 9)], vec![]) };
            send.run(communicator).unwrap();
        } else {
            let receive = Call { root: Some(0), ..Call::new(OpKind::Recv, vec![], vec![vec![0; 9]]) };
            assert_eq!(receive.run(communicator).unwrap(), [chunk(0, 0, 9)]);
            // Nothing will come any more.
            let receive = Call { root: Some(0), ..Call::new(OpKind::Recv, vec![], vec![vec![0; 9]]) };
            let failure = receive.run(communicator).unwrap_err();
            assert_eq!((failure.kind(), failure.ranks()), (FailureKind::Deadlock, &[0][..]), "{failure}");
        }
    });
}

#[test]
fn who_leaves_is_not_waited_for() {
    let texts = on_hosts(&[0, 0, 1, 1], &config(), TIMEOUT, |communicator| {
        let (rank, _) = me(communicator);
        if rank == 3 {
            communicator.shutdown();
            return String::new();
        }
        let failure = Call::new(OpKind::Barrier, vec![], vec![]).run(communicator).unwrap_err();
        assert_eq!((failure.kind(), failure.ranks()), (FailureKind::Deadlock, &[3][..]), "{failure}");
        failure.to_string()
    });
    assert!(texts[..3].iter().all(|text| *text == texts[0]), "{texts:?}");
}

#[test]
fn who_does_not_come_is_named_on_all_hosts() {
    let timeout = Duration::from_secs(2);
    let texts = on_hosts(&[0, 0, 1, 1], &config(), timeout, |communicator| {
        let (rank, _) = me(communicator);
        if rank == 2 {
            while communicator.failure().is_none() {
                std::thread::yield_now();
            }
            return communicator.failure().unwrap().to_string();
        }
        let failure = Call::new(OpKind::Barrier, vec![], vec![]).run(communicator).unwrap_err();
        assert_eq!((failure.kind(), failure.ranks()), (FailureKind::Timeout, &[2][..]), "{failure}");
        failure.to_string()
    });
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
}

#[test]
fn who_is_not_there_when_all_come_together_is_named_on_all_hosts() {
    let store = Memory::default();
    let timeout = Duration::from_secs(2);
    let texts = std::thread::scope(|scope| {
        // Rank 3 says where it is, and is not heard of again.
        scope.spawn(|| store.set("tpurun/place/1/3", &store.get("tpurun/place/1/2").unwrap()));
        some_on_hosts(
            &[(1, Bulk::Tcp); 4],
            &store,
            &[0, 0, 1, 1],
            &[0, 1, 2],
            &config(),
            timeout,
            |created| {
                let failure = created.unwrap_err();
                assert_eq!((failure.kind(), failure.ranks()), (FailureKind::Timeout, &[3][..]), "{failure}");
                failure.to_string()
            },
        )
    });
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    assert!(texts[0].ends_with("creating test: 3 of 4 ranks came, missing rank 3"), "{}", texts[0]);
}

#[test]
fn a_mismatch_is_told_alike_on_all_hosts() {
    let texts = on_hosts(&[0, 0, 1, 1], &config(), TIMEOUT, |communicator| {
        let (rank, _) = me(communicator);
        let reduce_op = if rank == 2 { ReduceOp::Max } else { ReduceOp::Sum };
        let call =
            Call { reduce_op, ..Call::new(OpKind::AllReduce, vec![chunk(rank, 0, 9)], vec![vec![0; 9]]) };
        let failure = call.run(communicator).unwrap_err();
        assert_eq!((failure.kind(), failure.ranks()), (FailureKind::Mismatch, &[2][..]));
        failure.to_string()
    });
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    assert!(texts[0].contains("(host n0, pid") && texts[0].contains("(host n1, pid"), "{}", texts[0]);
}

/// A store that ends the wait for a key, as Ctrl-C in the program does.
struct Interrupted {
    memory: Memory,
    key: &'static str,
}

impl Store for Interrupted {
    fn set(&self, key: &str, value: &str) -> Result<(), Failure> {
        self.memory.set(key, value)
    }

    fn get(&self, key: &str) -> Result<String, Failure> {
        if key == self.key {
            interrupt::stop();
            return Err(Failure::new(FailureKind::Transport, "no answer"));
        }
        self.memory.get(key)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64, Failure> {
        self.memory.add(key, delta)
    }
}

/// A rank that is interrupted before the ranks know of each other's hosts is named by all that have come, and by one
/// that comes later.
#[test]
fn who_is_interrupted_in_the_survey_is_named() {
    for (guilty, key) in [(0, "tpurun/place/1/3"), (1, "tpurun/survey/1/0"), (2, "tpurun/survey/1/0")] {
        let memory = Memory::default();
        let create = |rank| {
            let networks = Network::new();
            let store = Interrupted { memory: memory.clone(), key: if rank == guilty { key } else { "" } };
            let bootstrap =
                StoreBootstrap::new(store, rank, &networks).unwrap().on_host(&format!("n{}", rank % 2));
            let members =
                Membership { name: "test".to_owned(), rank, world_ranks: vec![4, 5, 6, 7], epoch: 0 };
            Communicator::create(members, TIMEOUT, config(), &bootstrap, None, 1).map(drop).unwrap_err()
        };
        let mut failures: Vec<Failure> = std::thread::scope(|scope| {
            let threads = [0, 1, 2].map(|rank| scope.spawn(move || create(rank)));
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let own = failures.remove(guilty as usize);
        assert!(own.text().ends_with("its program was interrupted"), "{own}");
        failures.push(create(3));
        for failure in failures {
            let expected = (FailureKind::Aborted, &[guilty + 4][..]);
            assert_eq!((failure.kind(), failure.ranks()), expected, "{guilty}: {failure}");
            assert!(failure.text().starts_with(&format!("rank {} (host ", guilty + 4)), "{failure}");
            assert!(failure.text().ends_with(own.text()), "{failure}");
        }
    }
}

/// A store whose answer about a segment, the first one, is under way until rank 0 has given up.
struct Held<'g> {
    memory: Memory,
    given_up: &'g Barrier,
    is_held: Cell<bool>,
}

impl Store for Held<'_> {
    fn set(&self, key: &str, value: &str) -> Result<(), Failure> {
        self.memory.set(key, value)
    }

    fn get(&self, key: &str) -> Result<String, Failure> {
        let value = self.memory.get(key);
        if key.starts_with("tpurun/segment/") && self.is_held.replace(false) {
            self.given_up.wait();
        }
        value
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64, Failure> {
        self.memory.add(key, delta)
    }
}

/// A rank that is told of a segment that is closed before it opens it learns why.
#[test]
fn who_comes_too_late_for_a_segment_learns_why_it_failed() {
    let (memory, given_up) = (Memory::default(), Barrier::new(2));
    let network = Network::new();
    let create = |rank, timeout, is_held: bool| {
        let store = Held { memory: memory.clone(), given_up: &given_up, is_held: is_held.into() };
        let bootstrap = StoreBootstrap::new(store, rank, &network).unwrap();
        let members = Membership { name: "test".to_owned(), rank, world_ranks: vec![4, 7], epoch: 0 };
        Communicator::create(members, timeout, config(), &bootstrap, None, 1).map(drop).unwrap_err()
    };
    let (first, late) = std::thread::scope(|scope| {
        let late = scope.spawn(|| create(1, TIMEOUT, true));
        let first = create(0, Duration::from_millis(50), false);
        given_up.wait();
        (first, late.join().unwrap())
    });
    assert_eq!((first.kind(), first.ranks()), (FailureKind::Timeout, &[7_u32][..]), "{first}");
    assert_eq!(late, first);
}
