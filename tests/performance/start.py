"""From the command to the first collective that is over: `tpurun`, torchrun and mpirun in turn."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from .collectives import GLOO, OURS
from .job import TORCHRUN, TPURUN, Failed, Job, Late, Row, processes
from .mpi import OPEN_MPI
from .progress import Progress
from .settings import Settings

TURNS = 5
LIMIT_S = 60.0
SAMPLED_S = 0.05
# Every rank of torchrun imports torch, which takes 3 to 5 s of CPU and up to 360 MB for each: with more ranks
# than these it has one turn, and enough time for it.
TORCHRUN_RANKS = 8
TORCHRUN_S_PER_RANK = 10.0
TORCHRUN_BYTES_PER_RANK = 320 << 20
SCRIPT = Path(__file__).with_name("first_barrier.py")


def measured(settings: Settings, progress: Progress) -> Iterator[Row]:
    """Rows of wall and CPU seconds, by turn, and of the peak of the memory in a run of its own."""
    numbers = settings.ranks_of("start")
    progress.part("start", len(numbers))
    for ranks in numbers:
        progress.case(f"{ranks} ranks")
        yield from _of_one(ranks, settings.turns(TURNS))


@dataclass(frozen=True)
class Launcher:
    """A command and the turns that it has; the memory is looked at in turn 0."""

    name: str
    command: list
    turns: range
    limit_s: float = LIMIT_S
    missing: str = ""


def _of_one(ranks: int, turns: int) -> Iterator[Row]:
    launchers = list(_launchers(ranks, range(turns + 1)))
    rows: dict[str, Row] = {one.name: {"launcher": one.name, "ranks": ranks} for one in launchers}
    for one in launchers:
        if one.missing:
            rows[one.name]["missing"] = one.missing
    for turn in range(turns + 1):
        for one in launchers:
            row = rows[one.name]
            if "missing" in row or turn not in one.turns:
                continue
            try:
                # Looking at the memory takes time of its own, hence not in the runs that are timed. The same
                # run fills the caches of files for the others.
                found = _memory(one) if turn == 0 else _times(one)
            except Late:
                row["missing"] = f"over {one.limit_s:.0f} s"
            except Failed as failed:
                row["missing"] = str(failed)
            else:
                for name, value in found.items():
                    row.setdefault(name, []).append(value)
    yield from rows.values()


def _launchers(ranks: int, turns: range) -> Iterator[Launcher]:
    yield Launcher("tpurun", [TPURUN, "-n", str(ranks), SCRIPT, OURS], turns)
    torchrun = Launcher(
        "torchrun, Gloo", [TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), SCRIPT, GLOO], turns
    )
    if ranks > TORCHRUN_RANKS:
        limit_s, missing = TORCHRUN_S_PER_RANK * ranks, _lacking_memory(ranks)
        torchrun = replace(torchrun, turns=range(1, 2), limit_s=limit_s, missing=missing)
    yield torchrun
    if not OPEN_MPI.missing:
        yield Launcher("mpirun, Open MPI, C", OPEN_MPI.command(("mpi_first_barrier.c",), ranks), turns)


def _lacking_memory(ranks: int) -> str:
    """Why torchrun can not start so many ranks; empty when it can."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    needed = ranks * TORCHRUN_BYTES_PER_RANK
    return f"not measured: needs {needed / 2**30:.0f} GiB" if needed > available else ""


def _times(launcher: Launcher) -> Row:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with Job(launcher.command) as job:
        (row,) = job.rows(launcher.limit_s)
        ended_s = time.monotonic()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "first_s": row["monotonic_s"] - job.began_s,
        "exit_s": ended_s - job.began_s,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def _memory(launcher: Launcher) -> Row:
    """The greatest sum of the memory of all processes; pages that some share count once."""
    peak = 0
    ended = threading.Event()

    def look() -> None:
        nonlocal peak
        while not ended.wait(SAMPLED_S):
            peak = max(peak, sum(map(_proportional_bytes, processes(job.name))))

    with Job(launcher.command) as job:
        watch = threading.Thread(target=look)
        watch.start()
        try:
            list(job.rows(launcher.limit_s))
        finally:
            ended.set()
            watch.join()
    return {"peak_bytes": peak}


def _proportional_bytes(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return 0
