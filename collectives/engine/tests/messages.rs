//! Send and recv, with threads as ranks.

mod ranks;

use std::sync::Arc;
use std::time::Duration;

use ranks::collectives::LARGE;
use ranks::{Call, Handover, config, who, with_ranks};
use tpurun_engine::{Communicator, FailureKind, Membership, Mode, OpKind};

const TIMEOUT: Duration = Duration::from_secs(60);

fn send(to: u32, tag: i32, data: Vec<i64>) -> Call {
    Call { root: Some(to), tag, ..Call::new(OpKind::Send, vec![data], vec![]) }
}

fn recv(from: Option<u32>, tag: i32, count: usize) -> Call {
    Call { root: from, tag, ..Call::new(OpKind::Recv, vec![], vec![vec![0; count]]) }
}

fn data(seed: i64, count: usize) -> Vec<i64> {
    (0..count as i64).map(|index| seed * 1000 + index).collect()
}

#[test]
fn messages_of_every_size_pass_around_a_ring() {
    for ranks in [1, 2, 3, 8] {
        with_ranks(ranks, &config(), TIMEOUT, |communicator| {
            let rank = communicator.members().rank;
            let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            for count in [0, 1, 1000, 100_000] {
                // A send larger than the ring needs its receiver, so one of the two must be asynchronous.
                let mut out = send(next, 0, data(rank.into(), count));
                let work = out.post(communicator).unwrap();
                let got = recv(Some(before), 0, count).run(communicator).unwrap();
                assert_eq!(got, [data(before.into(), count)]);
                communicator.wait(&work, None, 1).unwrap().unwrap();
            }
        });
    }
}

#[test]
fn a_message_of_more_than_caches_hold_is_whole() {
    with_ranks(2, &config(), TIMEOUT, |communicator| match communicator.members().rank {
        0 => assert!(send(1, 0, data(7, LARGE)).run(communicator).is_ok()),
        _ => assert!(recv(Some(0), 0, LARGE).run(communicator).unwrap() == [data(7, LARGE)]),
    });
}

#[test]
fn tags_may_come_in_another_order_than_they_were_sent() {
    with_ranks(2, &config(), TIMEOUT, |communicator| {
        if communicator.members().rank == 0 {
            for tag in 0..5 {
                send(1, tag, data(tag.into(), 50)).run(communicator).unwrap();
            }
        } else {
            for tag in [3, 0, 4, 2, 1] {
                assert_eq!(recv(Some(0), tag, 50).run(communicator).unwrap(), [data(tag.into(), 50)]);
            }
        }
    });
}

#[test]
fn messages_with_one_tag_stay_in_order() {
    with_ranks(2, &config(), TIMEOUT, |communicator| {
        let mut calls: Vec<Call> = (0..200)
            .map(|n| {
                if communicator.members().rank == 0 {
                    send(1, 7, data(n, 300))
                } else {
                    recv(Some(0), 7, 300)
                }
            })
            .collect();
        let works: Vec<_> = calls.iter_mut().map(|call| call.post(communicator).unwrap()).collect();
        for work in works {
            communicator.wait(&work, None, 1).unwrap().unwrap();
        }
        if communicator.members().rank == 1 {
            for (n, call) in calls.iter().enumerate() {
                assert_eq!(call.outputs, [data(n as i64, 300)]);
            }
        }
    });
}

#[test]
fn receiving_from_anybody_says_from_whom() {
    with_ranks(5, &config(), TIMEOUT, |communicator| {
        let rank = communicator.members().rank;
        if rank > 0 {
            send(0, 0, data(rank.into(), 10)).run(communicator).unwrap();
            return;
        }
        let mut heard: Vec<u32> = (1..5)
            .map(|_| {
                let mut call = recv(None, 0, 10);
                let work = call.post(communicator).unwrap();
                let source = communicator.wait(&work, None, 1).unwrap().unwrap().unwrap();
                assert_eq!(call.outputs, [data(source.into(), 10)]);
                source
            })
            .collect();
        heard.sort_unstable();
        assert_eq!(heard, [1, 2, 3, 4]);
    });
}

/// Nobody waits for the works at first: the progress threads must move the bytes.
#[test]
fn messages_pass_while_nobody_waits() {
    with_ranks(2, &config(), TIMEOUT, |communicator| {
        let peer = 1 - communicator.members().rank;
        let mut incoming = recv(Some(peer), 0, 200_000);
        let mut outgoing = send(peer, 0, data(peer.into(), 200_000));
        let works = [incoming.post(communicator).unwrap(), outgoing.post(communicator).unwrap()];
        while !works.iter().all(|work| work.is_done()) {
            std::thread::yield_now();
        }
        assert_eq!(incoming.outputs, [data(communicator.members().rank.into(), 200_000)]);
    });
}

#[test]
fn a_message_of_another_size_is_a_mismatch_on_both_sides() {
    let failures = with_ranks(2, &config(), TIMEOUT, |communicator: &Communicator| {
        if communicator.members().rank == 0 {
            send(1, 5, data(1, 4)).run(communicator).unwrap();
            let barrier = Call::new(OpKind::Barrier, vec![], vec![]);
            barrier.run(communicator).unwrap_err()
        } else {
            recv(Some(0), 5, 6).run(communicator).unwrap_err()
        }
    });
    assert_eq!(failures[0], failures[1]);
    assert_eq!(failures[0].kind(), FailureKind::Mismatch);
    assert_eq!(
        failures[0].text(),
        "message mismatch in test, tag 5: the ranks differ in element count\n  \
         rank 0 (WHO) posted send(i64[4], to rank 1) at test.py:1\n  \
         rank 1 (WHO) posted recv(i64[6], from rank 0) at test.py:1"
            .replace("WHO", &who())
    );
}

#[test]
fn a_receive_without_a_send_times_out() {
    let failures = with_ranks(2, &config(), TIMEOUT, |communicator| {
        communicator.set_timeout(Duration::from_millis(200));
        if communicator.members().rank == 0 {
            recv(Some(1), 9, 1).run(communicator).unwrap_err()
        } else {
            while communicator.failure().is_none() {
                std::thread::yield_now();
            }
            communicator.failure().unwrap()
        }
    });
    assert_eq!(failures[0], failures[1]);
    assert_eq!(failures[0].text(), "Timed out after 200ms in recv(i64[1], from rank 1) at test.py:1 of test");
    assert_eq!(failures[0].ranks(), [1]);
}

/// Callbacks are called without a lock: they may post messages and wait for them. Either the thread that waits for a
/// message calls its callback, or the progress thread does, or the one that posts it.
#[test]
fn a_callback_may_post_a_message() {
    let handover = Handover::default();
    let create = |rank: u32| {
        let members = Membership { name: "test".to_owned(), rank, world_ranks: vec![0, 1], epoch: 0 };
        Arc::new(Communicator::create(members, TIMEOUT, config(), &handover, None, 1).unwrap())
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let communicator = create(0);
            for tag in 0..3 {
                send(1, tag, data(tag.into(), 10)).run(&communicator).unwrap();
                let answer = recv(Some(1), tag + 100, 10).run(&communicator).unwrap();
                assert_eq!(answer, [data(i64::from(tag) + 100, 10)]);
            }
        });
        scope.spawn(|| {
            let communicator = create(1);
            let answering = |tag: i32| {
                let communicator = communicator.clone();
                Mode::Async(Some(Box::new(move |outcome| {
                    assert_eq!(outcome, &Ok(Some(0)));
                    // Both at once, so that the callback waits for a thread that has to move bytes.
                    let mut echo = recv(Some(1), tag, 10);
                    let echoed = echo.post(&communicator).unwrap();
                    send(1, tag, data(7, 10)).run(&communicator).unwrap();
                    communicator.wait(&echoed, None, 1).unwrap().unwrap();
                    assert_eq!(echo.outputs, [data(7, 10)]);
                    send(0, tag + 100, data(i64::from(tag) + 100, 10)).run(&communicator).unwrap();
                })))
            };
            let mut first = recv(Some(0), 0, 10);
            let work = first.post_as(&communicator, answering(0)).unwrap().unwrap();
            communicator.wait(&work, None, 1).unwrap().unwrap();
            let mut second = recv(Some(0), 1, 10);
            let work = second.post_as(&communicator, answering(1)).unwrap().unwrap();
            while !work.is_done() {
                std::thread::yield_now();
            }
            // It is there by then, or nearly.
            let mut third = recv(Some(0), 2, 10);
            let work = third.post_as(&communicator, answering(2)).unwrap().unwrap();
            communicator.wait(&work, None, 1).unwrap().unwrap();
            assert_eq!([first, second, third].map(|call| call.outputs), [0, 1, 2].map(|tag| [data(tag, 10)]));
        });
    });
}
