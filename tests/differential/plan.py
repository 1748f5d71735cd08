"""A plan is what one job does. The plan and what the ranks say about it are files in a folder of the job's
own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import generate
from .program import Program


@dataclass(frozen=True)
class Item:
    """A program by its seed, and the steps of it that are kept; None for all."""

    seed: int
    kept: tuple[int, ...] | None = None

    def program(self) -> Program:
        return generate.program(self.seed).only(self.kept)


@dataclass(frozen=True)
class Plan:
    """The programs of one job, all of the same number of ranks."""

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
        plan = asdict(self) | {"folder": None, "items": [[one.seed, one.kept] for one in self.items]}
        self.path.write_text(json.dumps(plan))

    @staticmethod
    def read(path: Path) -> Plan:
        plan = json.loads(path.read_text()) | {"folder": path.parent}
        items = [Item(seed, None if kept is None else tuple(kept)) for seed, kept in plan.pop("items")]
        return Plan(items=items, **plan)

    @property
    def output(self) -> Path:
        """The file of what the ranks print."""
        return self.folder / "output"

    @property
    def limit_s(self) -> float:
        """The longest time of one program, which is more than any operation waits."""
        return self.timeout_s + 10

    def log(self, rank: int) -> Path:
        """The file of one rank, with a line for each program that it has come to the end of."""
        return self.folder / f"rank-{rank}.jsonl"

    def stack(self, rank: int) -> Path:
        """Where a rank is that did not come to the end in time."""
        return self.folder / f"rank-{rank}.stack"


@dataclass(frozen=True)
class Finding:
    """Something that is wrong."""

    rank: int | None
    """None where it is the job as a whole."""
    step: str
    """Empty where it is no step's."""
    what: str
    is_over: bool
    """The ranks could not go on."""

    def __str__(self) -> str:
        who = "the job" if self.rank is None else f"rank {self.rank}"
        what = " ".join(self.what.split())
        return f"{who}, step {self.step}: {what}" if self.step else f"{who}: {what}"


def findings(plan: Plan, rank: int) -> list[list[Finding]]:
    """By program, as far as the rank came."""
    path = plan.log(rank)
    lines = path.read_text().splitlines() if path.exists() else []
    return [[Finding(rank, *one) for one in json.loads(line)] for line in lines]
