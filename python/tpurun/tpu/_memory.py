"""How much memory the device has, how much is held, and by whom."""

from __future__ import annotations

import json
from typing import Any

import torch

from tpurun import _C as _native


def memory_allocated(device: Any = None) -> int:
    """Bytes that tensors hold."""
    return _native.device_memory()["allocated"]


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that tensors held since :func:`reset_peak_memory_stats`."""
    return _native.device_memory()["allocated_peak"]


def memory_reserved(device: Any = None) -> int:
    """Bytes of the host's memory that the device holds, for tensors or for later ones."""
    return _native.device_memory()["reserved"]


def max_memory_reserved(device: Any = None) -> int:
    """The most bytes of the host's memory that the device held since :func:`reset_peak_memory_stats`."""
    return _native.device_memory()["reserved_peak"]


def memory_stats(device: Any = None) -> dict[str, Any]:
    """Counts under the names of ``torch.accelerator.memory_stats``."""
    return torch.accelerator.memory_stats(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Bytes that are free, and all bytes of the device (``--hbm``)."""
    counts = _native.device_memory()
    return counts["limit"] - counts["allocated"], counts["limit"]


get_memory_info = mem_get_info


def memory_report() -> dict[str, Any]:
    """Returns how much is held and by which lines of the program, as a dictionary that :mod:`json` can
    write."""
    return json.loads(_native.device_memory_report())


def empty_cache() -> None:
    """Give memory that no tensor holds back to the host."""
    torch._C._accelerator_emptyCache()


def reset_peak_memory_stats(device: Any = None) -> None:
    """The peaks become what is held now."""
    torch.accelerator.reset_peak_memory_stats(_index(device))


def reset_accumulated_memory_stats(device: Any = None) -> None:
    """Sets the counters that count from the beginning to zero."""
    torch.accelerator.reset_accumulated_memory_stats(_index(device))


def _index(device: Any) -> int:
    if device is None:
        return torch._C._accelerator_getDeviceIndex()
    return device if isinstance(device, int) else (torch.device(device).index or 0)
