use std::collections::HashMap;

use proptest::prelude::*;
use tpurun_protocol::board::{OpView, Wait};

use super::*;

const ME: u32 = 1;

/// Communicators by number, with their ranks; messages where there are any.
#[derive(Default)]
struct Known {
    members: HashMap<u64, Vec<u32>>,
    between: HashMap<(u64, u32, u32), MessagesBetween>,
}

impl Groups for Known {
    fn members(&self, comm_id: u64) -> Option<&[u32]> {
        self.members.get(&comm_id).map(Vec::as_slice)
    }

    fn between(&self, comm_id: u64, from: u32, to: u32) -> Option<MessagesBetween> {
        Some(self.between.get(&(comm_id, from, to)).copied().unwrap_or_default())
    }
}

struct Scene {
    known: Known,
    views: Vec<RankView>,
    ended: Vec<bool>,
}

impl Scene {
    /// Groups are numbered from 0.
    fn new(ranks: usize, groups: &[&[u32]]) -> Scene {
        let members = (0_u64..).zip(groups).map(|(id, ranks)| (id, ranks.to_vec())).collect();
        let mut views = vec![RankView { pid: 7, ..RankView::default() }; ranks];
        for (comm_id, members) in (0_u64..).zip(groups) {
            for (comm_rank, rank) in (0_u32..).zip(*members) {
                views[*rank as usize].lanes.push(LaneView {
                    comm_id,
                    name: format!("g{comm_id}"),
                    size: members.len() as u32,
                    comm_rank,
                    closed: false,
                    posted: 0,
                    completed: 0,
                    attended: 0,
                    blocked_since_ns: None,
                    op: None,
                });
            }
        }
        Scene { known: Known { members, ..Known::default() }, views, ended: vec![false; ranks] }
    }

    fn lane(&mut self, rank: u32, comm_id: u64) -> &mut LaneView {
        let lanes = &mut self.views[rank as usize].lanes;
        lanes.iter_mut().find(|lane| lane.comm_id == comm_id).unwrap()
    }

    /// `rank` blocks in its next collective of a group.
    fn collective(&mut self, rank: u32, comm_id: u64) {
        let lane = self.lane(rank, comm_id);
        let seq = lane.posted;
        lane.posted += 1;
        lane.attended = lane.posted;
        let site = format!("t.py:{comm_id}");
        let root = -1;
        lane.op = Some(OpView { seq, reduce_op: 0, dtype: 11, count: 8, root, site, ..OpView::default() });
        self.wait(rank, comm_id, WaitKind::Collective { seq });
    }

    fn wait(&mut self, rank: u32, comm_id: u64, kind: WaitKind) {
        let waits = &mut self.views[rank as usize].waits;
        let token = 2 + waits.len() as u64;
        waits.push(WaitView { token, since_ns: token, wait: Wait { comm_id, kind, python_threads: 1 } });
    }

    fn world(&self) -> World<'_> {
        World { views: &self.views, ended: &self.ended, groups: &self.known }
    }

    /// The deadlock that is proven when no rank moves any more.
    fn circle(&self) -> Option<Deadlock> {
        let world = self.world();
        let first = world.stuck(None);
        let second = world.stuck(Some(&first));
        (first == second && !second.is_empty()).then(|| world.circle(&second)).flatten()
    }

    fn text(&self, deadlock: &Deadlock) -> String {
        describe(deadlock, &Names { host: &|_| "n0", views: &self.views, ended: &self.ended })
    }
}

#[test]
fn two_groups_in_opposite_order_are_a_circle() {
    let mut scene = Scene::new(4, &[&[0, 1, 2, 3], &[0, 1, 2, 3]]);
    scene.collective(0, 0);
    scene.collective(1, 0);
    scene.collective(3, 0);
    assert_eq!(scene.circle(), None, "rank 2 may still come");
    scene.collective(2, 1);
    let deadlock = scene.circle().unwrap();
    assert_eq!(deadlock.comm_ids(), [0, 1].into());
    assert_eq!(deadlock.guilty(), [2]);
    expect_test::expect![[r#"
        deadlock: ranks wait for each other in a circle, none of them can go on
          ranks 0-1,3 (host n0, pids 7, 7, 7) wait in all_reduce#0 (f32[8], SUM) of group g0 at t.py:0 for rank 2
          rank 2 (host n0, pid 7) waits in all_reduce#0 (f32[8], SUM) of group g1 at t.py:1 for ranks 0-1,3"#]]
    .assert_eq(&scene.text(&deadlock));
}

#[test]
fn a_circle_over_three_groups_leaves_out_who_only_hangs_on_it() {
    let mut scene = Scene::new(4, &[&[0, 1], &[1, 2], &[2, 0], &[0, 3]]);
    scene.collective(0, 0);
    scene.collective(1, 1);
    scene.collective(2, 2);
    scene.collective(3, 3);
    let deadlock = scene.circle().unwrap();
    assert_eq!(deadlock.comm_ids(), [0, 1, 2].into());
    assert!(deadlock.guilty().is_empty());
}

#[test]
fn a_circle_of_two_is_told_before_those_that_hang_on_it() {
    let mut scene = Scene::new(5, &[&[0, 1, 2, 3, 4], &[0, 1, 2, 3, 4]]);
    scene.wait(3, 0, WaitKind::Recv { from: Some(1) });
    for rank in [0, 1, 2, 4] {
        scene.collective(rank, 1);
    }
    let deadlock = scene.circle().unwrap();
    assert!(deadlock.guilty().is_empty(), "rank 3 is one of two, not one against four");
    expect_test::expect![[r#"
        deadlock: ranks wait for each other in a circle, none of them can go on
          rank 1 (host n0, pid 7) waits in all_reduce#0 (f32[8], SUM) of group g1 at t.py:1 for rank 3
          rank 3 (host n0, pid 7) waits in recv (from 1) of group g0 for rank 1
          ranks 0,2,4 (host n0, pids 7, 7, 7) wait in all_reduce#0 (f32[8], SUM) of group g1 at t.py:1 for rank 3"#]].assert_eq(&scene.text(&deadlock));
}

#[test]
fn whoever_may_still_post_is_no_proof() {
    let base = || {
        let mut scene = Scene::new(2, &[&[0, 1], &[0, 1]]);
        scene.collective(0, 0);
        scene.collective(1, 1);
        scene
    };
    assert!(base().circle().is_some());
    let mut another_thread = base();
    another_thread.views[1].waits[0].wait.python_threads = 2;
    assert_eq!(another_thread.circle(), None);
    let mut both_wait = base();
    both_wait.views[1].waits[0].wait.python_threads = 2;
    both_wait.wait(1, 1, WaitKind::Collective { seq: 0 });
    both_wait.views[1].waits[1].wait.python_threads = 2;
    assert!(both_wait.circle().is_some(), "the second thread waits, too");
    let mut no_python = base();
    no_python.views[1].waits[0].wait.python_threads = 0;
    assert_eq!(no_python.circle(), None);
    let mut unseen_lane = base();
    unseen_lane.views[1].lanes.retain(|lane| lane.comm_id != 0);
    assert_eq!(unseen_lane.circle(), None);
    let mut unknown_group = base();
    unknown_group.known.members.insert(0, vec![0, 1, 9]);
    assert_eq!(unknown_group.circle(), None);
}

#[test]
fn a_rank_that_moved_is_no_longer_stuck() {
    let mut scene = Scene::new(2, &[&[0, 1], &[0, 1]]);
    scene.collective(0, 0);
    scene.collective(1, 1);
    let before = scene.world().stuck(None);
    scene.views[1].waits[0].token += 1;
    assert!(scene.world().stuck(Some(&before)).is_empty());
}

#[test]
fn an_asynchronous_operation_that_can_end_may_run_a_callback() {
    let mut scene = Scene::new(3, &[&[0, 1], &[0, 1], &[0, 2]]);
    scene.collective(0, 0);
    scene.collective(1, 1);
    (scene.lane(0, 2).posted, scene.lane(0, 2).attended) = (1, 1);
    assert_eq!(scene.circle(), None, "rank 2 may join, and then rank 0 may post");
    scene.collective(2, 2);
    assert_eq!(scene.circle(), None, "all have come");
    (scene.lane(0, 2).posted, scene.lane(0, 2).attended) = (2, 2);
    scene.lane(0, 2).completed = 1;
    scene.views[2].waits.clear();
    scene.ended[2] = true;
    assert!(scene.circle().is_some(), "rank 2 never will");
}

#[test]
fn who_has_finished_is_waited_for_in_vain() {
    let mut scene = Scene::new(3, &[&[0, 1, 2]]);
    scene.collective(0, 0);
    scene.collective(1, 0);
    assert_eq!(scene.world().waits_for_finished(|_| false), None);
    scene.ended[2] = true;
    let deadlock = scene.world().waits_for_finished(|_| false).unwrap();
    assert_eq!((deadlock.guilty(), deadlock.comm_ids()), (vec![2], [0].into()));
    expect_test::expect![[r#"
        deadlock: rank 2 (host n0, pid 7) exited with code 0 while others wait for it
          ranks 0-1 (host n0, pids 7, 7) wait in all_reduce#0 (f32[8], SUM) of group g0 at t.py:0 for rank 2"#]]
    .assert_eq(&scene.text(&deadlock));
    assert_eq!(scene.world().waits_for_finished(|_| true), None, "it has failed already");
    scene.ended[2] = false;
    scene.lane(2, 0).closed = true;
    let deadlock = scene.world().waits_for_finished(|_| false).unwrap();
    assert!(scene.text(&deadlock).contains("rank 2 (host n0, pid 7) destroyed group g0 while others"));
    // It had done its part before it left.
    scene.lane(2, 0).posted = 1;
    assert_eq!(scene.world().waits_for_finished(|_| false), None);
}

#[test]
fn a_group_that_somebody_never_comes_to_create() {
    let mut scene = Scene::new(2, &[&[0, 1]]);
    scene.views[1].lanes.clear();
    scene.known.members.clear();
    scene.wait(0, 0, WaitKind::Creation);
    assert_eq!(scene.world().waits_for_finished(|_| false), None);
    scene.ended[1] = true;
    let deadlock = scene.world().waits_for_finished(|_| false).unwrap();
    assert!(scene.text(&deadlock).ends_with("waits in the creation of group g0 for rank 1"));
}

#[test]
fn a_group_that_is_made_again_under_its_name() {
    let mut scene = Scene::new(2, &[&[0, 1]]);
    scene.known.members.clear();
    scene.wait(0, 0, WaitKind::Creation);
    // Rank 1 has destroyed the first group, and computes before it comes to the second.
    scene.lane(1, 0).closed = true;
    assert_eq!(scene.world().waits_for_finished(|_| false), None);
    scene.ended[1] = true;
    assert!(scene.world().waits_for_finished(|_| false).is_some());
}

#[test]
fn an_end_that_nobody_would_notice_helps_nobody() {
    let mut scene = Scene::new(2, &[&[0, ME], &[0, ME]]);
    scene.wait(0, 0, WaitKind::Recv { from: Some(1) });
    scene.wait(1, 0, WaitKind::Recv { from: Some(0) });
    for rank in 0..2 {
        scene.lane(rank, 1).posted = 1;
    }
    assert!(scene.circle().is_some());
    scene.lane(0, 1).attended = 1;
    assert_eq!(scene.circle(), None, "what runs at its end could send");
}

#[test]
fn messages_that_nobody_sends_or_takes() {
    let two = || Scene::new(3, &[&[0, ME, 2]]);
    let mut both_receive = two();
    both_receive.wait(0, 0, WaitKind::Recv { from: Some(1) });
    both_receive.wait(1, 0, WaitKind::Recv { from: Some(0) });
    assert_eq!(both_receive.circle().unwrap().comm_ids(), [0].into());
    let mut on_its_way = two();
    on_its_way.views = both_receive.views.clone();
    on_its_way
        .known
        .between
        .insert((0, 1, 0), MessagesBetween { in_flight: true, ..MessagesBetween::default() });
    assert_eq!(on_its_way.circle(), None);
    let mut both_send = two();
    both_send.wait(0, 0, WaitKind::Send { to: 1 });
    both_send.wait(1, 0, WaitKind::Send { to: 0 });
    for (from, to) in [(0, 1), (1, 0)] {
        let full = MessagesBetween { sends: 1, in_flight: true, ..MessagesBetween::default() };
        both_send.known.between.insert((0, from, to), full);
    }
    assert!(both_send.circle().is_some());
    both_send.known.between.get_mut(&(0, 0, 1)).unwrap().any_receives = 1;
    assert_eq!(both_send.circle(), None, "rank 1 takes it");
    let mut any = two();
    any.wait(0, 0, WaitKind::Recv { from: None });
    any.wait(1, 0, WaitKind::Recv { from: Some(0) });
    assert_eq!(any.circle(), None, "rank 2 may send");
    any.wait(2, 0, WaitKind::Recv { from: Some(1) });
    assert!(any.circle().is_some());
}

/// Programs of blocking collectives over groups, and what happens when they are run in some order.
#[derive(Debug, Clone)]
struct Programs {
    groups: Vec<Vec<u32>>,
    /// By rank: the groups it calls, one after the other.
    calls: Vec<Vec<u64>>,
}

struct Run {
    scene: Scene,
    at: Vec<usize>,
}

impl Programs {
    fn start(&self) -> Run {
        let groups: Vec<&[u32]> = self.groups.iter().map(Vec::as_slice).collect();
        Run { scene: Scene::new(self.calls.len(), &groups), at: vec![0; self.calls.len()] }
    }
}

impl Run {
    fn is_blocked(&self, rank: usize) -> bool {
        !self.scene.views[rank].waits.is_empty()
    }

    /// Lets a rank do one thing: post its next call, or return from one that all have joined.
    fn step(&mut self, programs: &Programs, rank: usize) -> bool {
        if self.scene.ended[rank] {
            return false;
        }
        let Some(comm_id) = programs.calls[rank].get(self.at[rank]).copied() else {
            self.scene.ended[rank] = true;
            return true;
        };
        if !self.is_blocked(rank) {
            self.scene.collective(rank as u32, comm_id);
            return true;
        }
        let seq = self.scene.lane(rank as u32, comm_id).completed;
        let members = programs.groups[comm_id as usize].clone();
        let have_come = members.iter().all(|other| self.scene.lane(*other, comm_id).posted > seq);
        if have_come {
            self.scene.lane(rank as u32, comm_id).completed += 1;
            self.scene.views[rank].waits.clear();
            self.at[rank] += 1;
        }
        have_come
    }
}

fn programs() -> impl Strategy<Value = Programs> {
    let group = proptest::sample::subsequence(vec![0_u32, 1, 2, 3], 2..=4);
    proptest::collection::vec(group, 1..4).prop_flat_map(|groups| {
        let of_rank = |rank: u32| {
            let mine: Vec<u64> =
                (0_u64..).zip(&groups).filter(|(_, ranks)| ranks.contains(&rank)).map(|(id, _)| id).collect();
            match mine.is_empty() {
                true => Just(vec![]).boxed(),
                false => proptest::collection::vec(proptest::sample::select(mine), 0..5).boxed(),
            }
        };
        let calls: Vec<_> = (0..4).map(of_rank).collect();
        (Just(groups.clone()), calls).prop_map(|(groups, calls)| Programs { groups, calls })
    })
}

proptest! {
    /// A verdict at any time comes true, and a hang in the end always has a verdict.
    #[test]
    fn verdicts_are_sound_and_complete(
        programs in programs(),
        order in proptest::collection::vec(0_usize..4, 0..40),
    ) {
        let mut run = programs.start();
        for rank in &order {
            run.step(&programs, *rank);
        }
        let accused: Vec<u32> = run.scene.world().stuck(None).ranks.keys().copied().collect();
        let at = run.at.clone();
        while (0..4).any(|rank| run.step(&programs, rank)) {}
        for rank in accused {
            prop_assert_eq!(run.at[rank as usize], at[rank as usize], "rank {} went on", rank);
        }
        let is_hanging = run.scene.ended.contains(&false);
        let verdict = run.scene.world().waits_for_finished(|_| false).or_else(|| run.scene.circle());
        prop_assert_eq!(verdict.is_some(), is_hanging);
        if let Some(deadlock) = verdict {
            prop_assert!(!run.scene.text(&deadlock).is_empty());
        }
    }
}
