"""How Ray Train is made to take ``tpu_dist`` for this backend.

To Ray that name is Google's torch_tpu, which it loads before it makes a process group, and to which it
leaves workers with the resource ``TPU``. Both are in one module of Ray's, which is changed when a process
imports it; nobody else is led to believe that torch_tpu is here.
"""

from __future__ import annotations

import sys
from types import ModuleType

from tpurun._imports import after_import

MODULE = "ray.air._internal.device_manager.tpu"


def stand_in() -> None:
    """Make Ray take this backend for torch_tpu, in a process that has imported ray; repeatable."""
    # As its workers have before anything else; the module comes after torch.
    if "ray" in sys.modules and MODULE not in sys.modules:
        after_import(MODULE, _change)


def _change(module: ModuleType) -> None:
    manager = getattr(module, "TPUTorchDeviceManager", None)
    if manager is None:  # another version of Ray
        return
    manager.is_available = lambda self: _has_device()
    manager.register_custom_torch_dist_backend = staticmethod(_has_backend)


def _has_device() -> bool:
    """Ray asks this where a worker was given a ``TPU``. Such a program uses the device, and gets it."""
    from tpurun.device import _device

    _device.claim()
    return True


def _has_backend() -> None:
    from tpurun.backend import _backend

    _backend.register()
