"""What one job does: programs of the same number of ranks. Kept in a file, for the ranks to read."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from . import generate
from .program import Program

PLANTS = ("oracle", "operation", "result", "stray", "crash", "hang")
"""Errors that can be made on purpose, see `plants.py`."""


@dataclass(frozen=True)
class Item:
    """A program by its seed, and the steps of it that are kept; None for all."""

    seed: int
    kept: tuple[int, ...] | None = None

    def program(self) -> Program:
        return generate.program(self.seed).only(self.kept)


@dataclass(frozen=True)
class Plan:
    """The programs of one job."""

    folder: Path
    """Where the plan lies and the ranks write."""
    ranks: int
    items: Sequence[Item]
    timeout_s: float
    """Of all groups."""
    plant: str | None = None

    @property
    def path(self) -> Path:
        return self.folder / "plan.json"

    def write(self) -> None:
        self.folder.mkdir(parents=True)
        self.progress.write_bytes(bytes(8 * self.ranks))
        plan = asdict(self) | {"folder": None, "items": [[one.seed, one.kept] for one in self.items]}
        self.path.write_text(json.dumps(plan))

    @staticmethod
    def read(path: Path) -> Plan:
        plan = json.loads(path.read_text()) | {"folder": path.parent}
        items = [Item(seed, None if kept is None else tuple(kept)) for seed, kept in plan.pop("items")]
        return Plan(items=items, **plan)

    @property
    def limit_s(self) -> float:
        """Of one program: longer than any group waits."""
        return 2 * self.timeout_s + 30

    def stacks(self, rank: int) -> Path:
        """Where a rank that hangs writes in what."""
        return self.folder / f"rank-{rank}.stacks"

    @property
    def progress(self) -> Path:
        return self.folder / "progress"

    def positions(self) -> list[int]:
        """Which program each rank is in; as many as there are when it is done."""
        bits = self.progress.read_bytes()
        return [int.from_bytes(bits[8 * rank : 8 * rank + 8], "little") for rank in range(self.ranks)]

    @cached_property
    def _progress_fd(self) -> int:
        return os.open(self.progress, os.O_WRONLY | os.O_CLOEXEC)

    def reach(self, rank: int, position: int) -> None:
        os.pwrite(self._progress_fd, position.to_bytes(8, "little"), 8 * rank)


@dataclass(frozen=True)
class Report:
    """Something that one rank found wrong."""

    rank: int
    position: int
    step: str
    what: str
    is_over: bool
    """The ranks could not go on."""

    def write(self, plan: Plan) -> None:
        with open(plan.folder / f"rank-{self.rank}.jsonl", "a") as file:
            file.write(json.dumps(asdict(self)) + "\n")

    @staticmethod
    def read(plan: Plan) -> list[Report]:
        lines = [line for path in plan.folder.glob("rank-*.jsonl") for line in path.read_text().splitlines()]
        return [Report(**json.loads(line)) for line in lines]
