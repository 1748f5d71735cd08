"""A rank writes what it saw of one cell as a line of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO


@dataclass
class Seen:
    """The record of what a rank saw of a cell. Times are of CLOCK_MONOTONIC, in nanoseconds."""

    cell: str
    rank: int
    is_guilty: bool
    acted_ns: int = 0
    """When it last began something that is no operation."""
    entered_ns: int = 0
    """When it last began to post or to wait."""
    ended_ns: int = 0
    kind: str = "none"
    text: str = ""
    names: list[int] = field(default_factory=list)
    tensors: str = ""
    others: str = ""
    is_over: bool = False


def write(seen: Seen, file: TextIO) -> None:
    file.write(json.dumps(vars(seen)) + "\n")


def read(folder: Path) -> Iterator[Seen]:
    """Returns what each rank has written last about each cell."""
    for path in folder.glob("rank-*.jsonl"):
        by_cell: dict[str, Seen] = {}
        # The last line of a rank that was killed may be torn.
        for line in path.read_text().split("\n")[:-1]:
            one = Seen(**json.loads(line))
            by_cell[one.cell] = one
        yield from by_cell.values()
