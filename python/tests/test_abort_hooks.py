"""Functions that torch runs before a failure reaches the program."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ranks
import tpurun
from test_device_collectives import on_device

pytestmark = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_abort_hook"), reason="torch has no abort hooks before 2.15"
)


def called_before_the_failure(async_op: bool) -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["told"], ranks.TIMEOUT)
        return
    group, calls = dist.group.WORLD, []
    assert group.supports_abort_hooks
    group.register_abort_hook(2, lambda: calls.append("second"))
    group.register_abort_hook(1, lambda: calls.append("first"))
    group.register_abort_hook(3, lambda: calls.append("gone"))
    group.unregister_abort_hook(3)
    dist.distributed_c10d._set_pg_timeout(timedelta(milliseconds=500), group)

    def wait_in_vain() -> None:
        work = dist.all_reduce(torch.ones(2), async_op=async_op)
        if work is not None:
            early = ranks.failure_of(lambda: work.wait(timedelta(milliseconds=10)))
            assert type(early) is tpurun.CollectiveTimeoutError
            assert calls == []  # nothing has failed yet
            work.wait()

    error = ranks.failure_of(wait_in_vain)
    assert type(error) is tpurun.CollectiveTimeoutError, error
    assert calls == ["first", "second"]
    store.set("told", "")


def called_by_abort() -> None:
    backend, calls = dist.group.WORLD._get_backend(torch.device("cpu")), []
    backend.register_abort_hook(1, lambda: calls.append(1))
    ranks.failure_of(lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e8m0fnu)))
    assert calls == []  # refused, which no other rank knows of
    dist.barrier()
    backend.abort()
    assert calls


def what_a_hook_raises_is_not_the_failure() -> None:
    def hook() -> None:
        raise ArithmeticError("in the hook")

    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        dist.group.WORLD.register_abort_hook(1, hook)
        error = ranks.failure_of(lambda: dist.barrier(timeout=timedelta(milliseconds=300)))
        assert type(error) is tpurun.CollectiveTimeoutError, error
        store.set("told", "")
    else:
        store.wait(["told"], ranks.TIMEOUT)


def what_a_hook_runs_on_the_device_does_not_wait_for_what_failed() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        x, seen = torch.ones(2, device="tpu"), []
        dist.group.WORLD.register_abort_hook(1, lambda: seen.append((x + 1).tolist()))
        dist.distributed_c10d._set_pg_timeout(timedelta(milliseconds=500), dist.group.WORLD)
        dist.all_reduce(x, async_op=True).wait()
        error = ranks.failure_of(lambda: x.tolist())
        assert type(error) is tpurun.CollectiveTimeoutError, error
        assert seen == [[2.0, 2.0]]
        assert x.tolist() == [1.0, 1.0]  # the stream has told its error
        store.set("told", "")
    else:
        store.wait(["told"], ranks.TIMEOUT)


@pytest.mark.parametrize("async_op", [False, True])
def test_abort_hooks_run_before_the_failure(async_op: bool) -> None:
    ranks.run(2, called_before_the_failure, async_op)


def test_abort_hooks_run_before_an_abort() -> None:
    ranks.run(2, called_by_abort)


def test_a_hook_uses_the_device() -> None:
    on_device(2, what_a_hook_runs_on_the_device_does_not_wait_for_what_failed)


def test_a_raising_hook() -> None:
    ranks.run(2, what_a_hook_raises_is_not_the_failure)
