"""``torch.tpu.compiler``: options for the compiler of chips, which here has nothing to do.

Operations run as they are called, with the kernels of the CPU: options are checked as there, so that a
program that is wrong about them is found out here, and change nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

__all__ = ["custom_compiler_options"]

_LEVELS = ("O0", "O1", "O2", "O3")
_LEVELLED = ("xla_optimization_level", "xla_memory_fitting_level")


@contextlib.contextmanager
def custom_compiler_options(options: Mapping[str, str]) -> Iterator[None]:
    """Options of XLA for what runs in the block, by name. Refused within ``torch.compile``.

    Raises:
        TypeError: for names and values that are not strings.
        ValueError: for a level other than O0 to O3.
    """
    for name, value in options.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise TypeError(f"tpurun: expected compiler options as strings, got {name!r}: {value!r}")
        if name in _LEVELLED and value not in _LEVELS:
            raise ValueError(f"tpurun: expected {name} as one of {', '.join(_LEVELS)}, got {value!r}")
    if torch.compiler.is_compiling():
        raise RuntimeError("tpurun: expected custom_compiler_options outside of torch.compile")
    yield
