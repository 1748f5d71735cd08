"""Sums of sparse tensors, which gradients of sparse embeddings are."""

import pytest
import torch
import torch.distributed as dist

import ranks
from test_device_collectives import on_device

# Torch takes the parts of complex tensors apart before any backend sees them, which loses sparse ones.
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def sparse(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rank r has r values, some at the places of others' and one place twice."""
    rows = torch.arange(rank) // 2 * 2
    values = torch.arange(rank * 2).reshape(rank, 2) + rank
    return torch.sparse_coo_tensor(rows[None], values.to(dtype), (8, 2), check_invariants=True)


def expected(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    return sum(sparse(rank, wide).to_dense() for rank in range(dist.get_world_size())).to(dtype)


def sums() -> None:
    for dtype in DTYPES:
        for async_op in (False, True):
            tensor = sparse(dist.get_rank(), dtype)
            work = dist.all_reduce(tensor, async_op=async_op)
            if work is not None:
                assert work.get_future().wait()[0] is tensor
                work.wait()
            assert tensor.is_sparse
            assert torch.equal(tensor.to_dense(), expected(dtype))


def many_at_once() -> None:
    tensors = [sparse(dist.get_rank()) for _ in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    dist.all_reduce(torch.ones(1))
    for work in reversed(works):
        work.wait()
    for tensor in tensors:
        assert torch.equal(tensor.to_dense(), expected())


def what_differs() -> None:
    size = 8 + dist.get_rank()
    tensor = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1), (size,), check_invariants=True)
    error = ranks.failure_of(lambda: dist.all_reduce(tensor))
    assert isinstance(error, ValueError), error
    assert "expected the same dtype, sizes and sparse dimensions" in str(error)
    error = ranks.failure_of(lambda: dist.all_reduce(sparse(dist.get_rank()), dist.ReduceOp.MAX))
    assert isinstance(error, ValueError), error
    assert "expected the reduce op SUM" in str(error)
    dist.barrier()


def embedding_gradients() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(20, 4, sparse=True), torch.nn.Linear(4, 2))
    alone = torch.nn.Sequential(torch.nn.EmbeddingBag(20, 4, sparse=True), torch.nn.Linear(4, 2))
    alone.load_state_dict(model.state_dict())
    words = torch.arange(24).reshape(6, 4) * 7 % 20
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    parallel(words.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
    alone(words).square().mean().backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours.grad.to_dense(), theirs.grad.to_dense(), atol=1e-6)


@pytest.mark.parametrize("body", [sums, many_at_once, embedding_gradients], ids=lambda body: body.__name__)
@pytest.mark.parametrize("size", [2, 3])
def test_sparse_sums(body, size: int) -> None:
    ranks.run(size, body)


def test_sparse_sums_of_what_differs() -> None:
    ranks.run(2, what_differs)


def sums_on_the_device() -> None:
    for dtype in DTYPES:
        for async_op in (False, True):
            tensor = sparse(dist.get_rank(), dtype).to("tpu")
            work = dist.all_reduce(tensor, async_op=async_op)
            if work is not None:
                work.wait()
            assert tensor.is_sparse and tensor.device.type == "tpu"
            assert torch.equal(tensor.to_dense().cpu(), expected(dtype))
    tensor = sparse(dist.get_rank()).to("tpu")
    dist.all_reduce(tensor, async_op=True).get_future().wait()
    assert torch.equal(tensor.to_dense().cpu(), expected())
    for call in (lambda: dist.broadcast(tensor, 0), lambda: dist.reduce(tensor, 0)):
        assert isinstance(ranks.failure_of(call), NotImplementedError)
    compressed = torch.eye(3).to_sparse_csr().to("tpu")
    assert isinstance(ranks.failure_of(lambda: dist.all_reduce(compressed)), NotImplementedError)


def test_sparse_sums_on_the_device() -> None:
    on_device(3, sums_on_the_device)
