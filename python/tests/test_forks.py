"""A process that a rank forks is not the rank: it has no part in its groups, and disturbs nothing there."""

import os
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ranks


def in_fork(body: Callable[[], Any]) -> Any:
    """Returns what `body` returns in a fork of this rank, which ends without a word to anybody else."""
    (answer,) = ranks.fork(1, lambda _: pickle.dumps(body()))
    return pickle.loads(answer)


def what_is_refused(pending: dist.Work) -> dict[str, str]:
    tensor = torch.full((4,), 100.0)
    every = [torch.empty(4) for _ in range(dist.get_world_size())]
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_reduce async": lambda: dist.all_reduce(tensor, async_op=True),
        "all_gather": lambda: dist.all_gather(every, tensor),
        "broadcast": lambda: dist.broadcast(tensor, 0),
        "barrier": dist.barrier,
        "send": lambda: dist.send(tensor, 1 - dist.get_rank()),
        "recv": lambda: dist.recv(tensor, 1 - dist.get_rank()),
        "objects": lambda: dist.all_gather_object([None] * dist.get_world_size(), 1),
        "new_group": dist.new_group,
        "wait": pending.wait,
    }
    refused = {name: ranks.failure_of(call) for name, call in calls.items()}
    assert all(type(error) is ValueError for error in refused.values()), refused
    assert torch.equal(tensor, torch.full((4,), 100.0))
    assert pending.is_completed() and pending.exception() is not None
    return {name: str(error) for name, error in refused.items()}


def forks_are_refused() -> tuple[int, dict[str, str]]:
    size, me = dist.get_world_size(), dist.get_rank()
    for tensor in (torch.ones(4), torch.ones(100_000)):
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
    # Nobody has answered it when the fork begins, and it ends in the rank all the same.
    awaited = torch.zeros(3)
    pending = dist.irecv(awaited, 1 - me)
    texts = in_fork(lambda: what_is_refused(pending))
    dist.barrier()
    sent = dist.isend(torch.full((3,), float(me)), 1 - me)
    pending.wait()
    sent.wait()
    assert torch.equal(awaited, torch.full((3,), float(1 - me)))
    for turn in range(3):
        tensor = torch.full((4,), float(turn))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((4,), float(turn * size)))
    return me, texts


def test_a_fork_has_no_part_in_the_groups_of_its_parent() -> None:
    for rank, (me, texts) in enumerate(ranks.run(2, forks_are_refused)):
        assert me == rank
        for name, text in texts.items():
            assert f"rank {rank}" in text, (name, text)
            assert "a fork of it" in text, (name, text)
            assert "destroy_process_group()" in text, (name, text)


def sum_of_own_world(path: str, rank: int) -> float:
    dist.destroy_process_group()
    dist.init_process_group("tpu_dist", init_method=f"file://{path}", rank=rank, world_size=2)
    tensor = torch.full((4,), float(rank + 1))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor[0].item()


def forks_make_their_own_world(path: str) -> float:
    me = dist.get_rank()
    dist.all_reduce(torch.ones(4))
    total = in_fork(lambda: sum_of_own_world(path, me))
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((4,), 2.0))
    return total


def test_forks_that_leave_the_world_may_make_another() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert ranks.run(2, forks_make_their_own_world, f"{folder}/store") == [3.0, 3.0]


def destroys_in_a_fork() -> None:
    dist.all_reduce(torch.ones(4), async_op=True).wait()

    def leave() -> int:
        dist.destroy_process_group()
        return os.getpid()

    assert in_fork(leave) != os.getpid()
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((4,), float(dist.get_world_size())))


def test_a_fork_that_destroys_its_groups_leaves_those_of_the_rank() -> None:
    ranks.run(3, destroys_in_a_fork)
