"""FSDP2: parameters in shards, on one mesh dimension and on two."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from .case import Case, here, program
from .compare import ROUNDING, all_same, same
from .training import Batch, History, adam, batches, mlp, parameters, shares, train

# No dimension divides evenly among the ranks, and the last one leaves some ranks with nothing.
WIDTHS = (10, 33, 13, 3)


def data(**options: object) -> list[Batch]:
    return batches(WIDTHS[0], WIDTHS[-1], **options)


def sharded(model: nn.Sequential, **options: object) -> nn.Sequential:
    """Each layer is gathered for itself."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def ours(case: Case, model: nn.Sequential) -> History:
    return train(model, adam(model), shares(data(), case.rank, dist.get_world_size()))


def oracle() -> History:
    model = mlp(*WIDTHS)
    return train(model, adam(model), data())


def gathered(model: nn.Module) -> list[int]:
    """How many elements this rank holds of each layer's weight."""
    return [
        layer.weight.to_local().numel() if isinstance(layer.weight, DTensor) else layer.weight.numel()
        for layer in model
        if isinstance(layer, nn.Linear)
    ]


@program(ranks=4)
def plain(case: Case) -> None:
    model = sharded(mlp(*WIDTHS))
    sizes = [rows * columns for columns, rows in pairwise(WIDTHS)]
    held = torch.tensor(gathered(model))
    dist.all_reduce(held)
    same("elements of all ranks together", held.tolist(), sizes)
    ours(case, model).must_be(oracle())


@program(ranks=4, sizes=(4, 8, 16))
def kept_after_forward(case: Case) -> None:
    """`reshard_after_forward=False`: whole parameters stay until they have been used backward."""
    model = sharded(mlp(*WIDTHS), reshard_after_forward=False)
    held = gathered(model)
    model(data()[0][0])
    assert all(now > before for now, before in zip(gathered(model), held, strict=True)), "nothing was kept"
    model.reshard()
    for layer in model:
        if isinstance(layer, FSDPModule):
            layer.reshard()
    same("elements after a reshard", gathered(model), held)
    ours(case, model).must_be(oracle())


@program(ranks=4, sizes=(4, 8, 16))
def resharded_to_pairs(case: Case) -> None:
    """`reshard_after_forward=2`: after forward each pair of ranks holds all of it."""
    model = sharded(mlp(*WIDTHS), reshard_after_forward=2)
    model(data()[0][0])
    inner = gathered(model)[0]
    assert abs(inner - WIDTHS[0] * WIDTHS[1] / 2) <= WIDTHS[0], f"{inner} of {WIDTHS[0] * WIDTHS[1]} elements"
    model = sharded(mlp(*WIDTHS), reshard_after_forward=2)
    ours(case, model).must_be(oracle())


@program(ranks=4, sizes=(4,))
def sharded_by_columns(case: Case) -> None:
    """`shard_placement_fn`: weights by their second dimension, which all ranks must share evenly."""
    widths = (8, 16, 4)

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(1 if parameter.dim() == 2 else 0)

    model, alone = mlp(*widths), mlp(*widths)
    sharded(model, shard_placement_fn=placement)
    same("elements of a row", model[0].weight.to_local().shape, torch.Size((16, 2)))
    steps = batches(widths[0], widths[-1])
    train(model, adam(model), shares(steps, case.rank, dist.get_world_size())).must_be(
        train(alone, adam(alone), steps)
    )


@program(ranks=8)
def hybrid(case: Case) -> None:
    """HSDP: replicas of two rows, each in four shards."""
    mesh = init_device_mesh(here(), (2, 4), mesh_dim_names=("replicas", "shards"))
    model = sharded(mlp(*WIDTHS), mesh=mesh)
    assert model[0].weight.placements == (Replicate(), Shard(0)), model[0].weight.placements
    ours(case, model).must_be(oracle())


@program(ranks=4)
def offloaded(case: Case) -> None:
    """`CPUOffloadPolicy` where the parameters already are: nothing may change."""
    model = sharded(mlp(*WIDTHS), offload_policy=CPUOffloadPolicy(pin_memory=False))
    ours(case, model).must_be(oracle())


@program(ranks=4)
def made_on_meta(case: Case) -> None:
    """Parameters that never were whole anywhere: sharded on meta, then filled from rank 0's state dict."""
    with torch.device("meta"):
        model = sharded(mlp(*WIDTHS))
    model.to_empty(device=here())
    state = mlp(*WIDTHS).state_dict() if case.rank == 0 else {}
    set_model_state_dict(
        model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    ours(case, model).must_be(oracle())


@program(ranks=4)
def state_dict(case: Case) -> None:
    """Trained, saved whole, taken up by other objects, trained on: as one training without a break."""
    mine, options = shares(data(), case.rank, dist.get_world_size()), StateDictOptions(full_state_dict=True)
    model = sharded(mlp(*WIDTHS))
    optimizer = adam(model)
    first = train(model, optimizer, mine[:2])
    weights = get_model_state_dict(model, options=options)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    all_same("saved", weights, parameters(model), 0.0)

    again = sharded(mlp(*WIDTHS, seed=99))
    taken_up = adam(again)
    set_model_state_dict(again, weights, options=options)
    set_optimizer_state_dict(again, taken_up, moments, options=options)
    first.followed_by(train(again, taken_up, mine[2:])).must_be(oracle())


@program(ranks=4)
def clipped(case: Case) -> None:
    """The norm of all gradients is one over the shards of all ranks."""
    model, alone = sharded(mlp(*WIDTHS)), mlp(*WIDTHS)
    ((x, y),) = data(steps=1)
    ((mine, target),) = shares([(x, y)], case.rank, dist.get_world_size())
    nn.functional.mse_loss(model(mine), target).backward()
    nn.functional.mse_loss(alone(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05).full_tensor()
    same("norm", norm, nn.utils.clip_grad_norm_(alone.parameters(), 0.05), ROUNDING)
    for ours_, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        same("clipped gradient", ours_.grad.full_tensor(), wanted.grad, ROUNDING)
