"""The collectives of Open MPI and MPICH beside those of this backend, job after job in turn."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from .collectives import OURS, bench, fitting
from .job import ROOT, Failed, Job, Late, Row
from .progress import Progress
from .settings import Settings

TURNS = 3
# MPICH spins: with more ranks than cores one operation may take seconds.
LIMIT_S = 20.0
COMPILER_S = 120.0
VERSION_S = 30.0
BUILT = ROOT / ".cache" / "performance"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Mpi:
    """An implementation, as Debian calls its commands."""

    name: str
    suffix: str
    packages: str

    @cached_property
    def missing(self) -> str:
        """How to get it, if it is not here."""
        commands = [f"{command}.{self.suffix}" for command in ("mpicc", "mpirun")]
        return "" if all(map(shutil.which, commands)) else f"not measured (apt-get install {self.packages})"

    def version(self) -> str:
        """As its own command says."""
        command = [f"mpirun.{self.suffix}", "--version"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_S).stdout
        numbers = re.search(r"\d+(\.\d+)+", said)
        return numbers[0] if numbers else "of unknown version"

    def command(self, source: str, ranks: int, *arguments: str) -> list[str]:
        """Runs the program of that source on so many ranks."""
        words = [f"mpirun.{self.suffix}", "-n", str(ranks)]
        if self.suffix == "openmpi":
            words += ["--allow-run-as-root"] * (os.geteuid() == 0)
            words += ["--oversubscribe"] * (ranks > len(os.sched_getaffinity(0)))
        return [*words, str(self._built(source)), *arguments]

    def _built(self, source: str) -> Path:
        path, program = HERE / source, BUILT / f"{Path(source).stem}.{self.suffix}"
        if not program.exists() or program.stat().st_mtime < path.stat().st_mtime:
            BUILT.mkdir(parents=True, exist_ok=True)
            compiler = [f"mpicc.{self.suffix}", "-O2", "-Wall", "-Werror", "-o", program, path]
            subprocess.run(compiler, check=True, timeout=COMPILER_S)
        return program


OPEN_MPI = Mpi("Open MPI", "openmpi", "openmpi-bin libopenmpi-dev")
MPICH = Mpi("MPICH", "mpich", "mpich libmpich-dev")


def measured(settings: Settings, progress: Progress) -> Iterator[Row]:
    """A row for each turn, whose backend is this one or an implementation of MPI."""
    ranks = settings.ranks_of("mpi")
    progress.part("mpi", len(ranks) * len(settings.collectives))
    for mpi in (OPEN_MPI, MPICH):
        yield {
            "backend": mpi.name,
            **({"missing": mpi.missing} if mpi.missing else {"version": mpi.version()}),
        }
    for count in ranks:
        for collective in settings.collectives:
            progress.case(f"{collective} on {count} ranks")
            yield from _of_one(collective, count, settings, progress)


def _of_one(collective: str, ranks: int, settings: Settings, progress: Progress) -> Iterator[Row]:
    turns = settings.turns(TURNS)
    each = replace(settings, seconds=settings.seconds / turns)
    backends = [OURS, *(mpi.name for mpi in (OPEN_MPI, MPICH) if not mpi.missing)]
    sizes, missing = fitting(collective, ranks, settings)
    for backend in backends:
        for size, why in missing.items():
            yield _row(collective, ranks, size, backend) | {"missing": why}
    wanted = dict.fromkeys(backends, sizes)
    for turn in range(turns):
        for backend in backends:
            seen: set[int] = set()
            late = ""
            for row in _of_one_turn(backend, collective, ranks, wanted[backend], each):
                if "late" in row:
                    late = row["late"]
                else:
                    seen.add(row["bytes"])
                    yield row | {"backend": backend, "turn": turn}
            for size in wanted[backend]:
                if size not in seen:
                    yield _row(collective, ranks, size, backend) | {"missing": late}
            if late:
                progress.note(f"{collective} on {ranks} ranks of {backend}: {late}")
            # What took too long once is not tried again.
            wanted[backend] = {size: asked for size, asked in wanted[backend].items() if size in seen}


def _of_one_turn(
    backend: str, collective: str, ranks: int, sizes: dict[int, int], settings: Settings
) -> Iterator[Row]:
    """The rows, and one with `late` when it was ended."""
    if not sizes:
        return
    if backend == OURS:
        command = bench(collective, ranks, list(sizes.values()), settings.seconds)
    else:
        (mpi,) = (mpi for mpi in (OPEN_MPI, MPICH) if mpi.name == backend)
        arguments = [collective, str(settings.seconds), *map(str, sizes)]
        command = mpi.command("mpi_collectives.c", ranks, *arguments)
    with Job(command) as job:
        try:
            yield from job.rows(LIMIT_S)
        except Late:
            yield {"late": f"over {LIMIT_S:.0f} s"}
        except Failed as failed:
            yield {"late": str(failed)}


def _row(collective: str, ranks: int, size: int, backend: str) -> Row:
    return {"collective": collective, "bytes": size, "ranks": ranks, "backend": backend}
