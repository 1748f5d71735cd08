"""Runs many programs in few jobs, and says which of them failed."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
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
LOOK_S = 0.5
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
        ending = runner.run(plan)
        failures = list(failures_of(plan, ending))
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
            reports.append(Report(plan.positions().index(first), first, "", ending or "a rank died", True))
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


class Watch:
    """Notices when no rank gets any further."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.limit_s = 2 * plan.timeout_s + 30
        self.seen: list[int] = []
        self.since = time.monotonic()

    def is_stuck(self) -> bool:
        now = self.plan.positions()
        if now != self.seen:
            self.seen, self.since = now, time.monotonic()
        return time.monotonic() - self.since > self.limit_s

    @property
    def ending(self) -> str:
        return f"no rank got any further for {self.limit_s:.0f} s"


class Launched:
    """Jobs of `tpurun`."""

    def run(self, plan: Plan) -> str:
        log = plan.folder / "run"
        command = [TPURUN, "-n", plan.ranks, "--log-dir", log, "-m", "differential.rank", plan.path]
        with (plan.folder / "output").open("w") as output:
            job = subprocess.Popen(
                [str(word) for word in command],
                cwd=TESTS,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            return self._wait(job, plan)

    def _wait(self, job: subprocess.Popen, plan: Plan) -> str:
        watch = Watch(plan)
        while True:
            try:
                job.wait(LOOK_S)
                break
            except subprocess.TimeoutExpired:
                if watch.is_stuck():
                    job.terminate()
                    job.wait()
                    return watch.ending
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
        pids = [int(word) for word in self.server.stdout.readline().split()]
        if not pids:
            raise RuntimeError(f"the process that forks the ranks has died: {self.log.read_text()[-2000:]}")
        watch, ending = Watch(plan), ""
        while not select.select([self.server.stdout], [], [], LOOK_S)[0]:
            if not ending and watch.is_stuck():
                ending = watch.ending
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
        self.server.stdout.readline()
        return ending or _last_words(self.log)

    def close(self) -> None:
        self.server.stdin.close()
        self.server.wait()


def _last_words(log: Path) -> str:
    return " ".join(log.read_text().split())[-500:]
