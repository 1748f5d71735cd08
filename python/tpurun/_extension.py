"""The extension module ``tpurun._C``, which the first process group or the first use of the device loads."""

from __future__ import annotations

import atexit
from typing import Any

_module: Any = None


def load() -> Any:
    """The extension module, loaded at its first use."""
    global _module
    if _module is None:
        _module = _load()
    return _module


def loaded() -> Any:
    """The extension module where somebody has loaded it, else None."""
    return _module


def _load() -> Any:
    import torch

    try:
        from tpurun._build import TORCH_VERSION
    except ImportError as error:
        raise ImportError("tpurun: this copy has no compiled parts; install it with `make build`") from error
    if _minor(torch.__version__) != _minor(TORCH_VERSION):
        # Torch's C++ interface changes with every minor: the loader would only speak of missing symbols.
        raise ImportError(
            f"tpurun: expected torch {_minor(TORCH_VERSION)}, which this copy was built for, "
            f"found {torch.__version__}; rebuild tpurun with this torch installed"
        )
    from tpurun import _C

    # Futures run Python on threads of the extension; none may be left when the interpreter goes.
    atexit.register(_C.stop_callbacks)
    return _C


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
