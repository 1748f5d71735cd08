"""Another backend is given the same faults, and is judged by what its ranks learn and not by names of
ours."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from . import forked
from .cells import PATIENT_S, SHORT_S, Cell
from .judge import named_by
from .oracle import MEANINGLESS, NONE, expected
from .seen import Seen, read

RIGHT = "right"
SILENT = "silent"
TIMED_OUT = "timeout"
NAMELESS = "nameless"
CRASHED = "crash"
ALARM = "false alarm"
UNTESTED = "untested"

MEANINGS = {
    RIGHT: "completes where it should, or names the guilty rank on every innocent one before the timeout",
    SILENT: "no rank learns anything: operations that do not fit together complete",
    TIMED_OUT: "some rank learns nothing until the timeout of its group",
    NAMELESS: "raises before the timeout, and does not name the guilty rank on every rank",
    CRASHED: "an innocent rank dies without an exception",
    ALARM: "raises where everything was in order",
    UNTESTED: "its groups did not come about",
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell."""

    cell: Cell
    what: str
    text: str = ""


def run(cells: Iterable[Cell], backend: str, progress: Callable[[Outcome], None]) -> list[Outcome]:
    """All cells that have a meaning, in groups whose timeout is short."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="tpurun-matrix-") as folder:
        meaningful = [cell for cell in cells if expected(cell).kind != MEANINGLESS]
        for plan in forked.run(meaningful, Path(folder), backend, timeout_s):
            (cell,) = plan.cells
            outcomes.append(outcome(cell, list(read(plan.folder))))
            progress(outcomes[-1])
    return outcomes


def timeout_s(cell: Cell) -> float:
    """Short where something is wrong: most of these faults show in nothing but the timeout."""
    return PATIENT_S if expected(cell).kind == NONE else SHORT_S


def outcome(cell: Cell, seen: list[Seen]) -> Outcome:
    over = [one for one in seen if one.is_over and not one.is_guilty]
    text = next((one.text for one in over if one.text), "")
    if len(seen) < cell.ranks:
        return Outcome(cell, UNTESTED)
    return Outcome(cell, classify(cell, over), text)


def classify(cell: Cell, innocent: list[Seen]) -> str:
    """`innocent` are the ranks that came to an end."""
    if len(innocent) < cell.ranks - 1:
        return CRASHED
    raised = [one for one in innocent if one.kind != NONE]
    if expected(cell).kind == NONE:
        if raised:
            return ALARM
        return SILENT if any(one.tensors for one in innocent) else RIGHT
    if not raised:
        return SILENT
    if any(one.ended_ns - one.entered_ns > 0.9e9 * SHORT_S for one in raised):
        return TIMED_OUT
    is_named = len(raised) == len(innocent) and all(cell.guilty in named_by(one) for one in raised)
    return RIGHT if is_named else NAMELESS
