"""An asynchronous call gives torch a work, a future or a coalesced work, and these tests use all three."""

import contextlib
import os
import random
import threading
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import ranks


def works_tell_how_they_are() -> None:
    size = dist.get_world_size()
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait()
    assert work.is_completed()
    assert work.exception() is None
    assert torch.equal(tensor, torch.full((3,), float(size)))
    assert work.wait()


def works_complete_without_a_wait() -> None:
    for tensor in (torch.ones(4, 2), torch.ones(4, 2).t()):
        work = dist.all_reduce(tensor, async_op=True)
        while not work.is_completed():
            pass
        assert torch.equal(tensor, torch.full_like(tensor, dist.get_world_size()))


def a_dropped_work_still_happens() -> None:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(torch.ones(1), async_op=True).wait()  # in order, so the first is done
    assert torch.equal(tensor, torch.full((1000,), float(dist.get_world_size())))
    tensor = torch.ones(1)
    dist.all_reduce(tensor, async_op=True)
    while tensor.item() == 1:  # nothing comes after it
        pass


def tensors_live_until_the_end() -> None:
    tensor = torch.ones(1000)
    alive = weakref.ref(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    del tensor
    work.wait()
    assert alive() is not None  # the work holds it as its result
    del work
    dist.barrier()


def futures_have_the_result() -> None:
    size = dist.get_world_size()
    for tensor in (torch.ones(3), torch.ones(4, 3).t()):
        future = dist.all_reduce(tensor, async_op=True).get_future()
        (result,) = future.wait()
        assert result is tensor or torch.equal(result, tensor)
        assert torch.equal(tensor, torch.full_like(tensor, size))
    for _ in range(50):
        before = dist.all_reduce(torch.ones(1), async_op=True)
        future = before.get_future()
        before.wait()
        assert future.done()
        after = dist.all_reduce(torch.ones(1), async_op=True)
        after.wait()
        assert after.get_future().done()


def futures_chain() -> None:
    size = dist.get_world_size()
    future = (
        dist.all_reduce(torch.ones(3), async_op=True)
        .get_future()
        .then(lambda done: done.value()[0] * 2)
        .then(lambda done: done.value() + 1)
    )
    assert torch.equal(future.wait(), torch.full((3,), 2.0 * size + 1))


def callbacks_may_communicate() -> None:
    # As PowerSGD does: a callback posts the next collective and waits for it.
    size = dist.get_world_size()
    futures = []
    for group in [dist.new_group() for _ in range(4)]:
        tensor = torch.ones(2)
        first = dist.all_reduce(tensor, group=group, async_op=True).get_future()

        def next_in(done: torch.futures.Future, group: dist.ProcessGroup = group) -> torch.Tensor:
            (tensor,) = done.value()
            dist.all_reduce(tensor, group=group)
            return dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()[0]

        futures.append(first.then(next_in))
    for future in futures:
        assert torch.equal(future.wait(), torch.full((2,), float(size**3)))


def callbacks_run_in_the_order_of_posting() -> None:
    # The order matters because callbacks post in a group of their own, and all ranks must post there in the
    # same order.
    size, count = dist.get_world_size(), 40
    group = dist.new_group()
    order: list[int] = []
    posted: list[dist.Work] = []
    results = [torch.full((3,), float(number)) for number in range(count)]

    def post_next(number: int) -> None:
        order.append(number)
        sum(range(random.randrange(20_000)))  # another time on every rank
        posted.append(dist.broadcast(results[number], number % size, group=group, async_op=True))

    futures = []
    for number in range(count):
        work = dist.all_reduce(torch.ones(1 + 1000 * (number % 3)), async_op=True)
        futures.append(work.get_future().then(lambda _, number=number: post_next(number)))
    for future in futures:
        future.wait()
    assert order == list(range(count))
    for work in posted:
        work.wait()
    assert all(torch.equal(result, torch.full((3,), float(number))) for number, result in enumerate(results))


def callbacks_run_elsewhere() -> None:
    threads = []
    work = dist.all_reduce(torch.ones(2), async_op=True)
    work.get_future().then(lambda _: threads.append(threading.get_native_id())).wait()
    assert len(threads) == 1


def failing_callbacks_fail_their_future() -> None:
    def fail(_: torch.futures.Future) -> None:
        raise ArithmeticError("in the callback")

    future = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(fail)
    assert "in the callback" in str(ranks.failure_of(future.wait))


def coalesced_by_kind() -> None:
    size, me = dist.get_world_size(), dist.get_rank()
    for async_ops in (False, True):
        tensors = [torch.full((count,), float(me)) for count in (1, 5, 3)]
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        for tensor in tensors:
            assert torch.equal(tensor, torch.full_like(tensor, sum(range(size))))

        inputs = [torch.full((count,), float(me)) for count in (2, 4)]
        outputs = [torch.zeros(size * count) for count in (2, 4)]
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for output, tensor in zip(outputs, inputs, strict=True):
                dist.all_gather_into_tensor(output, tensor)
        manager.wait()
        for output, count in zip(outputs, (2, 4), strict=True):
            assert torch.equal(output, torch.arange(float(size)).repeat_interleave(count))

        inputs = [torch.arange(float(size)).repeat_interleave(count) for count in (2, 4)]
        outputs = [torch.zeros(count) for count in (2, 4)]
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for output, tensor in zip(outputs, inputs, strict=True):
                dist.reduce_scatter_tensor(output, tensor)
        manager.wait()
        for output in outputs:
            assert torch.equal(output, torch.full_like(output, me * size))


def coalesced_one_by_one() -> None:
    # With a device, torch brackets the single calls instead of collecting them.
    size = dist.get_world_size()
    tensors = [torch.ones(3), torch.ones(2, 2).t()]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.broadcast(tensor.mul_(dist.get_rank() + 1), 1, async_op=True)
    (work,) = manager.works
    work.wait()
    assert work.is_completed()
    for tensor in tensors:
        assert torch.equal(tensor, torch.full_like(tensor, 2))
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.broadcast(tensor, 0, async_op=True)
    results = manager.works[0].get_future().wait()
    assert len(results) == 2
    assert size >= 2


def coalesced_lists() -> None:
    size, me = dist.get_world_size(), dist.get_rank()
    tensors = [torch.full((2,), float(me)), torch.full((3, 2), float(me)).t()]
    dist.all_reduce_coalesced(tensors)
    for tensor in tensors:
        assert torch.equal(tensor, torch.full_like(tensor, sum(range(size))))
    outputs = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    dist.all_gather_coalesced(outputs, [torch.full((2,), float(me)), torch.full((3,), float(me))])
    for rank, output in enumerate(outputs):
        assert all(torch.equal(tensor, torch.full_like(tensor, rank)) for tensor in output)


def profilers_see_names_and_shapes() -> None:
    tensor = torch.ones(2, 3)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        dist.barrier()
    events = [(event.name, event.input_shapes) for event in profile.events() if "tpu_dist:" in event.name]
    assert events.count(("tpu_dist:all_reduce", [[2, 3]])) == 2
    assert (("tpu_dist:send" if dist.get_rank() == 0 else "tpu_dist:recv"), [[2, 3]]) in events


def sequence_numbers_count_collectives() -> None:
    group = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    assert group._get_sequence_number_for_group() == before + 2


def many_works_at_once() -> None:
    size = dist.get_world_size()
    tensors = [torch.full((7,), float(index)) for index in range(200)]
    futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
    for index, future in enumerate(futures):
        assert torch.equal(future.wait()[0], torch.full((7,), float(index * size)))


def threads_post_on_their_own_groups() -> None:
    size = dist.get_world_size()
    groups = [dist.new_group() for _ in range(3)]
    results = [torch.ones(10) for _ in groups]

    def loop(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
        for _ in range(20):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
        dist.all_reduce(tensor, group=group)

    threads = [threading.Thread(target=loop, args=pair) for pair in zip(groups, results, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tensor in results:
        assert torch.equal(tensor, torch.full((10,), float(size)))


def functional_collectives() -> None:
    size = dist.get_world_size()
    group = dist.group.WORLD
    summed = funcol.all_reduce(torch.ones(3), "sum", group)
    assert torch.equal(summed + 0, torch.full((3,), float(size)))
    gathered = funcol.all_gather_tensor(torch.full((2,), float(dist.get_rank())), 0, group)
    assert torch.equal(gathered + 0, torch.arange(float(size)).repeat_interleave(2))


def test_functional_collectives() -> None:
    ranks.run(2, functional_collectives)


def test_works() -> None:
    ranks.run(2, works_tell_how_they_are)
    ranks.run(2, works_complete_without_a_wait)
    ranks.run(3, a_dropped_work_still_happens)
    ranks.run(2, tensors_live_until_the_end)
    ranks.run(4, many_works_at_once)


def test_futures() -> None:
    ranks.run(2, futures_have_the_result)
    ranks.run(2, futures_chain)
    ranks.run(2, failing_callbacks_fail_their_future)


def test_callbacks_run_on_threads_that_may_block() -> None:
    ranks.run(2, callbacks_may_communicate)
    ranks.run(3, callbacks_run_in_the_order_of_posting)
    ranks.run(2, callbacks_run_elsewhere)


def progress_threads() -> int:
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(Path(f"/proc/self/task/{task}/comm").read_text())
    return sum(name.startswith(("tpurun-coll", "tpurun-p2p")) for name in names)


def threads_end_when_nothing_is_to_do() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(12)]

    def everything_once() -> None:
        tensors = [torch.ones(3) for _ in groups]
        works = [
            dist.all_reduce(tensor, group=group, async_op=True)
            for tensor, group in zip(tensors, groups, strict=True)
        ]
        got = [torch.zeros(2) for _ in groups]
        for tensor, group in zip(got, groups, strict=True):
            works.append(dist.irecv(tensor, (me - 1) % size, group=group))
            works.append(dist.isend(torch.full((2,), float(me)), (me + 1) % size, group=group))
        for work in works:
            work.wait()
        assert all(torch.equal(tensor, torch.full((3,), float(size))) for tensor in tensors)
        assert all(torch.equal(tensor, torch.full((2,), float((me - 1) % size))) for tensor in got)

    everything_once()
    assert progress_threads() >= len(groups)
    # They end by themselves, some seconds later; how many, the limit of the test says.
    while progress_threads() > 0:
        time.sleep(0.05)
    everything_once()


def test_groups_that_do_nothing_have_no_threads() -> None:
    ranks.run(2, threads_end_when_nothing_is_to_do)


def test_coalescing() -> None:
    for size in (2, 3):
        ranks.run(size, coalesced_by_kind)
        ranks.run(size, coalesced_one_by_one)
        ranks.run(size, coalesced_lists)


def test_profiling() -> None:
    ranks.run(2, profilers_see_names_and_shapes)


def test_sequence_numbers() -> None:
    ranks.run(2, sequence_numbers_count_collectives)


def test_threads() -> None:
    ranks.run(2, threads_post_on_their_own_groups)
