"""DTensor: every placement, every way from one to another, operations on shards, random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from .case import Case, here, program
from .compare import ROUNDING, equal_on_all_ranks, same, torch_refuses

# Even, uneven, with fewer rows than ranks, and with nothing at all.
SHAPES = [(8, 12, 4), (7, 5, 3), (2, 9, 1), (0, 3, 4)]
PARTIALS = [Partial(op) for op in ("sum", "avg", "max", "min", "product")]
SHARDS = [Shard(0), Shard(1), Shard(2)]


def numbers(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Integers that stay exact in every sum, mean of 2, 4 or 8, and product."""
    generator = torch.Generator(here()).manual_seed(seed)
    return torch.randint(-8, 9, tuple(shape), generator=generator).double() * 8


def piece(full: torch.Tensor, placement: Placement, index: int, ranks: int, seed: int = 1) -> torch.Tensor:
    """Returns the part of `full` that rank `index` of `ranks` along one mesh dimension holds, by the
    definition of the placement and without torch's help."""
    if isinstance(placement, Shard):
        rows = full.size(placement.dim)
        size = -(-rows // ranks)
        return full.narrow(placement.dim, min(index * size, rows), max(0, min(size, rows - index * size)))
    if isinstance(placement, Partial):
        return contribution(full, placement.reduce_op, index, ranks, seed)
    return full


def contribution(full: torch.Tensor, op: str, index: int, ranks: int, seed: int) -> torch.Tensor:
    """Parts that are all different and whose reduction is `full`."""
    noise = [numbers(full.shape, seed * 100 + other) for other in range(ranks)]
    if op in ("sum", "avg"):
        share = full if op == "avg" or index == 0 else torch.zeros_like(full)
        return share + noise[index] - noise[(index + 1) % ranks]
    turn = (torch.arange(full.numel()).view(full.shape) + index) % ranks
    if op == "product":
        return torch.where(turn == 0, full * 2, torch.where(turn == 1, 0.5, 1.0))
    sign = -1 if op == "max" else 1
    return torch.where(turn == 0, full, full + sign * noise[index].abs())


def local_part(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """Returns the part of `full` that this rank holds."""
    coordinate = mesh.get_coordinate()
    for dim, placement in enumerate(placements):
        # Ranks that differ in an outer coordinate hold parts of different values.
        seed = 1 + dim + sum(coordinate[:dim])
        full = piece(full, placement, coordinate[dim], mesh.size(dim), seed)
    return full.contiguous()


def placed(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """`full` in these placements, built on each rank without any communication."""
    local = local_part(full, mesh, placements)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def check_way(
    full: torch.Tensor, mesh: DeviceMesh, source: Sequence[Placement], target: Sequence[Placement]
) -> None:
    what = f"{tuple(full.shape)} from {source} to {target}"
    arrived = placed(full, mesh, source).redistribute(mesh, target)
    assert tuple(arrived.placements) == tuple(target), f"{what}: is {arrived.placements}"
    if not any(isinstance(placement, Partial) for placement in target):
        same(what, arrived.to_local(), local_part(full, mesh, target))
    same(f"{what}, whole", arrived.full_tensor(), full)


@program(ranks=4, sizes=(4, 8, 16))
def every_redistribution(case: Case) -> None:
    """All that DTensor allows: nothing becomes partial but shards, which become parts of a sum."""
    mesh = init_device_mesh(here(), (dist.get_world_size(),))
    for shape in SHAPES:
        full = numbers(shape)
        for source, target in product([*SHARDS, *PARTIALS, Replicate()], [*SHARDS, Replicate()]):
            check_way(full, mesh, [source], [target])
        for source in SHARDS:
            check_way(full, mesh, [source], [Partial("sum")])


@program(ranks=8)
def every_redistribution_on_two_dimensions(case: Case) -> None:
    """Two reductions in one source are of one kind: a maximum of sums is not a sum of maxima."""
    mesh = init_device_mesh(here(), (2, 4))
    plain = [Shard(0), Shard(1), Replicate()]
    sources = [*plain, Partial("sum"), Partial("avg"), Partial("max")]
    for shape in SHAPES[1:3]:
        full = numbers(shape)
        for source in product(sources, sources):
            if len({placement.reduce_op for placement in source if isinstance(placement, Partial)}) <= 1:
                for target in product(plain, plain):
                    check_way(full, mesh, source, target)


@program(ranks=4)
def distributed_from_rank_0(case: Case) -> None:
    """`distribute_tensor` takes the values of the first rank, whatever the others have."""
    mesh = init_device_mesh(here(), (dist.get_world_size(),))
    for shape, placement in product(SHAPES, [*SHARDS, Replicate()]):
        mine = numbers(shape, seed=case.rank)
        tensor = distribute_tensor(mine, mesh, [placement])
        same(f"{shape} {placement}", tensor.to_local(), local_part(numbers(shape), mesh, [placement]))


@program(ranks=4)
def gradients_of_redistribution(case: Case) -> None:
    """Backward, each redistribution is the way back."""
    mesh = init_device_mesh(here(), (dist.get_world_size(),))
    full, weight = numbers((7, 5, 3)), numbers((7, 5, 3), seed=3)
    for source, target in product([*SHARDS, Replicate()], repeat=2):
        tensor = placed(full, mesh, [source]).requires_grad_()
        scaled = tensor.redistribute(mesh, [target]) * placed(weight, mesh, [target])
        scaled.sum().backward()
        same(f"gradient from {source} to {target}", tensor.grad.full_tensor(), weight)


@program(ranks=4)
def matrix_products(case: Case) -> None:
    """All pairs of placements, values and gradients."""
    mesh = init_device_mesh(here(), (dist.get_world_size(),))
    left, right, seed = numbers((7, 6)), numbers((6, 9), seed=1), numbers((7, 9), seed=2)
    for one, other in product([Shard(0), Shard(1), Replicate(), Partial("sum")], repeat=2):
        a, b = (placed(x, mesh, [p]).requires_grad_() for x, p in ((left, one), (right, other)))
        out = a @ b
        same(f"{one} @ {other}", out.full_tensor(), left @ right)
        out.redistribute(mesh, [Replicate()]).backward(placed(seed, mesh, [Replicate()]))
        same(f"{one} @ {other}: left gradient", a.grad.full_tensor(), seed @ right.T)
        same(f"{one} @ {other}: right gradient", b.grad.full_tensor(), left.T @ seed)


OPERATIONS = {
    "add": lambda x: x + 2 * x,
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(dim=0),
    "mean": lambda x: x.mean(dim=1, keepdim=True),
    "amax": lambda x: x.amax(dim=0),
    "argmax": lambda x: x.argmax(dim=1),
    "softmax": lambda x: x.softmax(dim=-1),
    "log_softmax of rows": lambda x: x.log_softmax(dim=0),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "norm": lambda x: torch.linalg.vector_norm(x),
    "var": lambda x: x.var(dim=0),
    "transpose": lambda x: x.t(),
    "unflatten": lambda x: x.unflatten(1, (2, 5)),
    "flatten": lambda x: x.unsqueeze(1).expand(-1, 2, -1).flatten(0, 1),
    "cat": lambda x: torch.cat([x, x + 1], dim=0),
    "slice": lambda x: x[1:6, ::2],
    "topk": lambda x: x.topk(2, dim=0).values,
    "sort": lambda x: x.sort(dim=1).values,
    "gelu": functional.gelu,
    "where": lambda x: torch.where(x > 0, x, -x),
    "cumsum": lambda x: x.cumsum(dim=0),
    "repeat": lambda x: x.repeat(1, 2),
    "tril": lambda x: x.tril(),
}
# Operations that torch can not split further without a redistribution, with any backend.
REFUSED = {"unflatten of S(1)", "flatten of S(0)"}


@program(ranks=4, sizes=(4,))
def operations(case: Case) -> None:
    """Operations find out what to do with their shards, or refuse. No shard is empty: torch's argmax fails on
    those, on any backend."""
    mesh = init_device_mesh(here(), (dist.get_world_size(),))
    full = numbers((7, 10)) / 8
    refused: dict[str, str] = {}
    for (name, operation), placement in product(
        OPERATIONS.items(), [Shard(0), Shard(1), Replicate(), Partial("sum")]
    ):
        try:
            result = operation(placed(full, mesh, [placement]))
        except (NotImplementedError, RuntimeError) as error:
            refused[f"{name} of {placement}"] = str(error)
            continue
        result = result.full_tensor() if isinstance(result, DTensor) else result
        same(f"{name} of {placement}", result, operation(full), ROUNDING)
    assert refused.keys() == REFUSED, f"expected refusals of {REFUSED}, got {refused}"


@program(ranks=4, sizes=(1, 4))
def embedding(case: Case) -> None:
    """A table by rows is looked up everywhere, and masked where the row is somebody else's."""
    mesh = init_device_mesh(here(), (dist.get_world_size(),))
    table, tokens = numbers((11, 6)), torch.tensor([[0, 10, 3, 3], [7, 1, 2, 9]])
    seed = numbers((2, 4, 6), seed=4)
    alone = table.clone().requires_grad_()
    functional.embedding(tokens, alone).backward(seed)
    for placement in (Shard(0), Shard(1), Replicate()):
        mine = placed(table, mesh, [placement]).requires_grad_()
        out = functional.embedding(distribute_tensor(tokens, mesh, [Replicate()]), mine)
        whole = out.redistribute(mesh, [Replicate()])
        same(f"rows of {placement}", whole.to_local(), functional.embedding(tokens, table))
        whole.backward(placed(seed, mesh, [Replicate()]))
        same(f"gradient of {placement}", mine.grad.full_tensor(), alone.grad)


@program(ranks=4)
def random_numbers(case: Case) -> None:
    """torch keeps the random states of a mesh in step on accelerators alone (`is_rng_supported_mesh`). On the
    CPU, on any backend, its factories of random tensors refuse, and other operations draw each part from the
    generator of its rank: equal seeds give equal replicas, and shards need different ones."""
    mesh = init_device_mesh(here(), (dist.get_world_size(),))
    if here() != "cpu":
        kept_in_step(mesh)
        return
    torch_refuses(AssertionError, "", lambda: dt.rand(7, 5, device_mesh=mesh, placements=[Replicate()]))

    full = torch.zeros(7, 5)
    torch.manual_seed(3)
    replicas = torch.rand_like(placed(full, mesh, [Replicate()]))
    torch.manual_seed(3)
    same("replicas", replicas.to_local(), torch.rand(7, 5))

    torch.manual_seed(case.rank)
    shards = placed(full, mesh, [Shard(0)]).normal_()
    parts = []
    ranks = dist.get_world_size()
    for rank in range(ranks):
        torch.manual_seed(rank)
        parts.append(torch.randn(piece(full, Shard(0), rank, ranks).shape))
    same("shards", shards.full_tensor(), torch.cat(parts))

    ones = placed(torch.ones(64, 32), mesh, [Shard(0)]).requires_grad_()
    torch.manual_seed(case.rank)
    dropped = nn.Dropout(0.25)(ones)
    torch.manual_seed(case.rank)
    same("dropped by this rank", dropped.to_local(), functional.dropout(torch.ones(64 // ranks, 32), 0.25))
    dropped.sum().backward()
    same("gradient of dropout", ones.grad.full_tensor(), dropped.full_tensor())


def kept_in_step(mesh: DeviceMesh) -> None:
    """Every rank has the numbers of one tensor, however that is placed, and replicas are equal."""
    drawn = []
    for placement in (Replicate(), Shard(0)):
        torch.manual_seed(3)
        drawn.append(dt.rand(8, 5, device_mesh=mesh, placements=[placement]).full_tensor())
    equal_on_all_ranks("replicas", drawn[0])
    rows = drawn[1].tolist()
    assert len({tuple(row) for row in rows}) == len(rows), "shards repeat each other's numbers"

    torch.manual_seed(4)
    replicas = placed(torch.ones(64, 32), mesh, [Replicate()]).requires_grad_()
    dropped = nn.Dropout(0.25)(replicas)
    equal_on_all_ranks("dropped from replicas", dropped.to_local())
    dropped.sum().backward()
    same("gradient of dropout", replicas.grad.full_tensor(), dropped.full_tensor())


@program(ranks=4)
def made_in_place(case: Case) -> None:
    """Factories make the part of each rank, also where the parts are uneven."""
    mesh = init_device_mesh(here(), (dist.get_world_size(),))
    for shape, placement in product(SHAPES, [*SHARDS, Replicate()]):
        for made, wanted in (
            (dt.ones(shape, device_mesh=mesh, placements=[placement]), torch.ones(shape)),
            (dt.full(shape, 2.5, device_mesh=mesh, placements=[placement]), torch.full(shape, 2.5)),
        ):
            same(f"{shape} {placement}", made.full_tensor(), wanted)
            same(
                f"{shape} {placement}, local",
                made.to_local(),
                piece(wanted, placement, case.rank, dist.get_world_size()),
            )
