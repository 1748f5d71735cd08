"""``python -m tests.performance.many_ranks``: what many ranks of one host cost, from the start to Ctrl-C.

Every size runs some times, all sizes in turn; what is shown are medians, with the least and the most.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..fault_matrix.table import table
from .memory import available_mib

SIZES = (64, 128, 256, 512)
SAMPLE_S = 0.05
# Memory that grows by less than this in so long is as much as it will be.
SETTLED_MIB = 4
SETTLED_S = 2
# On a machine on which others come and go it never settles.
MOST_S = 10
GROUPS = 5
PROGRAM = f"""
import time
import torch
import torch.distributed as dist

dist.init_process_group("tpu_dist")
dist.all_reduce(torch.ones(8))
dist.barrier()
is_first = dist.get_rank() == 0
if is_first:
    print("first", time.time(), flush=True)
ranks, took = list(range(dist.get_world_size())), []
for _ in range({GROUPS}):
    dist.barrier()
    began = time.perf_counter()
    dist.barrier(group := dist.new_group(ranks))
    took.append(time.perf_counter() - began)
    dist.destroy_process_group(group)
if is_first:
    print("groups", *took, flush=True)
dist.barrier()
if is_first:
    print("ready", flush=True)
# Until Ctrl-C.
time.sleep(600)
"""


@dataclass(frozen=True)
class Run:
    """Seconds, and MiB."""

    first: float
    groups: list[float]
    memory: float
    answered: float
    stopped: float


def settled_mib() -> float:
    """Returns the memory that is available once it no longer grows, because the memory of the job before is
    freed little by little."""
    most, since = available_mib(), time.monotonic()
    end = since + MOST_S
    while time.monotonic() < min(since + SETTLED_S, end):
        time.sleep(SAMPLE_S)
        if (now := available_mib()) > most + SETTLED_MIB:
            most, since = now, time.monotonic()
    return most


def run(ranks: int) -> Run:
    """One job, which Ctrl-C ends."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        before, least, has_ended = settled_mib(), [float("inf")], threading.Event()

        def sample() -> None:
            while not has_ended.wait(SAMPLE_S):
                least[0] = min(least[0], available_mib())

        sampler = threading.Thread(target=sample)
        sampler.start()
        began = time.time()
        job = subprocess.Popen(
            [Path(sys.executable).with_name("tpurun"), "-n", str(ranks), program],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        answers: list[float] = []

        def listen() -> None:
            answers.extend(time.time() for line in job.stderr if ": stopping " in line)

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            told = {}
            for line in job.stdout:
                what, *numbers = line.partition("| ")[2].split()
                told[what] = [float(number) for number in numbers]
                if what == "ready":
                    break
            asked = time.time()
            os.killpg(job.pid, signal.SIGINT)
            job.stdout.read()
            job.wait()
            stopped = time.time() - asked
        finally:
            has_ended.set()
            sampler.join()
            job.kill()
            job.wait()
            listener.join()
    return Run(told["first"][0] - began, told["groups"], before - least[0], answers[0] - asked, stopped)


def median(values: Iterable[float], unit: str, digits: int) -> str:
    values = list(values)
    shown = [f"{value:,.{digits}f} {unit}" for value in (statistics.median(values), min(values), max(values))]
    return "{} ({} to {})".format(*shown)


def page(runs: dict[int, list[Run]], command: str) -> str:
    """Returns the page that is written into docs/."""
    rows = [
        (
            str(ranks),
            median((run.first for run in own), "s", 1),
            median((run.memory / 1024 for run in own), "GiB", 2),
            median((took for run in own for took in run.groups), "s", 3),
            median((run.answered for run in own), "s", 2),
            median((run.stopped for run in own), "s", 2),
        )
        for ranks, own in runs.items()
    ]
    head = (
        "ranks",
        "to the first all-reduce",
        "memory",
        "a group of all ranks",
        "Ctrl-C is answered",
        "all have ended",
    )
    times = len(next(iter(runs.values())))
    return f"""# Many ranks on one host

Made by `{command}` on {os.cpu_count()} cores: {times} jobs of each size,
in turn; medians, with the least and the most.

{table(head, rows)}

- **to the first all-reduce**: from the command until rank 0 has the result of an all-reduce and a barrier.
- **memory**: by how much the machine's available memory fell at the most, while the ranks ended, too;
  sampled every {1000 * SAMPLE_S:.0f} ms. Free pages that the kernel keeps for each CPU count as available.
- **a group of all ranks**: `dist.new_group` and a barrier in it, on rank 0; {GROUPS} in each job.
- **Ctrl-C is answered**: from SIGINT, while every rank sleeps, until the launcher says what happens now;
  **all have ended**: until it ends itself. Each rank raises `KeyboardInterrupt`, and ends as an
  interpreter does.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.performance.many_ranks", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page into this file")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="N", help=f"default {SIZES}")
    parser.add_argument("--jobs", type=int, default=3, metavar="N", help="of each size (default 3)")
    options = parser.parse_args(arguments)
    runs: dict[int, list[Run]] = {ranks: [] for ranks in options.sizes}
    for number in range(options.jobs):
        for ranks, own in runs.items():
            own.append(run(ranks))
            print(f"{number + 1} of {options.jobs}, {ranks} ranks: {own[-1]}", flush=True)
    command = "python -m tests.performance.many_ranks " + " ".join(
        sys.argv[1:] if arguments is None else arguments
    )
    text = page(runs, command.rstrip())
    print(text)
    if options.out:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
