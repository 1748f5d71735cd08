"""``TORCH_DISTRIBUTED_DEBUG=DETAIL``: torch wraps the backend, and compares calls through Gloo first."""

import pytest
import torch
import torch.distributed as dist

import ranks


def under_the_wrapper() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert isinstance(backend, dist.distributed_c10d._ProcessGroupWrapper)
    total = float(sum(range(size)))
    for async_op in (False, True):
        tensor = torch.full((3,), float(me))
        work = dist.all_reduce(tensor, async_op=async_op)
        if work is not None:
            assert work.get_future().wait()[0] is tensor
        assert torch.equal(tensor, torch.full((3,), total))
    parts = [torch.empty(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(me)))
    assert torch.equal(torch.cat(parts), torch.arange(float(size)).repeat_interleave(2))
    whole = torch.empty(size)
    dist.all_gather_into_tensor(whole, torch.tensor([float(me)]))
    assert torch.equal(whole, torch.arange(float(size)))
    own = torch.empty(1)
    dist.reduce_scatter_tensor(own, torch.arange(float(size)))
    assert own.item() == me * size
    swapped = torch.empty(size)
    dist.all_to_all_single(swapped, torch.full((size,), float(me)))
    assert torch.equal(swapped, torch.arange(float(size)))
    if me == 0:
        dist.send(whole, 1)
    elif me == 1:
        dist.recv(whole.zero_(), 0)
        assert torch.equal(whole, torch.arange(float(size)))
    dist.barrier()
    dist.monitored_barrier()
    group = dist.new_group([0, 1])
    if me < 2:
        dist.all_reduce(torch.ones(1), group=group)


def what_differs() -> str:
    shape = (2,) if dist.get_rank() == 0 else (3,)
    return str(ranks.failure_of(lambda: dist.all_reduce(torch.ones(shape))))


@pytest.fixture(autouse=True)
def detail(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    dist.set_debug_level_from_env()
    yield
    monkeypatch.undo()
    dist.set_debug_level_from_env()


def test_everything_goes_through_the_wrapper() -> None:
    ranks.run(3, under_the_wrapper)


def test_the_wrapper_finds_what_differs() -> None:
    for text in ranks.run(2, what_differs):
        assert "Detected mismatch between collectives on ranks" in text
