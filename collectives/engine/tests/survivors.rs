//! Those that are left of a communicator go on without the lost.

mod ranks;

use std::sync::Barrier;
use std::time::{Duration, Instant};

use ranks::{Call, config, who, with_ranks};
use tpurun_engine::{Communicator, Failure, FailureKind, OpKind};

const TIMEOUT: Duration = Duration::from_secs(60);

fn sum(communicator: &Communicator) -> i64 {
    Call::new(OpKind::AllReduce, vec![vec![1]], vec![vec![0]]).run(communicator).unwrap()[0][0]
}

fn shrink(communicator: &Communicator, lost: &[u32], timeout: Duration) -> Result<Communicator, Failure> {
    communicator.shrink(lost, timeout, &config(), None, None, 1)
}

#[test]
fn survivors_get_a_communicator_of_the_next_epoch() {
    with_ranks(5, &config(), TIMEOUT, |communicator| {
        let me = communicator.members().rank;
        assert_eq!(sum(communicator), 5);
        if me == 0 || me == 3 {
            return;
        }
        // Not all name all of them.
        let lost: &[u32] = if me == 1 { &[0, 3] } else { &[3] };
        let next = shrink(communicator, lost, TIMEOUT).unwrap();
        let members = next.members();
        assert_eq!((members.name.as_str(), members.epoch), ("test~1", 1));
        assert_eq!(members.world_ranks, [1, 2, 4]);
        assert_eq!(members.world_ranks[members.rank as usize], me);
        assert_eq!(sum(&next), 3);
        // The old one has failed for good, the new one shrinks, too, and all keep the numbers they had.
        assert!(communicator.failure().is_some());
        if me == 4 {
            return;
        }
        let last = shrink(&next, &[4], TIMEOUT).unwrap();
        let members = last.members();
        assert_eq!((members.name.as_str(), members.epoch), ("test~1~1", 2));
        assert_eq!(members.world_ranks, [1, 2]);
        assert_eq!(sum(&last), 2);
    });
}

/// Ranks that destroyed their end can not come, so nobody waits for them; the rest may all come.
#[test]
fn who_has_left_is_not_waited_for() {
    with_ranks(3, &config(), TIMEOUT, |communicator| {
        if communicator.members().rank == 1 {
            communicator.shutdown();
            return;
        }
        let next = shrink(communicator, &[], TIMEOUT).unwrap();
        assert_eq!(next.members().world_ranks, [0, 2]);
        assert_eq!(sum(&next), 2);
    });
}

#[test]
fn who_does_not_come_is_named_and_may_come_later() {
    let late = Barrier::new(3);
    with_ranks(3, &config(), TIMEOUT, |communicator| {
        if communicator.members().rank != 2 {
            let failure = shrink(communicator, &[], Duration::from_millis(100)).unwrap_err();
            assert_eq!(
                (failure.kind(), failure.ranks().last()),
                (FailureKind::Timeout, Some(&2)),
                "{failure}"
            );
            assert!(failure.text().starts_with("Timed out after 100ms shrinking test: "), "{failure}");
            assert!(failure.text().contains("missing rank"), "{failure}");
        }
        late.wait();
        let next = shrink(communicator, &[], TIMEOUT).unwrap();
        assert_eq!(next.members().world_ranks, [0, 1, 2]);
        assert_eq!(sum(&next), 3);
    });
}

/// A rank that was given up, and is alive all the same, is told so and disturbs nobody.
#[test]
fn who_was_given_up_is_told() {
    let decided = Barrier::new(3);
    with_ranks(3, &config(), TIMEOUT, |communicator| {
        if communicator.members().rank == 1 {
            decided.wait();
            let failure = shrink(communicator, &[], TIMEOUT).unwrap_err();
            let text =
                format!("rank 1 ({}) was given up by the other ranks of test, which go on without it", who());
            assert_eq!(failure.text(), text);
            assert_eq!((failure.kind(), failure.ranks()), (FailureKind::RankLost, &[1_u32][..]));
            return;
        }
        let next = shrink(communicator, &[1], TIMEOUT).unwrap();
        decided.wait();
        assert_eq!(sum(&next), 2);
    });
}

#[test]
fn lost_ranks_are_checked() {
    with_ranks(2, &config(), TIMEOUT, |communicator| {
        let me = communicator.members().rank;
        let refused = |lost| {
            let failure = shrink(communicator, &[lost], TIMEOUT).unwrap_err();
            assert_eq!(failure.kind(), FailureKind::InvalidUsage);
            failure.to_string()
        };
        assert_eq!(refused(7), "shrink: expected lost ranks of test, given 7");
        assert_eq!(refused(me), format!("shrink: expected other ranks as lost, given this rank, {me}"));
        assert_eq!(sum(communicator), 2);
    });
}

#[test]
fn sixty_four_ranks_agree_quickly() {
    let took = with_ranks(64, &config(), TIMEOUT, |communicator| {
        sum(communicator);
        if communicator.members().rank % 9 == 5 {
            return Duration::ZERO;
        }
        let lost: Vec<u32> = (0..64).filter(|rank| rank % 9 == 5).collect();
        let began = Instant::now();
        let next = shrink(communicator, &lost, TIMEOUT).unwrap();
        assert_eq!(next.members().size(), 57);
        let took = began.elapsed();
        assert_eq!(sum(&next), 57);
        took
    });
    eprintln!("57 of 64 ranks went on after {:?}", took.iter().max().unwrap());
}
