"""The training loop that programs and their oracles share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from .case import called, here
from .compare import ROUNDING, all_same, same, whole

Batch = tuple[torch.Tensor, torch.Tensor]
Optimizer = torch.optim.Optimizer
STEPS = 4
BATCH = 48


@dataclass
class History:
    """The history of a training."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)

    def followed_by(self, rest: History) -> History:
        """The history of both trainings, one after the other."""
        return History(self.losses + rest.losses, self.gradients + rest.gradients, rest.parameters)

    def must_be(self, wanted: History, tolerance: float = ROUNDING) -> None:
        """Raises where this history, whose losses are means over the shares, is another one."""
        same("losses", mean_over_ranks(self.losses), wanted.losses, tolerance)
        for step, (ours, others) in enumerate(zip(self.gradients, wanted.gradients, strict=True)):
            all_same(f"step {step}: gradient of", ours, others, tolerance)
        all_same("after the last step:", self.parameters, wanted.parameters, tolerance)


def mlp(*widths: int, dtype: torch.dtype = torch.float64, seed: int = 7) -> nn.Sequential:
    """The same one on every rank."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for narrow, wide in pairwise(widths):
        layers += [nn.Linear(narrow, wide, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batches(
    width_in: int,
    width_out: int,
    *,
    size: int = BATCH,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float64,
) -> list[Batch]:
    """Whole batches, the same ones on every rank."""
    generator = torch.Generator(here()).manual_seed(11)
    return [
        (
            torch.randn(size, width_in, generator=generator, dtype=dtype),
            torch.randn(size, width_out, generator=generator, dtype=dtype),
        )
        for _ in range(steps)
    ]


def shares(whole_batches: Iterable[Batch], rank: int, ranks: int) -> list[Batch]:
    """Returns the share of each batch that one of the ranks gets."""
    return [(x.chunk(ranks)[rank], y.chunk(ranks)[rank]) for x, y in whole_batches]


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.to(target.dtype), target)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    data: Iterable[Batch],
    *,
    named: nn.Module | None = None,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = mse,
) -> History:
    """One step for each batch. `named` has the parameters under their own names when `model` wraps them."""
    named = model if named is None else named
    forward = called(model)
    history = History()
    for x, y in data:
        optimizer.zero_grad()
        value = loss(forward(x), y)
        value.backward()
        history.losses.append(value.item())
        history.gradients.append(gradients(named))
        optimizer.step()
    history.parameters = parameters(named)
    return history


def step_beside(alone: nn.Module, model: nn.Module, batch: Batch, *optimizers: Optimizer) -> None:
    """Takes a whole batch through `alone`, whose gradients `model` must have by now; then all step."""
    x, y = batch
    alone.zero_grad()
    mse(alone(x), y).backward()
    all_same("gradient of", gradients(model), gradients(alone), ROUNDING)
    for optimizer in optimizers:
        optimizer.step()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """All of each gradient that there is."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """All of each parameter."""
    return {name: whole(p) for name, p in model.named_parameters()}


def mean_over_ranks(values: list[float]) -> list[float]:
    """The mean of each over the world."""
    sums = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums / dist.get_world_size()).tolist()


def backward_on_each(replicas: list[nn.Module], batch: Batch) -> None:
    """The gradients that every rank computes of its share, one replica for each, without talking."""
    for rank, replica in enumerate(replicas):
        ((x, y),) = shares([batch], rank, len(replicas))
        replica.zero_grad()
        mse(replica(x), y).backward()


@torch.no_grad()
def average(lists: list[list[torch.Tensor]]) -> None:
    """Sets all to the mean of all, place by place."""
    for same_place in zip(*lists, strict=True):
        mean = sum(same_place) / len(same_place)
        for tensor in same_place:
            tensor.copy_(mean)
