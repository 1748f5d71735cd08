"""A plan is what one job does: cells, and the ranks in each. It is kept in a file for the ranks to read."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from .cells import Cell


@dataclass(frozen=True)
class Plan:
    """The cells of one job."""

    folder: Path
    """Where the plan lies and the ranks write."""
    backend: str
    cells: list[Cell]
    members: list[list[int]]
    """The ranks of each cell, by their numbers in the world."""
    world: int
    is_alone: bool
    """One fatal cell, at whose end the launcher stops the job."""
    timeout_s: float | None = None
    """Of all groups, instead of what each cell asks for."""

    @staticmethod
    def together(folder: Path, backend: str, cells: list[Cell], timeout_s: float | None = None) -> Plan:
        """Cells that all ranks survive, or a single one, all of the same number of ranks."""
        (ranks,) = {cell.ranks for cell in cells}
        members = [list(range(ranks)) for _ in cells]
        return Plan(folder, backend, cells, members, ranks, any(cell.is_fatal for cell in cells), timeout_s)

    @staticmethod
    def with_spares(folder: Path, backend: str, cells: list[Cell]) -> Plan:
        """Fatal cells of the same number of ranks: each has a guilty rank of its own, which waits for its
        turn."""
        (ranks,) = {cell.ranks for cell in cells}
        innocent = list(range(ranks - 1))
        members = []
        for index, cell in enumerate(cells):
            spare = len(innocent) + index
            members.append([*innocent[: cell.guilty], spare, *innocent[cell.guilty :]])
        return Plan(folder, backend, cells, members, len(innocent) + len(cells), False)

    def rest(self, start: int) -> Plan:
        """The cells from this one on, all of which the same ranks take part in."""
        folder = self.folder.with_name(f"{self.folder.name}+{start}")
        return replace(self, folder=folder, cells=self.cells[start:], members=self.members[start:])

    @property
    def has_spares(self) -> bool:
        """Fatal cells, each with a guilty rank of its own."""
        return not self.is_alone and any(cell.is_fatal for cell in self.cells)

    def guilty_ranks(self) -> list[int]:
        """All that are guilty in any cell."""
        return sorted({members[cell.guilty] for cell, members in zip(self.cells, self.members, strict=True)})

    @property
    def path(self) -> Path:
        return self.folder / "plan.json"

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        plan = {
            "backend": self.backend,
            "cells": [cell.name for cell in self.cells],
            "members": self.members,
            "world": self.world,
            "is_alone": self.is_alone,
            "timeout_s": self.timeout_s,
        }
        self.path.write_text(json.dumps(plan))

    @staticmethod
    def read(path: Path) -> Plan:
        plan = json.loads(path.read_text())
        cells = [Cell.parse(name) for name in plan.pop("cells")]
        return Plan(path.parent, cells=cells, **plan)
