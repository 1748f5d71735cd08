"""The collectives of Open MPI and MPICH beside those of this backend, job after job in turn.

Those of MPI are measured in C, and so those of this backend are, too: what torch and Python add shows.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from .collectives import OURS, bench, fitting
from .job import ROOT, TPURUN, Failed, Job, Late, Row
from .progress import Progress
from .settings import Settings

TURNS = 3
# MPICH spins: with more ranks than cores one operation may take seconds.
LIMIT_S = 20.0
COMPILER_S = 120.0
FLAGS = ("-O2", "-Wall", "-Werror")
# The engine needs these libraries. They change nothing for the other programs.
LIBRARIES = ("-lpthread", "-ldl", "-lm")
VERSION_S = 30.0
BUILT = ROOT / ".cache" / "performance"
HERE = Path(__file__).parent
ENGINE_LIBRARY = ROOT / "target" / "release" / "libtpurun_runtime.a"
ENGINE_HEADERS = ROOT / "python" / "csrc" / "abi"
TIMING = ("timed_collectives.c", "timed_collectives.h")


def built(program: Path, compiler: Sequence[str | Path], sources: Sequence[Path]) -> Path:
    """Compiles a program if it is not there, or older than what it is made of."""
    made = program.stat().st_mtime if program.exists() else 0.0
    if any(source.stat().st_mtime > made for source in sources):
        BUILT.mkdir(parents=True, exist_ok=True)
        inputs = [source for source in sources if source.suffix != ".h"]
        subprocess.run([*compiler, "-o", program, *inputs, *LIBRARIES], check=True, timeout=COMPILER_S)
    return program


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

    def collectives(self, ranks: int, *arguments: str) -> list[str]:
        """Runs what times collectives on so many ranks."""
        return self.command(("mpi_collectives.c", *TIMING), ranks, *arguments)

    def command(self, sources: Sequence[str], ranks: int, *arguments: str) -> list[str]:
        """Runs the program of these sources, which is called like the first one, on so many ranks."""
        words = [f"mpirun.{self.suffix}", "-n", str(ranks)]
        if self.suffix == "openmpi":
            words += ["--allow-run-as-root"] * (os.geteuid() == 0)
            words += ["--oversubscribe"] * (ranks > len(os.sched_getaffinity(0)))
        program = BUILT / f"{Path(sources[0]).stem}.{self.suffix}"
        compiler = [f"mpicc.{self.suffix}", *FLAGS]
        return [*words, str(built(program, compiler, [HERE / name for name in sources])), *arguments]


@dataclass(frozen=True)
class Engine:
    """The engine of this backend, without torch and Python."""

    name: str = f"{OURS}, C"

    @cached_property
    def missing(self) -> str:
        """How to get it, if it is not here."""
        if not ENGINE_LIBRARY.exists():
            return "not measured (make build)"
        return "" if shutil.which("cc") else "not measured (it takes a C compiler, cc)"

    def version(self) -> str:
        return importlib.metadata.version("tpurun")

    def collectives(self, ranks: int, *arguments: str) -> list[str]:
        """Runs what times collectives on so many ranks."""
        sources = [HERE / "engine_collectives.c", *(HERE / name for name in TIMING)]
        sources += [ENGINE_HEADERS / "tpurun.h", ENGINE_LIBRARY]
        program = built(BUILT / "engine_collectives", ["cc", *FLAGS, f"-I{ENGINE_HEADERS}"], sources)
        return [str(TPURUN), "-n", str(ranks), "--no-python", str(program), *arguments]


OPEN_MPI = Mpi("Open MPI", "openmpi", "openmpi-bin libopenmpi-dev")
MPICH = Mpi("MPICH", "mpich", "mpich libmpich-dev")
ENGINE = Engine()
IN_C = (ENGINE, OPEN_MPI, MPICH)


def measured(settings: Settings, progress: Progress) -> Iterator[Row]:
    """A row for each turn, whose backend is this one, its engine alone, or an implementation of MPI."""
    ranks = settings.ranks_of("mpi")
    progress.part("mpi", len(ranks) * len(settings.collectives))
    for one in IN_C:
        yield {
            "backend": one.name,
            **({"missing": one.missing} if one.missing else {"version": one.version()}),
        }
    for count in ranks:
        for collective in settings.collectives:
            progress.case(f"{collective} on {count} ranks")
            yield from _of_one(collective, count, settings, progress)


def _of_one(collective: str, ranks: int, settings: Settings, progress: Progress) -> Iterator[Row]:
    turns = settings.turns(TURNS)
    each = replace(settings, seconds=settings.seconds / turns)
    backends = [OURS, *(one.name for one in IN_C if not one.missing)]
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
            # Sizes that took too long once are not tried again.
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
        (measured,) = (one for one in IN_C if one.name == backend)
        command = measured.collectives(ranks, collective, str(settings.seconds), *map(str, sizes))
    with Job(command) as job:
        try:
            yield from job.rows(LIMIT_S)
        except Late:
            yield {"late": f"over {LIMIT_S:.0f} s"}
        except Failed as failed:
            yield {"late": str(failed)}


def _row(collective: str, ranks: int, size: int, backend: str) -> Row:
    return {"collective": collective, "bytes": size, "ranks": ranks, "backend": backend}
