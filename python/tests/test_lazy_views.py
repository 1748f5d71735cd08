"""Views with a pending conjugation or negation, and outputs that share memory."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import ranks
from test_device_collectives import on_device


def views(device: str) -> list[torch.Tensor]:
    """Each reads as -1, -2."""
    complex_ = torch.tensor([1j, 2j], device=device)
    return [complex_.conj().imag, torch._neg_view(torch.tensor([1.0, 2.0], device=device))]


def results_arrive(device: str) -> None:
    rank = dist.get_rank()
    for index in range(2):
        view = views(device)[index]
        assert view.is_neg()
        dist.all_reduce(view)
        assert view.tolist() == [-2.0, -4.0]
        view = views(device)[index]
        dist.all_reduce(view, async_op=True).wait()
        assert view.tolist() == [-2.0, -4.0]
        view = views(device)[index]
        if rank == 0:
            view *= 3
        dist.broadcast(view, 0)
        assert view.tolist() == [-3.0, -6.0]
        view = views(device)[index]
        if rank == 0:
            dist.send(view, 1)
        else:
            view.zero_()
            dist.recv(view, 0)
        assert view.tolist() == [-1.0, -2.0]
        gathered = [views(device)[index].zero_() for _ in range(2)]
        dist.all_gather(gathered, view * (rank + 1))
        assert [part.tolist() for part in gathered] == [[-1.0, -2.0], [-2.0, -4.0]]
        whole = torch._neg_view(torch.zeros(4, device=device))
        dist.all_gather_into_tensor(whole, view)
        assert whole.tolist() == [-1.0, -2.0] * 2
        part = torch._neg_view(torch.zeros(2, device=device))
        dist.reduce_scatter_tensor(part, whole)
        assert part.tolist() == [-2.0, -4.0]


def conjugate_views_get_results_or_are_refused(device: str) -> None:
    rank, world = dist.get_rank(), dist.group.WORLD

    def view(scale: float = 1.0) -> torch.Tensor:
        conjugate = torch.tensor([1 + 2j, 3 + 4j], device=device).mul_(scale).conj()
        assert conjugate.is_conj()
        return conjugate

    def holds(tensor: torch.Tensor, scale: float) -> bool:
        # Both what it reads as and what lies in memory.
        base = tensor.conj()
        return tensor.tolist() == [scale * (1 - 2j), scale * (3 - 4j)] and not base.is_conj()

    view_of_sum = view()
    world.allreduce([view_of_sum]).wait()
    assert holds(view_of_sum, 2)
    sent = view(1 + rank)
    world.broadcast(sent, 1).wait()
    assert holds(sent, 2)
    reduced = view()
    dist.reduce(reduced, 0)
    assert holds(reduced, 2 if rank == 0 else 1)
    gathered = [view(0), view(0)]
    dist.gather(view(1 + rank), gathered if rank == 0 else None)
    assert rank == 1 or (holds(gathered[0], 1) and holds(gathered[1], 2))
    # Torch makes real tensors of these first, which it refuses for a conjugate.
    whole = torch.cat([view(), view()])
    for action in (
        lambda: dist.all_reduce(view()),
        lambda: dist.broadcast(view(), 0),
        lambda: dist.send(view(), 1) if rank == 0 else dist.recv(view(), 0),
        lambda: dist.all_gather([view(), view()], view()),
        lambda: dist.all_gather_into_tensor(whole, view()),
        lambda: dist.all_to_all_single(view(), view()),
        lambda: dist.scatter(view(), [view(), view()] if rank == 0 else None),
    ):
        error = ranks.failure_of(action)
        assert "resolve_conj()" in str(error)
        assert "\n" not in str(error)
    dist.barrier()


def shared_outputs_are_refused(device: str) -> None:
    output = torch.zeros(12, device=device)

    def strided(sizes: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        return torch.as_strided(output, sizes, strides, offset)

    for outputs in (
        [output[:2], output[:2]],
        [output[:2], output[1:3]],
        [output[0:4:2], output[2:6:2]],
        [output[0:4:2], output[1:3]],
        [strided((2,), (3,)), strided((2,), (2,), 1)],
        [strided((2, 2), (1, 4)), strided((2, 2), (4, 1), 1)],
        [strided((2, 2), (2, 1)), strided((2, 2), (1, 5), 2)],
        [output.view(torch.complex64)[:2].real, output[2:4]],
    ):
        ones = torch.ones(outputs[0].shape, device=device)
        error = ranks.failure_of(lambda outputs=outputs, ones=ones: dist.all_gather(outputs, ones))
        assert isinstance(error, ValueError), error
        assert "expected outputs that lie apart in memory" in str(error)
    for overlapping in (strided((3, 2), (1, 1)), strided((2, 3), (2, 1)), output[:1].expand(6)):
        for action in (
            lambda one=overlapping: dist.all_reduce(one),
            lambda one=overlapping: dist.all_gather_into_tensor(one, torch.ones(3, device=device)),
        ):
            error = ranks.failure_of(action)
            assert isinstance(error, ValueError), error
    error = ranks.failure_of(lambda: dist.all_reduce(strided((3, 2), (1, 1))))
    assert "expected an output whose elements lie apart in memory, got strides [1, 1]" in str(error)
    assert output.tolist() == [0.0] * 12
    dist.barrier()


def outputs_between_each_other_are_filled(device: str) -> None:
    output = torch.zeros(3, 4, device=device)
    columns = [*output.chunk(2, dim=1)]
    dist.all_gather(columns, torch.full((3, 2), 1.0 + dist.get_rank(), device=device))
    assert output.tolist() == [[1.0, 1.0, 2.0, 2.0]] * 3
    flat = torch.zeros(6, device=device)
    dist.all_gather([flat[0::2], flat[1::2]], torch.full((3,), 1.0 + dist.get_rank(), device=device))
    assert flat.tolist() == [1.0, 2.0] * 3


def results_arrive_while_the_program_is_elsewhere(device: str) -> None:
    """The stream waits for the operation before it has ended, and nobody uses the stream until it has."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    for number in range(20):
        view = torch._neg_view(torch.tensor([1.0], device=device))
        if rank == 1:
            store.wait([f"posted/{number}"])
        dist.all_reduce(view, async_op=True).wait()
        if rank == 0:
            store.set(f"posted/{number}", "")
            store.wait([f"read/{number}"])
        assert view.tolist() == [-2.0], number
        if rank == 1:
            store.set(f"read/{number}", "")


def threads_share_a_stream(device: str) -> None:
    """While one thread waits for what the stream has begun, another one that uses it waits, too."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    for number in range(20):
        x = torch.tensor([1.0], device=device)
        if rank == 1:
            store.wait([f"both/{number}"])
        dist.all_reduce(x, async_op=True).wait()
        with ThreadPoolExecutor(1) as other:
            first = other.submit(x.tolist)
            if rank == 0:
                store.set(f"both/{number}", "")
            assert [x.tolist(), first.result()] == [[2.0], [2.0]], number


BODIES = [
    results_arrive,
    conjugate_views_get_results_or_are_refused,
    shared_outputs_are_refused,
    outputs_between_each_other_are_filled,
]


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_views(body, device: str) -> None:
    on_device(2, body, device)


@pytest.mark.parametrize(
    "body",
    [results_arrive_while_the_program_is_elsewhere, threads_share_a_stream],
    ids=lambda body: body.__name__,
)
def test_streams(body) -> None:
    on_device(2, body, "tpu")
