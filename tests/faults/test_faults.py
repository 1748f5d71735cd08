"""Every way for a rank to fail, alone among ranks that wait for it: the report names it, the exit code is its
own, the others are stopped in bounded time, and the machine is clean afterwards."""

import functools
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fault_matrix.patience import Clock
from tools.jobs import Finished, Job
from tools.slices import FULL

PROGRAM = """
import ctypes, os, signal, subprocess, sys, time
import torch
import torch.distributed as dist

fault, culprit = sys.argv[1], int(sys.argv[2])


def fail():
    if fault == "exception":
        raise ValueError("the loss is nan")
    if fault == "code":
        sys.exit(3)
    if fault == "early":
        sys.exit(0)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "crash":
        ctypes.string_at(0)
    if fault == "stopped":
        print("stopped at", time.time())
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "stubborn":
        raise ValueError("another rank will not go")
    if fault == "grandchild":
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        raise ValueError(f"process {child.pid} is left")


dist.init_process_group("tpu_dist")
rank = dist.get_rank()
is_stubborn = fault == "stubborn" and rank == 0
if is_stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.all_reduce(torch.ones(8))
if rank == culprit:
    fail()
try:
    dist.all_reduce(torch.ones(8))
finally:
    while is_stubborn:
        signal.pause()
"""


@dataclass(frozen=True)
class Fault:
    """A fault is what a rank does, and what the report must say of it."""

    name: str
    code: int
    said: str
    """A regular expression."""


FAULTS = [
    Fault("exception", 1, r"raised ValueError: the loss is nan"),
    Fault("code", 3, r"exited with code 3"),
    Fault("early", 1, r"exited with code 0 while others were waiting for it"),
    Fault("killed", 128 + signal.SIGKILL, r"was killed by SIGKILL \(signal 9\)"),
    Fault("crash", 128 + signal.SIGSEGV, r"was killed by SIGSEGV \(signal 11\)"),
    Fault("stopped", 1, r"has been stopped \(SIGSTOP\) for \d+\.\d s"),
    Fault("stubborn", 1, r"raised ValueError: another rank will not go"),
    Fault("grandchild", 1, r"raised ValueError: process \d+ is left"),
]
# Time for the others, once the launcher knows; or, where it has to kill or to find out first, altogether.
STOPPED_IN_S = 0.5
KILLED_IN_S = 2.0

# The same end without a launcher: processes that have torch are forked, and all of them are told to go.
BARE = """
import os, signal, sys, time
import torch.distributed, tpurun

ranks = int(sys.argv[1])
ready, say = os.pipe()
pids = []
for _ in range(ranks):
    pids.append(os.fork())
    if pids[-1] == 0:
        os.write(say, b".")
        signal.pause()
while ranks:
    ranks -= len(os.read(ready, ranks))
began = time.monotonic()
for pid in pids:
    os.kill(pid, signal.SIGTERM)
for pid in pids:
    os.waitpid(pid, 0)
print(time.monotonic() - began)
"""


def measure_bare_end_s(ranks: int) -> float:
    """How long this machine takes to end so many processes: each has torch to unmap."""
    clock = Clock()
    took = float(subprocess.check_output([sys.executable, "-c", BARE, str(ranks)]))
    return took / clock.patience()


@pytest.fixture(scope="module")
def bare_end_s() -> Callable[[int], float]:
    return functools.cache(measure_bare_end_s)


@pytest.mark.parametrize(
    ("fault", "ranks", "culprit"),
    # With every change each fault on one of the two sizes.
    [
        pytest.param(fault, ranks, culprit, id=f"{fault.name}-{ranks}-{culprit}")
        for number, fault in enumerate(FAULTS)
        for ranks, culprit in ([(4, 2), (64, 37)] if FULL else [[(4, 2), (64, 37)][number % 2]])
    ],
)
def test_the_culprit_is_named_and_nothing_is_left(
    run, script, bare_end_s, fault: Fault, ranks: int, culprit: int
):
    bare_s = bare_end_s(ranks)
    done = run("-n", str(ranks), script(PROGRAM), fault.name, str(culprit))
    assert done.report.culprit == culprit, done.report.text
    assert re.match(fault.said, done.report.what), done.report.text
    assert done.code == fault.code, done.report.text
    assert done.ends().keys() == set(range(ranks)), "every rank is accounted for"
    seconds, limit_s = time_to_end(done, fault, culprit)
    if seconds > (bare_s + limit_s) * done.patience:
        # To unmap is all the work there is, and neighbours slow memory down in no way that the system counts.
        bare_s = max(bare_s, measure_bare_end_s(ranks))
    assert seconds <= (bare_s + limit_s) * done.patience, (
        f"{seconds:.2f} s, bare {bare_s:.2f} s, patience {done.patience:.1f}\n{done.report.text}"
    )


def time_to_end(done: Finished, fault: Fault, culprit: int) -> tuple[float, float]:
    """From the failure until the last rank was gone, and how long that may take."""
    last_ms = max(end["ms"] for end in done.ends().values())
    if fault.name == "stopped":
        stopped_at = float(re.search(r"stopped at ([0-9.]+)", done.log(culprit))[1])
        return done.ended_at - stopped_at, KILLED_IN_S
    failed_ms = done.ends()[culprit]["ms"]
    limit_s = KILLED_IN_S if fault.name in ("stubborn", "early") else STOPPED_IN_S
    return (last_ms - failed_ms) / 1000, limit_s


def test_the_line_that_raised_is_shown(run, script):
    done = run("-n", "2", script("def main():\n    raise ValueError('bad')\n\nmain()\n"))
    assert "program.py:2 in main  ->  raise ValueError('bad')" in done.report.text


WAITED_FOR = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("tpu_dist")
elsewhere = dist.new_group()
if dist.get_rank() == 0:
    work = dist.all_reduce(torch.ones(5), async_op=True)
dist.barrier(elsewhere)
if dist.get_rank() == 1:
    os._exit(7)
work.wait()
"""


def test_the_others_are_said_to_wait(run, script):
    """The culprit leaves when it knows that rank 0 has begun what they should do together."""
    done = run("-n", "2", script(WAITED_FOR))
    assert (done.report.culprit, done.code) == (1, 7), done.report.text
    number = 1 + WAITED_FOR.splitlines().index("    work = dist.all_reduce(torch.ones(5), async_op=True)")
    what = rf"all_reduce#\d+ \(f32\[5\], SUM\), group \S+ at \S*program.py:{number}$"
    waits = f"rank 0 was waiting for it in {what}"
    assert re.search(waits, done.report.text, re.MULTILINE), done.report.text


LEAVES = """
import os, sys
import torch
import torch.distributed as dist

when, rank = sys.argv[1], int(os.environ["RANK"])
if when == "before the world" and rank == 1:
    sys.exit()
dist.init_process_group("tpu_dist")
if when == "before the first collective" and rank == 1:
    sys.exit()
dist.all_reduce(torch.ones(5))
if rank == 1:
    dist.destroy_process_group()
    sys.exit()
dist.all_reduce(torch.ones(5))
"""


@pytest.mark.parametrize("when", ["before the world", "before the first collective", "in good order"])
def test_a_rank_that_leaves_too_soon_is_named(start, script, when: str):
    """The others would wait for it in vain, whatever it has done before."""
    done = start("-n", "4", script(LEAVES), when).wait(limit_s=20)
    assert done.report.culprit == 1, done.report.text
    assert done.report.what == "exited with code 0 while others were waiting for it", done.report.text
    assert done.code == 1


PAUSED = """
import signal, subprocess
import torch
import torch.distributed as dist

dist.init_process_group("tpu_dist")
subprocess.Popen(["sleep", "1000"], start_new_session=True)
dist.barrier()
if dist.get_rank() == 0:
    print("all are here", flush=True)
    signal.pause()
dist.all_reduce(torch.ones(8))
"""


@pytest.fixture
def paused(start, script) -> Callable[..., Job]:
    """A job of ranks and grandchildren that all wait."""

    def start_paused(ranks: int, *options: str) -> Job:
        job = start(*options, "-n", str(ranks), script(PAUSED))
        job.read_until("all are here")
        assert len(job.processes()) >= 2 * ranks + 2
        return job

    return start_paused


@pytest.mark.slice(2)
@pytest.mark.parametrize("options", [[], ["--spawn"]], ids=["forked", "spawned"])
def test_nothing_survives_the_launcher(paused, options: list[str]):
    job = paused(3, *options)
    job.signal(signal.SIGKILL)
    assert job.wait(linger_s=KILLED_IN_S).code == -signal.SIGKILL


def test_nothing_survives_the_agent(paused):
    job = paused(3)
    job.signal(signal.SIGKILL, agent_of(job))
    done = job.wait()
    assert done.code == 128 + signal.SIGKILL
    assert re.search(
        r"^tpurun: the agent \(pid \d+\) was killed by signal 9; its ranks were ended$", done.err, re.M
    )


def test_nothing_survives_both(paused):
    """Neither can clean up after the other."""
    job = paused(3)
    agent = agent_of(job)
    job.signal(signal.SIGSTOP, agent)
    job.signal(signal.SIGKILL)
    job.signal(signal.SIGKILL, agent)
    assert job.wait(linger_s=KILLED_IN_S).code == -signal.SIGKILL


def test_the_fork_server_is_missed(paused):
    job = paused(3)
    (server,) = [event["pid"] for event in events_of(job) if event["event"] == "fork server started"]
    job.signal(signal.SIGKILL, server)
    done = job.wait()
    assert done.code == 1
    assert "the fork server, which all ranks were forked from, is gone" in done.err


# The default store, or one that the program makes in rank 0; rank 1 asks it for a key that nobody sets.
ASKS = """
import os, sys, time, torch.distributed as dist
rank, port = int(os.environ["RANK"]), int(sys.argv[1])
if port:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
else:
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
print("up", os.getpid(), flush=True)
if rank:
    store.get("never")
time.sleep(1000)
"""


@pytest.fixture
def asking(start, script) -> Callable[..., tuple[Job, int]]:
    """Two ranks of which one asks for a key that nobody sets, and the process that holds their store."""

    def start_asking(*options: str, port: int) -> tuple[Job, int]:
        job = start(*options, "-n", "2", script(ASKS), str(port))
        job.read_of_all("up", 2)
        ranks = [event["pid"] for event in events_of(job) if event["event"] == "rank started"]
        # The job has one of its own, too.
        (holder,) = [pid for pid in job.processes() if holds_store(pid) and (pid in ranks) == (port > 0)]
        return job, holder

    return start_asking


def holds_store(pid: int) -> bool:
    """Torch serves a store on a thread of that name."""
    return any("pt_tcpstore" in path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/comm"))


def test_the_store_of_the_job_is_missed(asking):
    """No rank is to blame that asks it next."""
    job, holder = asking(port=0)
    job.signal(signal.SIGKILL, holder)
    done = job.wait()
    assert done.code == 1
    killed = "culprit   the store of the job, through which the ranks meet, was killed by SIGKILL (signal 9)"
    assert killed in done.err, done.err


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_holds_the_store_is_missed(asking, how: signal.Signals):
    """Nobody waits for it in the engine, which knows nothing of the store."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job, holder = asking(port=port)
    job.signal(how, holder)
    done = job.wait()
    assert done.report.culprit == 0
    if how == signal.SIGSTOP:
        assert done.code == 1 and re.fullmatch(r"has been stopped \(SIGSTOP\) for \d\.\d s", done.report.what)
        assert "why       the store that rank 0 holds does not answer rank 1\n" in done.report.text
    else:
        assert done.code == 128 + how and done.report.what == "was killed by SIGKILL (signal 9)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminated"])
def test_a_signal_ends_the_job(paused, number: signal.Signals):
    job = paused(3)
    job.signal(number)
    done = job.wait()
    assert done.code == 128 + number
    assert re.search(r"after [0-9.]+ s, 3 ranks stopped, run ", done.err), done.err


SLOW_TO_GO = """
import signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: print("not yet", flush=True))
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def test_a_second_ctrl_c_ends_it_at_once(start, script):
    job = start("-n", "1", "--shutdown-timeout", "1h", script(SLOW_TO_GO))
    job.read_until("ready")
    job.signal(signal.SIGINT)
    job.read_until("not yet")
    job.signal(signal.SIGINT)
    done = job.wait()
    assert done.code == 128 + signal.SIGINT
    assert "1 ranks killed, run" in done.err


def agent_of(job: Job) -> int:
    return next(event["agent"] for event in events_of(job) if event["event"] == "started")


def events_of(job: Job) -> list[dict]:
    """Returns the events that have happened so far."""
    return Finished(0, "", "", job.run_dir, 0, 1).events


LOSES_ONE = """
import sys, torch, torch.distributed as dist

dist.init_process_group("tpu_dist")
if dist.get_rank() == 3:
    dist.all_reduce(torch.ones(2)) if sys.argv[1] == "differ" else sys.exit(0)
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    ("how", "error"), [("differ", "CollectiveMismatchError"), ("leave", "DeadlockError")]
)
def test_victims_are_one_line(run, script, how: str, error: str):
    done = run("-n", "4", "--shutdown-timeout", "1h", script(LOSES_ONE), how)
    lines = [line for line in done.err.splitlines() if re.match(r" *[0-9,-]+\| ", line)]
    victims = [line for line in lines if "3" not in line.split("|")[0]]
    assert len(victims) == 1 and victims[0].startswith(f"0-2| {error}: "), done.err
    assert "--show-victims" in victims[0]
    assert any("3| [rank3]: Traceback" in line for line in lines) == (how == "differ"), done.err
    for rank in range(3):
        assert f"tpurun.errors.{error}: " in done.log(rank) and "Traceback" in done.log(rank)


def test_victims_are_shown_in_full_where_somebody_wants_them(run, script):
    done = run("-n", "4", "--show-victims", "--shutdown-timeout", "1h", script(LOSES_ONE), "leave")
    assert done.err.count("]: Traceback") == 3, done.err


WRAPPED = """
import logging, os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

what, how = sys.argv[1:]
dist.init_process_group("tpu_dist", timeout=timedelta(seconds=2 if what == "timeout" else 60))
rank = dist.get_rank()
dist.all_reduce(torch.ones(2))


def step():
    if rank == 2 and what == "early":
        sys.exit(0)
    if rank == 2 and what == "killed":
        os.kill(os.getpid(), 9)
    if rank == 2 and what == "timeout":
        time.sleep(1000)
    dist.all_reduce(torch.ones(4 if rank == 2 and what == "mismatch" else 3))


class StepError(Exception):
    pass


late = None
try:
    step()
except Exception as error:
    if how == "from":
        raise RuntimeError("step failed") from error
    if how == "from none":
        raise StepError("step failed") from None
    if how == "group":
        raise ExceptionGroup("several", [ValueError("a"), error])
    if how == "exit":
        logging.exception("step failed")
        sys.exit(1)
    if how == "_exit":
        os._exit(1)
    if how == "abort":
        os.abort()
    late = str(error)
raise RuntimeError(late)
"""
WRAPPED_SAID = {
    "mismatch": "is to blame for CollectiveMismatchError: collective mismatch",
    "early": "exited with code 0 while others were waiting for it",
    "killed": r"was killed by SIGKILL",
    "timeout": "is to blame for CollectiveTimeoutError: Timed out",
}


@pytest.mark.slice(2)
@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("mismatch", "from"),
        ("mismatch", "abort"),
        ("mismatch", "later"),
        ("early", "from none"),
        ("early", "exit"),
        ("killed", "_exit"),
        ("timeout", "group"),
    ],
)
def test_an_error_that_is_wrapped_still_names_the_guilty(run, script, what: str, how: str):
    done = run("-n", "4", script(WRAPPED), what, how)
    assert done.report.culprit == 2, done.report.text
    assert re.match(WRAPPED_SAID[what], done.report.what), done.report.text
    assert done.code != 0


HANDLED = """
import torch
import torch.distributed as dist
from tpurun.errors import CollectiveMismatchError

dist.init_process_group("tpu_dist")
other, rank = dist.new_group(), dist.get_rank()
try:
    dist.all_reduce(torch.ones(4 if rank == 2 else 3))
except CollectiveMismatchError:
    dist.barrier(other)
    dist.barrier(other)
if rank == 1:
    raise ValueError("its own")
dist.barrier(other)
"""


def test_a_failure_that_was_handled_excuses_nobody(run, script):
    done = run("-n", "3", script(HANDLED))
    assert done.report.culprit == 1 and "raised ValueError: its own" in done.report.what, done.report.text


LINGERS = """
import os, sys, threading
import torch.distributed as dist

if os.fork() == 0:
    raise KeyError("the end of a child is not the end of its rank")
threading.Thread(target=threading.Event().wait, name="metrics").start()
dist.init_process_group("tpu_dist")
if dist.get_rank() == 1:
    raise ValueError("bad batch") if sys.argv[1] == "raises" else SystemExit(3)
dist.barrier()
"""


@pytest.mark.parametrize(
    ("how", "said"), [("raises", "raised ValueError: bad batch"), ("exits", "exited with code 3")]
)
def test_a_program_that_has_failed_is_over_though_a_thread_lives(run, script, how: str, said: str):
    done = run("-n", "2", "--shutdown-timeout", "1", script(LINGERS), how)
    assert done.report.culprit == 1 and said in done.report.what, done.report.text
    assert done.code == (1 if how == "raises" else 3)


FINISHES = """
import atexit, os, time
import torch.distributed as dist

dist.init_process_group("tpu_dist")
pids = [None, None]
dist.all_gather_object(pids, os.getpid())

def finish():
    while os.path.exists(f"/proc/{pids[1]}"):
        time.sleep(0.01)
    print("finished", flush=True)

if dist.get_rank() == 0:
    atexit.register(finish)
    raise ValueError("bad batch")
dist.barrier()
"""


@pytest.mark.slice(2)
@pytest.mark.parametrize("options", [[], ["--spawn"]], ids=["forked", "spawned"])
def test_a_rank_that_has_failed_finishes_what_it_does_at_its_end(run, script, options: list[str]):
    """Until after the other one, which hears of the failure meanwhile, is gone."""
    done = run("-n", "2", *options, script(FINISHES))
    assert (done.code, done.report.culprit) == (1, 0), done.err
    assert done.shown_by_rank()[0][-1] == "finished", done.out + done.err


LEAVES_A_THREAD = """
import os, threading, time
import torch
import torch.distributed as dist

dist.init_process_group("tpu_dist")
pid = torch.tensor([os.getpid()])
dist.broadcast(pid, 0)
if dist.get_rank() == 0:
    threading.Thread(target=dist.recv, args=(torch.ones(2), 1), daemon=True).start()
else:
    while os.path.exists(f"/proc/{pid.item()}"):
        time.sleep(0.01)
"""


@pytest.mark.parametrize("options", [[], ["--spawn"]], ids=["forked", "spawned"])
def test_a_daemon_thread_in_a_collective_does_not_abort_the_end(run, script, options: list[str]):
    """The end of the group wakes it, when the interpreter lets no other thread run any more."""
    done = run("-n", "2", *options, script(LEAVES_A_THREAD))
    assert done.code == 0 and "terminate called" not in done.out + done.err, done.out + done.err


WELL_BUT_LINGERS = """
import threading
from datetime import timedelta
import torch.distributed as dist

dist.init_process_group("tpu_dist", timeout=timedelta(seconds=4))
dist.barrier()
if dist.get_rank() == 1:
    threading.Thread(target=threading.Event().wait).start()
else:
    dist.barrier()
"""


def test_a_program_that_has_ended_well_but_lingers_is_suspected_until_the_timeout(run, script):
    done = run("-n", "2", "--shutdown-timeout", "1", script(WELL_BUT_LINGERS))
    line = "suspect: the program of rank 1 has ended, but a thread that is no daemon keeps its process"
    assert line in done.err, done.err
    assert done.report.culprit == 1 and "CollectiveTimeoutError" in done.report.what, done.report.text


FAILED_BUT_LINGERS = """
import signal, sys, threading
import torch.distributed as dist
from tpurun.errors import RankLostError

# The others are asked to end while they say why they do.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.init_process_group("tpu_dist")
dist.barrier()
if dist.get_rank() == 1:
    threading.Thread(target=threading.Event().wait).start()
    sys.exit(3)
try:
    dist.barrier()
except RankLostError as error:
    print("lost:", error, flush=True)
"""


def test_a_program_that_has_failed_but_lingers_is_lost_with_its_own_code(run, script):
    done = run("-n", "2", "--shutdown-timeout", "1", script(FAILED_BUT_LINGERS))
    assert done.code == 3 and done.report.what.startswith("exited with code 3"), done.err
    (said,) = done.shown_by_rank()[0]
    assert re.match(r"lost: rank 1 \(host .*, pid \d+\) exited with code 3: group 0 can not", said), said


KEEPS_A_WORKER = """
import signal, subprocess, sys, time

worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

def stop(number, frame):
    worker.communicate(b"\\n")
    print("the worker ended with", worker.returncode, flush=True)
    sys.exit(0)

signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.slice(2)
@pytest.mark.parametrize("options", [[], ["--spawn"]], ids=["forked", "spawned"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminated"])
def test_a_signal_is_for_ranks_and_not_for_their_workers(
    start, script, options: list[str], number: signal.Signals
):
    job = start("-n", "1", *options, "--shutdown-timeout", "1h", script(KEEPS_A_WORKER))
    job.read_until("ready")
    job.signal(number)
    done = job.wait()
    assert (done.code, done.out.splitlines()[-1]) == (128 + number, "the worker ended with 0"), done.out


def test_a_shell_is_asked_with_what_it_has_started(start, script):
    """It waits for its program and passes nothing on."""
    job = start("-n", "1", "--shutdown-timeout", "1h", "sh", "-c", "echo ready; sleep 1000; true")
    job.read_until("ready")
    job.signal(signal.SIGTERM)
    assert job.wait().code == 128 + signal.SIGTERM


CATCHES = """
import sys, threading, time
import torch.distributed as dist

dist.init_process_group("tpu_dist")
try:
    print("ready", flush=True)
    while True:  # pause() would miss a signal that comes just before it
        time.sleep(0.05)
except KeyboardInterrupt:
    is_main = threading.current_thread() is threading.main_thread()
    print("saved", is_main, flush=True)
    sys.exit(0)
finally:
    print("closed", flush=True)
"""


@pytest.mark.slice(2)
@pytest.mark.parametrize("options", [[], ["--spawn"]], ids=["forked", "spawned"])
def test_ctrl_c_is_a_keyboard_interrupt_in_every_rank(start, script, options: list[str]):
    job = start("-n", "3", *options, "--shutdown-timeout", "1h", script(CATCHES))
    job.read_of_all("ready", 3)
    job.signal(signal.SIGINT)
    done = job.wait()
    assert done.code == 128 + signal.SIGINT and "3 ranks stopped" in done.err, done.err
    assert done.shown_by_rank() == {rank: ["ready", "saved True", "closed"] for rank in range(3)}
    assert {end.get("code") for end in done.ends().values()} == {0}


def test_a_keyboard_interrupt_that_nobody_catches_is_one_line(start, script):
    # All of it in one line, which the traceback names.
    program = script("import time\nprint('ready', flush=True); time.sleep(1000)")
    job = start("-n", "3", "--shutdown-timeout", "1h", program)
    job.read_of_all("ready", 3)
    job.signal(signal.SIGINT)
    done = job.wait()
    assert done.err.count("Traceback") == 0 and done.err.count("0-2| KeyboardInterrupt (") == 1, done.err
    assert "Traceback" in done.log(1)
    assert {end.get("signal") for end in done.ends().values()} == {signal.SIGINT}


INTERRUPTED_IN_A_CREATION = """
import os, sys, time
import torch.distributed as dist
import tpurun

# Some wait for who makes the group, and he for them.
late = int(sys.argv[2])
is_late = int(os.environ["RANK"]) == late
try:
    if sys.argv[1] != "world":
        dist.init_process_group("tpu_dist")
    print("ready", flush=True)
    if is_late:
        time.sleep(1000)
    elif sys.argv[1] == "world":
        dist.init_process_group("tpu_dist")
    elif sys.argv[1] == "group":
        dist.new_group([0, 1, 2, 3])
    else:
        tpurun.shrink()
except KeyboardInterrupt:
    print("saved", flush=True)
"""


@pytest.mark.slice(3)
@pytest.mark.parametrize("options", [[], ["--spawn"], ["--hosts", "2"]], ids=["forked", "spawned", "hosts"])
@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("what", ["world", "group", "survivors"])
def test_ctrl_c_reaches_ranks_that_wait_for_a_group(start, script, what: str, late: int, options: list[str]):
    if (what, options) == ("world", ["--spawn"]):
        pytest.skip("torch waits until all have come to the store of rank 0, and nothing interrupts that")
    if (what, options) == ("survivors", ["--hosts", "2"]):
        pytest.skip("only groups on one host shrink")
    job = start(
        "-n", "4", *options, "--shutdown-timeout", "1h", script(INTERRUPTED_IN_A_CREATION), what, str(late)
    )
    job.read_of_all("ready", 4)
    job.signal(signal.SIGINT)
    done = job.wait()
    assert done.code == 128 + signal.SIGINT, done.err
    assert done.shown_by_rank() == {rank: ["ready", "saved"] for rank in range(4)}


def test_ctrl_c_is_not_lost_where_a_call_site_is_looked_up(run, script):
    """No code of Python runs there, in which it could be raised, from the first time on."""
    done = run(
        "-n",
        "1",
        script(
            "import sys\nfrom tpurun import _C\nseen = []\n"
            "sys.setprofile(lambda frame, event, what: seen.append((event, frame.f_code.co_filename)))\n"
            "site = _C.call_site()\nsys.setprofile(None)\n"
            "print(site, [file for event, file in seen if event == 'call'])\n"
        ),
    )
    assert done.code == 0, done.err
    assert re.fullmatch(r"program.py:5 \[\]\n", done.log(0)), done.log(0)


MANY = 256


def test_ctrl_c_is_answered_while_ranks_are_started(start, script):
    """Those that are just being forked get it, too, and the rest never is."""
    program = script("import signal\nprint('ready', flush=True)\nwhile True: signal.pause()")
    job = start("-n", str(MANY), "--shutdown-timeout", "1h", program)
    job.read_until("ready")
    job.signal(signal.SIGINT)
    done = job.wait()
    assert done.code == 128 + signal.SIGINT, done.err
    assert 0 < sum(event["event"] == "rank started" for event in done.events) < MANY


def test_ranks_that_had_to_be_killed_are_named(start, script):
    job = start("-n", "1", "--shutdown-timeout", "300ms", script(SLOW_TO_GO))
    job.read_until("ready")
    job.signal(signal.SIGTERM)
    done = job.wait()
    assert "tpurun: killed after 0.3 s (--shutdown-timeout): ranks 0, which had not ended" in done.err
    assert "1 ranks killed after 0.3 s (--shutdown-timeout), run" in done.err


INTERRUPTED_IN_A_COLLECTIVE = """
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group("tpu_dist")
try:
    print("ready", flush=True)
    if dist.get_rank() == 0:
        time.sleep(1000)
    work = dist.all_reduce(torch.ones(8), async_op=sys.argv[1] == "wait")
    work.wait()
except KeyboardInterrupt:
    print("saved", flush=True)
    sys.exit(0)
except Exception as error:
    print("instead", type(error).__name__, flush=True)
    raise
"""


@pytest.mark.parametrize("how", ["post", "wait"])
def test_ctrl_c_reaches_ranks_that_wait_in_a_collective(start, script, how: str):
    """All end at once. Where a rank has left before another one hears of it, that may see its loss."""
    job = start("-n", "3", "--shutdown-timeout", "1h", script(INTERRUPTED_IN_A_COLLECTIVE), how)
    job.read_of_all("ready", 3)
    job.signal(signal.SIGINT)
    done = job.wait()
    assert done.code == 128 + signal.SIGINT, done.err
    ends = [shown[-1] for _, shown in sorted(done.shown_by_rank().items())]
    assert len(ends) == 3 and "saved" in ends, done.out
    assert {*ends} <= {"saved", "instead RankLostError", "instead AbortedError"}, done.out
