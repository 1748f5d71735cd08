"""How torch.distributed finds the backend: the names, the devices, and the timeouts of its groups."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tpurun import _chip_rules, _torch_tpu
from tpurun.backend import NAMES, _alone, _creation, _gloo, _ray, _world


def register(claim: Callable[[], None]) -> None:
    """Register the names; cheap, and repeatable. Libraries that ask for the device have it by `claim`."""
    import torch.distributed as dist

    if not dist.is_available() or all(name.upper() in dist.Backend._plugins for name in NAMES):
        return
    if _torch_tpu.is_in_charge():
        print(
            "tpurun: torch_tpu and its chips are here; device tpu, tpu_dist and tpu are left to it",
            file=sys.stderr,
        )
        return
    # CPU tensors only, until somebody claims the device: torch refuses a device name that nobody has. Gloo
    # stays the default backend of the CPU, whoever serves it.
    _offer(["cpu"])
    _inherit_timeouts(dist.distributed_c10d)
    _alone.watch(dist.distributed_c10d)
    _gloo.take_over(dist.distributed_c10d)
    # The engine records what every rank does. Torch's recorder would hook each call for 2 to 5 us more.
    recorders = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if isinstance(recorders, set):
        recorders.update(NAMES)
    os.register_at_fork(after_in_child=_world.remember_as_parents)
    _chip_rules.follow(_check_collectives)
    _ray.stand_in(claim)


def serve_device(claim: Callable[[], None]) -> None:
    """Offer the backends for tensors on ``tpu``, too; the first is what such programs get by default."""
    import torch.distributed as dist

    if dist.is_available():
        register(claim)
        _offer(["cpu", "tpu"])


def _offer(devices: list[str]) -> None:
    import torch.distributed as dist

    for name in NAMES:
        dist.Backend.register_backend(name, _creation.create, extended_api=True, devices=devices)


def _inherit_timeouts(c10d: Any) -> None:
    """Make groups that are given no timeout have that of the world, instead of half an hour."""
    default = getattr(c10d, "_get_default_timeout", None)
    if default is None:
        return

    def of_the_world(backend: str) -> timedelta:
        ours = (*NAMES, *_gloo.NAMES) if _gloo.is_ours() else NAMES
        if not any(name in ours for name in re.split("[:,]", str(backend))):
            return default(backend)
        _world.check_is_own()
        world = _world.of_this_backend()
        if world is None:
            return default(backend)
        return world.options._timeout

    c10d._get_default_timeout = of_the_world


def _check_collectives(is_on: bool) -> None:
    """Apply the rules of chips to collectives, in processes where the rules have ever been on."""
    if is_on or "tpurun.backend._chip_collectives" in sys.modules:
        from tpurun.backend import _chip_collectives

        _chip_collectives.apply(is_on)
