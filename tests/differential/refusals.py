"""Calls that can not work, with whatever the others do, raise on every rank, move nothing, and harm
nobody."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from .posted import Posted, Team, Tensors
from .program import Step


def refused(step: Step, team: Team, tensors: Tensors) -> Posted:
    """Raises AssertionError unless it was refused with the documented type."""
    call, wanted = FORMS[step.form]
    try:
        call(team, tensors)
    except wanted as error:
        assert str(error), "refused without a text"
        return Posted()
    raise AssertionError(f"expected {wanted.__name__} for a wrong {step.form}, got none")


def _op(team: Team, tensors: Tensors) -> None:
    dist.all_reduce(tensors["x0"], dist.ReduceOp.BXOR, team.group)


def _root(team: Team, tensors: Tensors) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = len(team.ranks)
    team.group.broadcast([tensors["x0"]], options).wait()


def _dtypes(team: Team, tensors: Tensors) -> None:
    outputs = [torch.empty(4, dtype=torch.int32) for _ in team.ranks]
    team.group.allgather([outputs], [tensors["x0"]]).wait()


def _room(team: Team, tensors: Tensors) -> None:
    output = torch.empty(4 * len(team.ranks) + 1)
    dist.all_gather_single(output, tensors["x0"], team.group)


def _count(team: Team, tensors: Tensors) -> None:
    outputs = [torch.empty(4) for _ in range(len(team.ranks) + 1)]
    dist.all_gather(outputs, tensors["x0"], team.group)


def _overlapping(team: Team, tensors: Tensors) -> None:
    """Elements of the output that are the same memory: nobody can say which of them remains."""
    dist.all_reduce(tensors["x0"][:1].expand(4), group=team.group)


FORMS: dict[str, tuple[Callable[[Team, Tensors], None], type[Exception]]] = {
    "op": (_op, ValueError),
    "root": (_root, ValueError),
    "dtypes": (_dtypes, TypeError),
    "room": (_room, ValueError),
    "count": (_count, ValueError),
    "overlapping": (_overlapping, ValueError),
}
