"""CPU tensors in memory that the other ranks of the host map, so that collectives use them where they are.

Tensors of device ``tpu`` are there always; the buckets of DDP and the buffers of FSDP2 are if their group is
of this backend. Any other tensor that a program all-reduces is copied through a window of shared memory,
unless it was made by :func:`empty` or :func:`symmetric`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from tpurun import _extension
from tpurun._imports import after_import
from tpurun.backend import _world

if TYPE_CHECKING:
    import torch

T = TypeVar("T", "torch.Tensor", "torch.nn.Module")


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """Like ``torch.empty`` for a CPU tensor, in memory that all ranks of the host can read and write.

    Collectives copy nothing into or out of such tensors. The memory is kept for later ones when they are
    freed. In a process that was forked from a rank, or where the host refuses such memory, the tensor is an
    ordinary one, for which collectives work as well.

        >>> gradients = tpurun.empty(1024, 1024).zero_()
        >>> dist.all_reduce(gradients)
    """
    import torch

    if not size:
        raise TypeError("tpurun.empty: expected a size such as 4, 5 or (4, 5), got none")
    sizes = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    dtype = torch.get_default_dtype() if dtype is None else dtype
    tensor = _extension.load().shared_empty(list(sizes), dtype)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def symmetric(what: T) -> T:
    """Bring what there is into such memory: a copy of a CPU tensor, or a module's parameters and buffers.

    A module is changed in place and returned: its parameters stay the objects that they are, so an optimizer
    that has them goes on. Tensors that share memory with each other share it afterwards.

        >>> model = tpurun.symmetric(model)
        >>> for parameter in model.parameters():
        ...     dist.broadcast(parameter.data, src=0)

    Raises TypeError for anything else, ValueError for a tensor that is on another device or not dense.
    """
    import torch

    if isinstance(what, torch.Tensor):
        return _moved(what, {})
    if not isinstance(what, torch.nn.Module):
        raise TypeError(f"tpurun.symmetric: expected a tensor or a module, got {type(what).__name__}")
    storages: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for tensor in [*what.parameters(), *what.buffers()]:
            for each in (tensor, tensor.grad):
                if each is not None:
                    each.data = _moved(each.data, storages)
    return what


def _moved(tensor: torch.Tensor, storages: dict[int, torch.Tensor]) -> torch.Tensor:
    """The same in shared memory; ``storages`` are those that have been moved, by their address."""
    import torch

    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        kind = f"one on {tensor.device}" if tensor.device.type != "cpu" else f"one of layout {tensor.layout}"
        raise ValueError(f"tpurun.symmetric: expected a dense CPU tensor, got {kind}")
    native = _extension.load()
    if native.is_shared(tensor):
        return tensor
    storage = tensor.untyped_storage()
    moved = storages.get(storage.data_ptr())
    if moved is None:
        moved = native.shared_empty([storage.nbytes()], torch.uint8)
        moved.untyped_storage().copy_(storage)
        storages[storage.data_ptr()] = moved
    view = torch.empty(0, dtype=tensor.dtype)
    view.set_(moved.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return view.requires_grad_(tensor.requires_grad)


# --- DDP and FSDP2 ------------------------------------------------------------------------------------------

_FSDP_BUFFERS = "torch.distributed.fsdp._fully_shard._fsdp_collectives"


def serve_wrappers() -> None:
    """Have DDP take its buckets, and FSDP2 the buffers of its collectives on CPU, from here. Repeatable.

    Torch lets a program ask for both (``DDP_DISABLE_COMM_MEM=0``, and FSDP2's
    ``set_allocate_memory_from_process_group_for_comm``). Here it costs nothing and changes no result, so
    programs get it.
    """
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    # Importing it takes most of a second, which programs without FSDP2 would pay.
    after_import(_FSDP_BUFFERS, _offer_buffers)


def _offer_buffers(module: ModuleType) -> None:
    mixin = getattr(module, "DefaultAllocMixin", None)
    ordinary = getattr(mixin, "allocate", None)
    if mixin is None or ordinary is None or getattr(ordinary, "is_of_tpurun", False):
        return

    def allocate(self: Any, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if _is_ours(size, device):
            return _extension.load().shared_empty(list(size), dtype)
        return ordinary(self, size, dtype=dtype, device=device)

    allocate.is_of_tpurun = True
    mixin.allocate = allocate


def _is_ours(size: Sequence[int], device: torch.device) -> bool:
    """Real tensors, of a program whose collectives on CPU are of this backend."""
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    is_real = _get_current_dispatch_mode() is None and all(isinstance(extent, int) for extent in size)
    return (
        torch.device(device).type == "cpu"
        and is_real
        and not torch.compiler.is_compiling()
        and _world.serves_cpu()
    )
