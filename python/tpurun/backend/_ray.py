"""How Ray Train is made to take ``tpu_dist`` for this backend.

To Ray that name is Google's torch_tpu, which it loads before it makes a process group, and to which it
leaves workers with the resource ``TPU``. Both are in one module of Ray's, which is changed when a process
imports it; nobody else is led to believe that torch_tpu is here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from tpurun._imports import after_import

MODULE = "ray.air._internal.device_manager.tpu"


def stand_in(claim: Callable[[], None]) -> None:
    """Make Ray take this backend for torch_tpu, in a process that has imported ray; repeatable.

    It calls `claim` where a worker was given a ``TPU``.
    """
    # As its workers have before anything else; the module comes after torch.
    if "ray" in sys.modules and MODULE not in sys.modules:
        after_import(MODULE, _StandIn(claim))


@dataclass(frozen=True)
class _StandIn:
    """Changes Ray's module."""

    claim: Callable[[], None]

    def __call__(self, module: ModuleType) -> None:
        manager = getattr(module, "TPUTorchDeviceManager", None)
        if manager is None:  # another version of Ray
            return
        manager.is_available = lambda _manager: self._has_device()
        # The names are registered since before this module of Ray's could be imported.
        manager.register_custom_torch_dist_backend = staticmethod(lambda: None)

    def _has_device(self) -> bool:
        """Ray asks this where a worker was given a ``TPU``. Such a program uses the device, and gets it."""
        self.claim()
        return True
