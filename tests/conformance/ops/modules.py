"""Modules on the device: what they return, their gradients, and what they keep."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

from .operators import derive
from .placing import tensors_of
from .running import SEED, Outcome, called, run_on_both

KINDS = ("module", "module_backward")
MODULES: dict[str, ModuleInfo] = {f"nn.{info.name}": info for info in module_db}


def dtypes_of(info: ModuleInfo) -> list[torch.dtype]:
    return sorted(info.supported_dtypes("cpu"), key=str)


def check(info: ModuleInfo, dtype: torch.dtype, kinds: Sequence[str]) -> Iterator[Outcome]:
    for training in (True, False) if info.train_and_eval_differ else (True,):
        for kind in KINDS:
            if kind in kinds:
                torch.manual_seed(SEED)
                wants = kind == "module_backward"
                inputs = info.module_inputs_func(
                    info, device="cpu", dtype=dtype, requires_grad=wants, training=training
                )
                for one in inputs:
                    yield from _of_input(info, one, dtype, training, kind)


def _of_input(
    info: ModuleInfo, given: ModuleInput, dtype: torch.dtype, training: bool, kind: str
) -> Iterator[Outcome]:
    if given.forward_input is None:
        return
    torch.manual_seed(SEED)
    try:
        made = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
        made = made.to(dtype).train(training)
    except Exception:
        # Not for this dtype.
        return

    def body(on: Any) -> Any:
        module = _on(made, on[2])
        results = called(module)(*on[0], **on[1])
        if kind == "module":
            return results, dict(module.state_dict())
        leaves = [*tensors_of(on), *module.parameters()]
        leaves = [one for one in leaves if one.requires_grad]
        return derive(tensors_of(results), leaves)

    pair = run_on_both(body, (given.forward_input.args, given.forward_input.kwargs, torch.device("cpu")))
    if pair.cpu.error is None:
        yield Outcome(kind, pair.difference())


def _on(module: nn.Module, device: torch.device) -> nn.Module:
    return copy.deepcopy(module).to(device)
