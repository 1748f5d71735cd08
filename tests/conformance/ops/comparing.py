"""In what two results differ, one of the CPU and one of the device; None where they are the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from .placing import DEVICE, tensors_of


class Values(Enum):
    """Whether the numbers count, or only what is around them (of uninitialised memory, say)."""

    COUNT = 0
    DIFFER = 1


def difference(expected: Any, given: Any, values: Values = Values.COUNT, at: str = "result") -> str | None:
    if isinstance(expected, torch.Tensor):
        if not isinstance(given, torch.Tensor):
            return f"{at}: expected a tensor, got {type(given).__name__}"
        return _of_tensors(expected, given, values, at)
    if type(expected) is not type(given):
        return f"{at}: expected {type(expected).__name__}, got {type(given).__name__}"
    if isinstance(expected, dict):
        if expected.keys() != given.keys():
            return f"{at}: expected keys {list(expected)}, got {list(given)}"
        return _first(difference(expected[key], given[key], values, f"{at}[{key!r}]") for key in expected)
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(given):
            return f"{at}: expected {len(expected)} of them, got {len(given)}"
        pairs = enumerate(zip(expected, given, strict=True))
        return _first(difference(one, other, values, f"{at}[{k}]") for k, (one, other) in pairs)
    if isinstance(expected, torch.device) or expected in ("cpu", DEVICE):
        return None
    if values is Values.COUNT and not _same_number(expected, given):
        return f"{at}: expected {expected!r}, got {given!r}"
    return None


def _first(differences: Any) -> str | None:
    return next((one for one in differences if one is not None), None)


def _same_number(expected: Any, given: Any) -> bool:
    if isinstance(expected, float) and math.isnan(expected):
        return math.isnan(given)
    if isinstance(expected, complex):
        return repr(expected) == repr(given)
    try:
        return bool(expected == given)
    except (RuntimeError, TypeError, ValueError):
        return True


def _of_tensors(expected: torch.Tensor, given: torch.Tensor, values: Values, at: str) -> str | None:
    if type(expected) is not type(given):
        return f"{at}: expected a {type(expected).__name__}, got a {type(given).__name__}"
    if expected.device.type != "cpu":
        same_device = given.device.type == expected.device.type
        return None if same_device else f"{at}: expected device {expected.device}, got {given.device}"
    if given.device.type != DEVICE:
        return f"{at}: expected device {DEVICE}, got {given.device}"
    for name, one, other in zip(_LOOKS, _looks(expected), _looks(given), strict=True):
        if one != other:
            return f"{at}: expected {name} {one}, got {other}"
    return _of_parts(expected.detach(), given.detach(), values, at)


_LOOKS = ("shape", "dtype", "layout", "requires_grad", "conj", "neg", "stride", "storage_offset", "nested")


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = tensor.layout == torch.strided and not tensor.is_nested
    place = (tensor.stride(), tensor.storage_offset()) if plain else (None, None)
    shape = None if tensor.is_nested else tuple(tensor.shape)
    bits = tensor.is_conj(), tensor.is_neg()
    return shape, tensor.dtype, tensor.layout, tensor.requires_grad, *bits, *place, tensor.is_nested


def _of_parts(expected: torch.Tensor, given: torch.Tensor, values: Values, at: str) -> str | None:
    parts = _parts(expected)
    if not parts:
        return None if values is Values.DIFFER else _of_numbers(expected, given.cpu(), at)
    if expected.layout == torch.sparse_coo and expected.is_coalesced() != given.is_coalesced():
        return f"{at}: expected coalesced {expected.is_coalesced()}, got {given.is_coalesced()}"
    pairs = zip(parts, _parts(given), strict=True)
    return _first(_of_tensors(one, other, values, f"{at} part {k}") for k, (one, other) in enumerate(pairs))


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return list(tensor.unbind()) if tensor.is_nested else []


def _of_numbers(expected: torch.Tensor, given: torch.Tensor, at: str) -> str | None:
    one, other = _plain(expected), _plain(given)
    if torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
        return None
    if not one.dtype.is_floating_point:
        return f"{at}: {int((one != other).sum())} of {one.numel()} numbers differ"
    # NaNs may have any payload.
    one, other = one.double(), other.double()
    same = (one.isnan() & other.isnan()) | ((one == other) & (one.signbit() == other.signbit()))
    if bool(same.all()):
        return None
    most = (one - other)[~same].abs().max().item()
    return f"{at}: {int((~same).sum())} of {one.numel()} numbers differ, by {most:.3g} at most"


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    # A contiguous tensor of one element may have any stride, which does not let its bytes be seen.
    tensor = tensor.resolve_conj().resolve_neg().reshape(-1).clone().as_strided((tensor.numel(),), (1,))
    return torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor


def aliases(results: Any, inputs: Any) -> list[tuple[Any, ...]]:
    """Says of each result whether it is, or shares memory with, an input or a result before it."""
    known: list[torch.Tensor] = list(tensors_of(inputs))
    found = []
    for result in tensors_of(results):
        same = next((k for k, one in enumerate(known) if one is result), None)
        shared = next((k for k, one in enumerate(known) if _share(one, result)), None)
        base = next((k for k, one in enumerate(known) if one is result._base), None)
        found.append((same, shared, base, result._is_view()))
        known.append(result)
    return found


def alias_anything(found: Sequence[tuple[Any, ...]]) -> bool:
    return any(same is None and shared is not None for same, shared, *_ in found)


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    pair = (one, other)
    if any(tensor.layout != torch.strided or tensor.is_nested for tensor in pair):
        return False
    if any(tensor.untyped_storage().nbytes() == 0 for tensor in pair):
        return False
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata
