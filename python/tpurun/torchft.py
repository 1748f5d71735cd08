"""The process group of torchft's replica groups on this backend::

    from tpurun.torchft import ProcessGroupTpurun

    manager = Manager(pg=ProcessGroupTpurun(timeout=timedelta(seconds=30)), ...)

Its ranks are of one job for each replica group, or of one job with all of them: they meet through the store
that torchft names, as under any other launcher.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tpurun import _extension

try:
    from torchft.process_group import ProcessGroupWrapper
except ImportError as error:
    raise ImportError(
        f"tpurun.torchft: expected torchft and what it needs, given {error}; "
        "install it with `pip install torchft`"
    ) from error

__all__ = ["ProcessGroupTpurun"]


class ProcessGroupTpurun(ProcessGroupWrapper):
    """A group of backend ``tpu_dist`` that torchft configures anew for each quorum.

    Args:
        timeout: Of each operation, and of how long the other ranks may take to come.
        pg: As of torchft's wrapper; leave it None.
    """

    _native: Any = None
    _error: Exception | None = None

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        self._error = None
        self._native = _extension.load().ProcessGroup(
            store,
            rank,
            world_size,
            self._numbers(world_size),
            f"torchft quorum {self._quorum_id}",
            self._timeout,
            0,
            True,
        )
        group = dist.ProcessGroup(store, rank, world_size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        group._set_default_backend(kind)
        for device in dist.Backend.backend_capability["tpu_dist"]:
            group._register_backend(torch.device(device), kind, self._native)
        return group

    def _numbers(self, world_size: int) -> list[int]:
        """The ranks as messages show them: where torchft says so, by their numbers in all replica groups."""
        given = list(self._global_ranks or ())
        return given if len(set(given)) == len(given) == world_size else list(range(world_size))

    def abort(self, errored: bool = True) -> None:
        """Free every waiter at once; the group can be configured again."""
        if errored:
            self._error = RuntimeError("the process group was aborted")
        super().abort(errored=errored)

    def shutdown(self) -> None:
        """End the group; the others are not waited for."""
        if self._native is not None:
            self._native.shutdown()
            self._native = None
        super().shutdown()

    def errored(self) -> Exception | None:
        """Whether this rank has aborted the group since it was configured.

        A lost rank fails the operations that wait for it. The group itself fails, too, where others only
        leave it for their next quorum; what has ended well before is good.
        """
        return self._error

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations from now on, of this group and of later ones."""
        super().set_timeout(timeout)
        if self._native is not None:
            self._native.set_timeout(timeout)

    def getBackendName(self) -> str:
        """As torchft's own: ``torchft-tpurun``."""
        return "torchft-tpurun"
