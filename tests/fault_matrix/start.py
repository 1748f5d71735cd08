"""Runs plans under `tpurun`: many cells to a job where all ranks, or all innocent ones, survive them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

from .cells import Cell
from .judge import Judged, judge
from .oracle import MEANINGLESS, expected
from .patience import Clock
from .plan import Plan
from .seen import read

TESTS = Path(__file__).parents[1]
TPURUN = Path(sys.executable).with_name("tpurun")
# Variables that a shell or another job may have set, and that a job would obey.
FOREIGN = re.compile(
    r"(OMP|OPENBLAS|MKL)_NUM_THREADS|TPURUN_.*|PET_.*|TORCHELASTIC_.*|RANK|WORLD_SIZE|MASTER_.*"
)
# Longest time without any cell coming to its end.
STUCK_S = 60.0
# Faults after which `--on-failure continue` goes on.
LOST = ("raise", "sigkill", "sigsegv", "sigstop")
# Guilty ranks that wait for their turns in one job.
SPARES = 35

Progress = Callable[[Judged], None]


def run(cells: Iterable[Cell], progress: Progress, *, backend: str = "tpu_dist") -> list[Judged]:
    """All cells; `progress` is told of each as it is judged."""
    judged = []
    with tempfile.TemporaryDirectory(prefix="tpurun-matrix-") as folder:
        plans = plans_of(cells, Path(folder), backend)
        for one in (one for plan in plans for one in outcomes(plan)):
            progress(one)
            judged.append(one)
    return judged


def plans_of(cells: Iterable[Cell], folder: Path, backend: str) -> Iterator[Plan]:
    """Cells of the same number of ranks, those together that one job survives; those without meaning are not
    run."""

    def kind(cell: Cell) -> tuple[int, str]:
        if not cell.is_fatal:
            return cell.ranks, "living"
        return cell.ranks, "lost" if cell.fault in LOST and goes_on_after_failures() else "alone"

    meaningful = (cell for cell in cells if expected(cell).kind != MEANINGLESS)
    for (ranks, how), some in groupby(sorted(meaningful, key=kind), key=kind):
        some = list(some)
        shares = {"living": len(some), "lost": SPARES, "alone": 1}
        for index, start in enumerate(range(0, len(some), shares[how])):
            together = Plan.with_spares if how == "lost" else Plan.together
            yield together(folder / f"{ranks}-{how}-{index}", backend, some[start : start + shares[how]])


@cache
def goes_on_after_failures() -> bool:
    """Whether the launcher can leave the survivors of a failure alone."""
    return "--on-failure" in subprocess.run([TPURUN, "--help"], capture_output=True, text=True).stdout


def outcomes(plan: Plan) -> Iterator[Judged]:
    """Runs one job and judges its cells; those that it did not come to are run in another one."""
    plan.write()
    clock = Clock()
    report = run_job(plan)
    patience = clock.patience()
    by_cell = {cell.name: [] for cell in plan.cells}
    for one in read(plan.folder):
        by_cell[one.cell].append(one)
    for index, (cell, members) in enumerate(zip(plan.cells, plan.members, strict=True)):
        if not by_cell[cell.name] and index > 0 and not plan.has_spares:
            yield from outcomes(plan.rest(index))
            return
        yield judge(
            cell, members[cell.guilty], by_cell[cell.name], report if plan.is_alone else None, patience
        )


def run_job(plan: Plan) -> str | None:
    """Runs the job to its end, or until it is stuck, and returns the launcher's report if it made one."""
    log = plan.folder / "run"
    go_on = ["--on-failure", "continue"] if plan.has_spares else []
    command = [TPURUN, "-n", plan.world, "--log-dir", log, *go_on, "-m", "fault_matrix.rank", plan.path]
    job = subprocess.Popen(
        [str(word) for word in command],
        cwd=TESTS,
        env={name: value for name, value in os.environ.items() if not FOREIGN.fullmatch(name)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=(plan.folder / "stderr").open("w"),
        text=True,
    )
    watch(job)
    report = log / "report.txt"
    return report.read_text() if report.exists() else None


def watch(job: subprocess.Popen[str]) -> None:
    """Reads what the job prints; ends it when nothing comes any more."""
    while True:
        watchdog = threading.Timer(STUCK_S, job.send_signal, [signal.SIGTERM])
        watchdog.start()
        line = job.stdout.readline()
        watchdog.cancel()
        if not line:
            break
    job.wait()
