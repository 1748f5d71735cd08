"""Distributed checkpoints: saved by 8 ranks, taken up by 4 and by 6."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor, zeros

from .case import Case, here, program
from .compare import ROUNDING, all_same, same, whole
from .training import Batch, History, adam, batches, mlp, parameters, shares, train

# 33 rows are shared unevenly by 4, by 6 and by 8; 3 rows leave some with nothing.
WIDTHS = (10, 33, 3)
# A whole batch is shared evenly by all of them.
SIZE = 48
SAVED_AFTER = 2


def data() -> list[Batch]:
    return batches(WIDTHS[0], WIDTHS[-1], size=SIZE)


def sharded(seed: int, **options: object) -> nn.Sequential:
    model = mlp(*WIDTHS, seed=seed)
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(here(), sizes, mesh_dim_names=("replicas", "shards")[-len(sizes) :])


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def train_until_saved(case: Case, **options: object) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = sharded(7, **options)
    optimizer = adam(model)
    train(model, optimizer, shares(data()[:SAVED_AFTER], case.rank, dist.get_world_size()))
    return model, optimizer


def go_on(case: Case, name: str) -> None:
    """Takes up weights and moments, compares them, trains on, and compares what comes of it."""
    model = sharded(99)
    optimizer = adam(model)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=case.folder / name)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    alone = mlp(*WIDTHS)
    other = adam(alone)
    train(alone, other, data()[:SAVED_AFTER])
    all_same("taken up:", parameters(model), parameters(alone), ROUNDING)
    for ours, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            same(key, whole(optimizer.state[ours][key]), other.state[wanted][key], ROUNDING)
    rest: list[Batch] = data()[SAVED_AFTER:]
    ours: History = train(model, optimizer, shares(rest, case.rank, dist.get_world_size()))
    ours.must_be(train(alone, other, rest))


def saved_and_taken_up(case: Case, name: str, rows: tuple[int, ...]) -> None:
    with case.world(8):
        model, optimizer = train_until_saved(case, mesh=mesh_of(rows))
        dcp.save(state_of(model, optimizer), checkpoint_id=case.folder / name)
    for ranks in (4, 6):
        with case.world(ranks) as is_member:
            if is_member:
                go_on(case, name)


@program(ranks=8, makes_worlds=True)
def fsdp(case: Case) -> None:
    saved_and_taken_up(case, "fsdp", (8,))


@program(ranks=8, makes_worlds=True)
def hybrid(case: Case) -> None:
    """Two rows of four ranks save together, and others take up what they have saved."""
    saved_and_taken_up(case, "hybrid", (2, 4))


@program(ranks=8, makes_worlds=True)
def saved_meanwhile(case: Case) -> None:
    """`async_save`: the training goes on at once, what is saved is what was there when it was called."""
    name = "meanwhile"
    with case.world(8):
        own = dist.new_group()
        model, optimizer = train_until_saved(case)
        saving = dcp.async_save(
            state_of(model, optimizer), checkpoint_id=case.folder / name, process_group=own
        )
        train(model, optimizer, shares(data(), case.rank, 8))
        saving.result()
    with case.world(4) as is_member:
        if is_member:
            go_on(case, name)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator(here()).manual_seed(4)
    shapes = {"even": (16, 8), "uneven": (7, 5), "few": (2, 3), "cube": (5, 9, 6)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    halves = torch.randn(9, 9, generator=generator).bfloat16()
    return made | {"halves": halves, "integers": torch.arange(24).view(12, 2)}


Layout = tuple[tuple[int, ...], list[Placement]]
LAYOUTS: list[Layout] = [
    ((4,), [Shard(0)]),
    ((4,), [Replicate()]),
    ((6,), [Shard(1)]),
    ((2, 3), [Replicate(), Shard(0)]),
    ((3, 2), [Shard(1), Shard(0)]),
]


def from_two_dimensions(case: Case, name: str, placements: list[Placement]) -> None:
    """Saved from 2 x 4 ranks, taken up in all layouts."""
    with case.world(8):
        mesh = init_device_mesh(here(), (2, 4))
        before = {key: distribute_tensor(value, mesh, placements) for key, value in tensors().items()}
        dcp.save(before | {"note": {"step": 3}}, checkpoint_id=case.folder / name)
    for ranks, targets in LAYOUTS:
        with case.world(torch.Size(ranks).numel()) as is_member:
            if is_member:
                take_up(case, name, ranks, targets)


def take_up(case: Case, name: str, ranks: tuple[int, ...], placements: list[Placement]) -> None:
    mesh = init_device_mesh(here(), ranks)
    after = {
        key: zeros(value.shape, dtype=value.dtype, device_mesh=mesh, placements=placements)
        for key, value in tensors().items()
    }
    state = {**after, "note": {"step": 0}}
    dcp.load(state, checkpoint_id=case.folder / name)
    assert state["note"] == {"step": 3}, state["note"]
    for key, value in tensors().items():
        same(f"{key} on {ranks} as {placements}", after[key].full_tensor(), value)


@program(ranks=8, makes_worlds=True)
def rows_in_other_layouts(case: Case) -> None:
    from_two_dimensions(case, "rows", [Shard(0), Replicate()])


@program(ranks=8, makes_worlds=True)
def tiles_in_other_layouts(case: Case) -> None:
    from_two_dimensions(case, "tiles", [Shard(0), Shard(1)])
