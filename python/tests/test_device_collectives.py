"""Collectives of tensors on device tpu: the results of CPU tensors, and who waits for them."""

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ranks
import tpurun

SHORT = timedelta(milliseconds=700)
# Staged, and used where it is.
COUNTS = (5, 50_003)


def on_device(size: int, body: Callable[..., Any], *args: Any, mode: str = "DEFER_NEVER") -> list[Any]:
    """Run a body on ranks that have the device."""

    def claimed() -> Any:
        torch.tpu.eager_mode = mode
        torch.manual_seed(dist.get_rank())
        return body(*args)

    before = dict(os.environ)
    os.environ |= {"TPURUN_HBM": "256MiB", "LOCAL_WORLD_SIZE": str(size), "TPURUN_DEVICE": "1"}
    try:
        return ranks.run(size, claimed, prepare=lambda: torch.tpu.init())
    finally:
        os.environ.clear()
        os.environ |= before


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def results_of_every_collective(count: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    calls: list[Callable[[str], torch.Tensor]] = []

    def call(
        body: Callable[[Callable[[torch.Tensor], torch.Tensor]], torch.Tensor | list[torch.Tensor]],
    ) -> None:
        state = torch.get_rng_state()

        def on(device: str) -> torch.Tensor:
            torch.set_rng_state(state)
            made = body(lambda tensor: tensor.to(device))
            made = made if isinstance(made, list) else [made]
            assert all(tensor.device.type == device for tensor in made)
            return torch.cat([tensor.cpu().flatten().double() for tensor in made])

        calls.append(on)

    def all_reduced(place, op=dist.ReduceOp.SUM, dtype=torch.float32, **options: Any):
        tensor = place(random(count, dtype=dtype))
        work = dist.all_reduce(tensor, op, **options)
        if work is not None:
            work.wait()
        return tensor

    def strided(place):
        tensor = place(random(count, 2))[:, 1]
        dist.all_reduce(tensor)
        return tensor

    def all_gathered(place):
        outputs = [place(torch.zeros(count)) for _ in range(size)]
        dist.all_gather(outputs, place(random(count)))
        return outputs

    def gathered_in_place(place):
        output = place(torch.zeros(size, count))
        output[rank].copy_(random(count))
        dist.all_gather_into_tensor(output, output[rank])
        return output

    def scattered_sums(place):
        output = place(torch.zeros(count))
        dist.reduce_scatter_tensor(output, place(random(size * count)))
        return output

    def exchanged(place):
        output = place(torch.zeros(size * count))
        dist.all_to_all_single(output, place(random(size * count)))
        return output

    def broadcast(place):
        tensor = place(random(count))
        dist.broadcast(tensor, 1)
        return tensor

    def gathered(place):
        outputs = [place(torch.zeros(count)) for _ in range(size)] if rank == 2 else None
        dist.gather(place(random(count)), outputs, 2)
        return outputs or place(torch.zeros(1))

    def scattered(place):
        output = place(torch.zeros(count))
        dist.scatter(output, [place(random(count)) for _ in range(size)] if rank == 0 else None, 0)
        return output

    def sent(place):
        output = place(torch.zeros(count))
        right, left = (rank + 1) % size, (rank - 1) % size
        works = [dist.isend(place(random(count)), right), dist.irecv(output, left)]
        for work in works:
            work.wait()
        return output

    def coalesced(place):
        tensors = [place(random(count)) for _ in range(3)]
        with dist._coalescing_manager(device=tensors[0].device, async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        return tensors

    call(all_reduced)
    call(lambda place: all_reduced(place, dist.ReduceOp.AVG, torch.bfloat16))
    call(lambda place: all_reduced(place, dist.ReduceOp.MAX, async_op=True))
    for body in (
        strided, all_gathered, gathered_in_place, scattered_sums, exchanged, broadcast, gathered, scattered,
        sent, coalesced,
    ):  # fmt: skip
        call(body)
    for on in calls:
        assert torch.equal(on("tpu"), on("cpu"))


@pytest.mark.parametrize("count", COUNTS)
def test_results_are_those_of_cpu_tensors(count: int) -> None:
    on_device(3, results_of_every_collective, count)


def some_ranks_have_cpu_tensors() -> None:
    device = "cpu" if dist.get_rank() == 1 else "tpu"
    for count in COUNTS:
        tensor = torch.full((count,), float(dist.get_rank()), device=device)
        dist.all_reduce(tensor)
        assert tensor.device.type == device and tensor.eq(3).all()


def test_some_ranks_may_have_cpu_tensors() -> None:
    on_device(3, some_ranks_have_cpu_tensors)


def the_stream_waits() -> None:
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(10, device="tpu")
    if dist.get_rank() == 0:
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        event = torch.tpu.Event()
        event.record()
        assert not torch.tpu.current_stream().query() and not event.query(), "nobody else is there yet"
        with torch.tpu.stream(torch.tpu.Stream()):
            assert torch.ones(3, device="tpu").sum().item() == 3, "other streams go on"
        store.set("waited", "")
        assert (tensor + 1).tolist() == [3.0] * 10
        assert event.query() and torch.tpu.current_stream().query()
    else:
        store.wait(["waited"], ranks.TIMEOUT)
        dist.all_reduce(tensor)


def test_a_wait_orders_the_stream_and_not_the_host() -> None:
    on_device(2, the_stream_waits)


def callbacks_run_at_once() -> None:
    store = dist.distributed_c10d._get_default_store()
    me, size = dist.get_rank(), dist.get_world_size()
    order: list[int] = []
    tensors = [torch.full((10 + 60_000 * (number % 2),), float(number), device="tpu") for number in range(6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors] if me == 0 else []

    def add_one(future: torch.futures.Future, number: int) -> torch.Tensor:
        order.append(number)
        assert threading.get_ident() == here
        return future.value()[0] + 1 if me != 0 else future.value()[0]

    here = threading.get_ident()
    if me == 0:
        # Nobody else is there yet: what is asked for is done, and what uses a value waits.
        futures = [work.get_future() for work in works]
        assert all(future.done() for future in futures)
        for number in (3, 0, 5, 1):
            futures[number].then(lambda future, number=number: add_one(future, number))
        assert order == [3, 0, 5, 1]
        assert torch.ones(3, device="tpu").sum().item() == 3
        store.set("asked", "")
        for number, future in enumerate(futures):
            assert future.wait()[0][1].item() == number * size
    else:
        store.wait(["asked"], ranks.TIMEOUT)
        for number, tensor in enumerate(tensors):
            chained = (
                dist.all_reduce(tensor, async_op=True)
                .get_future()
                .then(lambda future, number=number: add_one(future, number))
            )
            assert order[-1] == number
            assert chained.wait()[1].item() == number * size + 1


def test_callbacks_run_at_once_and_their_values_wait() -> None:
    on_device(3, callbacks_run_at_once)


def futures_of_other_indices() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    for count in (5, 60_000):
        tensor = torch.full((count,), float(me), device=f"tpu:{me}")
        doubled = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
        assert doubled.wait()[-1].item() == size * (size - 1)
        gathered = torch.empty(size * count, device=f"tpu:{me}")
        dist.all_gather_into_tensor(gathered, tensor, async_op=True).get_future().wait()
        assert gathered.sum().item() == size * count * size * (size - 1) / 2
        dist.barrier(async_op=True).get_future().wait()


def test_futures_of_tensors_of_any_index() -> None:
    on_device(3, futures_of_other_indices)


def an_error_comes_late(is_debug: bool) -> str:
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(timeout=SHORT)
    text = ""
    if dist.get_rank() == 0:
        tensor = torch.ones(10, device="tpu")
        work = dist.all_reduce(tensor, group=group, async_op=True)
        if not is_debug:
            work.wait()
        error = ranks.failure_of(work.wait if is_debug else lambda: tensor + 1)
        assert type(error) is tpurun.CollectiveTimeoutError, f"{type(error)}: {error}"
        assert (torch.ones(2, device="tpu") + 1).tolist() == [2, 2], "an error is told once"
        text = str(error)
        store.set("told", "")
    else:
        store.wait(["told"], ranks.TIMEOUT)
    return text


@pytest.mark.parametrize("mode", ["DEFER_NEVER", "DEFER_NEVER_AND_LAUNCH_BLOCKING"])
def test_an_error_names_the_line_of_the_collective(mode: str) -> None:
    text, _ = on_device(2, an_error_comes_late, mode != "DEFER_NEVER", mode=mode)
    assert "test_device_collectives.py" in text


def a_rank_leaves_right_after_its_wait() -> None:
    tensor = torch.ones(100_000, device="tpu")
    dist.all_reduce(tensor, async_op=True).wait()


def test_what_streams_wait_for_is_done_before_a_group_ends() -> None:
    on_device(4, a_rank_leaves_right_after_its_wait)
