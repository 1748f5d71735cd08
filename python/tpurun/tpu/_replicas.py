"""Whether ranks that are to hold the same hold the same: parameters, DTensor specs, generators.

`check_replicas` compares on demand, and `_watch.py` lets Debug do it by itself. All ranks of a group find the
same, and raise the same.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tpurun.errors import CollectiveMismatchError

Digest = tuple[int, str]
"""And what to show of it."""
Digests = dict[str, Digest]

_TEXT_BYTES = 160


def check_replicas(
    of: nn.Module | Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None, *, rng: bool = False
) -> None:
    """Implements ``torch.tpu.check_replicas``, whose docstring describes it."""
    if isinstance(of, nn.Module):
        of = {**dict(of.named_parameters()), **dict(of.named_buffers())}
    spread = {name: tensor for name, tensor in of.items() if isinstance(tensor, DTensor)}
    digests = {name: digest_of(tensor) for name, tensor in of.items() if name not in spread}
    compare(group or dist.group.WORLD, digests, "tensors")
    check_specs(spread)
    check_replicated(spread)
    if rng:
        compare(group or dist.group.WORLD, _generators(), "generators")


def compare(group: dist.ProcessGroup, digests: Digests, what: str) -> None:
    """Raises on all ranks of the group when they do not have the same digests under the same names."""
    if dist.get_world_size(group) == 1:
        return
    names = [*digests]
    # First of all whether there is the same to compare: collectives of different shapes would not fit.
    listed = [len(names), zlib.crc32("\n".join(names).encode())]
    if (lists := _differing(group, listed)) is not None:
        texts = [f"{count} (names {digest:08x})" for count, digest in lists]
        raise _difference(group, f"other {what}: how many", lists, texts)
    rows = _differing(group, [digest for digest, _ in digests.values()]) if names else None
    if rows is None:
        return
    wrong = [at for at in range(len(names)) if len({row[at] for row in rows}) > 1]
    name = names[wrong[0]]
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    texts = _texts(group, digests[name][1])
    raise _difference(group, f"different {what}: {name!r}{more},", [row[wrong[0]] for row in rows], texts)


def _differing(group: dist.ProcessGroup, numbers: list[int]) -> list[list[int]] | None:
    """The numbers of all ranks of the group, if they are not all the same."""
    device = group._device_types[0]
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    extremes = torch.cat([mine, -mine])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    highest, lowest = extremes.cpu().split(len(numbers))
    if torch.equal(highest, -lowest):
        return None
    all_of = torch.empty(dist.get_world_size(group), len(numbers), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(all_of, mine, group)
    return all_of.tolist()


def _texts(group: dist.ProcessGroup, mine: str) -> list[str]:
    """Returns what every rank of the group has to say, cut short."""
    device = group._device_types[0]
    given = torch.tensor([*mine.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)], dtype=torch.uint8, device=device)
    all_of = torch.empty(dist.get_world_size(group), _TEXT_BYTES, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(all_of, given, group)
    return [bytes(row).decode(errors="replace").strip() for row in all_of.tolist()]


def _difference(
    group: dist.ProcessGroup, what: str, values: list[Any], texts: list[str]
) -> CollectiveMismatchError:
    world = dist.get_process_group_ranks(group)
    holders: dict[str, list[int]] = {}
    for rank, value, text in zip(world, values, texts, strict=True):
        holders.setdefault(f"{value} {text}", []).append(rank)
    shown = {f"{value} {text}": text for value, text in zip(values, texts, strict=True)}
    held = "; ".join(f"{shown[key]} on {_ranks(ranks)}" for key, ranks in holders.items())
    most = max(holders.values(), key=len)
    guilty = [rank for ranks in holders.values() if ranks is not most for rank in ranks]
    return CollectiveMismatchError(
        f"tpurun: ranks that are to be replicas of each other have {what} {held}", sorted(guilty)
    )


def _ranks(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0-6,8``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ",".join("-".join(map(str, part)) for part in parts)


def digest_of(tensor: torch.Tensor) -> Digest:
    """Returns the digest of shape, dtype and bits."""
    about = f"{str(tensor.dtype).removeprefix('torch.')}{[*tensor.shape]}"
    held = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    digest = zlib.crc32(about.encode())
    if held.layout == torch.strided and not held.is_quantized:
        digest = zlib.crc32(held.reshape(-1).view(torch.uint8).numpy(), digest)
    return digest, f"{about} checksum {digest:08x}"


def _spec_of(tensor: DTensor) -> Digest:
    mesh = tensor.device_mesh
    placed = ", ".join(map(str, tensor.placements))
    text = f"{str(tensor.dtype).removeprefix('torch.')}{[*tensor.shape]} ({placed}) on mesh {[*mesh.shape]}"
    return zlib.crc32(f"{text} {mesh.mesh_dim_names} {mesh.mesh.tolist()}".encode()), text


def _generators() -> Digests:
    states = {"of the CPU": torch.get_rng_state(), "of device tpu": torch.tpu.get_rng_state()}
    return {name: digest_of(state) for name, state in states.items()}


def _by_mesh(tensors: dict[str, DTensor]) -> Iterable[tuple[Any, dict[str, DTensor]]]:
    meshes: dict[Any, dict[str, DTensor]] = {}
    for name, tensor in tensors.items():
        if tensor.device_mesh.get_coordinate() is not None:
            meshes.setdefault(tensor.device_mesh, {})[name] = tensor
    return meshes.items()


def check_specs(tensors: dict[str, DTensor]) -> None:
    """Raises where ranks of a mesh have different specs."""
    for mesh, there in _by_mesh(tensors):
        digests = {name: _spec_of(tensor) for name, tensor in there.items()}
        for dim in range(mesh.ndim):
            compare(mesh.get_group(dim), digests, "DTensor specs")


def check_replicated(tensors: dict[str, DTensor]) -> None:
    """Raises where ranks have other bits of a tensor that their mesh replicates."""
    for mesh, there in _by_mesh(tensors):
        for dim in range(mesh.ndim):
            replicas = {name: one for name, one in there.items() if one.placements[dim].is_replicate()}
            digests = {name: digest_of(one.to_local()) for name, one in replicas.items()}
            compare(mesh.get_group(dim), digests, "parameters")


def warn_of_generators(tensors: dict[str, DTensor]) -> None:
    """DTensor's random operations count on generators in the same state; a program may never use them."""
    from torch.distributed.tensor import _random

    generators = _generators()
    for mesh, _ in _by_mesh(tensors):
        for dim in range(mesh.ndim):
            # All ranks compare, whatever has happened on them.
            try:
                compare(mesh.get_group(dim), generators, "generators")
            except CollectiveMismatchError as error:
                if _random._rng_tracker is not None:
                    text = f"{error}; random operations on DTensors need the same"
                    warnings.warn(text, stacklevel=5)
