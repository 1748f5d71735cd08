"""Collectives of Python objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .contents import mixed
from .posted import Posted, Team, Tensors
from .program import Step


def objects(step: Step, team: Team, _tensors: Tensors) -> Posted:
    """Blocks; raises AssertionError where another object came out than went in."""
    FORMS[step.form](step, team)
    return Posted()


def thing(step: Step, place: int) -> Any:
    """What the rank in this place gives: of another size on each."""
    number = mixed(step.index, place)
    return {"place": place, "number": number, "text": "a" * (number % 5000), "none": [None] * place}


def _equal(given: Any, wanted: Any) -> None:
    assert given == wanted, f"expected {str(wanted)[:80]}, got {str(given)[:80]}"


def _all_gather(step: Step, team: Team) -> None:
    gathered = [None] * len(team.ranks)
    dist.all_gather_object(gathered, thing(step, team.place), team.group)
    _equal(gathered, [thing(step, place) for place in range(len(team.ranks))])


def _broadcast(step: Step, team: Team) -> None:
    given = [thing(step, team.place), team.place]
    dist.broadcast_object_list(given, team.ranks[step.root], team.group)
    _equal(given, [thing(step, step.root), step.root])


def _gather(step: Step, team: Team) -> None:
    is_root = team.place == step.root
    gathered = [None] * len(team.ranks) if is_root else None
    dist.gather_object(thing(step, team.place), gathered, team.ranks[step.root], team.group)
    if is_root:
        _equal(gathered, [thing(step, place) for place in range(len(team.ranks))])


def _scatter(step: Step, team: Team) -> None:
    given = [thing(step, place) for place in range(len(team.ranks))]
    gotten = [None]
    dist.scatter_object_list(
        gotten, given if team.place == step.root else None, team.ranks[step.root], team.group
    )
    _equal(gotten, [thing(step, team.place)])


def _messages(step: Step, team: Team) -> None:
    """From the root to the next rank."""
    target = (step.root + 1) % len(team.ranks)
    if team.place == step.root and team.place != target:
        dist.send_object_list([thing(step, step.root)], team.ranks[target], team.group)
    elif team.place == target != step.root:
        gotten = [None]
        dist.recv_object_list(gotten, team.ranks[step.root], team.group)
        _equal(gotten, [thing(step, step.root)])


FORMS: dict[str, Callable[[Step, Team], None]] = {
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "messages": _messages,
}
