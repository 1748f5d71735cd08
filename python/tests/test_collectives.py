"""Every collective against what it means, on all ranks at once: dtypes, layouts, groups, blocking or not."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import ranks

SIZES = [2, 3, 4]
SHAPE = (3, 4)
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
DTYPES = [*FLOATS, *INTEGERS]
MOVED = [*DTYPES, torch.bool, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
BOTH = (False, True)  # blocking, async


def values(rank: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """Small whole numbers, different on every rank, whose sums and products are exact in every dtype."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * (rank + 1)) % 3 + rank % 2).reshape(shape).to(dtype)


def layouts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same values contiguous, transposed in memory, and as every second element of a larger tensor."""
    yield tensor.clone()
    if tensor.dim() == 2:
        yield tensor.t().contiguous().t()
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    strided = wide[..., 1]
    strided.copy_(tensor)
    yield strided


def groups() -> Iterator[tuple[dist.ProcessGroup | None, list[int]]]:
    """The world, and overlapping groups of some of its ranks; ranks outside get nothing."""
    size = dist.get_world_size()
    yield None, list(range(size))
    for members in ([0, size - 1], list(range(1, size))) if size > 1 else ():
        group = dist.new_group(members)
        if dist.get_rank() in members:
            yield group, members


def finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    if actual.dtype.itemsize == 1:
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    assert torch.equal(actual, expected), f"expected {expected}, got {actual}"


def reduced(op: dist.ReduceOp.RedOpType, tensors: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(tensors)
    wide = stacked.double() if stacked.is_floating_point() else stacked.long()
    ops = {
        dist.ReduceOp.SUM: lambda: wide.sum(0),
        dist.ReduceOp.AVG: lambda: wide.sum(0) / len(tensors),
        dist.ReduceOp.PRODUCT: lambda: wide.prod(0),
        dist.ReduceOp.MIN: lambda: wide.amin(0),
        dist.ReduceOp.MAX: lambda: wide.amax(0),
    }
    return ops[op]().to(stacked.dtype)


def all_reduce() -> None:
    arithmetic = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
    for group, members in groups():
        for dtype in DTYPES:
            for op in [*arithmetic, *([dist.ReduceOp.AVG] if dtype in FLOATS else [])]:
                expected = reduced(op, [values(rank, dtype) for rank in members])
                for async_op in BOTH:
                    for tensor in layouts(values(dist.get_rank(), dtype)):
                        finish(dist.all_reduce(tensor, op, group, async_op))
                        equal(tensor, expected)


def all_reduce_bits() -> None:
    size = dist.get_world_size()
    for dtype in [*INTEGERS, torch.bool]:
        rows = torch.stack([values(rank, dtype) for rank in range(size)])
        folds = {
            dist.ReduceOp.BAND: torch.bitwise_and,
            dist.ReduceOp.BOR: torch.bitwise_or,
            dist.ReduceOp.BXOR: torch.bitwise_xor,
        }
        for op, fold in folds.items():
            expected = rows[0]
            for row in rows[1:]:
                expected = fold(expected, row)
            tensor = rows[dist.get_rank()].clone()
            dist.all_reduce(tensor, op)
            equal(tensor, expected)


def all_reduce_premultiplied() -> None:
    size = dist.get_world_size()
    for factor in (0.5, torch.tensor([0.25])):
        op = dist._make_nccl_premul_sum(factor)
        tensor = values(dist.get_rank())
        dist.all_reduce(tensor, op)
        equal(tensor, sum(values(rank) for rank in range(size)) * float(factor))


def complex_sum() -> None:
    size = dist.get_world_size()
    tensor = values(dist.get_rank(), torch.complex64) * (1 + 2j)
    dist.all_reduce(tensor)
    equal(tensor, sum(values(rank, torch.complex64) for rank in range(size)) * (1 + 2j))


def narrow_floats() -> None:
    """Sums are rounded once, from what single precision gives."""
    size = dist.get_world_size()
    for dtype in EIGHT_BITS:
        rows = [(values(rank) / 4 + 0.25).to(dtype) for rank in range(size)]
        wide = torch.stack([row.float() for row in rows])
        results = {dist.ReduceOp.SUM: wide.sum(0), dist.ReduceOp.MAX: wide.amax(0)}
        for op, expected in results.items():
            tensor = rows[dist.get_rank()].clone()
            dist.all_reduce(tensor, op)
            equal(tensor, expected.to(dtype))


def under_newer_names() -> None:
    """Torch 2.15 has shorter names for collectives on single tensors, older ones the longer alone."""
    size, me = dist.get_world_size(), dist.get_rank()
    for suffix in ("_single", "_into_tensor"):
        if gather := getattr(dist, f"all_gather{suffix}", None):
            whole = torch.empty(size * 2)
            gather(whole, torch.full((2,), float(me)))
            equal(whole, torch.arange(float(size)).repeat_interleave(2))
        if gather := getattr(dist, f"gather{suffix}", None):
            whole = torch.empty(size * 2) if me == 0 else None
            gather(torch.full((2,), float(me)), whole, dst=0)
            if whole is not None:
                equal(whole, torch.arange(float(size)).repeat_interleave(2))
    for suffix in ("_single", "_tensor"):
        if scatter := getattr(dist, f"reduce_scatter{suffix}", None):
            own = torch.empty(2)
            scatter(own, torch.arange(float(size)).repeat_interleave(2))
            equal(own, torch.full((2,), float(me * size)))


def logical() -> None:
    size = dist.get_world_size()
    rows = torch.stack([values(rank).bool() for rank in range(size)])
    results = {
        dist.ReduceOp.SUM: rows.any(0),
        dist.ReduceOp.MAX: rows.any(0),
        dist.ReduceOp.PRODUCT: rows.all(0),
        dist.ReduceOp.MIN: rows.all(0),
    }
    for op, expected in results.items():
        tensor = rows[dist.get_rank()].clone()
        dist.all_reduce(tensor, op)
        equal(tensor, expected)


def unsigned() -> None:
    size = dist.get_world_size()
    for dtype, top in ((torch.uint16, 2**16 - 1), (torch.uint32, 2**32 - 1)):
        tensor = torch.tensor([dist.get_rank(), top], dtype=torch.int64).to(dtype)
        dist.all_reduce(tensor)
        expected = [sum(range(size)), top * size % (top + 1)]
        assert tensor.to(torch.int64).tolist() == expected
        tensor = torch.tensor([dist.get_rank(), top], dtype=torch.int64).to(dtype)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        assert tensor.to(torch.int64).tolist() == [size - 1, top]


def nothing() -> None:
    """Tensors without elements, in all places at once and in some."""
    size = dist.get_world_size()
    for shape in ((0,), (0, 3), (3, 0)):
        none = torch.empty(shape)
        several = [torch.empty(shape) for _ in range(size)]
        whole = torch.empty(size * shape[0], *shape[1:])
        root = dist.get_rank() == 0
        for async_op in BOTH:
            finish(dist.all_reduce(none, async_op=async_op))
            finish(dist.broadcast(none, 0, async_op=async_op))
            finish(dist.reduce(none, 0, async_op=async_op))
            finish(dist.all_gather(several, none, async_op=async_op))
            finish(dist.all_gather_into_tensor(whole, none, async_op=async_op))
            finish(dist.reduce_scatter(none, several, async_op=async_op))
            finish(dist.reduce_scatter_tensor(none, whole, async_op=async_op))
            finish(dist.gather(none, several if root else None, 0, async_op=async_op))
            finish(dist.scatter(none, several if root else None, 0, async_op=async_op))
            finish(dist.all_to_all(several, [none.clone() for _ in range(size)], async_op=async_op))
            finish(dist.all_to_all_single(whole, whole.clone(), async_op=async_op))
        assert none.shape == shape
    parts = [torch.empty(rank) for rank in range(size)]
    dist.all_gather(parts, torch.full((dist.get_rank(),), float(dist.get_rank())))
    for rank, part in enumerate(parts):
        equal(part, torch.full((rank,), float(rank)))


def broadcast() -> None:
    for group, members in groups():
        for root in members:
            for dtype in MOVED:
                for async_op in BOTH:
                    for tensor in layouts(values(dist.get_rank(), dtype)):
                        finish(dist.broadcast(tensor, root, group, async_op))
                        equal(tensor, values(root, dtype))


def reduce() -> None:
    for group, members in groups():
        for root in members:
            for async_op in BOTH:
                for tensor in layouts(values(dist.get_rank())):
                    finish(dist.reduce(tensor, root, dist.ReduceOp.SUM, group, async_op))
                    if dist.get_rank() == root:
                        equal(tensor, reduced(dist.ReduceOp.SUM, [values(rank) for rank in members]))
                    else:
                        equal(tensor, values(dist.get_rank()))


def all_gather() -> None:
    for group, members in groups():
        for dtype in MOVED:
            for async_op in BOTH:
                for kind in range(3):
                    tensor = list(layouts(values(dist.get_rank(), dtype)))[kind]
                    outputs = [list(layouts(torch.zeros(SHAPE).to(dtype)))[kind] for _ in members]
                    finish(dist.all_gather(outputs, tensor, group, async_op))
                    for rank, output in zip(members, outputs, strict=True):
                        equal(output, values(rank, dtype))


def all_gather_uneven() -> None:
    size = dist.get_world_size()
    shapes = [(rank + 1, 2) if rank != 1 else (0, 2) for rank in range(size)]
    for async_op in BOTH:
        outputs = [torch.empty(shape) for shape in shapes]
        finish(
            dist.all_gather(
                outputs, values(dist.get_rank(), shape=shapes[dist.get_rank()]), async_op=async_op
            )
        )
        for rank, output in enumerate(outputs):
            equal(output, values(rank, shape=shapes[rank]))


def all_gather_into_tensor() -> None:
    for group, members in groups():
        for async_op in BOTH:
            for dtype in MOVED:
                expected = torch.cat([values(rank, dtype) for rank in members])
                for tensor in layouts(values(dist.get_rank(), dtype)):
                    output = torch.zeros(len(members) * SHAPE[0], SHAPE[1]).to(dtype)
                    finish(dist.all_gather_into_tensor(output, tensor, group, async_op))
                    equal(output, expected)
            # In place, as FSDP does it.
            whole = torch.zeros(len(members) * SHAPE[0], SHAPE[1])
            mine = whole.chunk(len(members))[members.index(dist.get_rank())]
            mine.copy_(values(dist.get_rank()))
            finish(dist.all_gather_into_tensor(whole, mine, group, async_op))
            equal(whole, torch.cat([values(rank) for rank in members]))


def reduce_scatter() -> None:
    for group, members in groups():
        index = members.index(dist.get_rank())
        for dtype in FLOATS:
            for async_op in BOTH:
                for kind in range(3):
                    parts = [
                        list(layouts(values(dist.get_rank() + part, dtype)))[kind]
                        for part in range(len(members))
                    ]
                    output = list(layouts(torch.zeros(SHAPE).to(dtype)))[kind]
                    finish(dist.reduce_scatter(output, parts, group=group, async_op=async_op))
                    equal(
                        output, reduced(dist.ReduceOp.SUM, [values(rank + index, dtype) for rank in members])
                    )


def reduce_scatter_uneven() -> None:
    size, me = dist.get_world_size(), dist.get_rank()
    shapes = [(2 * part + 1,) if part != 1 else (0,) for part in range(size)]
    output = torch.empty(shapes[me])
    dist.reduce_scatter(output, [values(me + part, shape=shapes[part]) for part in range(size)])
    equal(output, reduced(dist.ReduceOp.SUM, [values(rank + me, shape=shapes[me]) for rank in range(size)]))


def reduce_scatter_tensor() -> None:
    for group, members in groups():
        index, count = members.index(dist.get_rank()), len(members)
        shape = (count * SHAPE[0], SHAPE[1])
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            expected = reduced(op, [values(rank, shape=shape) for rank in members]).chunk(count)[index]
            for async_op in BOTH:
                for tensor in layouts(values(dist.get_rank(), shape=shape)):
                    output = torch.empty(SHAPE)
                    finish(dist.reduce_scatter_tensor(output, tensor, op, group, async_op))
                    equal(output, expected)
                whole = values(dist.get_rank(), shape=shape)
                mine = whole.chunk(count)[index]
                finish(dist.reduce_scatter_tensor(mine, whole, op, group, async_op))
                equal(mine, expected)


def gather() -> None:
    for group, members in groups():
        for root in members:
            for async_op in BOTH:
                for tensor in layouts(values(dist.get_rank())):
                    outputs = [torch.zeros(SHAPE) for _ in members] if dist.get_rank() == root else None
                    finish(dist.gather(tensor, outputs, root, group, async_op))
                    for rank, output in zip(members, outputs or [], strict=False):
                        equal(output, values(rank))


def scatter() -> None:
    for group, members in groups():
        for root in members:
            for async_op in BOTH:
                for output in layouts(torch.zeros(SHAPE)):
                    parts = [values(rank + 5) for rank in members] if dist.get_rank() == root else None
                    finish(dist.scatter(output, parts, root, group, async_op))
                    equal(output, values(dist.get_rank() + 5))


def lazy_signs() -> None:
    """Views whose numbers have another sign than their memory: the numbers are what counts."""
    size, me = dist.get_world_size(), dist.get_rank()
    real = [values(rank) for rank in range(size)]
    complex_ = [values(rank, torch.complex64) * (1 + 2j) for rank in range(size)]
    for numbers, mine in [
        (real, torch._neg_view(-real[me])),
        (complex_, torch.conj_physical(complex_[me]).conj()),
    ]:
        output = torch.empty_like(numbers[me])
        dist.reduce_scatter(output, [mine] * size)
        equal(output, sum(numbers))
        outputs = [torch.empty_like(output) for _ in range(size)] if me == 0 else None
        dist.gather(mine, outputs)
        for rank, gathered in enumerate(outputs or []):
            equal(gathered, numbers[rank])


def all_to_all() -> None:
    for group, members in groups():
        index = members.index(dist.get_rank())
        for dtype in MOVED:
            for async_op in BOTH:
                inputs = [values(7 * index + to, dtype, (index + to,)) for to in range(len(members))]
                outputs = [torch.zeros(index + source).to(dtype) for source in range(len(members))]
                finish(dist.all_to_all(outputs, inputs, group, async_op))
                for source, output in enumerate(outputs):
                    equal(output, values(7 * source + index, dtype, (index + source,)))


def all_to_all_single() -> None:
    for group, members in groups():
        index, count = members.index(dist.get_rank()), len(members)
        for async_op in BOTH:
            for tensor in layouts(values(index, shape=(2 * count, 3))):
                output = torch.empty(2 * count, 3)
                finish(dist.all_to_all_single(output, tensor, group=group, async_op=async_op))
                parts = [values(source, shape=(2 * count, 3)).chunk(count)[index] for source in range(count)]
                equal(output, torch.cat(parts))
            # Rank i sends i + j rows to rank j.
            sent = [index + to for to in range(count)]
            tensor, output = values(index, shape=(sum(sent), 2)), torch.empty(sum(sent), 2)
            finish(dist.all_to_all_single(output, tensor, sent, sent, group, async_op))
            pieces = []
            for source in range(count):
                rows = [source + to for to in range(count)]
                pieces.append(values(source, shape=(sum(rows), 2)).split(rows)[index])
            equal(output, torch.cat(pieces))


def all_to_all_onto_itself() -> None:
    size, me = dist.get_world_size(), dist.get_rank()
    tensor = values(me, shape=(size, 2))
    dist.all_to_all_single(tensor, tensor)
    equal(tensor, torch.stack([values(source, shape=(size, 2))[me] for source in range(size)]))


def barrier() -> None:
    for group, _ in groups():
        dist.barrier(group)
        finish(dist.barrier(group, async_op=True))


def tensors_that_need_care() -> None:
    size = dist.get_world_size()
    empty = torch.empty(0)
    dist.all_reduce(empty)
    scalar = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(scalar)
    assert scalar.item() == sum(range(size))
    leaf = torch.ones(4, 2, requires_grad=True)
    with torch.no_grad():
        finish(dist.all_reduce(leaf.t(), async_op=True))
    equal(leaf.detach(), torch.full((4, 2), float(size)))
    with torch.inference_mode():
        inferred = torch.ones(4, 2).t()
        finish(dist.all_reduce(inferred, async_op=True))
        equal(inferred.contiguous(), torch.full((2, 4), float(size)))
    large = torch.full((1 << 20,), float(dist.get_rank() + 1))
    dist.all_reduce(large)
    equal(large, torch.full((1 << 20,), float(sum(range(1, size + 1)))))


BODIES = [
    all_gather,
    all_gather_into_tensor,
    all_gather_uneven,
    all_reduce,
    all_reduce_bits,
    all_reduce_premultiplied,
    all_to_all,
    all_to_all_onto_itself,
    all_to_all_single,
    barrier,
    broadcast,
    complex_sum,
    gather,
    lazy_signs,
    logical,
    narrow_floats,
    nothing,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    reduce_scatter_uneven,
    scatter,
    tensors_that_need_care,
    under_newer_names,
    unsigned,
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_matches_its_meaning(body, size: int) -> None:
    ranks.run(size, body)


def test_a_world_of_one_rank() -> None:
    for body in (all_reduce, all_gather, reduce_scatter_tensor, all_to_all_single, broadcast, barrier):
        ranks.run(1, body)
