"""Counts of programs that were built, and of graphs that were not."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tpurun import _C as _native


@dataclass
class Built:
    """Programs of one process, or of a stretch of it."""

    programs: list[Any] = field(default_factory=list)
    kept_eager: dict[str, int] = field(default_factory=dict)
    """Graphs that run operation by operation, by the reason."""


_kept_eager: dict[str, int] = {}
_all: weakref.WeakSet[Any] = weakref.WeakSet()
_count = 0
_split = 0
_listeners: list[Built] = []


@contextlib.contextmanager
def listening() -> Iterator[Built]:
    """Fills in what is compiled in a block."""
    heard = Built()
    _listeners.append(heard)
    try:
        yield heard
    finally:
        _listeners.remove(heard)


def built(program: Any) -> None:
    global _count
    _count += 1
    _all.add(program)
    for listener in _listeners:
        listener.programs.append(program)
    if _is_logged():
        print(f"tpurun: program {program.fingerprint():016x}\n{program.text()}", file=sys.stderr)


def kept_eager(graph: fx.GraphModule, reason: str) -> None:
    for counts in (_kept_eager, *(listener.kept_eager for listener in _listeners)):
        counts[reason] = counts.get(reason, 0) + 1
    if _kept_eager[reason] == 1:
        count = sum(node.op == "call_function" for node in graph.graph.nodes)
        print(
            f"tpurun: a compiled graph of {count} operations runs them one by one, because a program cannot "
            f"have {reason}",
            file=sys.stderr,
        )


def split(operations: int, programs: int, most: int) -> None:
    """A graph of so many operations has become several programs."""
    global _split
    _split += 1
    if _split == 1:
        print(
            f"tpurun: a compiled graph of {operations} operations runs as {programs} programs, one after the "
            f"other, because a program has {most} operations at most",
            file=sys.stderr,
        )


def counters() -> dict[str, int]:
    """The numbers that ``torch.tpu.compile.counters`` gives."""
    return {
        "programs": _count,
        "runs": sum(program.runs() for program in _all),
        "graphs_kept_eager": sum(_kept_eager.values()),
        "graphs_split": _split,
        **{f"fused_{name}": count for name, count in _native.fused_counts().items()},
    }


def _is_logged() -> bool:
    return "program" in os.environ.get("TPURUN_LOG", "").split(",")
