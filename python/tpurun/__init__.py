"""Many PyTorch ranks on the machines you have, joined by fast, checked collectives.

Importing torch registers the backends ``tpu_dist`` and ``tpu``::

    torch.distributed.init_process_group("tpu_dist")

Nothing else happens until one of the two is asked for: the native library is loaded by the first process
group, and this module imports neither torch nor anything slow.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tpurun import _torch_tpu

if TYPE_CHECKING:
    from tpurun.backend._programs import Program, program, programs
    from tpurun.backend._shared import empty, symmetric
    from tpurun.errors import (
        AbortedError,
        CollectiveMismatchError,
        CollectiveTimeoutError,
        DeadlockError,
        RankLostError,
    )
    from tpurun.survivors import reform, shrink

    __version__: str

__all__ = [
    "AbortedError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "Program",
    "RankLostError",
    "__version__",
    "empty",
    "program",
    "programs",
    "reform",
    "register_backends",
    "shrink",
    "symmetric",
]

if "torch" not in sys.modules:
    # Ranks of tpurun and programs that import this first have device tpu when they import torch.
    _torch_tpu.keep_out()

_ERRORS = frozenset(name for name in __all__ if name.endswith("Error"))
_OF_PROGRAMS = frozenset({"Program", "program", "programs"})


def register_backends() -> None:
    """Make ``tpu_dist`` and ``tpu`` known to torch.distributed; done by ``import torch`` unless disabled."""
    from tpurun.backend import _backend
    from tpurun.device import _device

    _backend.register(_device.claim)


def announce_device() -> None:
    """Let this process have device ``tpu`` when it asks for it; done by ``import torch`` unless disabled."""
    from tpurun.device import _device

    _device.announce()
    _device.claim_if_interpreter_names_it()


def _autoload() -> None:
    """The entry point that torch calls at the end of its import. An error here must not break that import."""
    from tpurun.device import _device

    try:
        register_backends()
        announce_device()
    except Exception as error:
        text = str(error)
        if not text.startswith("tpurun: "):
            text = f"tpurun: not available: {type(error).__name__}: {text}"
        print(text, file=sys.stderr)
    if _device.is_claimed() or not _torch_tpu.has_library():
        _torch_tpu.keep_out()


def __getattr__(name: str) -> Any:
    if name in _ERRORS:
        from tpurun import errors

        return getattr(errors, name)
    if name in _OF_PROGRAMS:
        from tpurun.backend import _programs

        return getattr(_programs, name)
    if name in ("empty", "symmetric"):
        from tpurun.backend import _shared

        return getattr(_shared, name)
    if name in ("reform", "shrink"):
        from tpurun import survivors

        return getattr(survivors, name)
    if name == "__version__":
        from importlib.metadata import version

        return version("tpurun")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
