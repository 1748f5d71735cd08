"""``torch.tpu.distributed``: how ranks find their chips, and how meshes lie on them.

Here a rank needs no chip: `tpurun -n 8 script.py` sets everything. ``eval "$(python -m
torch.tpu.distributed)"`` prints what `set_tpu_launch_env` sets, for launchers that start ranks themselves.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

__all__ = ["set_tpu_launch_env", "spmd_safe", "topology_aware_mesh"]

_Function = TypeVar("_Function", bound=Callable[..., object])


def set_tpu_launch_env(*, nnodes: int = 1, nproc_per_node: int = 1) -> None:
    """Set, before ranks are started, the variables that all of them share; those that are set stay.

    Raises:
        ValueError: for less than one node, or one rank on each.
    """
    for name, given in (("nnodes", nnodes), ("nproc_per_node", nproc_per_node)):
        if given < 1:
            raise ValueError(f"tpurun: expected {name} of at least 1, got {given}")
    for name, value in _launch_env(nnodes, nproc_per_node).items():
        os.environ.setdefault(name, value)


def _launch_env(nnodes: int, nproc_per_node: int) -> dict[str, str]:
    return {
        "NNODES": str(nnodes),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(nnodes * nproc_per_node),
        "LOCAL_WORLD_SIZE": str(nproc_per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def spmd_safe(function: _Function) -> _Function:
    """Says that a function issues the same operations on all ranks, so that a compiler may fuse its
    collectives. Here each collective stays one, and is compared between the ranks as ever."""
    return function


def topology_aware_mesh(
    mesh_shape: Sequence[int],
    *,
    dcn_mesh_shape: Sequence[int] | None = None,
    allow_split_physical_axes: bool = False,
    contiguous_submeshes: bool = False,
) -> torch.Tensor:
    """The ranks as an int64 tensor of shape ``mesh_shape * dcn_mesh_shape``, neighbours next to each other.

    The ranks of a host are equally far from each other, so they lie in order, and how axes are split or
    submeshes lie makes no difference.

    Raises:
        ValueError: when the shapes are not of the same rank, or do not hold as many ranks as there are.
    """
    outer = [1] * len(mesh_shape) if dcn_mesh_shape is None else [*dcn_mesh_shape]
    if len(outer) != len(mesh_shape):
        raise ValueError(
            f"tpurun: expected dcn_mesh_shape of {len(mesh_shape)} dimensions as mesh_shape, got {outer}"
        )
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if math.prod(mesh_shape) * math.prod(outer) != size:
        raise ValueError(
            f"tpurun: expected a mesh of all {size} ranks, got {[*mesh_shape]} times {outer}, which has "
            f"{math.prod(mesh_shape) * math.prod(outer)}"
        )
    # Each slice is one block of the mesh.
    blocks = torch.arange(size).view(*outer, *mesh_shape)
    order = [axis for dim in range(len(outer)) for axis in (dim, dim + len(outer))]
    return blocks.permute(order).reshape([a * b for a, b in zip(outer, mesh_shape, strict=True)])


def _main() -> None:
    nnodes, nproc_per_node = (int(os.environ.get(name, "1")) for name in ("NNODES", "LOCAL_WORLD_SIZE"))
    for name, value in _launch_env(nnodes, nproc_per_node).items():
        sys.stdout.write(f"export {name}={os.environ.get(name, value)}\n")


if __name__ == "__main__":
    _main()
