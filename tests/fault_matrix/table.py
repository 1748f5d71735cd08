"""The matrix as a page of Markdown."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from .cells import FAULTS, MODES, OPS, SHORT_S, Cell
from .judge import Judged
from .oracle import LIMITS_S, MEANINGLESS, NONE, STOPPED_LIMIT_S, expected
from .other import MEANINGS, Outcome

HEAD = """\
# Fault matrix

One rank diverges, in every way and in every operation. What do all ranks learn, when, and is it right?"""
RIGHT = """\
A cell is right when every innocent rank, and the guilty one if it lives, raises the class that the table
says with the same text, the text names the guilty rank, no tensor of an operation that failed has changed
on any rank, every operation that completed has the right result, a group without the guilty rank works
afterwards, and the verdict came in time. The reasons for what is expected are in
`tests/fault_matrix/oracle.py`."""
TIMES = """\
Times are in milliseconds, median / longest over all operations, from the fault being in force (the guilty
act or the last rank's wait, whichever is later; of timeouts the group's deadline) until the last rank has
the exception. Where blocking and asynchronous operations differ, the blocking one comes first."""
SHORT_NAMES = {NONE: "completes", MEANINGLESS: "n/a"}


def page(judged: Sequence[Judged], others: Sequence[Outcome], command: str, took_s: float) -> str:
    """The whole page; `others` are of Gloo."""
    ranks = sorted({one.cell.ranks for one in judged})
    wrong = [one for one in judged if not one.is_right]
    right = len(judged) - len(wrong)
    made = f"Made by `{command}` in {took_s / 60:.0f} minutes."
    parts = [HEAD, made]
    if judged:
        parts += [
            f"{len(judged)} cells were run, {right} were right, {len(wrong)} wrong.",
            RIGHT,
            verdicts(judged, ranks),
            TIMES,
            by_class(judged, ranks),
            f"Expected at most, on a machine of one's own: {limits()}.",
        ]
    if wrong:
        parts += ["## Wrong", "\n".join(f"- `{one.cell.name}`: {one.problems[0]}" for one in wrong)]
    if others:
        parts += gloo(others)
    return "\n\n".join(parts) + "\n"


def verdicts(judged: Sequence[Judged], ranks: Sequence[int]) -> str:
    rows = []
    for fault in (fault for fault in FAULTS if any(one.cell.fault == fault for one in judged)):
        own = [one for one in judged if one.cell.fault == fault]
        kinds = [by_op(fault, op, ranks) for op in OPS]
        times = [spread(one.seconds for one in own if one.cell.ranks == count) for count in ranks]
        right = f"{sum(one.is_right for one in own)} of {len(own)}"
        rows.append([f"`{fault}`", *kinds, *times, right])
    return table(["fault", *OPS, *(f"n={count}" for count in ranks), "right"], rows)


def by_op(fault: str, op: str, ranks: Sequence[int]) -> str:
    """Returns what is expected. Where that depends on the number of ranks, it is the answer for the largest
    number."""
    names = []
    for mode in MODES:
        kind = expected(Cell(max(ranks), fault, op, mode)).kind
        names.append(SHORT_NAMES.get(kind, kind.removesuffix("Error").removeprefix("Collective")))
    return names[0] if len(set(names)) == 1 else " / ".join(names)


def by_class(judged: Sequence[Judged], ranks: Sequence[int]) -> str:
    kinds = [*LIMITS_S, NONE]
    classes: dict[str, list[Judged]] = {}
    for one in sorted(judged, key=lambda one: (kinds.index(one.expected.kind), is_stopped(one))):
        name = SHORT_NAMES.get(one.expected.kind, one.expected.kind)
        classes.setdefault(f"{name}, stopped" if is_stopped(one) else name, []).append(one)
    rows = []
    for name, own in classes.items():
        times = [spread(one.seconds for one in own if one.cell.ranks == count) for count in ranks]
        of_all = spread(one.seconds for one in own)
        rows.append([name, str(len(own)), str(sum(one.is_right for one in own)), *times, of_all])
    return table(["verdict", "cells", "right", *(f"n={count}" for count in ranks), "all"], rows)


def is_stopped(one: Judged) -> bool:
    return one.cell.fault == "sigstop"


def limits() -> str:
    named = [f"{kind} {seconds:g} s" for kind, seconds in LIMITS_S.items()]
    return ", ".join([*named, f"a stopped rank {STOPPED_LIMIT_S:g} s"])


def gloo(others: Sequence[Outcome]) -> list[str]:
    ranks = " and ".join(map(str, sorted({one.cell.ranks for one in others})))
    counts = Counter(one.what for one in others)
    met = [f"**{what}** ({counts[what]} cells): {text}" for what, text in MEANINGS.items() if counts[what]]
    rows = [
        [f"`{fault}`", *(cell_of(others, fault, op) for op in OPS)]
        for fault in FAULTS
        if any(one.cell.fault == fault for one in others)
    ]
    return [
        "## The same faults on Gloo",
        f"{len(others)} cells on {ranks} ranks without a launcher, in groups with a timeout of {SHORT_S:g} s "
        f"(the default is 30 minutes). {'; '.join(met)}.",
        table(["fault", *OPS], rows),
    ]


def cell_of(others: Sequence[Outcome], fault: str, op: str) -> str:
    counts = Counter(one.what for one in others if (one.cell.fault, one.cell.op) == (fault, op))
    if not counts:
        return "n/a"
    return ", ".join(what if len(counts) == 1 else f"{what} {count}" for what, count in counts.most_common())


def spread(seconds: Iterable[float | None]) -> str:
    known = [one * 1e3 for one in seconds if one is not None]
    return f"{statistics.median(known):.1f} / {max(known):.0f}" if known else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
