"""Runs many programs in few jobs, and says which of them failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .plan import Item, Plan, Report

TESTS = Path(__file__).parents[1]
TPURUN = Path(sys.executable).with_name("tpurun")
# What a shell or another job may have set, and what a job would obey.
FOREIGN = re.compile(
    r"(OMP|OPENBLAS|MKL)_NUM_THREADS|TPURUN_.*|PET_.*|TORCHELASTIC_.*|RANK|WORLD_SIZE|MASTER_.*"
)
LAUNCHERS = ("fork", "tpurun")
SHOWN = 4


@dataclass(frozen=True)
class Failure:
    """A program that did not do what it says."""

    item: Item
    reports: list[Report]

    def __str__(self) -> str:
        lines = [f"  rank {one.rank}, step {one.step}: {one.what}" for one in self.reports[:SHOWN]]
        more = len(self.reports) - SHOWN
        return "\n".join([*lines, *[f"  and {more} more"] * (more > 0)])


class Runner(Protocol):
    """Starts the ranks of a plan and returns when they have ended; says how when they had to be ended."""

    def run(self, plan: Plan) -> str: ...


def run(
    items: Sequence[Item],
    ranks: int,
    runner: Runner,
    folder: Path,
    *,
    timeout_s: float,
    plant: str | None = None,
    done: Callable[[int], None] = lambda count: None,
) -> Iterator[Failure]:
    """All these programs, of the same number of ranks; those behind one that ended its job in another job."""
    rest, jobs = list(items), 0
    while rest:
        plan = Plan(folder / f"{ranks}-{jobs}", ranks, rest, timeout_s, plant)
        plan.write()
        failures = list(failures_of(plan, runner.run(plan)))
        over = _end(plan, failures)
        done(over)
        yield from (failure for at, failure in failures if at < over)
        rest, jobs = rest[over:], jobs + 1


def failures_of(plan: Plan, ending: str) -> Iterator[tuple[int, Failure]]:
    """With their positions in the plan, in order."""
    reports = sorted(Report.read(plan), key=lambda one: (one.position, one.rank))
    if not any(one.is_over for one in reports):
        first = min(plan.positions())
        if first < len(plan.items):
            rank = plan.positions().index(first)
            reports.append(
                Report(rank, first, "", f"never came to an end: {_stack(plan, rank) or ending}", True)
            )
    over = min((one.position for one in reports if one.is_over), default=len(plan.items))
    for position in sorted({one.position for one in reports}):
        if position <= over:
            here = [one for one in reports if one.position == position]
            yield position, Failure(plan.items[position], here)


def _end(plan: Plan, failures: list[tuple[int, Failure]]) -> int:
    """How many programs of the plan are judged."""
    for at, failure in failures:
        if any(one.is_over for one in failure.reports):
            return at + 1
    return len(plan.items)


@contextmanager
def runner(launcher: str, folder: Path) -> Iterator[Runner]:
    if launcher == "tpurun":
        yield Launched()
        return
    forks = Forks(folder / "forks.log")
    try:
        yield forks
    finally:
        forks.close()


@contextmanager
def workplace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tpurun-differential-") as folder:
        yield Path(folder)


def environment() -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not FOREIGN.fullmatch(name)}
    return ours | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _stack(plan: Plan, rank: int) -> str:
    """What a rank was in when its time was over."""
    path = plan.stacks(rank)
    return " ".join(path.read_text().split())[:1000] if path.exists() else ""


class Launched:
    """Jobs of `tpurun`."""

    def run(self, plan: Plan) -> str:
        log = plan.folder / "run"
        command = [TPURUN, "-n", plan.ranks, "--log-dir", log, "-m", "differential.rank", plan.path]
        with (plan.folder / "output").open("w") as output:
            job = subprocess.run(
                [str(word) for word in command],
                cwd=TESTS,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        if job.returncode == 0:
            return ""
        report = plan.folder / "run" / "report.txt"
        text = report.read_text() if report.exists() else (plan.folder / "output").read_text()
        return " ".join(text.split())[:500]


class Forks:
    """Jobs of ranks that are forked from one process of this runner."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.server = subprocess.Popen(
            [sys.executable, "-m", "differential.forked"],
            cwd=TESTS,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )

    def run(self, plan: Plan) -> str:
        print(plan.path, file=self.server.stdin, flush=True)
        if not self.server.stdout.readline():
            raise RuntimeError(f"the process that forks the ranks has died: {_last_words(self.log)}")
        return _last_words(self.log)

    def close(self) -> None:
        self.server.stdin.close()
        self.server.wait()


def _last_words(log: Path) -> str:
    return " ".join(log.read_text().split())[-500:]
