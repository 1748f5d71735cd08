"""Messages between pairs of ranks."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from .contents import mixed
from .oracle import involves
from .order import shuffled
from .posted import Posted, Team, Tensors
from .program import Message, Step

# The tag of steps that receive from anybody. Their messages may not be taken by another such step.
ANY_SOURCE_TAG = 100


def messages(step: Step, team: Team, tensors: Tensors) -> Posted:
    """This rank's part of a step."""
    mine = [(index, one) for index, one in enumerate(step.messages) if involves(one, team.place)]
    if step.form in ("nonblocking", "batch"):
        # Those of one pair and tag in the order that both know.
        lanes = [(one.source, one.target, one.tag) for _, one in mine]
        mine = shuffled(mine, lanes, Random(mixed(step.index, team.place, len(mine))))
    return FORMS[step.form](step, team, [(one, tensors[f"message{index}"]) for index, one in mine])


Parts = list[tuple[Message, torch.Tensor]]


def _nonblocking(step: Step, team: Team, parts: Parts) -> Posted:
    works = []
    for message, tensor in parts:
        call, peer = _call(message, team)
        works.append(call(tensor, peer, group=team.group, tag=message.tag))
    return Posted(works)


def _call(message: Message, team: Team) -> tuple[Callable[..., Any], int]:
    if message.source == team.place:
        return dist.isend, team.ranks[message.target]
    return dist.irecv, team.ranks[message.source]


def _batch(step: Step, team: Team, parts: Parts) -> Posted:
    ops = []
    for message, tensor in parts:
        call, peer = _call(message, team)
        ops.append(dist.P2POp(call, tensor, peer, team.group, message.tag))
    return Posted(dist.batch_isend_irecv(ops) if ops else [])


def _blocking(step: Step, team: Team, parts: Parts) -> Posted:
    for message, tensor in parts:
        if message.source == team.place:
            dist.send(tensor, team.ranks[message.target], team.group, message.tag)
        else:
            source = dist.recv(tensor, team.ranks[message.source], team.group, message.tag)
            assert source == team.ranks[message.source], f"received from {source}"
    return Posted()


def _any_source(step: Step, team: Team, parts: Parts) -> Posted:
    tag = ANY_SOURCE_TAG + step.index
    works = []
    for message, tensor in parts:
        if message.source == team.place:
            works.append(dist.isend(tensor, team.ranks[message.target], group=team.group, tag=tag))
        else:
            works.append(dist.irecv(tensor, group=team.group, tag=tag))
    return Posted(works)


FORMS = {"nonblocking": _nonblocking, "batch": _batch, "blocking": _blocking, "any_source": _any_source}
