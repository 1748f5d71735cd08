"""torch.compile around what communicates, and through it: inductor's C++ code, on two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from .case import Case, program
from .compare import ROUNDING_F32, same
from .training import Batch, batches, mlp, sgd, shares, train

WIDTH = 6
# Sums in another order, and fused.
TOLERANCE = 10 * ROUNDING_F32


def data() -> list[Batch]:
    return batches(WIDTH, WIDTH, dtype=torch.float32)


class Block(nn.Module):
    """Dynamo begins to trace in a user's own `forward`, not in one of torch's."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = mlp(WIDTH, 9, WIDTH, dtype=torch.float32, seed=seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(1), Block(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


@contextmanager
def compiling() -> Iterator[None]:
    """Begins with nothing compiled, and sees to it that something was."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0, "nothing was compiled"


@program(ranks=2, devices=("cpu",))
def ddp(case: Case) -> None:
    """Dynamo cuts the graph where DDP's buckets end."""
    alone = Model()
    wanted = train(alone, sgd(alone), data())
    own = Model()
    with compiling():
        wrapped = torch.compile(DDP(own))
        mine = shares(data(), case.rank, dist.get_world_size())
        train(wrapped, sgd(own), mine, named=own).must_be(wanted, TOLERANCE)


@program(ranks=2, devices=("cpu",))
def fsdp2(case: Case) -> None:
    """Each block is compiled; its parameters are gathered in front of it."""
    alone = Model()
    wanted = train(alone, sgd(alone), data())
    own = Model()
    for block in own.blocks:
        fully_shard(block)
    fully_shard(own)
    with compiling():
        for block in own.blocks:
            block.compile()
        mine = shares(data(), case.rank, dist.get_world_size())
        train(own, sgd(own), mine).must_be(wanted, TOLERANCE)


@program(ranks=2, devices=("cpu",))
def functional_collectives(case: Case) -> None:
    """They are part of the one graph, with arithmetic around them, and are called from compiled code."""
    group = dist.group.WORLD

    def mixed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = collectives.all_reduce(x * 2, "sum", group)
        every = collectives.all_gather_tensor(total.sin() + x, 0, group)
        part = collectives.reduce_scatter_tensor(every.cos(), "avg", 0, group)
        turned = collectives.all_to_all_single(part + 1, None, None, group)
        return total + 1, every * 2, part, collectives.broadcast(turned, 0, group) - 1

    x = torch.arange(8.0).view(4, 2) * (case.rank + 1)
    wanted = [collectives.wait_tensor(value) for value in mixed(x)]
    with compiling():
        ours = torch.compile(mixed, fullgraph=True)(x)
    for index, (found, value) in enumerate(zip(ours, wanted, strict=True)):
        same(f"result {index}", found, value, TOLERANCE)
    sums = sum(torch.arange(8.0).view(4, 2) * (rank + 1) * 2 for rank in range(2))
    same("sum", wanted[0], sums + 1)
