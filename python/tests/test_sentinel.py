"""Without a launcher of ours the ranks themselves see that one of them died, at once."""

import os
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ranks

# From when the kernel tells of the death (taking a process with torch apart takes it tens of milliseconds) to
# the exception. Alone it takes a few milliseconds; where nobody watches, a waiter looks for the first time
# after a tenth of a second.
SOON_MS = 50
LIMIT_S = 120
RANKS = 4
VICTIM = 2
SCRIPT = f"""
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist

# torchrun ends the others as soon as it sees one die; first they are to say what they saw.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
folder = Path(sys.argv[1])
dist.init_process_group("tpu_dist")
rank = dist.get_rank()
x = torch.ones(4)
for _ in range(5):
    dist.all_reduce(x)
if rank == {VICTIM}:
    (folder / "pid").write_text(f"{{os.getpid()}}\\n")
    # Until the test says that all others wait.
    with open(folder / "die"):
        os.kill(os.getpid(), signal.SIGKILL)
(folder / f"waits-{{rank}}").touch()
try:
    dist.all_reduce(x)
except dist.DistBackendError as error:
    at = time.monotonic_ns()
    (folder / f"seen-{{rank}}").write_text(f"{{at}} {{type(error).__name__}} {{error}}")
    # Not to take the CPU from those that have not seen it yet.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    signal.pause()
"""


def until(done) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline, "the ranks did not come so far"
        os.sched_yield()


def a_rank_dies(folder: Path) -> list[float]:
    """How long after the death each survivor raised its error, in milliseconds."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    os.mkfifo(folder / "die")
    pid = folder / "pid"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*torchrun, script, folder], env=environment, stderr=subprocess.PIPE) as job:
        until(lambda: pid.exists() and pid.read_text().endswith("\n"))
        until(lambda: len(list(folder.glob("waits-*"))) == RANKS - 1)
        victim = os.pidfd_open(int(pid.read_text()))
        with open(folder / "die", "w"):
            select.select([victim], [], [], LIMIT_S)
        died = time.monotonic_ns()
        os.close(victim)
        _, errors = job.communicate(timeout=LIMIT_S)
    seen = [path.read_text().split(" ", 1) for path in sorted(folder.glob("seen-*"))]
    assert len(seen) == RANKS - 1, errors
    texts = {text for _, text in seen}
    assert len(texts) == 1, texts
    assert texts.pop().startswith(f"RankLostError rank {VICTIM} (")
    return [(int(at) - died) / 1e6 for at, _ in seen]


def test_torchrun(tmp_path: Path) -> None:
    took_ms = a_rank_dies(tmp_path)
    print(f"median {statistics.median(took_ms):.1f} ms, most {max(took_ms):.1f} ms: {took_ms}")
    assert statistics.median(took_ms) < SOON_MS, took_ms


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def forks() -> tuple[int, int]:
    x = torch.ones(2)
    dist.all_reduce(x)
    before = threads()
    if dist.get_rank() == 0:
        child = os.fork()
        if child == 0:
            dist.destroy_process_group()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(x)
    assert x.tolist() == [9.0, 9.0]
    return before, threads()


def test_a_forked_child_is_not_the_rank() -> None:
    """Its end is no loss, and what it destroys is its own copy."""
    for before, after in ranks.run(3, forks):
        assert before == after
