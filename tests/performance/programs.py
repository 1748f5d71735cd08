"""The parts that are programs of ranks: each prints its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .job import TPURUN, Failed, Job, Late, Row
from .progress import Progress
from .settings import Settings

LIMIT_S = 600.0
QUICK_BLOCK_S = 0.05


@dataclass(frozen=True)
class Program:
    """A module of this package, and how it measures."""

    part: str
    module: str
    turns: int
    block_s: float

    def measured(self, settings: Settings, progress: Progress) -> Iterator[Row]:
        """Its rows on all numbers of ranks, and one with `missing` where it did not end well."""
        numbers = settings.ranks_of(self.part)
        progress.part(self.part, len(numbers))
        block_s = QUICK_BLOCK_S if settings.is_quick else self.block_s
        for ranks in numbers:
            progress.case(f"{ranks} ranks")
            command = [TPURUN, "-n", str(ranks), "-m", f"tests.performance.{self.module}"]
            command += ["--turns", str(settings.turns(self.turns)), "--block-s", str(block_s)]
            with Job(command) as job:
                try:
                    yield from job.rows(LIMIT_S)
                except Late:
                    yield {"ranks": ranks, "missing": f"over {LIMIT_S:.0f} s"}
                except Failed as failed:
                    yield {"ranks": ranks, "missing": str(failed)}


STEPS = Program("steps", "step", turns=7, block_s=2.0)
WAITING = Program("waiting", "waiting", turns=7, block_s=1.0)
OVERLAP = Program("overlap", "overlap", turns=9, block_s=0.5)
FLOORS = Program("floors", "floors", turns=9, block_s=0.5)
