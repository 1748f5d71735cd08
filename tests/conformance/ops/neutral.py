"""Samples would differ by the name of the device alone, or by a seed that they set for themselves. Both are
made alike here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import linear_cross_entropy_options


def prepare() -> None:
    # Some samples seed for themselves, and put back the state of generators that they know.
    for module in list(sys.modules.values()):
        if hasattr(module, "wrapper_set_seed"):
            module.wrapper_set_seed = _unseeded
    _accumulate_as_on_cpu()


def _unseeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _accumulate_as_on_cpu() -> None:
    """In what dtype this loss adds up 16-bit numbers, torch chooses by the name of the device."""
    options = linear_cross_entropy_options
    policy, dtype_of = options._auto_acc_policy, options.LinearCrossEntropyOptions._resolve_auto_acc_dtype
    cpu = torch.device("cpu")
    options._auto_acc_policy = lambda _, dtype: policy("cpu", dtype)
    options.LinearCrossEntropyOptions._resolve_auto_acc_dtype = staticmethod(
        lambda dtype, _: dtype_of(dtype, cpu)
    )
