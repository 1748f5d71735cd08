"""How exactly matrices are multiplied: chosen as on chips, and at least as exact here.

A chip multiplies float32 in passes of bfloat16, one (``DEFAULT``), three (``HIGH``) or six (``HIGHEST``). The
CPU's kernels multiply float32 as it is, whatever is chosen.
"""

from __future__ import annotations

import enum
import threading
from types import TracebackType

import torch


class Precision(enum.Enum):
    """The choices, under TorchTPU's names."""

    DEFAULT = "default"
    HIGH = "high"
    HIGHEST = "highest"


class _Chosen(threading.local):
    def __init__(self) -> None:
        self.stack: list[Precision] = []


_chosen = _Chosen()


class precision:
    """Chooses the precision of this thread for a block; the innermost counts."""

    def __init__(self, value: Precision | str) -> None:
        try:
            self.value = Precision(value.lower()) if isinstance(value, str) else Precision(value)
        except ValueError:
            names = ", ".join(one.name for one in Precision)
            raise ValueError(f"tpurun: expected a precision ({names}), got {value!r}") from None

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError("tpurun: expected precision() outside of torch.compile")
        _chosen.stack.append(self.value)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _chosen.stack.pop()
