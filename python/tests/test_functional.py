"""Functional collectives (``torch.ops._c10d_functional``): out of place, in place, and compiled."""

from collections.abc import Callable

import pytest
import torch
import torch._dynamo  # what its first use would import on every rank
import torch._functorch.aot_autograd
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import ranks

OPS = torch.ops._c10d_functional


def wait(tensors):
    if isinstance(tensors, torch.Tensor):
        return OPS.wait_tensor(tensors)
    return [OPS.wait_tensor(tensor) for tensor in tensors]


def own(columns: int = 3) -> torch.Tensor:
    """A row for each rank, filled with this rank's number plus one."""
    return torch.full((dist.get_world_size(), columns), float(dist.get_rank() + 1))


def name() -> str:
    return dist.group.WORLD.group_name


def total() -> float:
    size = dist.get_world_size()
    return size * (size + 1) / 2


def everybody(rows: int = 1, columns: int = 3) -> torch.Tensor:
    """Returns the result of gathering `rows` rows of each rank."""
    numbers = torch.arange(1.0, dist.get_world_size() + 1).repeat_interleave(rows)
    return numbers[:, None].expand(-1, columns).contiguous()


def all_reduce() -> None:
    size = dist.get_world_size()
    for op, expected in (("sum", total()), ("avg", total() / size), ("max", size), ("min", 1.0)):
        tensor = own()
        assert torch.equal(wait(OPS.all_reduce(tensor, op, name())), torch.full_like(tensor, expected))
        assert torch.equal(tensor, own())
        wait(OPS.all_reduce_(tensor, op, name()))
        assert torch.equal(tensor, torch.full_like(tensor, expected))
    tensors = [own(2), own(5)]
    for result in wait(OPS.all_reduce_coalesced(tensors, "sum", name())):
        assert torch.equal(result, torch.full_like(result, total()))
    wait(OPS.all_reduce_coalesced_(tensors, "sum", name()))
    for tensor in tensors:
        assert torch.equal(tensor, torch.full_like(tensor, total()))


def all_gather() -> None:
    size = dist.get_world_size()
    assert torch.equal(wait(OPS.all_gather_into_tensor(own(), size, name())), everybody(size))
    gathered = wait(OPS.all_gather_into_tensor_coalesced([own(3), own(2)], size, name()))
    for result, columns in zip(gathered, (3, 2), strict=True):
        assert torch.equal(result, everybody(size, columns))
    out = torch.zeros(size * size, 3)
    wait(OPS.all_gather_into_tensor_out(own(), size, name(), out=out))
    assert torch.equal(out, everybody(size))


def reduce_scatter() -> None:
    size = dist.get_world_size()
    expected = torch.full((1, 3), total())
    assert torch.equal(wait(OPS.reduce_scatter_tensor(own(), "sum", size, name())), expected)
    for result in wait(OPS.reduce_scatter_tensor_coalesced([own(), own()], "sum", size, name())):
        assert torch.equal(result, expected)
    out = torch.zeros(1, 3)
    wait(OPS.reduce_scatter_tensor_out(own(), "sum", size, name(), out=out))
    assert torch.equal(out, expected)


def all_to_all() -> None:
    # Rank r gets r + 1 rows of everybody.
    me, size = dist.get_rank(), dist.get_world_size()
    sent = own(2)[:1].repeat(sum(range(1, size + 1)), 1)
    splits_in, splits_out = list(range(1, size + 1)), [me + 1] * size
    result = wait(OPS.all_to_all_single(sent, splits_out, splits_in, name()))
    assert torch.equal(result, everybody(me + 1, 2))


def broadcast() -> None:
    tensor = own()
    assert torch.equal(wait(OPS.broadcast(tensor, 1, name())), torch.full_like(tensor, 2))
    assert torch.equal(tensor, own())
    wait(OPS.broadcast_(tensor, 1, name()))
    assert torch.equal(tensor, torch.full_like(tensor, 2))


def messages() -> None:
    me, size = dist.get_rank(), dist.get_world_size()
    following, before = (me + 1) % size, (me - 1) % size
    sent = OPS.isend(own(), following, 3, name())
    received = wait(OPS.irecv(torch.zeros_like(own()), before, 3, name()))
    wait(sent)
    assert torch.equal(received, torch.full_like(received, before + 1))
    results = OPS.batch_p2p_ops(
        ["isend", "irecv"], [following, before], [0, 0], [own(), torch.zeros_like(own())], name()
    )
    received = wait(results)[1]
    assert torch.equal(received, torch.full_like(received, before + 1))


def python_wrappers() -> None:
    group = dist.group.WORLD
    summed = funcol.all_reduce(own(), "sum", group)
    assert torch.equal(summed + 0, torch.full_like(own(), total()))
    gathered = funcol.all_gather_tensor(own()[:1], 1, group)
    assert torch.equal(gathered + 0, everybody().reshape(1, -1))
    several = funcol.all_gather_into_tensor_coalesced([own()[:1], own(2)[:1]], group)
    for result, columns in zip(several, (3, 2), strict=True):
        assert torch.equal(result + 0, everybody(1, columns))
    shared = funcol.reduce_scatter_tensor(own(dist.get_world_size()), "sum", 1, group)
    assert torch.equal(shared + 0, torch.full((dist.get_world_size(), 1), total()))


def gradients() -> None:
    size, group = dist.get_world_size(), dist.group.WORLD
    leaf = torch.ones(size, 2, requires_grad=True)
    funcol.all_gather_tensor_autograd(leaf, 0, group).sum().backward()
    assert torch.equal(leaf.grad, torch.full((size, 2), float(size)))
    leaf = torch.ones(size, 2, requires_grad=True)
    (funcol.reduce_scatter_tensor_autograd(leaf, "sum", 0, group) * (dist.get_rank() + 1)).sum().backward()
    assert torch.equal(leaf.grad, everybody(1, 2))
    leaf = torch.ones(size, 2, requires_grad=True)
    (funcol.all_to_all_single_autograd(leaf, None, None, group) * (dist.get_rank() + 1)).sum().backward()
    assert torch.equal(leaf.grad, everybody(1, 2))


def compiled() -> None:
    group = dist.group.WORLD

    def step(tensor: torch.Tensor) -> torch.Tensor:
        summed = funcol.all_reduce(tensor * 2, "sum", group)
        gathered = funcol.all_gather_tensor(summed, 0, group)
        return gathered.sum() + funcol.reduce_scatter_tensor(gathered, "sum", 0, group).sum()

    def in_place(tensor: torch.Tensor) -> torch.Tensor:
        doubled = tensor * 2
        dist.all_reduce(doubled)
        return doubled + 1

    for function in (step, in_place):
        expected = function(own())
        for backend in ("eager", "aot_eager"):
            assert torch.equal(torch.compile(function, backend=backend, fullgraph=True)(own()), expected)


BODIES = [all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, messages, python_wrappers, gradients]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_functional_collectives(body: Callable[[], None]) -> None:
    ranks.run(3, body)


def test_compiled_functional_collectives() -> None:
    ranks.run(2, compiled)
