"""What goes wrong says what was expected, what was given, and where; on every rank alike."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ranks
import tpurun

SHORT = timedelta(milliseconds=700)


def one_line(error: BaseException, kind: type[BaseException], *parts: str) -> None:
    text = str(error)
    assert type(error) is kind, f"expected {kind}, got {type(error)}: {text}"
    assert "\n" not in text, text
    for part in parts:
        assert part in text, f"expected {part!r} in {text!r}"


def bad_arguments() -> None:
    size = dist.get_world_size()
    x = torch.ones(4)
    group = dist.group.WORLD
    calls = [
        (lambda: dist.all_reduce(x.to_sparse()), ValueError, "all_reduce: ", "dense", "Sparse"),
        (
            lambda: group.broadcast(x, size),
            ValueError,
            "invalid root rank",
            f"0 to {size - 1}",
            f"got {size}",
        ),
        (
            lambda: dist.all_gather([x.clone()], x),
            ValueError,
            f"all_gather: expected {size} output tensors",
            "got 1",
        ),
        (
            lambda: dist.all_gather([torch.ones(3)] * size, x),
            ValueError,
            "all_gather: expected an output",
            "4 elements, got one of 3",
        ),
        (
            lambda: dist.all_gather_into_tensor(torch.ones(5), x),
            ValueError,
            f"all_gather_into_tensor: expected an output tensor of {4 * size} elements",
            "got 5",
        ),
        (
            lambda: dist.all_gather_into_tensor(torch.ones(4 * size, dtype=torch.int32), x),
            TypeError,
            "all_gather_into_tensor: expected all tensors to be of dtype float32, got int32",
        ),
        (
            lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * size + 1)),
            ValueError,
            f"reduce_scatter_tensor: expected an input tensor of {2 * size} elements",
            f"got {2 * size + 1}",
        ),
        (
            lambda: dist.reduce_scatter(x, [x] * (size + 1)),
            ValueError,
            f"reduce_scatter: expected {size} input tensors",
            f"got {size + 1}",
        ),
        (
            lambda: dist.all_to_all_single(torch.ones(size), torch.ones(size), [1], [1] * size),
            ValueError,
            f"expected {size} output split sizes",
            "got 1",
        ),
        (
            lambda: dist.all_to_all_single(torch.ones(size), torch.ones(size + 1)),
            ValueError,
            f"multiple of {size} rows, got {size + 1}",
        ),
        (
            lambda: dist.all_to_all_single(torch.ones(size), torch.ones(size), None, [2] * size),
            ValueError,
            f"add up to its {size} rows, got {2 * size}",
        ),
        (
            lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e8m0fnu)),
            TypeError,
            "all_reduce: expected a dtype that can be reduced, got float8_e8m0fnu",
        ),
    ]
    for call, kind, *parts in calls:
        one_line(ranks.failure_of(call), kind, *parts)
    # None of it reached the engine.
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((4,), float(size)))


def wrong_device() -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert type(backend).__module__ == "tpurun._C"
    error = ranks.failure_of(lambda: dist.all_gather([torch.ones(2, device="meta")] * 2, torch.ones(2)))
    assert "meta" in str(error)


def second_init() -> None:
    error = ranks.failure_of(lambda: dist.init_process_group("tpu_dist"))
    one_line(error, ValueError, "twice")


def group_without_this_rank() -> dict[str, str]:
    group = dist.new_group([1])
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1), group=group)
        return {}
    assert group == dist.GroupMember.NON_GROUP_MEMBER
    assert "group" in str(ranks.failure_of(lambda: dist.get_group_rank(group, 0)))
    return {}


def mismatch(async_op: bool) -> tuple[str, str]:
    if dist.get_rank() == 1:
        site = ranks.here(1)
        error = ranks.failure_of(lambda: finish(dist.all_reduce(torch.ones(5), async_op=async_op)))
    else:
        site = ranks.here(1)
        error = ranks.failure_of(lambda: finish(dist.broadcast(torch.ones(5), 0, async_op=async_op)))
    assert type(error) is tpurun.CollectiveMismatchError
    assert isinstance(error, dist.DistBackendError)
    return str(error), site


def finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def mismatch_in_a_future() -> None:
    tensor = torch.ones(5) if dist.get_rank() == 0 else torch.ones(6)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    chained = future.then(lambda done: done.value())
    assert type(ranks.failure_of(future.wait)) is tpurun.CollectiveMismatchError
    assert "mismatch" in str(ranks.failure_of(chained.wait))
    assert type(ranks.failure_of(work.wait)) is tpurun.CollectiveMismatchError
    assert work.exception() is not None
    # What failed was not touched.
    assert torch.equal(tensor, torch.ones_like(tensor))


def shapes_that_differ() -> None:
    shape = (2, 3) if dist.get_rank() == 0 else (3, 2)
    error = ranks.failure_of(lambda: dist.all_reduce(torch.ones(shape)))
    assert type(error) is tpurun.CollectiveMismatchError
    assert "shape" in str(error)
    assert "[2,3]" in str(error).replace(" ", "")
    assert "[3,2]" in str(error).replace(" ", "")


def mismatch_in_backward() -> str:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    loss = model(torch.ones(2, 3)).sum()
    if dist.get_rank() == 0:
        error = ranks.failure_of(loss.backward)
    else:
        error = ranks.failure_of(lambda: dist.broadcast(torch.ones(1), 1))
    assert type(error) is tpurun.CollectiveMismatchError, f"{type(error)}: {error}"
    return str(error)


def timeout_of_the_group(async_op: bool) -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        started = time.monotonic()
        error = ranks.failure_of(lambda: finish(dist.all_reduce(torch.ones(2), async_op=async_op)))
        assert type(error) is tpurun.CollectiveTimeoutError, f"{type(error)}: {error}"
        assert "Timed out" in str(error)
        assert time.monotonic() - started < 10
        store.set("gave up", "yes")
    else:
        # Alive and absent until the other has given up.
        store.wait(["gave up"], ranks.TIMEOUT)


def timeout_of_a_wait() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        error = ranks.failure_of(lambda: work.wait(timedelta(milliseconds=100)))
        assert type(error) is tpurun.CollectiveTimeoutError
        assert not work.is_completed()
        store.set("waited", "yes")
        work.wait()  # the operation itself goes on
    else:
        store.wait(["waited"], ranks.TIMEOUT)
        dist.all_reduce(torch.ones(2))


def timeout_can_be_changed() -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5), dist.group.WORLD)
    assert backend.options._timeout == timedelta(seconds=5)
    group = dist.new_group(timeout=timedelta(seconds=7))
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)


def abort_wakes_everybody() -> None:
    group = dist.new_group()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        pending = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        waiter_saw = []
        waiter = threading.Thread(target=lambda: waiter_saw.append(ranks.failure_of(pending.wait)))
        waiter.start()
        group.abort()
        waiter.join()
        assert type(waiter_saw[0]) is tpurun.AbortedError
        store.set("aborted", "yes")
    store.wait(["aborted"], ranks.TIMEOUT)
    error = ranks.failure_of(lambda: dist.all_reduce(torch.ones(2), group=group))
    assert type(error) is tpurun.AbortedError
    # The other communicators of these ranks go on.
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((2,), float(dist.get_world_size())))


@pytest.mark.parametrize("size", [2, 3])
def test_bad_arguments(size: int) -> None:
    ranks.run(size, bad_arguments)


def test_wrong_device() -> None:
    ranks.run(2, wrong_device)


def test_second_init() -> None:
    ranks.run(2, second_init)


def test_group_without_this_rank() -> None:
    ranks.run(2, group_without_this_rank)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_mismatch_names_both_sides_on_every_rank(size: int, async_op: bool) -> None:
    results = ranks.run(size, mismatch, async_op)
    texts = {text for text, _ in results}
    assert len(texts) == 1, texts
    (text,) = texts
    assert "broadcast" in text
    assert "all_reduce" in text
    for _, site in results:
        assert site in text


def test_mismatch_in_a_future() -> None:
    ranks.run(2, mismatch_in_a_future)


def test_shapes_that_differ() -> None:
    ranks.run(2, shapes_that_differ)


def test_mismatch_in_backward_keeps_its_kind() -> None:
    texts = ranks.run(2, mismatch_in_backward)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("async_op", [False, True])
def test_timeout(async_op: bool) -> None:
    ranks.run(2, timeout_of_the_group, async_op, timeout=SHORT)


def test_timeout_of_a_wait() -> None:
    ranks.run(2, timeout_of_a_wait)


def test_timeout_can_be_changed() -> None:
    ranks.run(2, timeout_can_be_changed)


def test_abort() -> None:
    ranks.run(2, abort_wakes_everybody)
