"""FSDP2: what becomes of gradients. They are means over the ranks, or what a program asked for instead."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .case import Case, here, program
from .compare import ROUNDING, ROUNDING_F32, all_same, same
from .fsdp2 import WIDTHS, sharded
from .training import Batch, batches, gradients, mlp, mse, parameters, sgd, shares, step_beside


def data(dtype: torch.dtype = torch.float64, **options: object) -> list[Batch]:
    return batches(WIDTHS[0], WIDTHS[-1], dtype=dtype, **options)


class Weights(nn.Module):
    """The gradient of every weight is what forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(9, 2))

    def forward(self, factor: float) -> torch.Tensor:
        return (self.weight * factor).sum()


def reduced(mesh: DeviceMesh, dtype: torch.dtype, rank: int, divisor: float | None = None) -> torch.Tensor:
    """Returns the gradient after the reduction, where each rank's own gradient was rank + 1."""
    model = fully_shard(Weights(), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    if divisor is not None:
        model.set_gradient_divide_factor(divisor)
    model(rank + 1.0).backward()
    return model.weight.grad.full_tensor()


def every_way_to_divide(mesh: DeviceMesh, rank: int) -> None:
    """By the number of ranks and by other numbers, before or after the sum, as AVG or PREMUL_SUM: FSDP2
    chooses by the dtype. The numbers are exact in all of them."""
    ranks = mesh.size()
    total = ranks * (ranks + 1) / 2
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for divisor in (None, 1.0, 2.0, 4.0, float(ranks)):
            wanted = torch.full((9, 2), total / (divisor or ranks))
            same(f"{dtype}, divided by {divisor or ranks}", reduced(mesh, dtype, rank, divisor), wanted)


@program(ranks=4, sizes=(4, 8, 16))
def means(case: Case) -> None:
    every_way_to_divide(init_device_mesh(here(), (dist.get_world_size(),)), case.rank)


@program(ranks=8)
def means_on_two_dimensions(case: Case) -> None:
    every_way_to_divide(init_device_mesh(here(), (2, 4), mesh_dim_names=("replicas", "shards")), case.rank)


def low_precision_oracle(policy: MixedPrecisionPolicy, ranks: int) -> tuple[list[dict], dict]:
    """Weights in f32; each rank computes with a copy of param_dtype on its share; sums in reduce_dtype."""
    alone = mlp(*WIDTHS, dtype=torch.float32)
    optimizer = sgd(alone)
    history = []
    for batch in data(torch.float32):
        each = []
        for rank in range(ranks):
            ((x, y),) = shares([batch], rank, ranks)
            low = copy.deepcopy(alone).to(policy.param_dtype)
            mse(low(x.to(policy.param_dtype)), y).backward()
            each.append([p.grad.to(policy.reduce_dtype) for p in low.parameters()])
        for parameter, *parts in zip(alone.parameters(), *each, strict=True):
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            parameter.grad = (total / ranks).to(parts[0].dtype).float()
        history.append(gradients(alone))
        optimizer.step()
    return history, parameters(alone)


def low_precision(case: Case, policy: MixedPrecisionPolicy) -> None:
    """To the bit: four ranks divide by a power of two, and sums are made in the order of ranks, in f32."""
    wanted, last = low_precision_oracle(policy, dist.get_world_size())
    tolerance = 0.0 if case.backend == "tpu_dist" else 0.02
    model = sharded(mlp(*WIDTHS, dtype=torch.float32), mp_policy=policy)
    optimizer = sgd(model)
    for step, (x, y) in enumerate(shares(data(torch.float32), case.rank, dist.get_world_size())):
        optimizer.zero_grad()
        output = model(x)
        assert output.dtype == policy.param_dtype, output.dtype
        mse(output, y).backward()
        all_same(f"step {step}: gradient of", gradients(model), wanted[step], tolerance)
        optimizer.step()
    all_same("after the last step:", parameters(model), last, tolerance)


@program(ranks=4)
def bf16_reduced_in_f32(case: Case) -> None:
    low_precision(case, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


@program(ranks=4)
def bf16_reduced_in_bf16(case: Case) -> None:
    low_precision(case, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))


def accumulated(
    case: Case, mesh: DeviceMesh, silence: Callable[[nn.Module, bool], None], **options: object
) -> None:
    """Three parts of each share; gradients are complete after the last part only."""
    ranks, parts = dist.get_world_size(), 3
    model, alone = sharded(mlp(*WIDTHS), mesh=mesh, **options), mlp(*WIDTHS)
    optimizer, other = sgd(model), sgd(alone)
    for x, y in data():
        ((mine, target),) = shares([(x, y)], case.rank, ranks)
        optimizer.zero_grad()
        for part, piece in enumerate(zip(mine.chunk(parts), target.chunk(parts), strict=True)):
            silence(model, part == parts - 1)
            (mse(model(piece[0]), piece[1]) / parts).backward()
        step_beside(alone, model, (x, y), optimizer, other)
    all_same("after the last step:", parameters(model), parameters(alone), ROUNDING)


@program(ranks=4)
def accumulated_whole(case: Case) -> None:
    """`set_requires_gradient_sync`: whole gradients stay on their ranks until the last part."""

    def silence(model: nn.Module, is_last: bool) -> None:
        model.set_requires_gradient_sync(is_last)

    accumulated(case, init_device_mesh(here(), (dist.get_world_size(),)), silence)


@program(ranks=4)
def accumulated_in_shards(case: Case) -> None:
    """Every part is reduced at once and added to the shard."""

    def silence(model: nn.Module, is_last: bool) -> None:
        model.set_is_last_backward(is_last)

    accumulated(
        case, init_device_mesh(here(), (dist.get_world_size(),)), silence, reshard_after_forward=False
    )


@program(ranks=8)
def accumulated_in_replicas(case: Case) -> None:
    """`set_requires_all_reduce`: shards are reduced with every part, replicas meet with the last one."""

    def silence(model: nn.Module, is_last: bool) -> None:
        model.set_requires_all_reduce(is_last)

    mesh = init_device_mesh(here(), (2, 4), mesh_dim_names=("replicas", "shards"))
    accumulated(case, mesh, silence)


@program(ranks=4, sizes=(4,))
def a_hook_of_their_own(case: Case) -> None:
    """`set_all_reduce_hook`: what is reduced beyond the mesh, here between two meshes of two ranks."""
    pairs = init_device_mesh(here(), (2, 2), mesh_dim_names=("outer", "inner"))
    group = pairs["outer"].get_group()

    def hook(reduced_gradients: torch.Tensor) -> None:
        dist.all_reduce(reduced_gradients, dist.ReduceOp.AVG, group=group)

    model = mlp(*WIDTHS, dtype=torch.float32)
    fully_shard(model, mesh=pairs["inner"])
    model.set_all_reduce_hook(hook)
    alone = mlp(*WIDTHS, dtype=torch.float32)
    ((x, y),) = data(torch.float32, steps=1)
    ((mine, target),) = shares([(x, y)], case.rank, dist.get_world_size())
    mse(model(mine), target).backward()
    mse(alone(x), y).backward()
    all_same("gradient of", gradients(model), gradients(alone), ROUNDING_F32)
