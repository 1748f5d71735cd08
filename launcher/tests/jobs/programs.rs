//! Several programs in one job: the ranks of each, how each kind is started, and what people see of it.

use std::collections::BTreeSet;
use std::fs;

use crate::fork_server::with_torch;
use crate::sandbox::{Outcome, Sandbox};

const PYTHON: [&str; 2] = ["--python", "/usr/bin/python3"];

/// Prints the facts that a rank can tell of itself, in one word each.
const WHO: &str = "echo $RANK $TPURUN_PROGRAM $ROLE_NAME $ROLE_RANK/$ROLE_WORLD_SIZE $WORLD_SIZE $1";

#[test]
fn ranks_are_numbered_in_the_order_of_the_programs() {
    let sandbox = Sandbox::new();
    let eval = ["--role", "eval", "sh", "-c", WHO, "sh", "x"];
    let outcome = sandbox.run(&[&eval[..], &[":", "-n", "2", "sh", "-c", WHO, "sh", "y"]].concat());
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let said = ["eval 0| 0 eval eval 0/1 3 x", "sh 1| 1 sh sh 0/2 3 y", "sh 2| 2 sh sh 1/2 3 y"];
    assert_eq!(sorted(&outcome), said);
    assert!(outcome.err.starts_with("tpurun: 3 ranks (eval 0, sh 1-2), "), "{outcome:?}");
}

#[test]
fn a_job_file_says_the_same() {
    let mut sandbox = Sandbox::new();
    sandbox.variable("COLOUR", "grey");
    sandbox.file("jobs/place/name", "").file(
        "jobs/job.toml",
        r#"
        [job]
        only-ranks = "0-1"
        log-dir = "logs"
        [[program]]
        name = "eval"
        command = ["sh", "-c", "echo $COLOUR $@ `ls`", "sh", ":"]
        env = { COLOUR = "green" }
        cwd = "place"
        [[program]]
        ranks = 2
        command = ["sh", "-c", "echo $COLOUR"]
        "#,
    );
    let outcome = sandbox.run(&["--job", "jobs/job.toml"]);
    assert_eq!(sorted(&outcome), ["eval 0| green : name", "sh 1| grey"], "{outcome:?}");
    assert_eq!(fs::read_to_string(sandbox.path().join("logs/rank-0002-sh.log")).unwrap(), "grey\n");
    // The command line has the last word.
    let outcome = sandbox.run(&["--only-ranks", "2", "--job", "jobs/job.toml"]);
    assert_eq!(sorted(&outcome), ["sh 2| grey"], "{outcome:?}");
}

#[test]
fn what_is_wrong_is_one_line() {
    let sandbox = Sandbox::new();
    sandbox.file("job.toml", "[job]\ntimeout = \"soon\"\n[[program]]\ncommand = [\"true\"]\n");
    sandbox.file("key.toml", "[[program]]\ncommand = [\"true\"]\nrank = 3\n");
    sandbox.file("gone.toml", "[[program]]\ncommand = [\"gone.py\"]\n");
    for (arguments, error) in [
        (&["true", ":"][..], "program 2: expected a program to run, given none (see tpurun --help)"),
        (&[":", "true"], "program 1: expected a program to run, given none (see tpurun --help)"),
        (
            &["true", ":", "--topology", "2x2", "true"],
            "program 2: --topology: expected before the first program, as an option of the whole job, given after `:`",
        ),
        (
            &["-n", "3", "--topology", "2x2", "true", ":", "-n", "2", "true"],
            "--topology 2x2: expected -n 4, one rank per chip, given 5",
        ),
        (
            &["--job", "job.toml"],
            "job.toml: [job] timeout: expected a time such as 500ms, 30s, 10m or 1h, given soon",
        ),
        (
            &["--job", "key.toml"],
            "key.toml: program 1: rank: expected one of name, ranks, command, env, cwd, given rank",
        ),
        (&["--job", "gone.toml"], "gone.toml: expected a script or program, given gone.py: no such file"),
        (
            &["--job", "nope.toml"],
            "--job: expected a TOML file, given nope.toml: No such file or directory (os error 2)",
        ),
    ] {
        sandbox.run(arguments).expect_error(error);
    }
    assert!(!sandbox.path().join("tpurun-runs").exists());
}

#[test]
fn the_culprit_has_a_program() {
    let sandbox = Sandbox::new();
    let wait = ["-n", "2", "--role", "train", "sleep", "1000"];
    let outcome =
        sandbox.run(&[&["--role", "eval", "sh", "-c", "echo bad; exit 7", ":"], &wait[..]].concat());
    assert_eq!(outcome.code, 7);
    let report = outcome.report();
    assert!(report.contains("  culprit   rank 0 (eval, host "), "{report}");
    assert!(report.contains("/rank-0000-eval.log\n"), "{report}");
    let events = sandbox.events();
    assert_eq!(events[0]["programs"][1]["name"], "train");
    assert_eq!(events[0]["programs"][1]["first_rank"], 1);
    let ended = events.iter().find(|event| event["event"] == "rank ended").unwrap();
    assert_eq!((&ended["program"], &ended["code"]), (&"eval".into(), &7.into()));
}

#[test]
fn programs_are_at_random_addresses_unless_asked_or_crowded() {
    let sandbox = Sandbox::new();
    let stacks = |aslr: &str| {
        let line = ["--aslr", aslr, "-n", "2", "grep", "-F", "[stack]", "/proc/self/maps"];
        let outcome = sandbox.run(&line);
        let stacks: BTreeSet<_> = outcome.out.lines().filter_map(|line| line.split("| ").nth(1)).collect();
        (stacks.len(), outcome.err)
    };
    let (off, said) = stacks("off");
    assert!(off == 1 || said.contains("--aslr off: expected a host that allows it"), "{off}: {said}");
    assert_eq!(stacks("on").0, 2);
    let shown = |ranks: &str| sandbox.run(&["--dry-run", "-n", ranks, "true"]).out;
    assert!(shown("65536").contains("a process each, all at the same addresses: "));
    assert!(shown("1").contains("a process each: "));
}

#[test]
fn a_dry_run_shows_all_programs() {
    let sandbox = Sandbox::new();
    sandbox.file("train.py", "");
    let line =
        ["--dry-run", "--python", "/usr/bin/python3", "sh", "-c", "x", ":", "-n", "3", "train.py", "--lr"];
    let outcome = sandbox.run(&line);
    for part in [
        "sh (ranks 0): ",
        "train (ranks 1-3): train.py --lr\n",
        "1 of sh, a process each: ",
        "3 of train, forked from one interpreter",
        "rank 1     RANK=1\n",
        "TPURUN_PROGRAM=train\n",
    ] {
        assert!(outcome.out.contains(part), "{part}: {}", outcome.out);
    }
}

/// Says how it was started, and whether the store is one that it can use.
const TELL: &str = "\
import os, sys
parent = open(f'/proc/{os.getppid()}/cmdline').read()
forked = 'forked' if 'tpurun.fork_server' in parent else 'spawned'
print(forked, sys.argv[1:], os.path.basename(os.getcwd()), os.environ.get('PYTHONVERBOSITY'))
print(os.environ['TPURUN_PROGRAM'], int(os.environ['MASTER_PORT']) > 0, os.environ['TORCHELASTIC_USE_AGENT_STORE'])
";

fn mixed(sandbox: &Sandbox, start: &[&str]) -> Outcome {
    sandbox.file("train.py", TELL).file("play/play.py", TELL).file(
        "job.toml",
        r#"
        [[program]]
        name = "c"
        command = ["sh", "-c", "echo c True $TORCHELASTIC_USE_AGENT_STORE"]
        [[program]]
        ranks = 2
        command = ["train.py", "x"]
        [[program]]
        command = ["play.py"]
        cwd = "play"
        [[program]]
        name = "own"
        command = ["train.py"]
        env = { PYTHONVERBOSITY = "3" }
        "#,
    );
    sandbox.run(&[&PYTHON[..], start, &["--job", "job.toml"]].concat())
}

#[test]
fn forked_and_spawned_programs_share_a_store() {
    let sandbox = with_torch();
    let outcome = mixed(&sandbox, &[]);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let home = sandbox.path().file_name().unwrap().to_str().unwrap();
    let expected = [
        "c 0| c True True".to_owned(),
        "own 4| own True True".into(),
        "own 4| spawned [] HOME 3".replace("HOME", home),
        "play 3| forked [] play None".into(),
        "play 3| play True True".into(),
        "train 1| forked ['x'] HOME None".replace("HOME", home),
        "train 1| train True True".into(),
        "train 2| forked ['x'] HOME None".replace("HOME", home),
        "train 2| train True True".into(),
    ];
    assert_eq!(sorted(&outcome), expected);
}

/// Rank 0 is no Python: somebody else must hold the store.
#[test]
fn a_store_exists_where_nothing_is_forked() {
    let threads = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n";
    for start in [&["--spawn"][..], &["--preload", "threads"]] {
        let sandbox = with_torch();
        sandbox.file("modules/threads.py", threads);
        let outcome = mixed(&sandbox, start);
        assert_eq!(outcome.code, 0, "{outcome:?}");
        let lines = sorted(&outcome);
        assert_eq!(lines.iter().filter(|line| line.ends_with(" True True")).count(), 5, "{lines:?}");
        assert_eq!(lines.iter().filter(|line| line.contains("| spawned ")).count(), 4, "{lines:?}");
    }
    // Without torch nobody needs a store, and nothing is said.
    let outcome = mixed(&Sandbox::new(), &[]);
    assert_eq!((outcome.code, outcome.err.lines().count()), (0, 1), "{outcome:?}");
}

/// Goes on only after the launcher has seen the end of rank 0.
const OUTLIVE: &str = "\
import json, os, time
def is_over():
    events = open(os.environ['TPURUN_RUN_DIR'] + '/events.jsonl').read().splitlines()
    return any(json.loads(line).items() >= {'event': 'rank ended', 'rank': 0}.items() for line in events)
while not is_over():
    time.sleep(0.005)
print('went on')
";

/// The end of a spawned rank is not that of the fork server.
#[test]
fn spawned_ranks_end_while_forked_ones_go_on() {
    let sandbox = with_torch();
    sandbox.file("train.py", OUTLIVE);
    let outcome = sandbox.run(&[&PYTHON[..], &["true", ":", "-n", "2", "train.py"]].concat());
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert_eq!(sorted(&outcome), ["train 1| went on", "train 2| went on"]);
}

/// The next world has ranks of both kinds again, and a store.
#[test]
fn a_restart_starts_all_programs_again() {
    for start in [&[][..], &["--spawn"]] {
        let sandbox = with_torch();
        let script = "\
import os, sys
print('world', os.environ['TPURUN_RESTART'], os.environ['TORCHELASTIC_USE_AGENT_STORE'])
sys.exit(os.environ['TPURUN_RESTART'] == '0')
";
        sandbox.file("train.py", script);
        let shell = ["sh", "-c", "echo world $TPURUN_RESTART $TORCHELASTIC_USE_AGENT_STORE"];
        let line = [&PYTHON[..], start, &["--max-restarts", "1"], &shell, &[":", "-n", "2", "train.py"]];
        let outcome = sandbox.run(&line.concat());
        assert_eq!(outcome.code, 0, "{outcome:?}");
        let second = lines(&outcome).into_iter().filter(|line| line.text == "world 1 True");
        let ranks: Vec<u32> = second.map(|line| line.rank).collect();
        assert_eq!(ranks, [0, 1, 2], "{outcome:?}");
    }
}

/// A line of one rank, with the program in front where the line says it.
struct Line {
    program: String,
    rank: u32,
    text: String,
}

fn lines(outcome: &Outcome) -> Vec<Line> {
    let mut lines = Vec::new();
    for line in outcome.out.lines() {
        let (label, text) = line.split_once("| ").unwrap_or_else(|| panic!("no prefix in {outcome:?}"));
        let (program, ranks) = label.trim().rsplit_once(' ').unwrap_or(("", label.trim()));
        lines.extend(ranks.split(',').flat_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let ranks = first.parse::<u32>().unwrap()..=last.parse().unwrap();
            ranks.map(|rank| Line { program: program.into(), rank, text: text.into() }).collect::<Vec<_>>()
        }));
    }
    lines.sort_by_key(|line| line.rank);
    lines
}

/// Each line of each rank as `program rank| line`, in order.
fn sorted(outcome: &Outcome) -> Vec<String> {
    let shown =
        |Line { program, rank, text }: Line| format!("{program} {rank}| {text}").trim_start().to_owned();
    let mut shown: Vec<String> = lines(outcome).into_iter().map(shown).collect();
    shown.sort();
    shown
}
