"""Groups: overlapping, in opposite orders, destroyed and made again; objects; DDP against Gloo."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import ranks


def overlapping_groups() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    members = [[rank, (rank + 1) % size] for rank in range(size)]
    groups = [dist.new_group(pair) for pair in members]
    mine = [index for index in range(size) if me in members[index]]
    # Each rank posts on its two groups in its own order, nobody waits in between.
    tensors = {index: torch.full((3,), float(me)) for index in mine}
    works = [
        dist.all_reduce(tensors[index], group=groups[index], async_op=True)
        for index in sorted(mine, reverse=me % 2 == 1)
    ]
    for work in works:
        work.wait()
    for index, tensor in tensors.items():
        assert torch.equal(tensor, torch.full((3,), float(sum(members[index]))))


def groups_made_by_their_members_alone() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    members = [rank for rank in range(size) if rank % 2 == me % 2]
    group = dist.new_group(members, use_local_synchronization=True)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == len(members)


def timeout_of(group: dist.ProcessGroup | None = None) -> timedelta:
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu")).options._timeout


def split_in_two() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    halves = [list(range(0, size, 2)), list(range(1, size, 2))[::-1]]
    group = dist.split_group(split_ranks=halves, timeout=timedelta(seconds=7))
    mine = halves[me % 2]
    assert dist.get_process_group_ranks(group) == mine
    assert dist.get_rank(group) == mine.index(me)
    assert timeout_of(group) == timedelta(seconds=7)
    tensor = torch.tensor([me])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == sum(mine)
    # The part of a part.
    part = dist.split_group(parent_pg=group, split_ranks=[[1, 0]])
    tensor = torch.tensor([me])
    dist.broadcast(tensor, group=part, group_src=0)
    assert tensor.item() == mine[1]


def split_for_some() -> None:
    group = dist.split_group(split_ranks=[[0, 1]])
    if dist.get_rank() < 2:
        dist.barrier(group)
        assert timeout_of(group) == timeout_of()
    else:
        assert group in (None, dist.GroupMember.NON_GROUP_MEMBER)


def subgroups_inherit_the_timeout() -> None:
    assert timeout_of() == ranks.TIMEOUT
    assert timeout_of(dist.new_group([0, 1])) == ranks.TIMEOUT
    assert timeout_of(dist.new_group([0, 1], use_local_synchronization=True)) == ranks.TIMEOUT
    for given in (timedelta(seconds=9), timedelta(minutes=30)):
        assert timeout_of(dist.new_group(timeout=given)) == given
    # Other backends keep their own default.
    assert timeout_of(dist.new_group(backend="gloo")) == timedelta(minutes=30)
    dist.barrier()  # Gloo minds when others leave while it connects


def a_rank_elsewhere_does_not_disturb() -> None:
    # Rank 0 works alone in a group of its own while the others are in theirs.
    alone = dist.new_group([0])
    others = dist.new_group(list(range(1, dist.get_world_size())))
    for _ in range(5):
        tensor = torch.ones(2)
        if dist.get_rank() == 0:
            dist.all_reduce(tensor, group=alone)
            assert tensor[0].item() == 1
        else:
            dist.all_reduce(tensor, group=others)
            assert tensor[0].item() == dist.get_world_size() - 1


def objects() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": me, "text": "x" * me})
    assert gathered == [{"rank": rank, "text": "x" * rank} for rank in range(size)]
    everything = [None] * size if me == 1 else None
    dist.gather_object((me, "é"), everything, dst=1)
    assert everything is None or everything == [(rank, "é") for rank in range(size)]
    words = ["one", 2, None] if me == 0 else [None] * 3
    dist.broadcast_object_list(words, 0)
    assert words == ["one", 2, None]
    share = [None]
    dist.scatter_object_list(share, [f"for {rank}" for rank in range(size)] if me == 0 else None, 0)
    assert share == [f"for {me}"]


def names_and_lifecycle() -> None:
    assert dist.get_backend() == "tpu_dist"
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.name() == "tpu_dist"
    assert backend.supports_coalescing
    assert backend.supports_splitting
    for _ in range(3):
        group = dist.new_group()
        dist.barrier(group)
        dist.destroy_process_group(group)
    dist.barrier()


def init_again(folder: str, rank: int) -> None:
    for round_ in range(3):
        dist.init_process_group(
            "tpu",
            init_method=f"file://{folder}/store{round_}",
            rank=rank,
            world_size=2,
            timeout=ranks.TIMEOUT,
        )
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2
        dist.destroy_process_group()


def losses(hook: str | None) -> list[float]:
    torch.manual_seed(dist.get_rank())
    layers = [torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 30), torch.nn.Linear(30, 1)]
    # PowerSGD communicates from callbacks: with several buckets their order differs between ranks.
    bucket_mb = 25 if hook == "power" else 0.002
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*layers), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
    )
    if hook == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif hook == "power":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 20)).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach(), dist.ReduceOp.MAX)
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize(
    "body",
    [overlapping_groups, groups_made_by_their_members_alone, a_rank_elsewhere_does_not_disturb, objects],
    ids=lambda body: body.__name__,
)
def test_groups(body) -> None:
    ranks.run(2, body)
    ranks.run(4, body)


@pytest.mark.parametrize("body", [split_in_two, split_for_some], ids=lambda body: body.__name__)
def test_split_groups(body) -> None:
    ranks.run(4, body)


def test_subgroups_inherit_the_timeout() -> None:
    ranks.run(2, subgroups_inherit_the_timeout)


def test_names_and_lifecycle() -> None:
    ranks.run(2, names_and_lifecycle)


def test_destroy_and_init_again(tmp_path) -> None:
    ranks.fork(2, lambda rank: init_again(str(tmp_path), rank))


@pytest.mark.parametrize("hook", [None, "bf16", "power"])
def test_ddp_is_what_it_is_on_gloo(hook: str | None) -> None:
    ours = ranks.run(3, losses, hook)
    gloo = ranks.run(3, losses, hook, backend="gloo")
    for mine, theirs in zip(ours, gloo, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4 if hook is None else 2e-2)
