"""Ranks that keep others waiting although they live: the log names them, says what they do and where, and
takes it back when they come. Slow ranks are no suspects, and nobody is ended for being one."""

import json
import re
import time
from pathlib import Path

import pytest

from tools.jobs import Finished

# The last rank does something while the others wait for it. Then it comes, or the timeout of the group ends
# all.
PROGRAM = """
import ctypes, os, re, signal, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist

how, timeout_s = sys.argv[1], float(sys.argv[2])
dist.init_process_group("tpu_dist", timeout=timedelta(seconds=timeout_s))
last = dist.get_world_size() - 1


def until(event):
    # The launcher writes what it says; no clock of ours has to agree with its own.
    with open(os.path.join(os.environ["TPURUN_RUN_DIR"], "events.jsonl")) as events:
        while True:
            yield
            if f'"event":"{event}"' in events.read():
                return


def loop():
    for _ in until("suspect"):
        for _ in range(3_000_000):
            pass


def sleep():
    for _ in until("suspect"):
        time.sleep(0.05)


def native():
    # A lock that nobody opens: the call is restarted when a signal interrupts it.
    libc = ctypes.PyDLL(None)
    lock = ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)


def library():
    # Matrix products give the lock back.
    torch.set_num_threads(1)
    a = torch.randn(3000, 3000)
    for _ in until("suspect"):
        torch.mm(a, a)


if dist.get_rank() == last:
    globals()[how]()
dist.all_reduce(torch.ones(8))
for _ in until("suspect cleared"):
    time.sleep(0.05)
"""


LINE = r"program\.py:\d+"


def suspects(done: Finished) -> list[str]:
    return [line for line in done.err.splitlines() if line.startswith("tpurun: suspect:")]


@pytest.mark.slice(2)
@pytest.mark.parametrize("flags", [[], ["--spawn"]], ids=["forked", "spawned"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("loop", rf"computing in user code \(\d+ % CPU\) at {LINE} in (until <- {LINE} in )?loop"),
        ("sleep", r"sleeping at program\.py:\d+ in sleep"),
        ("library", r"computing in native code \(\d+ % CPU\) at program\.py:\d+ in library"),
    ],
)
def test_a_rank_that_is_late_is_named_and_cleared(run, script, flags, how, said):
    done = run(*flags, "-n", "4", script(PROGRAM), how, "60")
    assert done.code == 0, done.err
    named, cleared = suspects(done)
    what = (
        rf"tpurun: suspect: rank 3 \(pid \d+\) keeps 3 ranks waiting in all_reduce#0 since (\d\.\d) s: {said}"
    )
    match = re.match(what, named)
    assert match, named
    # Nobody waits for less than a second before it is said.
    assert 1.0 <= float(match[1]) <= 2.0 * done.patience, named
    assert re.fullmatch(r"tpurun: suspect: rank 3 cleared after \d+\.\d s", cleared), cleared
    event = next(event for event in done.events if event["event"] == "suspect")
    assert (event["waiting"], [one["rank"] for one in event["suspects"]]) == ("0-2", [3])
    stacks = (done.run_dir / "stacks.txt").read_text()
    assert f"in {how}" in stacks and "run_rank.py" not in stacks, stacks


def test_a_native_call_that_holds_the_lock_is_told_from_a_sleep(run, script):
    done = run("-n", "4", script(PROGRAM), "native", "3")
    assert done.report.text.count("CollectiveTimeoutError"), done.report.text
    named = suspects(done)[0]
    assert "blocked in a native call that holds the GIL at program.py" in named, named
    # All ranks raise what the launcher knew about the one that they waited for.
    assert "rank 3 (pid" in done.log(0) and "holds the GIL" in done.log(0), done.log(0)


def test_the_report_of_a_hang_says_where_everybody_is(run, script):
    program = script(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('tpu_dist')\n"
        "groups = [dist.new_group(), dist.new_group()]\n"
        "def main():\n"
        "    first, second = groups if dist.get_rank() != 5 else reversed(groups)\n"
        "    dist.all_reduce(torch.ones(8), group=first)\n"
        "    dist.all_reduce(torch.ones(8), group=second)\n"
        "main()\n"
    )
    done = run("-n", "8", program)
    report = (done.run_dir / "report.txt").read_text()
    assert "DeadlockError" in report and len(report.splitlines()) <= 25, report
    assert "stacks    8 ranks 0-7  all_reduce <- program.py:6 in main <- program.py:8" in report, report
    assert "8 ranks 0-7, main thread:" in (done.run_dir / "stacks.txt").read_text()


def test_slow_is_not_stuck(start, script):
    """64 ranks with uneven work on few cores: the first wait long for the last, who get their share."""
    program = script(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('tpu_dist')\n"
        "dist.barrier()\n"
        "for step in range(2):\n"
        "    work = 0.03 + 0.1 * ((dist.get_rank() + step * 17) % 64) / 64\n"
        "    end = time.process_time() + work\n"
        "    while time.process_time() < end:\n"
        "        pass\n"
        "    dist.all_reduce(torch.ones(8))\n"
    )
    done = start("-n", "64", program).wait(limit_s=300)
    assert done.code == 0, done.err
    assert suspects(done) == []


def test_many_late_ranks_are_one_line(run, script):
    program = script(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('tpu_dist')\n"
        "if dist.get_rank() > 0:\n"
        "    time.sleep(2.5)\n"
        "dist.barrier()\n"
    )
    done = run("-n", "16", program)
    assert done.code == 0, done.err
    named = [line for line in suspects(done) if "keep" in line]
    assert len(named) == 1 and "ranks 1-15 keep rank 0 waiting in barrier#0" in named[0], done.err
    assert "sleeping at program.py:4" in named[0], named


def test_a_stopped_rank_is_no_suspect_but_a_failure(run, script):
    program = script(
        "import os, signal, torch, torch.distributed as dist\n"
        "dist.init_process_group('tpu_dist')\n"
        "if dist.get_rank() == 1:\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "dist.barrier()\n"
    )
    done = run("-n", "3", program)
    assert done.report.culprit == 1 and "stopped (SIGSTOP)" in done.report.what, done.report.text
    assert suspects(done) == []


def test_a_program_that_took_the_place_of_a_rank_is_left_alone(start, script):
    """It has no handler: the signal would end it."""
    program = script(
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('tpu_dist')\n"
        "if dist.get_rank() == 1:\n"
        "    os.execv('/bin/sh', ['sh', '-c', 'sleep 2.5; exit 7'])\n"
        "dist.barrier()\n"
    )
    done = start("-n", "2", program).wait()
    assert done.ends()[1] == {**done.ends()[1], "code": 7}, done.err
    (named, *_) = suspects(done)
    assert re.search(r"rank 1 \(pid \d+\) keeps rank 0 waiting in barrier#0 since 1\.\d s: sleeping$", named)


def test_a_file_that_took_the_place_of_the_stacks_is_not_written_to(run, script, tmp_path):
    program = script(
        "import os, sys, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('tpu_dist')\n"
        "if dist.get_rank() == 1:\n"
        "    where = {fd: os.path.realpath(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')}\n"
        "    fd = next(int(fd) for fd, path in where.items() if '/stacks/' in path)\n"
        "    own = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
        "    os.dup2(own, fd)\n"
        "    time.sleep(2.5)\n"
        "dist.barrier()\n"
    )
    done = run("-n", "2", program, tmp_path / "own")
    assert done.code == 0 and suspects(done)[0].endswith(": sleeping"), done.err
    assert (tmp_path / "own").read_bytes() == b""


def test_nobody_is_asked_without_a_signal(run, script):
    done = run("-n", "4", script(PROGRAM), "sleep", "60", env={"TPURUN_STACK_SIGNAL": "0"})
    assert done.code == 0 and suspects(done)[0].endswith(": sleeping"), done.err
    assert list((done.run_dir / "stacks").iterdir()) == []


def test_a_signal_does_not_disturb_the_program(start, script):
    """Reads and sleeps go on where they were; the descriptors and handlers of the program are its own."""
    program = script(
        "import os, signal, sys, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('tpu_dist')\n"
        "assert signal.getsignal(54) == signal.SIG_DFL\n"
        "if dist.get_rank() == 1:\n"
        "    reader, writer = os.pipe()\n"
        "    print('reading', flush=True)\n"
        "    with open(os.path.join(os.environ['TPURUN_RUN_DIR'], 'pipe'), 'w') as file:\n"
        "        file.write(f'/proc/{os.getpid()}/fd/{writer}')\n"
        "    assert os.read(reader, 1) == b'x'\n"
        "dist.barrier()\n"
    )
    job = start("-n", "2", program)
    job.read_until("reading")
    events = job.run_dir / "events.jsonl"
    deadline = time.monotonic() + 30
    while '"event":"suspect"' not in events.read_text():
        assert time.monotonic() < deadline, events.read_text()
        time.sleep(0.05)
    Path((job.run_dir / "pipe").read_text()).write_bytes(b"x")
    done = job.wait()
    assert done.code == 0, done.err
    assert "sleeping at program.py:9" in suspects(done)[0], done.err
    states = [
        one["holds_gil"] for event in done.events if event["event"] == "suspect" for one in event["suspects"]
    ]
    assert states == [False], json.dumps(done.events)
