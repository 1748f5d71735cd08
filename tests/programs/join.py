"""Uneven inputs: ranks that have no more of them answer those that have."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from .case import Case, program
from .compare import ROUNDING, all_same
from .ddp import WIDTHS, data
from .training import mlp, mse, parameters, sgd, shares


def uneven(case: Case, divide_by_initial_world_size: bool) -> None:
    """Rank r has r + 1 batches; the oracle counts those who are still there."""
    ranks = dist.get_world_size()
    steps = data(steps=ranks)
    model, alone = mlp(*WIDTHS), mlp(*WIDTHS)
    wrapped = DDP(model)
    optimizer, other = sgd(wrapped), sgd(alone)
    with wrapped.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for x, y in shares(steps, case.rank, ranks)[: case.rank + 1]:
            optimizer.zero_grad()
            mse(wrapped(x), y).backward()
            optimizer.step()
    for step, whole_batch in enumerate(steps):
        other.zero_grad()
        divisor = ranks if divide_by_initial_world_size else ranks - step
        for rank in range(step, ranks):
            ((x, y),) = shares([whole_batch], rank, ranks)
            (mse(alone(x), y) / divisor).backward()
        other.step()
    all_same("after the last step:", parameters(model), parameters(alone), ROUNDING)


@program(ranks=4)
def divided_by_all(case: Case) -> None:
    uneven(case, divide_by_initial_world_size=True)


@program(ranks=4)
def divided_by_those_left(case: Case) -> None:
    uneven(case, divide_by_initial_world_size=False)


@program(ranks=4, sizes=(4, 8, 16))
def told_at_the_first_end(case: Case) -> None:
    """Everybody learns in the same step that somebody has no more input."""
    model, steps, told = DDP(mlp(*WIDTHS)), 0, ""
    try:
        with Join([model], throw_on_early_termination=True):
            for x, y in shares(data(), case.rank, dist.get_world_size())[: 2 + case.rank]:
                mse(model(x), y).backward()
                steps += 1
    except RuntimeError as error:
        told = str(error)
    assert "exhausted" in told, f"expected an error about exhausted inputs, got {told!r}"
    assert steps == 2, f"expected it after 2 steps, got it after {steps}"
