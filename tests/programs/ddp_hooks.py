"""Communication hooks of DistributedDataParallel: what they do to gradients, by hand."""

# torch compares the annotations of hooks with its classes: they must not become strings.
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from .case import Case, program
from .compare import ROUNDING_F32, all_same, equal_on_all_ranks
from .training import (
    Batch,
    average,
    backward_on_each,
    batches,
    gradients,
    mlp,
    mse,
    parameters,
    sgd,
    shares,
    train,
)

WIDTHS = (10, 33, 4)
Gradients = dict[str, torch.Tensor]


def data(**options: object) -> list[Batch]:
    return batches(WIDTHS[0], WIDTHS[-1], dtype=torch.float32, **options)


def model() -> nn.Module:
    return mlp(*WIDTHS, dtype=torch.float32)


def of_each_rank(ranks: int, batch: Batch) -> list[Gradients]:
    """The gradients that every rank computes of its share."""
    replicas = [model() for _ in range(ranks)]
    backward_on_each(replicas, batch)
    return [gradients(replica) for replica in replicas]


def hooked(case: Case, state: object, hook: Callable) -> Gradients:
    """The gradients after one backward pass with a hook."""
    own = model()
    wrapped = DDP(own)
    wrapped.register_comm_hook(state, hook)
    ((x, y),) = shares(data(steps=1), case.rank, dist.get_world_size())
    mse(wrapped(x), y).backward()
    for name, parameter in own.named_parameters():
        equal_on_all_ranks(f"gradient of {name}", parameter.grad)
    return gradients(own)


def compressed(case: Case, dtype: torch.dtype, hook: Callable, state: object = None) -> None:
    """Each rank rounds its part once, the sum is made in f32 and rounded once: to the bit on tpu_dist, which
    promises that; other backends may round in between."""
    ranks = dist.get_world_size()
    each = of_each_rank(ranks, data(steps=1)[0])
    wanted = {}
    for name in each[0]:
        parts = [one[name].to(dtype).div(ranks).float() for one in each]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        wanted[name] = total.to(dtype).float()
    tolerance = 0.0 if case.backend == "tpu_dist" else 4 * torch.finfo(dtype).eps
    all_same("gradient of", hooked(case, state, hook), wanted, tolerance)


@program(ranks=4)
def allreduce(case: Case) -> None:
    alone = model()
    ((x, y),) = data(steps=1)
    mse(alone(x), y).backward()
    all_same("gradient of", hooked(case, None, default_hooks.allreduce_hook), gradients(alone), ROUNDING_F32)


@program(ranks=4)
def fp16_compress(case: Case) -> None:
    compressed(case, torch.float16, default_hooks.fp16_compress_hook)


@program(ranks=4)
def bf16_compress(case: Case) -> None:
    compressed(case, torch.bfloat16, default_hooks.bf16_compress_hook)


@program(ranks=4)
def bf16_around_another_hook(case: Case) -> None:
    def noted(seen: list[torch.dtype], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.buffer().dtype)
        return default_hooks.allreduce_hook(None, bucket)

    seen: list[torch.dtype] = []
    compressed(case, torch.bfloat16, default_hooks.bf16_compress_wrapper(noted), seen)
    assert seen == [torch.bfloat16], seen


@program(ranks=4)
def median_of_the_ranks(case: Case) -> None:
    """A hook that anybody may write: gathers, and goes on in a chain of futures."""

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        mine = bucket.buffer()
        every = mine.new_empty(group.size() * mine.numel())
        gathered = dist.all_gather_into_tensor(every, mine, group=group, async_op=True).get_future()
        stacked = gathered.then(lambda future: every.view(group.size(), -1))
        return stacked.then(lambda future: future.value().median(dim=0).values)

    each = of_each_rank(dist.get_world_size(), data(steps=1)[0])
    wanted = {name: torch.stack([one[name] for one in each]).median(dim=0).values for name in each[0]}
    all_same("gradient of", hooked(case, dist.group.WORLD, hook), wanted, 0.0)


def power_sgd(case: Case, rank: int, steps: int) -> None:
    """PowerSGD of mean gradients is linear in them: the oracle is a group of one with the whole batch."""
    groups = [dist.new_group([member]) for member in range(dist.get_world_size())]
    own, alone = model(), model()
    wrapped, oracle = DDP(own), DDP(alone, process_group=groups[case.rank])
    for module, group in ((wrapped, None), (oracle, groups[case.rank])):
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    mine = train(
        wrapped, sgd(wrapped), shares(data(steps=steps), case.rank, dist.get_world_size()), named=own
    )
    mine.must_be(train(oracle, sgd(oracle), data(steps=steps), named=alone), 1e-4)
    for name, parameter in own.named_parameters():
        equal_on_all_ranks(name, parameter)


@program(ranks=4)
def power_sgd_of_rank_1(case: Case) -> None:
    power_sgd(case, rank=1, steps=6)


@program(ranks=4)
def power_sgd_of_rank_3(case: Case) -> None:
    power_sgd(case, rank=3, steps=6)


@program(ranks=4)
def post_local_sgd(case: Case) -> None:
    """After two steps together, each rank trains alone and all average every second step."""
    ranks, warm_up, period = dist.get_world_size(), 2, 2
    steps = data(steps=6)
    own = model()
    wrapped = DDP(own)
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=dist.new_subgroups(group_size=1)[0], start_localSGD_iter=warm_up
    )
    wrapped.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=0.1),
        PeriodicModelAverager(period=period, warmup_steps=warm_up),
    )
    train(wrapped, optimizer, shares(steps, case.rank, ranks), named=own)

    replicas = [model() for _ in range(ranks)]
    for step, batch in enumerate(steps):
        backward_on_each(replicas, batch)
        if step < warm_up:
            average([[p.grad for p in replica.parameters()] for replica in replicas])
        for replica in replicas:
            torch.optim.SGD(replica.parameters(), lr=0.1).step()
        if step >= warm_up and (step - warm_up) % period == 0:
            average([list(replica.parameters()) for replica in replicas])
    all_same("after the last step:", parameters(own), parameters(replicas[case.rank]), ROUNDING_F32)
