"""The settings say what is measured, and how long."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tpurun.bench import SHARED_OUT

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
PARTS = ("collectives", "mpi", "steps", "start", "waiting", "overlap", "floors")
SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
QUICK_SIZES = (8, 4 << 10)
# The numbers of ranks of each part, unless others are asked for.
RANKS = {
    "collectives": (2, 4, 8, 16, 64),
    "mpi": (2, 4, 8, 16, 64),
    "steps": (2, 8),
    "start": (2, 4, 8, 64),
    "waiting": (8, 64),
    "overlap": (2, 8),
    "floors": (8, 64),
}
ITEM_BYTES = 4  # of float32, which everything is measured with

# Buffers of both backends, expected results, and what the transports stage.
COPIES = 6
MEMORY_SHARE = 0.5


@dataclass(frozen=True)
class Settings:
    """Units are in the names; `ranks` is None where each part takes its own."""

    sizes: tuple[int, ...] = SIZES
    collectives: tuple[str, ...] = COLLECTIVES
    ranks: tuple[int, ...] | None = None
    seconds: float = 1.0
    """For each row and backend."""
    is_quick: bool = False

    def ranks_of(self, part: str) -> tuple[int, ...]:
        return self.ranks or ((2,) if self.is_quick else RANKS[part])

    def turns(self, usual: int) -> int:
        """How often things that are measured in turn have theirs."""
        return 2 if self.is_quick else usual

    def sizes_of(self, collective: str, ranks: int) -> dict[int, int]:
        """The size asked for, by the one that is measured: the same whole elements for each rank."""
        if collective == "barrier":
            return {0: self.sizes[0]}
        share = ITEM_BYTES * (ranks if collective in SHARED_OUT else 1)
        sizes: dict[int, int] = {}
        for asked in sorted(self.sizes):
            sizes.setdefault(max(1, asked // share) * share, asked)
        return sizes


def needed_bytes(ranks: int, size: int) -> int:
    """The memory that all ranks together take to measure a collective of that many bytes."""
    return ranks * size * COPIES


def bearable_bytes() -> int:
    """The memory of this machine that a measurement may take."""
    return int(memory_bytes() * MEMORY_SHARE)


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
