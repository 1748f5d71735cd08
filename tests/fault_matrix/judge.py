"""Compares what the ranks of a cell saw with what had to happen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .cells import Cell
from .oracle import LOST, MEANINGLESS, MISMATCH, NONE, TIMEOUT, Expected, expected
from .seen import Seen

NS = 1e9


@dataclass(frozen=True)
class Judged:
    """A cell, what had to happen, what did, and what is wrong about it."""

    cell: Cell
    expected: Expected
    kind: str
    seconds: float | None
    """Until the last rank had the verdict; None where there is none to wait for."""
    problems: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return not self.problems


def judge(
    cell: Cell, guilty_rank: int, seen: Sequence[Seen], report: str | None, patience: float = 1.0
) -> Judged:
    """`seen` by all ranks that wrote anything; `report` is the launcher's, where the job ended with one.

    Limits of time are stretched by `patience`, for a machine that others use, too.
    """
    wanted = expected(cell)
    if wanted.kind == MEANINGLESS:
        return Judged(cell, wanted, MEANINGLESS, None)
    survivors = [one for one in seen if one.is_over]
    kinds = sorted({one.kind for one in survivors})
    took = seconds(cell, wanted, seen)
    problems = [
        *problems_of_presence(cell, survivors),
        *problems_of_kind(wanted, survivors),
        *problems_of_text(cell, wanted, guilty_rank, survivors),
        *[f"rank {one.rank}: {one.tensors}" for one in survivors if one.tensors],
        *[
            f"rank {one.rank}, in a group without the guilty rank: {one.others}"
            for one in survivors
            if one.others
        ],
        *problems_of_report(cell, guilty_rank, report),
    ]
    if took is not None and took > wanted.limit_s * patience and not problems:
        problems.append(f"took {took:.3f} s, expected at most {wanted.limit_s * patience:.3f} s")
    return Judged(cell, wanted, " and ".join(kinds) or "nothing", took, problems)


def problems_of_presence(cell: Cell, survivors: Sequence[Seen]) -> list[str]:
    wanted = cell.ranks - cell.is_fatal
    if len(survivors) == wanted:
        return []
    return [f"{len(survivors)} of {wanted} ranks came to an end"]


def problems_of_kind(wanted: Expected, survivors: Sequence[Seen]) -> list[str]:
    wrong = [one for one in survivors if one.kind != wanted.kind]
    if not wrong:
        return []
    first = wrong[0]
    said = f": {first.text.splitlines()[0]}" if first.text else ""
    return [
        f"expected {wanted.kind} on all ranks, got {first.kind} on {len(wrong)} of {len(survivors)}{said}"
    ]


def problems_of_text(cell: Cell, wanted: Expected, guilty_rank: int, survivors: Sequence[Seen]) -> list[str]:
    texts = {one.text for one in survivors if one.text}
    problems = []
    if len(texts) > 1:
        problems.append(f"{len(texts)} different texts: " + " | ".join(sorted(texts)[:2]))
    if wanted.kind != NONE:
        for one in survivors[:1]:
            named = named_by(one)
            # If two ranks differ, nobody can say which one is right.
            is_tie = wanted.kind == MISMATCH and (cell.ranks == 2 or cell.op == "send_recv")
            if guilty_rank not in named:
                problems.append(f"rank {guilty_rank} is not named in {one.text!r}")
            elif cell.is_fatal and not re.search(SAID[cell.fault], one.text):
                problems.append(f"expected {SAID[cell.fault]!r} in {one.text!r}")
            elif wanted.kind in (MISMATCH, LOST) and len(named) > 1 and not is_tie:
                problems.append(f"ranks {named} are blamed, expected only {guilty_rank}: {one.text!r}")
    return problems


def named_by(seen: Seen) -> list[int]:
    """Whom the error blames: as it says itself, else those in the smallest group of its text."""
    if seen.names:
        return seen.names
    groups = [ranks_in(match[1]) for match in re.finditer(r"\branks? ([0-9][0-9,-]*)", seen.text)]
    if not groups:
        return []
    smallest = min(map(len, groups))
    return sorted({rank for group in groups if len(group) == smallest for rank in group})


def ranks_in(label: str) -> list[int]:
    """Those of `0-3,7`."""
    spans = [span.split("-") for span in label.strip(",-").split(",")]
    return [rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)]


def problems_of_report(cell: Cell, guilty_rank: int, report: str | None) -> list[str]:
    if report is None:
        return []
    culprit = re.search(r"^  culprit +rank (\d+) ", report, re.MULTILINE)
    if culprit is None:
        return [f"the launcher's report names nobody: {report!r}"]
    if int(culprit[1]) != guilty_rank:
        return [f"the launcher blames rank {culprit[1]}, expected {guilty_rank}"]
    said = re.search(REPORTED[cell.fault], report)
    return [] if said else [f"the launcher's report does not say {REPORTED[cell.fault]!r}: {report!r}"]


# The survivors' text and the launcher's report both say this of the guilty rank.
SAID = {
    "raise": "ValueError: the guilty rank was told to raise this",
    "exit0_early": "finished|code 0",
    "sigkill": "SIGKILL",
    "sigsegv": "SIGSEGV",
    "sigstop": "SIGSTOP|stopped",
}
REPORTED = {
    "raise": "raised ValueError: the guilty rank was told to raise this",
    "exit0_early": "exited with code 0",
    "sigkill": r"was killed by SIGKILL",
    "sigsegv": r"was killed by SIGSEGV",
    "sigstop": r"stopped \(SIGSTOP\)",
}


def seconds(cell: Cell, wanted: Expected, seen: Sequence[Seen]) -> float | None:
    """From the fault being in force until the last rank has its verdict.

    A dead rank is a fault for each rank that needs it from when both are so: its death, that rank's wait. An
    absent one is from the deadline of the first to wait. A wrong message is one for each rank from when its
    receiver asks for it. Else the fault is complete when the last rank has come: only then do keys differ,
    or is a circle closed.
    """
    raised = [one for one in seen if one.is_over and one.kind != NONE]
    if not raised or wanted.kind == NONE:
        return None
    acted = max((one.acted_ns for one in seen if one.is_guilty), default=0)
    if wanted.kind == TIMEOUT:
        waiting = [one for one in raised if not one.is_guilty]
        if not waiting:
            return None
        deadline = min(one.entered_ns for one in waiting) + cell.timeout_s * NS
        return max(0.0, max(one.ended_ns for one in waiting) - deadline) / NS
    if wanted.kind == MISMATCH and cell.op == "send_recv":
        receiver = (cell.guilty + 1) % cell.ranks
        acted = max((one.entered_ns for one in seen if one.rank == receiver), default=0)
        return max(one.ended_ns - max(acted, one.entered_ns) for one in raised) / NS
    if cell.is_fatal:
        return max(one.ended_ns - max(acted, one.entered_ns) for one in raised) / NS
    in_force = max(acted, *(one.entered_ns for one in raised))
    return max(0, max(one.ended_ns for one in raised) - in_force) / NS
