"""Posts steps on torch.distributed, in all its forms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from .messages import messages
from .posted import Posted, Team, Tensors, reduce_op
from .program import Step
from .refusals import refused


def several(tensors: Tensors, lead: str) -> list[torch.Tensor]:
    """Those named `lead0`, `lead1`, ..."""
    found = []
    while (tensor := tensors.get(f"{lead}{len(found)}")) is not None:
        found.append(tensor)
    return found


def post(step: Step, team: Team, tensors: Tensors) -> Posted:
    """Returns when a synchronous step is done, else at once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        work = CALLS[step.kind](step, team, tensors)
    if isinstance(work, Posted):
        return work
    return Posted([work] if work is not None else [])


def _returned(tensors: torch.Tensor | list[torch.Tensor]) -> Posted:
    return Posted(returned=tensors if isinstance(tensors, list) else [tensors])


def _all_reduce(step: Step, team: Team, tensors: Tensors) -> Any:
    if step.form == "functional":
        return _returned(functional.all_reduce(tensors["x0"], step.op.lower(), team.group))
    if step.form == "functional_in_place":
        name = team.group.group_name
        return _returned(torch.ops._c10d_functional.all_reduce_(tensors["x0"], step.op.lower(), name))
    return dist.all_reduce(tensors["x0"], reduce_op(step), team.group, step.is_async)


def _all_reduce_coalesced(step: Step, team: Team, tensors: Tensors) -> Any:
    given = several(tensors, "x")
    if step.form == "functional":
        return _returned(functional.all_reduce_coalesced(given, step.op.lower(), team.group))
    if step.form == "plain":
        return dist.all_reduce_coalesced(given, reduce_op(step), team.group, step.is_async)
    with _managed(step, team) as manager:
        for tensor in given:
            dist.all_reduce(tensor, reduce_op(step), team.group)
    return Posted(manager.works)


@contextmanager
def _managed(step: Step, team: Team) -> Iterator[Any]:
    with dist.distributed_c10d._coalescing_manager(team.group, async_ops=step.is_async) as manager:
        yield manager


def _broadcast(step: Step, team: Team, tensors: Tensors) -> Any:
    if step.form == "functional":
        return _returned(functional.broadcast(tensors["x0"], step.root, team.group))
    return dist.broadcast(tensors["x0"], group=team.group, group_src=step.root, async_op=step.is_async)


def _reduce(step: Step, team: Team, tensors: Tensors) -> Any:
    root = team.ranks[step.root]
    return dist.reduce(tensors["x0"], root, reduce_op(step), team.group, step.is_async)


def _all_gather(step: Step, team: Team, tensors: Tensors) -> Any:
    outputs = several(tensors, "out")
    source = tensors.get("in0", outputs[team.place])
    return dist.all_gather(outputs, source, team.group, step.is_async)


def _all_gather_lists(step: Step, team: Team, tensors: Tensors) -> Any:
    outputs = [several(tensors, f"out{place}.") for place in range(len(team.ranks))]
    return dist.all_gather_coalesced(outputs, several(tensors, "in"), team.group, step.is_async)


def _all_gather_single(step: Step, team: Team, tensors: Tensors) -> Any:
    if step.form == "functional":
        return _returned(functional.all_gather_single(tensors["in0"], 0, team.group))
    gather = dist.all_gather_single if step.form == "single" else dist.all_gather_into_tensor
    return gather(tensors["out0"], tensors["in0"], team.group, step.is_async)


def _all_gather_single_coalesced(step: Step, team: Team, tensors: Tensors) -> Any:
    inputs, outputs = several(tensors, "in"), several(tensors, "out")
    if step.form == "functional":
        return _returned(functional.all_gather_single_coalesced(inputs, team.group))
    with _managed(step, team) as manager:
        for output, source in zip(outputs, inputs, strict=True):
            dist.all_gather_single(output, source, team.group)
    return Posted(manager.works)


def _gather(step: Step, team: Team, tensors: Tensors) -> Any:
    outputs = several(tensors, "out") or None
    source = tensors["in0"] if "in0" in tensors else outputs[team.place]
    return dist.gather(source, outputs, group=team.group, async_op=step.is_async, dst=team.ranks[step.root])


def _gather_single(step: Step, team: Team, tensors: Tensors) -> Any:
    gather = dist.gather_single if step.form == "single" else dist.gather_into_tensor
    return gather(
        tensors["in0"],
        tensors.get("out0"),
        group=team.group,
        async_op=step.is_async,
        group_dst=step.root,
    )


def _scatter(step: Step, team: Team, tensors: Tensors) -> Any:
    inputs = several(tensors, "in") or None
    output = tensors["out0"] if "out0" in tensors else inputs[team.place]
    return dist.scatter(output, inputs, group=team.group, async_op=step.is_async, group_src=step.root)


def _reduce_scatter(step: Step, team: Team, tensors: Tensors) -> Any:
    inputs = several(tensors, "in")
    output = tensors.get("out0", inputs[team.place])
    return dist.reduce_scatter(output, inputs, reduce_op(step), team.group, step.is_async)


def _reduce_scatter_single(step: Step, team: Team, tensors: Tensors) -> Any:
    if step.form == "functional":
        return _returned(functional.reduce_scatter_single(tensors["in0"], step.op.lower(), 0, team.group))
    scatter = dist.reduce_scatter_single if step.form == "single" else dist.reduce_scatter_tensor
    return scatter(tensors["out0"], tensors["in0"], reduce_op(step), team.group, step.is_async)


def _reduce_scatter_single_coalesced(step: Step, team: Team, tensors: Tensors) -> Any:
    inputs, outputs = several(tensors, "in"), several(tensors, "out")
    if step.form == "functional":
        dims = [0] * len(inputs)
        return _returned(
            functional.reduce_scatter_single_coalesced(inputs, step.op.lower(), dims, team.group)
        )
    with _managed(step, team) as manager:
        for output, source in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_single(output, source, reduce_op(step), team.group)
    return Posted(manager.works)


def _all_to_all(step: Step, team: Team, tensors: Tensors) -> Any:
    outputs, inputs = several(tensors, "out"), several(tensors, "in")
    return dist.all_to_all(outputs, inputs, team.group, step.is_async)


def _all_to_all_single(step: Step, team: Team, tensors: Tensors) -> Any:
    places = range(len(team.ranks))
    sent = [step.rows[team.place * len(places) + to] for to in places]
    received = [step.rows[source * len(places) + team.place] for source in places]
    if len(set(step.rows)) == 1:
        sent = received = None
    if step.form == "functional":
        return _returned(functional.all_to_all_single(tensors["in0"], received, sent, team.group))
    return dist.all_to_all_single(tensors["out0"], tensors["in0"], received, sent, team.group, step.is_async)


def _barrier(step: Step, team: Team, tensors: Tensors) -> Any:
    if step.form == "monitored":
        return team.group.monitored_barrier()
    return dist.barrier(team.group, step.is_async)


CALLS: dict[str, Callable[[Step, Team, Tensors], Any]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_lists": _all_gather_lists,
    "all_gather_single": _all_gather_single,
    "all_gather_single_coalesced": _all_gather_single_coalesced,
    "gather": _gather,
    "gather_single": _gather_single,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_single_coalesced": _reduce_scatter_single_coalesced,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
    "messages": messages,
    "refused": refused,
}
