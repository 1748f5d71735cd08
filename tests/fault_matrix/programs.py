"""The ranks of a cell do the same list of steps, except for the guilty rank, which has its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .cells import FATAL, Cell


@dataclass(frozen=True)
class Call:
    """One operation on a group of the cell: "main" or "second", of the same ranks."""

    op: str
    group: str = "main"
    dtype: str = "float32"
    reduce_op: str = "SUM"
    root: int = 0
    scale: int = 1
    """How many times the usual number of elements."""
    ahead: int = 1
    """A message goes to the rank that is this far ahead, and one is received from the rank behind."""


@dataclass(frozen=True)
class Act:
    """Something that is no operation, by its name in `acts.py`."""

    name: str


@dataclass(frozen=True)
class Program:
    """Steps that are posted one after the other, then, when all have completed, a blocking barrier."""

    steps: tuple[Call | Act, ...]
    end: Call = Call("barrier")

    def groups(self) -> list[str]:
        """Those it uses, in an order that is the same on all ranks."""
        return sorted({step.group for step in (*self.steps, self.end) if isinstance(step, Call)})


def usual(cell: Cell) -> Program:
    """Returns the steps of every innocent rank."""
    op, then = Call(cell.op), Call(companion(cell.op))
    if cell.fault == "skip_equal":
        return Program((op, op), Call("barrier", "second"))
    if cell.fault == "reversed_groups":
        return Program((op, replace(op, group="second")))
    if cell.fault == "slow_x20":
        return Program((Act("compute"), op, Act("compute"), then))
    return Program((op, then))


def guilty(cell: Cell) -> Program:
    """Returns the steps of the guilty rank."""
    op, then = Call(cell.op), Call(companion(cell.op))
    others = usual(cell)
    wrong = {
        "wrong_op": Call(neither(cell.op)),
        "wrong_reduce_op": replace(op, reduce_op="MAX"),
        "wrong_dtype": replace(op, dtype="int32"),
        "wrong_shape": replace(op, scale=2),
        "wrong_root": replace(op, root=cell.guilty, ahead=2),
    }
    if cell.fault in wrong:
        return Program((wrong[cell.fault], then))
    if cell.fault == "gil_hog" and cell.mode == "async":
        return Program((op, then, Act("hold_gil")))
    steps = {
        "skip": (then,),
        "skip_equal": (op,),
        "swap": (then, op),
        "extra_op": (op, op, then),
        "reversed_groups": others.steps[::-1],
        "infinite_loop": (Act("loop"), op, then),
        "gil_hog": (Act("hold_gil"), op, then),
        "slow_x20": (Act("compute_x20"), op, Act("compute_x20"), then),
        **{fault: (Act(fault), op, then) for fault in FATAL},
    }
    return replace(others, steps=steps[cell.fault])


def companion(op: str) -> str:
    """The different operation that follows."""
    return "broadcast" if op == "all_reduce" else "all_reduce"


def neither(op: str) -> str:
    """An operation that is neither this one nor the one that follows."""
    return "reduce_scatter" if op == "all_gather" else "all_gather"
