"""``torch.tpu.ops``: collectives along any dimension, tensors from rank to rank, barriers for a compiler.

None of them has a gradient. TorchTPU's further operations, for its compiler and its SparseCores, do not exist
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["all_gather_dim", "optimization_barrier", "recv", "reduce_scatter_dim", "send"]


def all_gather_dim(
    tensor: torch.Tensor, dim: int = 0, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The tensors of all ranks, one after the other along a dimension: n times as long there.

    Raises:
        IndexError: when the tensor has no such dimension.
    """
    dim = _known(tensor, dim)
    given = tensor.detach().movedim(dim, 0).contiguous()
    size = dist.get_world_size(group)
    gathered = given.new_empty((size * given.shape[0], *given.shape[1:]))
    dist.all_gather_into_tensor(gathered, given, group)
    return gathered.movedim(0, dim).contiguous()


def reduce_scatter_dim(
    tensor: torch.Tensor,
    dim: int = 0,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """This rank's part of the reduced tensor along a dimension, which has as many parts as ranks.

    Raises:
        IndexError: when the tensor has no such dimension.
        ValueError: when it can not be cut there into as many equal parts.
    """
    dim = _known(tensor, dim)
    size = dist.get_world_size(group)
    if tensor.shape[dim] % size != 0:
        raise ValueError(
            f"tpurun: expected dimension {dim} as a multiple of {size} ranks, got shape {[*tensor.shape]}"
        )
    given = tensor.detach().movedim(dim, 0).contiguous()
    part = given.new_empty((given.shape[0] // size, *given.shape[1:]))
    dist.reduce_scatter_tensor(part, given, op, group)
    return part.movedim(0, dim).contiguous()


def send(tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> None:
    """Send tensors to a rank, which receives as many."""
    for tensor in tensors:
        dist.send(tensor, dst, tag=tag)


def recv(tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> None:
    """Receive into tensors what a rank sends, in its order."""
    for tensor in tensors:
        dist.recv(tensor, src, tag=tag)


def optimization_barrier(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, which no compiler may compute in another order: there is none here that would."""
    return tensors


def _known(tensor: torch.Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise IndexError(f"tpurun: expected a dimension of shape {[*tensor.shape]}, got {dim}")
    return dim % tensor.dim()


def __getattr__(name: str) -> Any:
    raise AttributeError(f"tpurun: torch.tpu.ops has no {name!r}; it has {', '.join(__all__)}")
