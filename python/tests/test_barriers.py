"""Barriers: with devices, with timeouts of their own, and the monitored one that says who did not come."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ranks
import tpurun

SHORT = timedelta(milliseconds=300)


def every_kind() -> None:
    dist.barrier(device_ids=[0])
    dist.barrier(async_op=True, device_ids=[dist.get_rank()]).wait()
    dist.barrier(timeout=timedelta(seconds=20))
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)
    dist.monitored_barrier(dist.new_group([0, 1]))
    dist.barrier()


def somebody_is_absent(missing: list[int], wait_all_ranks: bool) -> None:
    store = dist.distributed_c10d._get_default_store()
    me = dist.get_rank()
    if me in missing:
        store.wait(["told"], ranks.TIMEOUT)
        return
    error = ranks.failure_of(lambda: dist.monitored_barrier(timeout=SHORT, wait_all_ranks=wait_all_ranks))
    assert type(error) is tpurun.CollectiveTimeoutError, error
    names = "Rank 1" if missing == [1] else "Ranks 1, 2"
    assert f"{names} failed to pass monitoredBarrier in 300 ms" in str(error)
    assert error.ranks == tuple(missing)
    store.set("told", "")


def no_time_at_all() -> None:
    if dist.get_rank() == 0:
        error = ranks.failure_of(lambda: dist.group.WORLD.monitored_barrier(timedelta(0)))
        assert type(error) is tpurun.CollectiveTimeoutError, error
        assert "Rank 0 timed out in monitoredBarrier" in str(error)


def a_timeout_of_its_own() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        error = ranks.failure_of(lambda: dist.barrier(timeout=SHORT))
        assert type(error) is tpurun.CollectiveTimeoutError, error
        assert "Timed out after 300ms" in str(error)
        store.set("told", "")
    else:
        store.wait(["told"], ranks.TIMEOUT)


def a_message_is_no_barrier() -> None:
    """Messages that wait do not keep a barrier from passing."""
    tensor = torch.ones(3)
    if dist.get_rank() == 0:
        work = dist.isend(tensor, 1)
        dist.barrier()
    else:
        dist.barrier()
        work = dist.irecv(tensor.zero_(), 0)
    work.wait()
    assert torch.equal(tensor, torch.ones(3))


def test_every_kind_passes() -> None:
    ranks.run(2, every_kind)
    ranks.run(3, every_kind)


@pytest.mark.parametrize("wait_all_ranks", [False, True])
@pytest.mark.parametrize("missing", [[1], [1, 2]], ids=str)
def test_monitored_barrier_names_the_absent(missing: list[int], wait_all_ranks: bool) -> None:
    ranks.run(4, somebody_is_absent, missing, wait_all_ranks)


def test_timeouts() -> None:
    ranks.run(2, no_time_at_all)
    ranks.run(2, a_timeout_of_its_own)


def test_messages_beside_a_barrier() -> None:
    ranks.run(2, a_message_is_no_barrier)
