"""``torch.tpu``: the device, under the names that TorchTPU has for it.

Device memory is memory of this host, in an arena of the process that the other ranks of the host can map.
Operations are those of the CPU, on the same bytes.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch._utils import _get_device_index
from torch.distributed import ProcessGroup

from tpurun import _C as _native
from tpurun import _chip_rules
from tpurun._imports import after_import
from tpurun.compile import _backend
from tpurun.tpu import _attention, _eager, _watch
from tpurun.tpu._eager import EagerMode, set_eager_mode
from tpurun.tpu._memory import (
    empty_cache,
    get_memory_info,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_report,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)
from tpurun.tpu._precision import Precision, precision
from tpurun.tpu._random import (
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from tpurun.tpu._streams import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
)

__all__ = [
    "DeviceProperties",
    "EagerMode",
    "Event",
    "Precision",
    "Stream",
    "StreamContext",
    "check_replicas",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_memory_info",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_report",
    "memory_reserved",
    "memory_stats",
    "precision",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_eager_mode",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]


def is_available() -> bool:
    """Always: that is what this device is for."""
    return True


def init() -> None:
    """Nothing is left to do: the device is there from its first use on."""


_lazy_init = init


def is_initialized() -> bool:
    """Whether the device can be used; always."""
    return True


def _is_in_bad_fork() -> bool:
    return _native.device_is_forked()


def device_count() -> int:
    """How many ``tpu`` devices scripts may name: the ranks of this host (LOCAL_WORLD_SIZE), or 1.

    All of them are the memory of this process; a rank calls its own ``tpu:LOCAL_RANK`` or just ``tpu``.
    """
    return _native.device_count()


def current_device() -> int:
    """The index of the device that ``tpu`` without an index means, in this thread."""
    return torch._C._accelerator_getDeviceIndex()


def set_device(device: Any) -> None:
    """Make a device the current one of this thread; IndexError when there is none of that index."""
    if (index := _index(device)) >= 0:
        torch._C._accelerator_setDeviceIndex(index)


def synchronize(device: Any = None) -> None:
    """Wait until everything that the device has begun is over."""
    torch._C._accelerator_synchronizeDevice(_index(device) if device is not None else current_device())


def get_device_name(device: Any = None) -> str:
    """Returns the name that the device gives itself."""
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> dict[str, Any]:
    """As ``torch.accelerator.get_device_capability``: the dtypes that tensors of the device can have."""
    return torch._C._accelerator_getDeviceCapability(torch.device("tpu", _known(device)))


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Name, memory in bytes, and number of processors of a device."""
    _known(device)
    return DeviceProperties("tpurun host device", _native.device_memory()["limit"], 1)


def check_replicas(
    of: torch.nn.Module | Mapping[str, torch.Tensor], group: ProcessGroup | None = None, *, rng: bool = False
) -> None:
    """Compare the parameters and buffers of a module, or named tensors, with those of the other ranks.

    A collective of `group` (the default one), and of the meshes of DTensors among them. Tensors must have the
    same shape, dtype and bits on all ranks of the group; DTensors the same spec on all ranks of their mesh,
    and the same bits along the dimensions that replicate them. With `rng`, the generators of the CPU and of
    this device must be in the same state, too.

    Raises:
        CollectiveMismatchError: on every rank that took part in the comparison that failed, with the first
            name that differs, and who has what; its `ranks` are the minority.
    """
    # It needs DTensor, which takes long to import.
    from tpurun.tpu import _replicas

    _replicas.check_replicas(of, group, rng=rng)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that ``torch.autocast("tpu")`` can compute in."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Always."""
    return True


@dataclasses.dataclass(frozen=True)
class DeviceProperties:
    """The properties of a device."""

    name: str
    total_memory: int
    multi_processor_count: int


class device:
    """Makes a device the current one for a block; -1 and None change nothing."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = torch._C._accelerator_maybeExchangeDevice(self.idx)

    def __exit__(self, *_: object) -> None:
        torch._C._accelerator_maybeExchangeDevice(self.prev_idx)


class device_of(device):
    """Makes the device of a tensor or storage the current one; others change nothing."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if obj.device.type == "tpu" else -1)


def _exchange_device(index: int) -> int:
    return torch._C._accelerator_exchangeDevice(index)


def _maybe_exchange_device(index: int) -> int:
    return torch._C._accelerator_maybeExchangeDevice(index)


def _known(given: Any) -> int:
    index = _index(given) if given is not None else current_device()
    if not 0 <= index < device_count():
        raise IndexError(f"expected a tpu device from 0 to {device_count() - 1}, got {given!r}")
    return index


def _index(given: Any) -> int:
    return _get_device_index(given, optional=True, allow_cpu=False)


_SUBMODULES = ("compile", "compiler", "distributed", "ops", "optimizers")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"torch.tpu.{name}")
    raise AttributeError(f"tpurun: torch.tpu has no {name!r}")


class _Tpu(ModuleType):
    allow_excess_precision = True
    """Whether results may be more exact than asked for; these are."""

    @property
    def _initialized(self) -> bool:
        """Where torch asks every accelerator whether there are random numbers to save for a checkpoint."""
        return is_initialized()

    @property
    def eager_mode(self) -> EagerMode:
        """The mode that counts in this thread; set, it is that of the process."""
        return EagerMode(_native.eager_mode())

    @eager_mode.setter
    def eager_mode(self, mode: EagerMode | str) -> None:
        _eager.choose(_eager.known(mode))

    @property
    def strict_chip_rules(self) -> _chip_rules.Switch:
        """Whether what TorchTPU refuses is refused here, too; set, called or entered, it decides that."""
        return _chip_rules.switch

    @strict_chip_rules.setter
    def strict_chip_rules(self, mode: bool) -> None:
        _chip_rules.choose(mode)


_StrictTpu = _chip_rules.strict(_Tpu)


def _apply_chip_rules(is_on: bool) -> None:
    sys.modules[__name__].__class__ = _StrictTpu if is_on else _Tpu


_apply_chip_rules(_chip_rules.are_on())
_eager.begin()
_watch.begin()
after_import("torch.distributed.tensor", _attention.register)
after_import("torch._inductor.compile_fx", _backend.take_device)
_chip_rules.follow(_apply_chip_rules)
