"""Pipelines: a stage or two on each rank, micro-batches through all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)

from .case import Case, program
from .compare import ROUNDING, all_same, same
from .training import Batch, batches, gradients, mlp, mse, parameters, sgd

WIDTH = 6
# No fewer than the stages of any schedule that has one on each rank.
MICRO_BATCHES = 16


def data() -> list[Batch]:
    return batches(WIDTH, WIDTH)


def layers(count: int) -> list[nn.Module]:
    return [mlp(WIDTH, 9, WIDTH, seed=index) for index in range(count)]


def trained(case: Case, schedule: Callable, mine: list[int], count: int) -> None:
    """Some steps of a pipeline of `count` stages, of which this rank has `mine`, against the same layers in a
    row: losses of all micro-batches, gradients and the stages in the end."""
    stages = layers(count)
    device = torch.get_default_device()
    runs = [PipelineStage(stages[index], index, count, device) for index in mine]
    given = schedule(runs)
    ours = sgd(nn.ModuleList(stages[index] for index in mine))
    alone = nn.Sequential(*layers(count))
    other = sgd(alone)
    for step, (x, y) in enumerate(data()):
        ours.zero_grad()
        losses: list[torch.Tensor] = []
        output = given.step(
            *([x] if 0 in mine else []),
            **({"target": y, "losses": losses} if count - 1 in mine else {}),
        )
        other.zero_grad()
        wanted = alone(x)
        mse(wanted, y).backward()
        if count - 1 in mine:
            each = [
                mse(*pair) for pair in zip(wanted.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True)
            ]
            same(f"step {step}: losses", torch.stack(losses), torch.stack(each), ROUNDING)
            same(f"step {step}: output", output, wanted, ROUNDING)
        for index in mine:
            what = f"step {step}: stage {index}: gradient of"
            all_same(what, gradients(stages[index]), gradients(alone[index]), ROUNDING)
        ours.step()
        other.step()
    for index in mine:
        all_same(f"stage {index}:", parameters(stages[index]), parameters(alone[index]), ROUNDING)


def one_stage_each(case: Case, schedule: type) -> None:
    ranks = dist.get_world_size()
    trained(
        case,
        lambda stages: schedule(stages[0], MICRO_BATCHES, loss_fn=mse),
        [case.rank],
        ranks,
    )


@program(ranks=4)
def gpipe(case: Case) -> None:
    one_stage_each(case, ScheduleGPipe)


@program(ranks=4)
def one_forward_one_backward(case: Case) -> None:
    one_stage_each(case, Schedule1F1B)


def two_stages_each(case: Case, schedule: type) -> None:
    ranks = dist.get_world_size()
    mine = [case.rank, case.rank + ranks]
    trained(case, lambda stages: schedule(stages, MICRO_BATCHES, loss_fn=mse), mine, 2 * ranks)


@program(ranks=4)
def looped_breadth_first(case: Case) -> None:
    two_stages_each(case, ScheduleLoopedBFS)


@program(ranks=4)
def interleaved(case: Case) -> None:
    two_stages_each(case, ScheduleInterleaved1F1B)


@program(ranks=4)
def interleaved_zero_bubble(case: Case) -> None:
    two_stages_each(case, ScheduleInterleavedZeroBubble)


@program(ranks=4)
def zero_bubble_in_a_v(case: Case) -> None:
    """Rank 0 has the first stage and the last one."""
    ranks = dist.get_world_size()
    mine = [case.rank, 2 * ranks - 1 - case.rank]
    trained(
        case,
        lambda stages: ScheduleZBVZeroBubble(stages, MICRO_BATCHES, loss_fn=mse),
        mine,
        2 * ranks,
    )


@program(ranks=4)
def split_by_torch(case: Case) -> None:
    """`pipeline` traces one model and cuts it where it is told."""
    ranks = dist.get_world_size()
    whole, alone = (nn.Sequential(*layers(ranks)) for _ in range(2))
    ((x, y),) = data()[:1]
    cuts = {str(index): SplitPoint.BEGINNING for index in range(1, ranks)}
    traced = pipeline(whole, mb_args=(x.chunk(MICRO_BATCHES)[0],), split_spec=cuts)
    stage = traced.build_stage(case.rank, torch.get_default_device())
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=mse)
    schedule.step(*([x] if case.rank == 0 else []), **({"target": y} if case.rank == ranks - 1 else {}))
    mse(alone(x), y).backward()
    wanted = gradients(alone)
    mine = gradients(stage.submod)
    assert mine.keys() == {name for name in wanted if name.startswith(f"{case.rank}.")}, [*mine]
    all_same("gradient of", mine, {name: wanted[name] for name in mine}, ROUNDING)
