"""Ranks die, and the others go on: in smaller groups, in a smaller world, and in groups without the dead."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ranks
import tpurun


def run_some(size: int, returning: set[int], body: Callable[..., Any], *args: Any) -> dict[int, Any]:
    """Call ``body(rank, *args)`` on every rank of a new world; what those returned that live to the end."""

    def ranked(rank: int, folder: str) -> Any:
        dist.init_process_group(
            "tpu_dist",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=ranks.TIMEOUT,
        )
        return body(rank, *args)

    return ranks.fork_some(size, returning, ranked)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def total(group: dist.ProcessGroup | None = None) -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def lose(rank: int, doomed: set[int], group: dist.ProcessGroup | None = None) -> BaseException | None:
    """Some die; the others hear of it."""
    if rank in doomed:
        die()
    return ranks.failure_of(lambda: total(group))


def shrink_twice(rank: int) -> tuple[list[int], int, list[int], int]:
    error = lose(rank, {1})
    assert type(error) is tpurun.RankLostError and error.ranks == (1,), error
    group = tpurun.shrink()
    assert dist.get_process_group_ranks(group) == [0, 2, 3, 4]
    assert total(group) == 4
    first = group._get_backend(torch.device("cpu"))
    assert type(lose(rank, {0, 4}, group)) is tpurun.RankLostError
    again = tpurun.shrink(group, timedelta(seconds=20))
    assert total(again) == 2
    assert dist.get_rank(again) == {2: 0, 3: 1}[rank]
    second = again._get_backend(torch.device("cpu"))
    dist.destroy_process_group(again)
    return first.global_ranks, first.epoch, second.global_ranks, second.epoch


def test_shrink_is_repeated() -> None:
    results = run_some(5, {2, 3}, shrink_twice)
    assert results == {rank: ([0, 2, 3, 4], 1, [2, 3], 2) for rank in (2, 3)}


def shrink_the_same_group_again(rank: int) -> int:
    lose(rank, {3})
    first = tpurun.shrink()
    assert total(first) == 3
    if rank == 2:
        die()
    ranks.failure_of(lambda: total(first))
    # Not the shrunken group but the one that it came from: the next round of the same ranks.
    second = tpurun.shrink()
    assert dist.get_process_group_ranks(second) == [0, 1]
    assert total(second) == 2
    return second._get_backend(torch.device("cpu")).epoch


def test_a_group_can_be_shrunk_again() -> None:
    assert run_some(4, {0, 1}, shrink_the_same_group_again) == {0: 2, 1: 2}


def others_go_on(rank: int) -> float:
    living = dist.new_group([0, 1])
    world = dist.new_group([0, 1, 2])
    if rank == 2:
        die()
    total(living)
    assert type(ranks.failure_of(lambda: total(world))) is tpurun.RankLostError
    return total(living)


def test_a_group_without_the_dead_goes_on() -> None:
    assert run_some(3, {0, 1}, others_go_on) == {0: 2.0, 1: 2.0}


def give_up_one_that_stands_still(rank: int) -> tuple[int, ...]:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ()
    group = tpurun.shrink(lost=[1])
    assert total(group) == 2
    native = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert "given up" in str(ranks.failure_of(lambda: total()))
    return tuple(native.global_ranks)


def test_a_rank_that_stands_still_can_be_given_up() -> None:
    results = run_some(3, {0, 2}, give_up_one_that_stands_still)
    assert results == {0: (0, 1, 2), 2: (0, 1, 2)}


def nobody_comes(rank: int) -> tuple[str, tuple[int, ...]] | None:
    if rank == 1:
        signal.pause()
    error = ranks.failure_of(lambda: tpurun.shrink(timeout=timedelta(milliseconds=300)))
    assert type(error) is tpurun.CollectiveTimeoutError
    return str(error), error.ranks


def test_who_does_not_come_is_named() -> None:
    results = run_some(2, {0}, nobody_comes)
    text, guilty = results[0]
    assert text.startswith(
        "Timed out after 300ms shrinking group 0: 1 of 2 ranks came, missing rank 1 (host "
    )
    assert guilty == (1,)


def shrink_needs_our_backend() -> None:
    group = dist.new_group(backend="gloo")
    assert "tpu_dist, got one of gloo" in str(ranks.failure_of(lambda: tpurun.shrink(group)))
    assert "from 0 to 1, got 2" in str(ranks.failure_of(lambda: tpurun.shrink(lost=[2])))
    assert total() == 2


def test_bad_arguments() -> None:
    ranks.run(2, shrink_needs_our_backend)


def train_on(rank: int, doomed: list[set[int]]) -> list[tuple[int, int, float]]:
    seen = []
    job_rank = rank
    for dead in doomed:
        started = time.monotonic()
        assert type(lose(job_rank, dead)) is tpurun.RankLostError
        rank = tpurun.reform()
        assert time.monotonic() - started < 20
        assert (rank, dist.get_world_size()) == (dist.get_rank(), int(os.environ["WORLD_SIZE"]))
        assert os.environ["RANK"] == str(rank)
        # Groups and whatever else needs the store work in the new world.
        pair = dist.new_group([0, 1])
        if rank < 2:
            assert total(pair) == 2
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        model(torch.ones(2, 3)).sum().backward()
        seen.append((rank, dist.get_world_size(), total()))
    dist.destroy_process_group()
    return seen


def test_a_world_is_formed_again_and_again() -> None:
    results = run_some(5, {0, 2, 4}, train_on, [{3}, {1}])
    assert results == {
        0: [(0, 4, 4.0), (0, 3, 3.0)],
        2: [(2, 4, 4.0), (1, 3, 3.0)],
        4: [(3, 4, 4.0), (2, 3, 3.0)],
    }


def with_the_store_in_rank_0(rank: int, port: int) -> list[tuple[int, int, float]]:
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="4")
    dist.init_process_group("tpu_dist", timeout=ranks.TIMEOUT)
    seen = train_on(rank, [{0}])
    assert os.environ["MASTER_PORT"] != str(port)
    return seen


def test_a_world_is_formed_although_the_store_died_with_rank_0() -> None:
    results = run_some(4, {1, 2, 3}, with_the_store_in_rank_0, ranks.free_port())
    assert results == {1: [(0, 3, 3.0)], 2: [(1, 3, 3.0)], 3: [(2, 3, 3.0)]}


def ranks_keep_their_first_numbers(rank: int) -> tuple[tuple[int, ...], str]:
    lose(rank, {0})
    me = tpurun.reform()
    tensor = torch.ones(3 if rank == 2 else 4)
    error = ranks.failure_of(lambda: dist.all_reduce(tensor))
    assert me == rank - 1
    return error.ranks, str(error)


def test_messages_keep_the_numbers_of_the_first_world() -> None:
    results = run_some(4, {1, 2, 3}, ranks_keep_their_first_numbers)
    assert len(set(results.values())) == 1
    guilty, text = results[1]
    assert guilty == (2,)
    assert "minority: rank 2 (host " in text


def dying_on_the_way(rank: int, after_s: float) -> float:
    if rank == 2:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, after_s)
    group = tpurun.shrink()
    if dist.get_world_size(group) == 4:
        if rank == 2:
            signal.pause()
        # It came in time to be counted: the next round is without it.
        assert type(ranks.failure_of(lambda: total(group))) is tpurun.RankLostError
        group = tpurun.shrink(group)
    return total(group)


@pytest.mark.parametrize("after_ms", [1, 3, 10, 30])
def test_a_rank_dies_while_the_others_agree(after_ms: int) -> None:
    assert run_some(4, {0, 1, 3}, dying_on_the_way, after_ms / 1000) == {0: 3.0, 1: 3.0, 3: 3.0}


def shrunk_by_torch(rank: int, is_dead: bool) -> tuple[int, int, list[int]]:
    """torch.distributed's own call, which makes a world of the others."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        if is_dead:
            die()
        store.wait(["done"], ranks.TIMEOUT)
        return (-1, -1, [])
    if is_dead:
        assert type(ranks.failure_of(total)) is tpurun.RankLostError
    dist.shrink_group([1])
    assert total() == 3
    # Groups of the new world know who was who in the first one.
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        assert total(group) == 2
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    own = group._get_backend(torch.device("cpu")).global_ranks if dist.get_rank() < 2 else []
    dist.barrier()
    if rank == 0:
        store.set("done", "")
    return dist.get_rank(), backend.epoch, own


@pytest.mark.parametrize("is_dead", [False, True])
def test_torch_shrinks_groups(is_dead: bool) -> None:
    results = run_some(4, {0, 2, 3}, shrunk_by_torch, is_dead)
    assert results == {0: (0, 1, [0, 2]), 2: (1, 1, [0, 2]), 3: (2, 1, [])}
