//! Damaged schedules: the verifier must reject each of them.

use expect_test::{Expect, expect};
use tpurun_topology::verify::VerifyError;
use tpurun_topology::{
    Action, Algorithm, Block, Collective, Placement, Schedule, Source, Step, Tensor, verify,
};

use crate::{all_ranks, collectives, placed};

const TENSOR: Tensor = Tensor::of_bytes(1000);

fn check(schedules: &[Schedule], expect: Expect) {
    expect.assert_eq(&verify(schedules, TENSOR).expect_err("it is damaged").to_string());
}

fn ring(collective: Collective, ranks: u32) -> Vec<Schedule> {
    all_ranks(Algorithm::Ring, collective, &Placement::ring(ranks))
}

fn flat(collective: Collective, ranks: u32) -> Vec<Schedule> {
    all_ranks(Algorithm::Flat, collective, &Placement::ring(ranks))
}

/// Schedules of each algorithm and collective, small enough to damage each step.
fn samples() -> Vec<Vec<Schedule>> {
    let ring = Placement::ring;
    let cases = [
        (Algorithm::Flat, vec![ring(2), ring(4)]),
        (Algorithm::Ring, vec![ring(2), ring(5)]),
        (Algorithm::Bucket, vec![placed("2x3"), placed("3ox2"), placed("4o")]),
    ];
    let mut samples = Vec::new();
    for (algorithm, placements) in cases {
        for placement in &placements {
            let of = |collective| all_ranks(algorithm, collective, placement);
            samples.extend(collectives([1]).into_iter().map(of));
        }
    }
    samples
}

/// Damages a copy of the schedules at each step in turn, where `damage` finds something to damage.
fn every_damage_is_found(damage: impl Fn(&mut Vec<Step>, usize, u32) -> bool) {
    // A rank that copies from its own window gets what it starts with: the folding pass of rank 0 does.
    let own = |rank: usize, step: &Step| match step {
        Step::Fetch { from: Source::Rank(from), action: Action::Copy, .. } => *from as usize == rank,
        _ => false,
    };
    let mut damaged = 0;
    for sample in samples() {
        verify(&sample, TENSOR).expect("it is right before it is damaged");
        for rank in 0..sample.len() {
            for channel in 0..sample[rank].channels.len() {
                for step in 0..sample[rank].channels[channel].len() {
                    let mut schedules = sample.clone();
                    if own(rank, &sample[rank].channels[channel][step]) {
                        continue;
                    }
                    if !damage(&mut schedules[rank].channels[channel], step, sample[0].ranks) {
                        continue;
                    }
                    damaged += 1;
                    let accepted = verify(&schedules, TENSOR).is_ok();
                    assert!(!accepted, "rank {rank} channel {channel} step {step} of\n{}", sample[rank]);
                }
            }
        }
    }
    assert!(damaged > 100, "only {damaged} damaged");
}

#[test]
fn a_dropped_step_is_found() {
    every_damage_is_found(|steps, at, _| {
        steps.remove(at);
        true
    });
}

#[test]
fn a_repeated_step_is_found() {
    every_damage_is_found(|steps, at, _| {
        // Copying from a window twice is the one thing that may be done again.
        let harmless = matches!(steps[at], Step::Fetch { action: Action::Copy, .. });
        steps.insert(at, steps[at].clone());
        !harmless
    });
}

#[test]
fn a_wrong_rank_is_found() {
    every_damage_is_found(|steps, at, ranks| match &mut steps[at] {
        Step::Send { to: other, .. }
        | Step::Receive { from: other, .. }
        | Step::Fetch { from: Source::Rank(other), .. } => {
            *other = (*other + 1) % ranks;
            true
        }
        _ => false,
    });
}

#[test]
fn a_wrong_block_is_found() {
    every_damage_is_found(|steps, at, ranks| match &mut steps[at] {
        Step::Send { block, .. }
        | Step::Receive { block, .. }
        | Step::Publish { block }
        | Step::Fetch { block, .. } => {
            block.chunk = (block.chunk + 1) % ranks.max(2);
            true
        }
        Step::Meet { fold } => {
            fold.push(Block { chunk: 0, part: 0 });
            true
        }
    });
}

#[test]
fn a_wrong_action_is_found() {
    every_damage_is_found(|steps, at, _| match &mut steps[at] {
        Step::Receive { action, .. } | Step::Fetch { action, .. } => {
            *action = if *action == Action::Copy { Action::Reduce } else { Action::Copy };
            true
        }
        _ => false,
    });
}

#[test]
fn a_block_sent_before_it_has_come_is_found() {
    every_damage_is_found(|steps, at, _| {
        let (Step::Receive { block: received, .. }, Some(Step::Send { block: sent, .. })) =
            (&steps[at], steps.get(at + 1))
        else {
            return false;
        };
        let matters = received == sent;
        steps.swap(at, at + 1);
        matters
    });
}

#[test]
fn a_receive_that_goes_before_the_sends_closes_a_circle() {
    let mut schedules = ring(Collective::AllGather, 3);
    schedules.iter_mut().for_each(|schedule| schedule.channels[0].swap(0, 1));
    let error = verify(&schedules, TENSOR).unwrap_err();
    let VerifyError::Deadlock { circle, waits } = &error else { panic!("{error}") };
    assert_eq!((&circle[..], waits.len()), (&[0, 2, 1][..], 3));
    expect![[r#"
        deadlock: ranks 0 -> 2 -> 1 -> 0 in a circle: rank 0 channel 0 step 0 waits for rank 2 to send,
        rank 1 channel 0 step 0 waits for rank 0 to send,
        and 1 more"#]]
    .assert_eq(&error.to_string().replace(", ", ",\n"));
}

#[test]
fn a_dropped_send_leaves_the_next_rank_waiting() {
    let mut schedules = ring(Collective::AllReduce, 2);
    schedules[0].channels[0].pop();
    schedules[0].channels[0].pop();
    check(&schedules, expect!["deadlock: rank 1 channel 0 step 3 waits for rank 0 to send"]);
}

#[test]
fn two_sends_in_a_row_find_no_room() {
    let mut schedules = ring(Collective::Broadcast { root: 0 }, 2);
    schedules[1].channels[0].remove(0);
    schedules[1].channels[0].remove(0);
    check(&schedules, expect!["deadlock: rank 0 channel 0 step 1 waits for rank 1 to receive"]);
}

#[test]
fn a_message_too_many_is_never_received() {
    let mut schedules = ring(Collective::AllGather, 2);
    let send = schedules[0].channels[0][0].clone();
    schedules[0].channels[0].push(send);
    check(&schedules, expect!["block 0.0 from rank 0 to rank 1 on channel 0 is never received"]);
}

#[test]
fn a_contribution_cannot_be_reduced_twice() {
    let mut schedules = ring(Collective::ReduceScatter, 2);
    for schedule in &mut schedules {
        let steps = schedule.channels[0].clone();
        schedule.channels[0].extend(steps);
    }
    check(
        &schedules,
        expect!["rank 1 channel 0 step 3 reduces the contribution of rank 0 to block 1.0 a second time"],
    );
}

#[test]
fn a_rank_that_copies_instead_of_reducing_ends_with_too_little() {
    let mut schedules = ring(Collective::ReduceScatter, 2);
    let Step::Receive { action, .. } = &mut schedules[0].channels[0][1] else { panic!("a receive") };
    *action = Action::Copy;
    check(&schedules, expect!["rank 0 ends with block 0.0 of ranks [1], expected [0, 1]"]);
}

#[test]
fn ranks_that_fold_in_different_orders_may_differ_in_their_last_bits() {
    // Both swap their inputs and add: a + b here is b + a there.
    let mut schedules = flat(Collective::AllReduce, 2);
    for (rank, schedule) in (0..).zip(&mut schedules) {
        let (other, block) = (1 - rank, Block { chunk: 0, part: 0 });
        let receive = Step::Receive { from: other, block, action: Action::Reduce };
        schedule.channels[0] = vec![Step::Send { to: other, block }, receive];
    }
    check(&schedules, expect!["rank 1 ends with block 0.0 folded in another order than rank 0"]);
}

#[test]
fn two_channels_may_not_share_a_block() {
    let mut schedules = ring(Collective::AllReduce, 3);
    let send = Step::Send { to: 1, block: Block { chunk: 0, part: 1 } };
    schedules[0].channels[0].push(send);
    check(&schedules, expect!["rank 0 touches block 0.1 on channels 0 and 1, expected one of them"]);
}

#[test]
fn a_window_is_read_after_the_meeting_only() {
    let mut schedules = flat(Collective::Broadcast { root: 0 }, 2);
    schedules[1].channels[0].swap(0, 1);
    check(
        &schedules,
        expect![
            "rank 1 channel 0 step 0 reads block 0.0 of the window of rank 0, which no meeting has shown"
        ],
    );
}

#[test]
fn what_is_folded_must_be_published_by_all() {
    let mut schedules = flat(Collective::AllReduce, 3);
    schedules[1].channels[0].remove(0);
    check(
        &schedules,
        expect![
            "rank 2 channel 0 step 1 reads block 0.0 of the window of rank 1, which no meeting has shown"
        ],
    );
}

#[test]
fn what_is_fetched_must_be_folded() {
    let mut schedules = flat(Collective::AllReduce, 3);
    for schedule in &mut schedules {
        schedule.channels[0][1] = Step::Meet { fold: vec![] };
    }
    check(
        &schedules,
        expect!["rank 2 channel 0 step 2 reads the fold of block 0.0, which no meeting has made"],
    );
}

#[test]
fn a_rank_that_stays_away_from_the_meeting_is_named() {
    let mut schedules = flat(Collective::AllReduce, 6);
    schedules[4].channels[0].clear();
    let error = verify(&schedules, TENSOR).unwrap_err();
    expect![[r#"
        deadlock: rank 0 channel 0 step 1 waits for rank 4 to arrive,
        rank 1 channel 0 step 1 waits for rank 4 to arrive,
        and 3 more"#]]
    .assert_eq(&error.to_string().replace(", ", ",\n"));
}

#[test]
fn ranks_must_meet_for_the_same() {
    let mut schedules = flat(Collective::AllReduce, 3);
    schedules[1].channels[0][1] = Step::Meet { fold: vec![] };
    check(
        &schedules,
        expect!["rank 1 channel 0 step 1 meets to fold other blocks than the first rank to arrive"],
    );
}

#[test]
fn a_rank_cannot_publish_what_is_not_its_own() {
    let mut schedules = flat(Collective::AllGather, 2);
    schedules[1].channels[0][0] = Step::Publish { block: Block { chunk: 0, part: 0 } };
    check(&schedules, expect!["rank 1 channel 0 step 0 needs block 0.0, which the rank does not have"]);
}

#[test]
fn steps_name_ranks_and_blocks_that_exist() {
    let mut schedules = ring(Collective::AllReduce, 3);
    schedules[2].channels[1][0] = Step::Send { to: 3, block: Block { chunk: 0, part: 1 } };
    check(&schedules, expect!["rank 2 channel 1 step 0 names rank 3, expected another rank below 3"]);
    schedules[2].channels[1][0] = Step::Send { to: 0, block: Block { chunk: 3, part: 1 } };
    check(
        &schedules,
        expect!["rank 2 channel 1 step 0 names block 3.1, expected one of 3 chunks in 2 parts"],
    );
}

#[test]
fn the_schedules_are_those_of_one_collective() {
    let schedules = ring(Collective::AllReduce, 3);
    check(&schedules[..2], expect!["there are 2 schedules, expected one for each of 3 ranks"]);
    check(&[], expect!["there are 0 schedules, expected one for each of 1 ranks"]);
    let mut other = schedules.clone();
    other[2] = ring(Collective::AllGather, 3)[2].clone();
    check(&other, expect!["schedule 2 differs from schedule 0 in its collective"]);
}

#[test]
fn a_formula_that_is_off_is_found() {
    let proof = verify(&ring(Collective::AllReduce, 3), TENSOR).unwrap();
    let other = verify(&ring(Collective::AllGather, 3), TENSOR).unwrap();
    let error = proof.expect_traffic(&other.traffic).unwrap_err();
    expect!["rank 0 sends 666 bytes to rank 1, expected 333"].assert_eq(&error.to_string());
}
