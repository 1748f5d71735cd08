"""DistributedDataParallel: gradients and buffers, synchronised or not."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from .case import Case, here, program
from .compare import ROUNDING, all_same, equal_on_all_ranks, torch_refuses
from .training import (
    BATCH,
    Batch,
    History,
    average,
    backward_on_each,
    batches,
    gradients,
    mlp,
    mse,
    parameters,
    sgd,
    shares,
    step_beside,
    train,
)

WIDTHS = (10, 33, 4)


def data(**options: object) -> list[Batch]:
    return batches(WIDTHS[0], WIDTHS[-1], **options)


def ours(case: Case, model: nn.Module, **ddp: object) -> History:
    wrapped = DDP(model, **ddp)
    mine = shares(data(), case.rank, dist.get_world_size())
    history = train(wrapped, sgd(wrapped), mine, named=model)
    for name, parameter in model.named_parameters():
        equal_on_all_ranks(name, parameter)
    return history


def oracle() -> History:
    model = mlp(*WIDTHS)
    return train(model, sgd(model), data())


@program(ranks=4)
def plain(case: Case) -> None:
    """Many buckets, and parameters that begin different: rank 0's count."""
    model = mlp(*WIDTHS, seed=7 + case.rank)
    ours(case, model, bucket_cap_mb=1e-4).must_be(oracle())


@program(ranks=4)
def gradient_as_bucket_view(case: Case) -> None:
    model = mlp(*WIDTHS)
    ours(case, model, gradient_as_bucket_view=True).must_be(oracle())
    stores = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(stores) == 1, "gradients are not views of one bucket"


class Branches(nn.Module):
    """Uses one of three branches, or a shared one alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.shared = nn.Linear(WIDTHS[0], WIDTHS[-1], dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(WIDTHS[0], WIDTHS[-1], dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor, branch: int | None) -> torch.Tensor:
        out = self.shared(x)
        return out if branch is None else out + self.branches[branch](x)


@program(ranks=4, sizes=(4,))
def find_unused_parameters(case: Case) -> None:
    """Each rank uses another branch in each step, and one branch stays without any use."""
    ranks = dist.get_world_size()
    plan = [[None, 0, 0, 1], [1, 1, 1, 1], [None, None, None, None], [0, 1, None, 0]]
    model = Branches()
    wrapped = DDP(model, find_unused_parameters=True)
    for step, (whole_batch, used) in enumerate(zip(data(), plan, strict=True)):
        ((x, y),) = shares([whole_batch], case.rank, ranks)
        model.zero_grad()
        mse(wrapped(x, used[case.rank]), y).backward()
        wanted = Branches()
        for rank, branch in enumerate(used):
            ((x, y),) = shares([whole_batch], rank, ranks)
            (mse(wanted(x, branch), y) / ranks).backward()
        ours_now = {name: value for name, value in gradients(model).items() if value.any()}
        all_same(f"step {step}: gradient of", ours_now, gradients(wanted), ROUNDING)


class Checkpointed(nn.Module):
    """Uses a layer twice, once in a checkpoint that autograd enters anew: only a static graph allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = mlp(WIDTHS[0], WIDTHS[0])
        self.last = mlp(WIDTHS[0], WIDTHS[-1], seed=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).requires_grad_()
        return self.last(checkpoint(self.first, x, use_reentrant=True))


@program(ranks=4)
def static_graph(case: Case) -> None:
    alone = Checkpointed()
    wanted = train(alone, sgd(alone), data())
    ours(case, Checkpointed(), static_graph=True).must_be(wanted)


@program(ranks=4)
def no_sync(case: Case) -> None:
    """Three parts of each share accumulate without a word to the others, the fourth brings it all."""
    ranks, parts = dist.get_world_size(), 3
    model, alone = mlp(*WIDTHS), mlp(*WIDTHS)
    wrapped = DDP(model)
    optimizer, other = sgd(wrapped), sgd(alone)
    backend = dist.group.WORLD._get_backend(torch.device(here()))
    for step, (x, y) in enumerate(data()):
        ((mine, target),) = shares([(x, y)], case.rank, ranks)
        pieces = list(zip(mine.chunk(parts), target.chunk(parts), strict=True))
        optimizer.zero_grad()
        before = backend._get_sequence_number_for_group()
        with wrapped.no_sync():
            for piece in pieces[:-1]:
                (mse(wrapped(piece[0]), piece[1]) / parts).backward()
        # After the first backward pass the ranks agree on other buckets, whatever comes next.
        assert step == 1 or backend._get_sequence_number_for_group() == before, "no_sync communicates"
        (mse(wrapped(pieces[-1][0]), pieces[-1][1]) / parts).backward()
        step_beside(alone, model, (x, y), optimizer, other)
    all_same("after the last step:", parameters(model), parameters(alone), ROUNDING)


def normed() -> nn.Sequential:
    return nn.Sequential(mlp(WIDTHS[0], 6), nn.BatchNorm1d(6, dtype=torch.float64), mlp(6, 4, seed=9))


@program(ranks=4)
def buffers_are_those_of_rank_0(case: Case) -> None:
    """BatchNorm counts on every rank for itself; each forward pass begins with what rank 0 has counted."""
    model, replicas = normed(), [normed() for _ in range(dist.get_world_size())]
    wrapped = DDP(model)
    optimizer, others = sgd(wrapped), [sgd(replica) for replica in replicas]
    for step, batch in enumerate(data()):
        ((x, y),) = shares([batch], case.rank, len(replicas))
        optimizer.zero_grad()
        mse(wrapped(x), y).backward()
        optimizer.step()
        for replica in replicas[1:]:
            for buffer, first in zip(replica.buffers(), replicas[0].buffers(), strict=True):
                buffer.copy_(first)
        backward_on_each(replicas, batch)
        average([[p.grad for p in replica.parameters()] for replica in replicas])
        for other in others:
            other.step()
        own = dict(replicas[case.rank].named_buffers())
        all_same(f"step {step}: buffer", dict(model.named_buffers()), own, ROUNDING)
    all_same("after the last step:", parameters(model), parameters(replicas[0]), ROUNDING)


@program(ranks=4)
def sync_batch_norm(case: Case) -> None:
    """Statistics of the whole batch; torch itself refuses it on CPU tensors, whatever the backend."""
    if here() == "cpu":
        refuses_sync_batch_norm()
        return
    alone, model = normed(), nn.SyncBatchNorm.convert_sync_batchnorm(normed())
    wrapped = DDP(model)
    ranks = dist.get_world_size()
    ours = train(wrapped, sgd(model), shares(data(), case.rank, ranks), named=model)
    ours.must_be(train(alone, sgd(alone), data()))
    all_same("statistics:", dict(model.named_buffers()), dict(alone.named_buffers()), ROUNDING)


def refuses_sync_batch_norm() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(6)))
    torch_refuses(ValueError, "SyncBatchNorm layers only work with GPU modules", lambda: DDP(model))
    torch_refuses(ValueError, "SyncBatchNorm expected input tensor to be on", lambda: model(torch.ones(3, 6)))


@program(ranks=4, sizes=(4,))
def groups_of_their_own(case: Case) -> None:
    """Two models on overlapping groups in one backward pass: ranks 0-2 and 1-3."""
    groups = {low: dist.new_group(list(range(low, low + 3))) for low in (0, 1)}
    size = BATCH // 4
    whole_batches = data(steps=1)
    ((x, y),) = shares(whole_batches, case.rank, dist.get_world_size())
    models = {
        low: DDP(mlp(*WIDTHS, seed=low), process_group=group)
        for low, group in groups.items()
        if low <= case.rank < low + 3
    }
    sum(mse(model(x), y) for model in models.values()).backward()
    for low, model in models.items():
        alone = mlp(*WIDTHS, seed=low)
        x, y = (part[low * size : (low + 3) * size] for part in whole_batches[0])
        mse(alone(x), y).backward()
        all_same(f"group {low}: gradient of", gradients(model.module), gradients(alone), ROUNDING)
