"""The oracle says what must happen in each cell, and why. Nothing here looks at what the code under test
does."""

from __future__ import annotations

from dataclasses import dataclass

from .cells import AWAY_S, Cell

# By the class that all ranks raise; what a rank sees of a fault that is none.
MISMATCH, LOST, DEADLOCK, TIMEOUT = (
    "CollectiveMismatchError",
    "RankLostError",
    "DeadlockError",
    "CollectiveTimeoutError",
)
NONE = "none"
MEANINGLESS = "n/a"

# Seconds from the fault being in force until the last rank has the verdict, on a machine of one's own. The
# seconds of a timeout begin at the group's own deadline.
LIMITS_S = {MISMATCH: 0.5, LOST: 0.5, DEADLOCK: 1.0, TIMEOUT: 0.5}
# A rank that is stopped may be continued a moment later, so it is watched for a second first.
STOPPED_LIMIT_S = 2.0


@dataclass(frozen=True)
class Expected:
    """The verdict on a cell."""

    kind: str
    why: str
    limit_s: float = 0.0


def expected(cell: Cell) -> Expected:
    """The right verdict."""
    if (why := meaningless(cell)) is not None:
        return Expected(MEANINGLESS, why)
    kind, why = of_messages(cell) if cell.op == "send_recv" else of_collectives(cell)
    limit_s = STOPPED_LIMIT_S if cell.fault == "sigstop" else LIMITS_S.get(kind, 0.0)
    return Expected(kind, why, limit_s)


def meaningless(cell: Cell) -> str | None:
    """Why a combination can not be."""
    if cell.fault == "wrong_reduce_op" and cell.op not in ("all_reduce", "reduce_scatter"):
        return f"{cell.op} reduces nothing"
    if cell.fault == "wrong_root" and cell.op not in ("broadcast", "send_recv"):
        return f"{cell.op} has no root"
    if cell.fault == "wrong_root" and cell.op == "send_recv" and cell.ranks == 2:
        return "of two ranks, one has only one other to send to"
    if cell.fault in ("wrong_dtype", "wrong_shape") and cell.op == "barrier":
        return "barrier carries no data"
    return None


def of_collectives(cell: Cell) -> tuple[str, str]:
    if cell.fault == "skip_equal":
        return DEADLOCK, "what it skipped shows only in the end: it waits in one group, the others in another"
    if cell.fault == "reversed_groups":
        if cell.mode == "async":
            return NONE, "each group is a lane of its own, so both operations complete"
        return DEADLOCK, "it waits in the second group for ranks that wait for it in the first"
    return of_any(cell) or (MISMATCH, "its operation meets a different one of the others at the same place")


def of_messages(cell: Cell) -> tuple[str, str]:
    """Messages match by sender, receiver and tag; small sends complete at once, receives wait."""
    is_async = cell.mode == "async"
    next_waits = "the next rank waits for its message, and it waits for the next rank in a collective"
    if cell.fault in ("wrong_dtype", "wrong_shape"):
        return MISMATCH, "the receiver finds another message than it asked for"
    if cell.fault == "wrong_op" and is_async:
        return MISMATCH, "its collective meets the next one of the others"
    if cell.fault == "swap" and is_async:
        return NONE, "messages and collectives are lanes of their own, so both complete"
    if cell.fault == "reversed_groups":
        if is_async or cell.ranks > 2:
            return NONE, "small messages are sent without waiting, so every receive completes"
        return DEADLOCK, "each of the two waits for the other's message in another group"
    if cell.fault == "extra_op":
        return DEADLOCK, "it waits for a second message from a rank that waits for it in a collective"
    if cell.fault in ("skip", "skip_equal", "swap", "wrong_op", "wrong_root"):
        return DEADLOCK, next_waits
    return of_any(cell) or (MEANINGLESS, "")


def of_any(cell: Cell) -> tuple[str, str] | None:
    """Faults that do not depend on the operation."""
    absent = f"it is alive and has not come for {AWAY_S} s, longer than the group waits"
    if cell.fault == "gil_hog" and cell.mode == "async":
        return NONE, "asynchronous operations make progress without the interpreter's lock"
    return {
        "infinite_loop": (TIMEOUT, absent),
        "gil_hog": (TIMEOUT, absent),
        "slow_x20": (NONE, "slow is not stuck"),
        "raise": (LOST, "its process ends with an exception"),
        "exit0_early": (DEADLOCK, "the others wait for a rank that has finished in good order"),
        "sigkill": (LOST, "its process is dead"),
        "sigsegv": (LOST, "its process is dead"),
        "sigstop": (LOST, "its process is stopped, and does not go on within a second"),
    }.get(cell.fault)
