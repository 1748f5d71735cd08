"""Random numbers of the device. The state of a generator is 16 bytes: seed and offset."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tpurun import _C as _native

default_generators: tuple[torch.Generator, ...] = tuple(
    torch._C._accelerator_getDefaultGenerator(index) for index in range(_native.device_count())
)


def _generator(device: Any) -> torch.Generator:
    if device in (None, "tpu"):
        return default_generators[torch._C._accelerator_getDeviceIndex()]
    index = device if isinstance(device, int) else torch.device(device).index
    return default_generators[torch._C._accelerator_getDeviceIndex() if index is None else index]


def get_rng_state(device: Any = "tpu") -> torch.Tensor:
    """The state of a device's generator: 16 bytes on the CPU."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "tpu") -> None:
    """Set what :func:`get_rng_state` returned; ValueError when it is none."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices."""
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set what :func:`get_rng_state_all` returned."""
    for generator, state in zip(default_generators, new_states, strict=False):
        generator.set_state(state)


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices; ``torch.manual_seed`` does."""
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    """Seed the generator of the current device with a random number."""
    _generator(None).seed()


def seed_all() -> None:
    """Seed the generators of all devices with one random number."""
    manual_seed_all(default_generators[0].seed())


def initial_seed() -> int:
    """The seed of the current device's generator."""
    return _generator(None).initial_seed()
