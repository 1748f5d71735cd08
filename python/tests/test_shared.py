"""CPU tensors that collectives use where they are: tpurun.empty, tpurun.symmetric, DDP and FSDP2."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ranks
import tpurun
from tpurun import _extension


def is_shared(tensor: torch.Tensor) -> bool:
    return _extension.load().is_shared(tensor)


def like_torch_empty() -> None:
    for size in [((),), (0,), (3, 5), ([4, 2],), (torch.Size([7]),)]:
        tensor = tpurun.empty(*size)
        like = torch.empty(*size)
        assert (tensor.shape, tensor.dtype, tensor.device) == (like.shape, like.dtype, like.device)
        assert is_shared(tensor) == (tensor.numel() > 0)
    with pytest.raises(TypeError, match="expected a size"):
        tpurun.empty()
    assert tpurun.empty(2, dtype=torch.bfloat16, requires_grad=True).requires_grad
    big = tpurun.empty(1000).fill_(3)
    big.resize_(5000)
    assert is_shared(big) and (big[:1000] == 3).all()
    assert torch.equal(big[:1000].clone(), torch.full((1000,), 3.0))


# In processes of their own: ranks that were forked from one with such memory would have none.
def test_empty_is_like_torch_empty():
    ranks.run(1, like_torch_empty)


def same_module() -> None:
    net = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20), nn.Linear(20, 20))
    net[2].weight = net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.ones(4, 20)).sum().backward()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    identities = [id(parameter) for parameter in net.parameters()]
    assert tpurun.symmetric(net) is net
    assert [id(parameter) for parameter in net.parameters()] == identities
    assert all(is_shared(tensor) for tensor in net.state_dict().values())
    assert all(is_shared(parameter.grad) for parameter in net.parameters())
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    optimizer.step()
    assert not torch.equal(net[0].weight, before["0.weight"])
    assert net[2].weight is net[0].weight


def test_symmetric_keeps_what_a_module_is():
    ranks.run(1, same_module)


def views_and_mistakes() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    moved = tpurun.symmetric(whole.t())
    assert is_shared(moved) and torch.equal(moved, whole.t()) and moved.stride() == (1, 4)
    assert tpurun.symmetric(moved) is moved
    with pytest.raises(TypeError, match="expected a tensor or a module, got list"):
        tpurun.symmetric([whole])
    with pytest.raises(ValueError, match="expected a dense CPU tensor, got one on meta"):
        tpurun.symmetric(torch.empty(2, device="meta"))
    with pytest.raises(ValueError, match=r"got one of layout torch\.sparse_coo"):
        tpurun.symmetric(torch.eye(2).to_sparse())


def test_symmetric_of_views_and_mistakes():
    ranks.run(1, views_and_mistakes)


def all_kinds_of_memory() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = torch.full((70_000,), float(sum(range(1, size + 1))))
    for who in range(size + 1):
        # On no rank, on some, on all.
        make = tpurun.empty if rank < who else torch.empty
        tensor = make(70_000).fill_(rank + 1)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, expected)
    out, mine = tpurun.empty(size * 9000), tpurun.empty(9000).fill_(rank)
    dist.all_gather_into_tensor(out, mine)
    assert torch.equal(out, torch.arange(size).repeat_interleave(9000).float())


def test_ranks_may_mix_memory():
    ranks.run(3, all_kinds_of_memory)


def wrapped() -> None:
    torch.manual_seed(0)
    rank = dist.get_rank()
    net, alone = nn.Linear(300, 300), nn.Linear(300, 300)
    alone.load_state_dict(net.state_dict())
    data = torch.randn(dist.get_world_size(), 4, 300)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    for _ in range(3):  # the buckets are built anew after the first
        ddp.zero_grad()
        ddp(data[rank]).square().mean().backward()
        assert all(is_shared(parameter.grad) for parameter in net.parameters())
    for part in data:
        (alone(part).square().mean() / len(data)).backward()
    for ours, its in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, its.grad)


def test_ddp_has_its_buckets_there():
    ranks.run(2, wrapped)


def sharded() -> None:
    torch.manual_seed(0)
    native = _extension.load()
    made: list[torch.Tensor] = []

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(native, name)

        def shared_empty(self, *args: object) -> torch.Tensor:
            made.append(native.shared_empty(*args))
            return made[-1]

    _extension._module = Counting()
    try:
        net = fully_shard(nn.Linear(300, 300))
        net(torch.randn(4, 300)).sum().backward()
    finally:
        _extension._module = native
    # FSDP2 has made buffers for what it gathers, for what it scatters, and for the results.
    assert len(made) >= 3 and all(map(is_shared, made))


def test_fsdp2_has_its_buffers_there():
    ranks.run(2, sharded)


def forks() -> None:
    tensor = tpurun.empty(5000).fill_(1)
    child = os.fork()
    if child == 0:
        own = tpurun.empty(5000).fill_(7)
        tensor.fill_(2)
        os._exit(0 if not is_shared(own) and (tensor == 2).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (tensor == 1).all()


def test_a_fork_has_a_copy():
    ranks.run(1, forks)
