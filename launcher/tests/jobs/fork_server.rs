//! Python ranks, forked and not. A module called torch stands in for the real one: what is tested here is
//! how ranks start and end, and that takes no tensors.

use rustix::process::{Pid, Signal, kill_process};

use crate::sandbox::{Outcome, Sandbox};

const TORCH: &str = "
def get_num_threads(): return 1
def set_num_threads(n): print('threads', n)
class default_generator:
    def seed(): pass
";
const STORE: &str =
    "class TCPStore:\n    def __init__(self, host, port, *args, **kwargs): self.port = port\n";

pub(crate) fn with_torch() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.file("modules/torch/__init__.py", TORCH).file("modules/torch/distributed.py", STORE);
    sandbox
}

fn run(sandbox: &Sandbox, ranks: &str, start: &[&str], script: &str, arguments: &[&str]) -> Outcome {
    sandbox.file("train.py", script);
    sandbox.run(&[&["-n", ranks, "--python", "/usr/bin/python3"], start, &["train.py"], arguments].concat())
}

/// The same script forked, spawned, and spawned for want of torch.
fn everywhere(check: impl Fn(&Sandbox, &[&str])) {
    check(&with_torch(), &[]);
    check(&with_torch(), &["--spawn"]);
    check(&Sandbox::new(), &[]);
}

#[test]
fn a_script_sees_what_python_would_give_it() {
    let script = "\
import atexit, os, sys, threading
assert __name__ == '__main__' and sys.modules['__main__'].__dict__ is globals()
assert __file__ == os.path.abspath('train.py') and __spec__ is None and not __package__
assert sys.path[0] == os.getcwd() and os.getcwd() not in sys.path[1:], sys.path
assert os.getpgid(0) == os.getpid() and sys.flags.optimize == 0
import signal
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
print(sys.argv)
atexit.register(print, 'atexit')
threading.Timer(0.01, print, ['thread']).start()
";
    everywhere(|sandbox, start| {
        let outcome = run(sandbox, "2", start, script, &["--lr", "1"]);
        assert_eq!(outcome.code, 0, "{outcome:?}");
        let rank = |rank| {
            [
                format!("{rank}| ['train.py', '--lr', '1']"),
                format!("{rank}| thread"),
                format!("{rank}| atexit"),
            ]
        };
        assert_eq!(outcome.by_rank(), [rank(0), rank(1)].concat());
    });
}

#[test]
fn modules_and_directories_run_as_main() {
    everywhere(|sandbox, start| {
        sandbox
            .file("pkg/__init__.py", "")
            .file("pkg/main.py", "import sys; print(__package__, sys.argv[1:])");
        sandbox.file("app/__main__.py", "import sys; print(sys.argv)");
        let python = ["-n", "2", "--python", "/usr/bin/python3"];
        let outcome = sandbox.run(&[&python[..], start, &["-m", "pkg.main", "x"]].concat());
        assert_eq!(outcome.by_rank(), ["0| pkg ['x']", "1| pkg ['x']"], "{outcome:?}");
        let outcome = sandbox.run(&[&python[..], start, &["app", "y"]].concat());
        assert_eq!(outcome.by_rank(), ["0| ['app', 'y']", "1| ['app', 'y']"], "{outcome:?}");
        let outcome = sandbox.run(&[&python[..], start, &["-m", "missing"]].concat());
        assert_eq!(outcome.code, 1);
        assert!(outcome.err.contains("No module named missing"), "{outcome:?}");
    });
}

#[test]
fn exit_codes_are_those_of_python() {
    for (ending, code) in [
        ("sys.exit(3)", 3),
        ("sys.exit('text')", 1),
        ("os._exit(9)", 9),
        ("os.kill(os.getpid(), 11)", 139),
        ("raise KeyboardInterrupt", 130),
        ("sys.exit(0)", 0),
        ("sys.exit()", 0),
    ] {
        everywhere(|sandbox, start| {
            let script = format!("import os, sys\nif os.environ['RANK'] == '1': {ending}\n");
            let outcome = run(sandbox, "2", start, &script, &[]);
            assert_eq!(outcome.code, code, "{ending} {start:?} {outcome:?}");
        });
    }
}

#[test]
fn an_exception_is_reported_with_its_line() {
    let script = "\
import os, time
def main():
    print('step 9 loss nan')
    raise ValueError('loss is NaN at step 10')
if os.environ['RANK'] == '2':
    main()
time.sleep(1000)
";
    everywhere(|sandbox, start| {
        let outcome = run(sandbox, "4", start, script, &[]);
        assert_eq!(outcome.code, 1);
        let report = outcome.report();
        for part in [
            "culprit   rank 2 (",
            "raised ValueError: loss is NaN at step 10\n",
            "train.py:4 in main  ->  raise ValueError('loss is NaN at step 10')\n",
            "victims   0-1,3 ",
        ] {
            assert!(report.contains(part), "{part}: {report}");
        }
        // The traceback is printed as usual, without lines of ours.
        assert!(outcome.err.contains("Traceback (most recent call last):"), "{outcome:?}");
        assert!(!outcome.err.contains("run_rank.py") && !outcome.err.contains("runpy"), "{outcome:?}");
    });
}

#[test]
fn ranks_differ_where_processes_would() {
    let script = "\
import os, random, sys
print(random.random(), file=open(f'random-{os.environ[\"RANK\"]}', 'w'))
print(os.environ['RANK'], sys.stdin.read())
";
    everywhere(|sandbox, start| {
        sandbox.file("train.py", script);
        let arguments = [&["-n", "2", "--python", "/usr/bin/python3"], start, &["train.py"]].concat();
        let outcome = sandbox.run_with_input(&arguments, "hello");
        assert_eq!(outcome.by_rank(), ["0| 0 hello", "1| 1"], "{outcome:?}");
        let drawn = |rank| std::fs::read_to_string(sandbox.path().join(format!("random-{rank}"))).unwrap();
        assert_ne!(drawn(0), drawn(1));
    });
}

#[test]
fn what_starts_threads_is_not_forked() {
    let sandbox = with_torch();
    sandbox.file(
        "modules/threads.py",
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    );
    let outcome = run(&sandbox, "2", &["--preload", "threads"], "print('ran')", &[]);
    assert_eq!(outcome.by_rank(), ["0| ran", "1| ran"], "{outcome:?}");
    assert!(outcome.err.contains("no fork server (an imported module started threads"), "{outcome:?}");
}

#[test]
fn threads_per_rank_are_set_after_the_fork() {
    let mut sandbox = with_torch();
    sandbox.variable("OMP_NUM_THREADS", "3");
    let script = "import os; print(os.environ['OMP_NUM_THREADS'], 'OPENBLAS_NUM_THREADS' in os.environ)";
    let outcome = run(&sandbox, "2", &[], script, &[]);
    let rank = |rank| [format!("{rank}| threads 3"), format!("{rank}| 3 False")];
    assert_eq!(outcome.by_rank(), [rank(0), rank(1)].concat(), "{outcome:?}");
}

#[test]
fn a_taken_port_is_named() {
    let sandbox = with_torch();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let outcome = run(&sandbox, "2", &["--master-port", &port], "", &[]);
    assert_eq!(outcome.code, 1);
    assert!(
        outcome.report().contains("the rendezvous store: [Errno 98] Address already in use"),
        "{outcome:?}"
    );
}

#[test]
fn forked_ranks_die_with_the_launcher_and_with_the_fork_server() {
    let script = "\
import subprocess, time
subprocess.Popen(['setsid', 'sleep', '1000'])
print('ready')
time.sleep(1000)
";
    let start = |sandbox: &Sandbox| {
        sandbox.file("train.py", script);
        let mut job = sandbox.start(&["-n", "3", "--python", "/usr/bin/python3", "train.py"]);
        job.wait_for_lines("ready", 3);
        job
    };
    let sandbox = with_torch();
    let job = start(&sandbox);
    job.signal(Signal::KILL);
    assert_eq!(job.wait_without_reading(), 137);
    sandbox.expect_nothing_left();

    let sandbox = with_torch();
    let job = start(&sandbox);
    kill_process(sandbox.agent(), Signal::KILL).unwrap();
    assert_eq!(job.wait().code, 137);

    let sandbox = with_torch();
    let job = start(&sandbox);
    let server = sandbox.events().into_iter().find(|event| event["event"] == "fork server started").unwrap();
    kill_process(Pid::from_raw(server["pid"].as_i64().unwrap() as i32).unwrap(), Signal::KILL).unwrap();
    let outcome = job.wait();
    assert_eq!(outcome.code, 1, "{outcome:?}");
    assert!(outcome.report().contains("the fork server"), "{outcome:?}");
}

/// It is a process beside the fork server, which goes on.
#[test]
fn a_store_that_is_stopped_is_named_and_one_that_is_killed_is_the_culprit() {
    let sandbox = with_torch();
    sandbox.file("train.py", "import time\nprint('ready', flush=True)\ntime.sleep(1000)\n");
    let mut job = sandbox.start(&["-n", "2", "--python", "/usr/bin/python3", "train.py"]);
    job.wait_for_lines("ready", 2);
    let pids = |name: &str| -> Vec<i64> {
        let events = sandbox.events();
        events
            .iter()
            .filter(|event| event["event"] == name)
            .filter_map(|event| event["pid"].as_i64())
            .collect()
    };
    let server = pids("fork server started")[0];
    let children = std::fs::read_to_string(format!("/proc/{server}/task/{server}/children")).unwrap();
    let children = children.split_ascii_whitespace().map(|pid| pid.parse::<i64>().unwrap());
    let ranks = pids("rank started");
    let store = children.filter(|pid| !ranks.contains(pid)).collect::<Vec<_>>();
    assert_eq!(store.len(), 1, "{store:?}");
    let pid = Pid::from_raw(store[0] as i32).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    job.wait_for_note(&format!(
        "tpurun: the store of the job (pid {}), through which the ranks meet, is",
        store[0]
    ));
    kill_process(pid, Signal::KILL).unwrap();
    let outcome = job.wait();
    let culprit =
        "culprit   the store of the job, through which the ranks meet, was killed by SIGKILL (signal 9)";
    assert!(outcome.code == 1 && outcome.err.contains(culprit), "{outcome:?}");
}
