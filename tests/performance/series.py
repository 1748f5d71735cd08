"""The rows of collectives, ordered: by collective, number of ranks, bytes, and who was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .job import Row
from .quantities import Spread

OURS = "tpu_dist"
NAMES = {"gloo": "Gloo"}
MEMORIES = ("staged", "mapped")
ORDER = (
    OURS,
    f"{OURS}, mapped",
    f"{OURS}, C",
    f"{OURS}, C, mapped",
    "Gloo",
    "Gloo, mapped",
    "Open MPI",
    "MPICH",
)


def series_of(row: Row) -> str:
    """Returns the name of what was measured. The series of ordinary tensors is called like the backend
    alone."""
    name = NAMES.get(row["backend"], row["backend"])
    memory = row.get("memory", MEMORIES[0])
    return name if memory == MEMORIES[0] else f"{name}, {memory}"


@dataclass(frozen=True)
class Table:
    """One collective: each case, (ranks, bytes), with what every series took for it."""

    series: tuple[str, ...]
    cases: dict[tuple[int, int], dict[str, list[Row]]]

    @staticmethod
    def of(collective: str, rows: Sequence[Row]) -> Table:
        mine = [row for row in rows if row.get("collective") == collective]
        cases: dict[tuple[int, int], dict[str, list[Row]]] = {}
        for row in sorted(mine, key=lambda row: (row["ranks"], row["bytes"])):
            cases.setdefault((row["ranks"], row["bytes"]), {}).setdefault(series_of(row), []).append(row)
        seen = {series_of(row) for row in mine}
        known = tuple(name for name in ORDER if name in seen)
        return Table(known + tuple(sorted(seen - set(known))), cases)

    def figure(self, case: tuple[int, int], series: str) -> Spread | None:
        """In seconds, over all turns."""
        rows = [row for row in self.cases[case].get(series, []) if "missing" not in row]
        if not rows:
            return None
        least, most = min(row["min_us"] for row in rows), max(row["max_us"] for row in rows)
        return Spread(Spread.of([row["time_us"] for row in rows]).median / 1e6, least / 1e6, most / 1e6)

    def missing(self, case: tuple[int, int], series: str) -> str:
        """Why there is no figure."""
        reasons = [row["missing"] for row in self.cases[case].get(series, []) if "missing" in row]
        return reasons[0] if reasons else ""


def collectives_of(rows: Sequence[Row]) -> list[str]:
    """In the order in which they were measured."""
    return list(dict.fromkeys(row["collective"] for row in rows if "collective" in row))
