"""Programs that say tpu:LOCAL_RANK, with and without set_device: all indices name one memory."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

import ranks
from test_device_collectives import on_device

COUNT = 1000


def device_of_this_rank(sets: bool) -> torch.device:
    # Another index than the current one on every rank.
    device = torch.device("tpu", dist.get_world_size() - 1 - dist.get_rank())
    if sets:
        torch.tpu.set_device(device)
    return device


def waited_on_the_indexs_stream(sets: bool) -> None:
    device = device_of_this_rank(sets)
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(COUNT, device=device)
    received = torch.zeros(COUNT, device=device)
    if dist.get_rank() == 0:
        dist.all_reduce(tensor, async_op=True).wait()
        store.set("waited", "")
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, 1)])[0].wait()
        store.set("waited again", "")
        assert received.eq(7).all().item(), received
        assert tensor.tolist() == [2.0] * COUNT
    else:
        store.wait(["waited"], ranks.TIMEOUT)
        dist.all_reduce(tensor)
        store.wait(["waited again"], ranks.TIMEOUT)
        dist.send(torch.full((COUNT,), 7.0, device=device), 0)


def waited_on_a_side_stream(sets: bool) -> None:
    device = device_of_this_rank(sets)
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(COUNT, device=device)
    side = torch.tpu.Stream(device=device)
    if dist.get_rank() == 0:
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert not torch.tpu.current_stream().query(), "the current device's stream waits, too"
        side.wait_stream(torch.tpu.current_stream())
        store.set("waited", "")
        with torch.tpu.stream(side):
            assert tensor.tolist() == [2.0] * COUNT
    else:
        store.wait(["waited"], ranks.TIMEOUT)
        dist.all_reduce(tensor)


def a_side_stream_is_waited_for(sets: bool) -> None:
    device = device_of_this_rank(sets)
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(COUNT, device=device)
    side = torch.tpu.Stream(device=device)
    if dist.get_rank() == 0:
        with torch.tpu.stream(side):
            dist.all_reduce(tensor, async_op=True).wait()
        assert torch.ones(3, device=device).sum().item() == 3, "other streams go on"
        torch.tpu.current_stream().wait_stream(side)
        store.set("waited", "")
        assert tensor.tolist() == [2.0] * COUNT
    else:
        store.wait(["waited"], ranks.TIMEOUT)
        dist.all_reduce(tensor)


def objects_and_functional(sets: bool) -> None:
    device = device_of_this_rank(sets)
    rank, size = dist.get_rank(), dist.get_world_size()
    objects = ["hello", {"world": 1}] if rank == 0 else [None, None]
    if rank == 0:
        dist.send_object_list(objects, 1, device=device)
    else:
        dist.recv_object_list(objects, 0, device=device)
    assert objects == ["hello", {"world": 1}]
    assert all_reduce(torch.ones(COUNT, device=device), "sum", list(range(size))).tolist() == [2.0] * COUNT


def trained(sets: bool) -> None:
    device = device_of_this_rank(sets)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).to(device)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    parallel(torch.full((2, 8), dist.get_rank() + 1.0, device=device)).sum().backward()
    assert model.weight.grad.tolist() == [[3.0] * 8] * 4


@pytest.mark.parametrize(
    "body",
    [
        waited_on_the_indexs_stream,
        waited_on_a_side_stream,
        a_side_stream_is_waited_for,
        objects_and_functional,
        trained,
    ],
    ids=lambda body: body.__name__,
)
@pytest.mark.parametrize("sets", [False, True], ids=["index", "set_device"])
def test_a_wait_counts_on_every_index(body: Callable[[bool], None], sets: bool) -> None:
    on_device(2, body, sets)
