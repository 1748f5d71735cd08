"""From the command to the first collective that is over: `tpurun`, torchrun and mpirun in turn."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .collectives import GLOO, OURS
from .job import TORCHRUN, TPURUN, Failed, Job, Late, Row, processes
from .mpi import OPEN_MPI
from .progress import Progress
from .settings import Settings

TURNS = 5
LIMIT_S = 60.0
SAMPLED_S = 0.05
# Every rank of torchrun imports torch: 3 s of CPU and 360 MB for each.
TORCHRUN_RANKS = 8
SCRIPT = Path(__file__).with_name("first_barrier.py")


def measured(settings: Settings, progress: Progress) -> Iterator[Row]:
    """Rows of wall and CPU seconds, by turn, and of the peak of the memory in a run of its own."""
    numbers = settings.ranks_of("start")
    progress.part("start", len(numbers))
    for ranks in numbers:
        progress.case(f"{ranks} ranks")
        yield from _of_one(ranks, settings.turns(TURNS))


def _of_one(ranks: int, turns: int) -> Iterator[Row]:
    rows: dict[str, Row] = {}
    commands = dict(_commands(ranks))
    for turn in range(turns + 1):
        for launcher, command in commands.items():
            row = rows.setdefault(launcher, {"launcher": launcher, "ranks": ranks})
            if "missing" in row:
                continue
            try:
                # Looking at the memory takes time of its own, hence not in the runs that are timed. The same
                # run fills the caches of files for the others.
                found = _memory(command) if turn == 0 else _times(command)
            except Late:
                row["missing"] = f"over {LIMIT_S:.0f} s"
            except Failed as failed:
                row["missing"] = str(failed)
            else:
                for name, value in found.items():
                    row.setdefault(name, []).append(value)
    yield from rows.values()


def _commands(ranks: int) -> Iterator[tuple[str, list]]:
    yield "tpurun", [TPURUN, "-n", str(ranks), SCRIPT, OURS]
    if ranks <= TORCHRUN_RANKS:
        yield "torchrun, Gloo", [TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), SCRIPT, GLOO]
        if not OPEN_MPI.missing:
            yield "mpirun, Open MPI, C", OPEN_MPI.command("mpi_first_barrier.c", ranks)


def _times(command: list) -> Row:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with Job(command) as job:
        (row,) = job.rows(LIMIT_S)
        ended_s = time.monotonic()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "first_s": row["monotonic_s"] - job.began_s,
        "exit_s": ended_s - job.began_s,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def _memory(command: list) -> Row:
    """The greatest sum of the memory of all processes; pages that some share count once."""
    peak = 0
    ended = threading.Event()

    def look() -> None:
        nonlocal peak
        while not ended.wait(SAMPLED_S):
            peak = max(peak, sum(map(_proportional_bytes, processes(job.name))))

    with Job(command) as job:
        watch = threading.Thread(target=look)
        watch.start()
        try:
            list(job.rows(LIMIT_S))
        finally:
            ended.set()
            watch.join()
    return {"peak_bytes": peak}


def _proportional_bytes(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return 0
