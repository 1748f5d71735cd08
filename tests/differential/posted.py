"""A posted step leaves something to wait for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from .program import Step

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Team:
    """A process group on one of its ranks."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """By their numbers in the world."""
    place: int


@dataclass
class Posted:
    """The works and tensors that a step waits for."""

    works: list[Any] = field(default_factory=list)
    """Works, or futures where a form returns these."""
    returned: list[torch.Tensor] = field(default_factory=list)

    def wait(self, how: str) -> None:
        for work in self.works:
            WAITS[how if isinstance(work, dist.Work) else "work"](work)
        self.returned = [functional.wait_tensor(tensor) for tensor in self.returned]

    def sources(self) -> list[int]:
        """Returns the source of the message of each work, by its rank in the group."""
        return [work._source_rank() for work in self.works]


def _then(work: dist.Work) -> None:
    if work.get_future().then(lambda future: len(future.value())).wait() < 0:
        raise AssertionError("a future without a value")


def _poll(work: dist.Work) -> None:
    """Looks before it waits: who only looks would take the CPU from those it waits for."""
    if not work.is_completed():
        os.sched_yield()
    work.is_completed()
    work.wait()
    assert work.is_completed(), "waited for, and not completed"


WAITS: dict[str, Callable[[Any], Any]] = {
    "work": lambda work: work.wait(),
    "future": lambda work: work.get_future().wait(),
    "then": _then,
    "poll": _poll,
}


def reduce_op(step: Step) -> Any:
    if step.op == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(step.factor)
    return getattr(dist.ReduceOp, step.op)
