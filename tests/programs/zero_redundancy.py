"""ZeroRedundancyOptimizer: each rank holds the optimizer's state of some parameters and updates those."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from .case import Case, program
from .compare import ROUNDING, all_same, same
from .ddp import WIDTHS, data
from .training import adam, mlp, mse, parameters, sgd, shares, train


@program(ranks=4)
def in_shards(case: Case) -> None:
    """State of Adam in shards, also when saved from rank 0 and taken up again."""
    ranks = dist.get_world_size()
    model, alone = mlp(*WIDTHS), mlp(*WIDTHS)
    wrapped, other = DDP(model), adam(alone)
    wanted = train(alone, other, data())
    mine = shares(data(), case.rank, ranks)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.01)
    first = train(wrapped, optimizer, mine[:2], named=model)
    held = torch.tensor(len(optimizer.optim.state))
    dist.all_reduce(held)
    same("parameters whose state is held anywhere", held.item(), len(list(model.parameters())))
    optimizer.consolidate_state_dict(to=0)
    states = [optimizer.state_dict() if case.rank == 0 else None]
    dist.broadcast_object_list(states, src=0)
    again = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.5)
    again.load_state_dict(states[0])
    first.followed_by(train(wrapped, again, mine[2:], named=model)).must_be(wanted)
    again.consolidate_state_dict(to=0)
    if case.rank == 0:
        saved, whole_state = again.state_dict()["state"], other.state_dict()["state"]
        for index, state in whole_state.items():
            all_same(f"state of parameter {index}:", saved[index], state, ROUNDING)


@program(ranks=4)
def overlapping_backward(case: Case) -> None:
    """Updates parameters inside of the communication hook."""
    overlapped(case, hook_with_zero_step)


@program(ranks=4, devices=("tpu",))
def interleaved_with_backward(case: Case) -> None:
    """Each bucket's callback updates its parameters and broadcasts them, while backward goes on.

    All ranks post that in the same order where callbacks run when they are added, as on accelerators.
    """
    overlapped(case, hook_with_zero_step_interleaved)


def overlapped(case: Case, hooked: Callable) -> None:
    ranks = dist.get_world_size()
    model, alone = mlp(*WIDTHS), mlp(*WIDTHS)
    wrapped = DDP(model, bucket_cap_mb=1e-4)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1, momentum=0.9
    )
    wrapped.register_comm_hook(None, hooked(allreduce_hook, wrapped, optimizer))
    # The first two backward passes only find the order of the buckets.
    warm_up, steps = data(steps=2), data()
    for x, y in shares(warm_up + steps, case.rank, ranks):
        model.zero_grad()
        mse(wrapped(x), y).backward()
        optimizer.step()
    train(alone, sgd(alone), steps)
    # The last update may be on its way until the next forward pass.
    wrapped(shares(steps, case.rank, ranks)[0][0])
    all_same("after the last step:", parameters(model), parameters(alone), ROUNDING)
