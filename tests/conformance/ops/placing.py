"""One sample on some device: the same bytes, strides, offsets and aliases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

DEVICE = "tpu"
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


@dataclass(frozen=True)
class OnHost:
    """A tensor that an operation wants on the CPU, whatever the device of the others."""

    tensor: torch.Tensor


class Placing:
    """Copies values of the CPU to a device; what shares memory there shares it here, too."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        # The original is kept, too: another one at its address must not be taken for it.
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = (value, self._leaf(value))
            return self._tensors[id(value)][1]
        if isinstance(value, OnHost):
            return value.tensor.clone()
        if isinstance(value, torch.device):
            return self._device if value.type == "cpu" else value
        if isinstance(value, str):
            return str(self._device) if value == "cpu" else value
        if isinstance(value, torch.Generator):
            return torch.Generator(self._device).manual_seed(value.initial_seed())
        if isinstance(value, dict):
            return type(value)((self(key), self(one)) for key, one in value.items())
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self, value))
        if type(value) in (list, tuple):
            return type(value)(map(self, value))
        return value

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self._copy(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.sparse_coo:
            parts = self._copy(tensor._indices()), self._copy(tensor._values())
            made = torch.sparse_coo_tensor(*parts, tensor.shape, check_invariants=False)
            return made._coalesced_(tensor.is_coalesced())
        if tensor.layout in _COMPRESSED:
            parts = [self._copy(getattr(tensor, name)()) for name in _COMPRESSED[tensor.layout]]
            values = self._copy(tensor.values())
            return torch.sparse_compressed_tensor(
                *parts, values, tensor.shape, layout=tensor.layout, check_invariants=False
            )
        if tensor.is_nested or tensor.layout != torch.strided:
            return tensor.to(self._device, copy=True)
        if tensor._is_zerotensor():
            return torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype, device=self._device)
        made = torch.empty(0, dtype=tensor.dtype, device=self._device)
        storage = self._storage(tensor.untyped_storage())
        made.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        made = made.conj() if tensor.is_conj() else made
        return made._neg_view() if tensor.is_neg() else made

    def _storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage._cdata not in self._storages:
            made = torch.UntypedStorage(storage.nbytes(), device=self._device)
            self._storages[storage._cdata] = (storage, made.copy_(storage))
        return self._storages[storage._cdata][1]


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tree of tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_of(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_of(one)
