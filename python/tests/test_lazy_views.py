"""Views with a pending conjugation or negation, and outputs that share memory."""

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


def shared_outputs_are_refused(device: str) -> None:
    output = torch.zeros(3, device=device)
    ones = torch.ones(2, device=device)
    for outputs in ([output[:2], output[:2]], [output[:2], output[1:]]):
        error = ranks.failure_of(lambda outputs=outputs: dist.all_gather(outputs, ones))
        assert isinstance(error, ValueError), error
        assert "expected outputs that lie apart in memory" in str(error)
    dist.barrier()


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize("body", [results_arrive, shared_outputs_are_refused], ids=lambda body: body.__name__)
def test_views(body, device: str) -> None:
    on_device(2, body, device)
