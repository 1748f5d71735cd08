"""Comparisons of what must be equal, each with its tolerance."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

# Sums in another order differ in the last bits of an f64; anything wrong differs by far more.
ROUNDING = 1e-11
# The same of an f32.
ROUNDING_F32 = 1e-5


class Digest:
    """A digest of all that has been compared, by which two runs of a program can be told apart to the bit."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, value: object) -> None:
        if isinstance(value, DTensor):
            value = value.to_local()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            value = value.detach().cpu().resolve_conj().contiguous()
            self._hash.update(f"{value.dtype} {tuple(value.shape)}".encode())
            self._hash.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, (list, tuple)):
            for one in value:
                self.add(one)
        elif isinstance(value, (bool, int, float)):
            self._hash.update(repr(value).encode())

    def text(self) -> str:
        return self._hash.hexdigest()


DIGEST = Digest()


def same(what: str, ours: object, wanted: object, tolerance: float = 0.0) -> None:
    """Raises unless both are the same, by default to the bit; `tolerance` is absolute below 1, relative
    above."""
    DIGEST.add(ours)
    torch.testing.assert_close(
        on_cpu(ours),
        on_cpu(wanted),
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def on_cpu(value: object) -> object:
    """Brings a value to the host, because a value to compare may be on a device, or on the host for want of
    room there."""
    return value.cpu() if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) else value


def all_same(what: str, ours: Mapping[str, object], wanted: Mapping[str, object], tolerance: float) -> None:
    """`same` for everything with a name."""
    assert ours.keys() == wanted.keys(), f"{what}: expected {[*wanted]}, got {[*ours]}"
    for name, value in ours.items():
        same(f"{what} {name}", value, wanted[name], tolerance)


def equal_on_all_ranks(what: str, tensor: torch.Tensor) -> None:
    """Raises unless every rank has the bits of rank 0."""
    first = tensor.detach().clone()
    dist.broadcast(first, 0)
    same(f"{what}, against rank 0", tensor.detach(), first)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of it, wherever its parts are. All ranks of its mesh come here."""
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def torch_refuses(kind: type[Exception], text: str, use: Callable[[], object]) -> None:
    """Raises unless torch itself refuses this on the CPU: once it does not, the program is to be written."""
    try:
        use()
    except kind as error:
        if text not in str(error):
            raise
        return
    raise AssertionError(f"torch no longer refuses with {kind.__name__} {text!r}: compare it with an oracle")
