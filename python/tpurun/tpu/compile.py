"""``torch.tpu.compile``: what became of a function that was compiled for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import counters as _dynamo_counters

from tpurun.compile import _backend, _counters

__all__ = ["Explanation", "Step", "counters", "explain"]

_RUNS = 4


@dataclass(frozen=True)
class Step:
    """Operations that one pass over memory runs, or one that ATen runs alone."""

    operations: tuple[str, ...]
    line: str
    """Of the user's program, as ``train.py:12``; empty where torch's tracing knows none."""
    microseconds: float
    """Of one run, on average."""


@dataclass(frozen=True)
class Explained:
    """One program."""

    fingerprint: str
    """16 digits, equal for equal streams of operations on every rank."""
    text: str
    """Its values and operations."""
    steps: tuple[Step, ...]
    workspace: int
    """Bytes that a run needs for values that nobody else sees."""

    def __str__(self) -> str:
        operations = sum(len(step.operations) for step in self.steps)
        tiled = sum(len(step.operations) for step in self.steps if len(step.operations) > 1)
        head = (
            f"program {self.fingerprint}: {operations} operations in {len(self.steps)} steps, "
            f"{tiled} of them together with others; workspace {self.workspace / 1024:.0f} KiB"
        )
        lines = [
            f"  {one.microseconds:9.1f} us  {' + '.join(one.operations)}  {one.line}" for one in self.steps
        ]
        return "\n".join([head, *lines])


@dataclass(frozen=True)
class Explanation:
    """The report on a function: its programs, in the order in which they were built."""

    programs: tuple[Explained, ...]
    graph_breaks: dict[str, int]
    """Why Dynamo split the function, and how often."""
    kept_eager: dict[str, int]
    """Why graphs run operation by operation, and how many."""

    def __str__(self) -> str:
        parts = [str(program) for program in self.programs]
        parts += [f"graph break, {count}x: {reason}" for reason, count in self.graph_breaks.items()]
        parts += [f"no program, {count}x: {reason}" for reason, count in self.kept_eager.items()]
        return "\n\n".join(parts) or "nothing was compiled"


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Compile a function anew, call it a few times, and say what it became and where its time goes.

    Backward passes are explained where the function runs them. Its side effects happen as often as it is
    called.
    """

    def backend(graph: Any, inputs: list[Any]) -> Any:
        return _backend.tpu(graph, inputs)

    before = dict(_dynamo_counters["graph_break"])
    compiled = torch.compile(function, backend=backend)
    with _counters.listening() as heard:
        compiled(*args, **kwargs)
        for program in heard.programs:
            program.time(True)
        for _ in range(_RUNS):
            compiled(*args, **kwargs)
    for program in heard.programs:
        program.time(False)
    breaks = _dynamo_counters["graph_break"].items()
    return Explanation(
        tuple(_explained(program) for program in heard.programs),
        {
            reason.partition("\n")[0]: count - before.get(reason, 0)
            for reason, count in breaks
            if count > before.get(reason, 0)
        },
        dict(heard.kept_eager),
    )


def _explained(program: Any) -> Explained:
    plan = program.plan()
    steps = tuple(
        Step(tuple(names), line, nanoseconds / 1000 / _RUNS)
        for kind, names, line, nanoseconds in plan["steps"]
        if kind in ("run", "tiles")
    )
    return Explained(f"{program.fingerprint():016x}", program.text(), steps, plan["workspace"])


def counters() -> dict[str, int]:
    """The programs that this process has built and run, and the graphs that it has none for.

    ``fused_*`` counts what ``DEFER_AND_FUSE`` has run: operations, those that shared a pass over memory with
    others, stretches of operations, plans that were made for them, and why each stretch ended.
    """
    return _counters.counters()
