use expect_test::{Expect, expect};

use super::*;
use crate::observe::flight::notice::JobNotice;
use crate::observe::flight::samples::{self, NOW_NS};
use crate::observe::flight::{Outcome, RankState, WaitFlight};

fn run() -> Run {
    let job = samples::flight().job;
    let (agent_start_ticks, boot_id) = (1, String::new());
    let notice = JobNotice {
        format: 1,
        job,
        agent_start_ticks,
        boot_id,
        board_fd: 3,
        programs: vec![],
        others: vec![],
    };
    Run { dir: "/nowhere".into(), notice }
}

fn check(picture: &Picture<'_>, grouping: Grouping, expected: Expect) {
    expected.assert_eq(&picture.text(grouping));
}

#[test]
fn a_running_job_is_a_line_for_each_class() {
    let run = run();
    let picture = Picture { is_running: true, ran_ms: 6_000, ..Picture::new(&run, samples::flight()) };
    check(
        &picture,
        Grouping::Class,
        expect![[r#"
            20261121-030415-7f3a  running for 6.0 s  5 ranks on n0: train.py

            RANKS  STATE     GROUP  OPERATION                         BY         FOR  DONE/POSTED  OPS/S  CPU %      RSS  AT
            0-2    waiting   dp0    all_reduce#1 (f32[8], SUM)                 5.0 s          1/2    0.1     25  302 MiB  train.py:9
            3      running   dp0    after all_reduce#0 (f32[8], SUM)  windows  9.0 s          1/1    0.1     75  303 MiB  train.py:5
            4      starting
        "#]],
    );
    check(
        &picture,
        Grouping::Rank,
        expect![[r#"
            20261121-030415-7f3a  running for 6.0 s  5 ranks on n0: train.py

            RANKS  STATE     GROUP  OPERATION                         BY         FOR  DONE/POSTED  OPS/S  CPU %      RSS  AT
            0      waiting   dp0    all_reduce#1 (f32[8], SUM)                 5.0 s          1/2    0.1      0  300 MiB  train.py:9
            1      waiting   dp0    all_reduce#1 (f32[8], SUM)                 5.0 s          1/2    0.1     25  301 MiB  train.py:9
            2      waiting   dp0    all_reduce#1 (f32[8], SUM)                 5.0 s          1/2    0.1     50  302 MiB  train.py:9
            3      running   dp0    after all_reduce#0 (f32[8], SUM)  windows  9.0 s          1/1    0.1     75  303 MiB  train.py:5
            4      starting
        "#]],
    );
}

#[test]
fn a_job_that_has_ended_shows_its_dump() {
    let run = run();
    let story = Story { exit: Some(3), ran_ms: 843_000, ..Story::default() };
    let picture = Picture::of_ended(&run, story, Some(samples::flight()));
    let text = picture.text(Grouping::Class);
    let head: Vec<&str> = text.lines().take(2).collect();
    expect![[r#"
        20261121-030415-7f3a  ended after 00:14:03 with exit 3  5 ranks on n0: train.py
        The last dump, 6.0 s after the start (failed):"#]]
    .assert_eq(&head.join("\n"));
}

#[test]
fn a_job_without_a_dump_shows_how_its_ranks_ended() {
    let run = run();
    let ending = |ending: &str| processes::RankStory { pid: Some(7), ending: Some(ending.into()) };
    let ranks = vec![ending("exit 0"), ending("exit 0"), ending("signal 9")];
    let story = Story { exit: None, ran_ms: 1_200, ranks, servers: Vec::new() };
    check(
        &Picture::of_ended(&run, story, None),
        Grouping::Class,
        expect![[r#"
        20261121-030415-7f3a  ended after 1.2 s without saying how: its agent was killed  5 ranks on n0: train.py
        No dump: one is written when a job fails or is stopped.

        RANKS  STATE
        0-1    exit 0
        2      signal 9
    "#]],
    );
}

#[test]
fn other_states_read_well() {
    let mut flight = samples::flight();
    flight.ranks[0].state = RankState::Stopped;
    flight.ranks[1].lanes.remove(0);
    flight.ranks[1].waits.clear();
    flight.ranks[2].waits = vec![WaitFlight {
        communicator: None,
        text: "creation of the group".into(),
        seq: None,
        since_ns: NOW_NS,
    }];
    for record in &mut flight.ranks[3].lanes[0].records {
        record.outcome = Outcome::Pending;
    }
    for rank in &mut flight.ranks {
        rank.program = Some(if rank.rank < 2 { "trainer" } else { "reader" }.into());
    }
    let run = run();
    check(
        &Picture { is_running: true, ..Picture::new(&run, flight) },
        Grouping::Class,
        expect![[r#"
            20261121-030415-7f3a  running for 0.0 s  5 ranks on n0: train.py

            RANKS  PROGRAM  STATE     GROUP  OPERATION                            BY         FOR  DONE/POSTED  OPS/S  CPU %      RSS  AT
            0      trainer  stopped   dp0    all_reduce#1 (f32[8], SUM)                    5.0 s          1/2    0.1      0  300 MiB  train.py:9
            1      trainer  waiting   tp     failed broadcast#0 (f32[8], root 0)  windows  9.0 s          0/1    0.1     25  301 MiB  train.py:5
            2      reader   waiting          creation of the group                         0.0 s                         50  302 MiB
            3      reader   running   dp0    all_reduce#0 (f32[8], SUM)           windows  9.0 s          1/1    0.1     75  303 MiB  train.py:5
            4      reader   starting
        "#]],
    );
}

#[test]
fn many_ranks_are_few_lines() {
    let mut flight = samples::flight();
    let pattern = flight.ranks.clone();
    flight.ranks = (0..1024)
        .map(|rank| crate::observe::flight::RankFlight { rank, ..pattern[rank as usize % 5].clone() })
        .collect();
    assert_eq!(rows(&flight, Grouping::Class).len(), 3);
    assert_eq!(rows(&flight, Grouping::Rank).len(), 1024);
}
