"""Optimizers on the device: some steps of each variant, with the numbers of the CPU's."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

from .running import SEED, Outcome, run_on_both

KINDS = ("optimizer",)
OPTIMIZERS: dict[str, OptimizerInfo] = {f"optim.{info.optim_cls.__name__}": info for info in optim_db}
_STEPS = 4
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)


def dtypes_of(info: OptimizerInfo) -> list[torch.dtype]:
    return [dtype for dtype in _DTYPES if info.supports_complex or not dtype.is_complex]


def check(info: OptimizerInfo, dtype: torch.dtype, kinds: Sequence[str]) -> Iterator[Outcome]:
    if "optimizer" not in kinds:
        return
    for given in info.optim_inputs_func(device="cpu"):
        for variant in _variants(info):
            yield from _steps(
                info, {**given.kwargs, **variant}, dtype, is_sparse=info.only_supports_sparse_grads
            )
    if info.supports_sparse and not info.only_supports_sparse_grads and not dtype.is_complex:
        yield from _steps(info, dict(info.metadata_for_sparse[0]), dtype, is_sparse=True)


def _variants(info: OptimizerInfo) -> Iterator[dict[str, bool]]:
    yield {"foreach": False} if "foreach" in info.supported_impls else {}
    for name in ("foreach", "differentiable"):
        if name in info.supported_impls:
            yield {name: True}
    if "fused" in info.supported_impls and "cpu" in info.supports_fused_on:
        yield {"fused": True}


def _steps(
    info: OptimizerInfo, kwargs: dict[str, Any], dtype: torch.dtype, *, is_sparse: bool
) -> Iterator[Outcome]:
    shapes = [(5, 3)] if is_sparse else [(4, 3), (4,), (2, 2, 2), ()]
    if info.optim_cls.__name__ == "Muon":
        shapes = [(4, 3), (3, 5)]
    torch.manual_seed(SEED)
    starts = [torch.randn(shape, dtype=dtype) for shape in shapes]
    slopes = [[torch.randn(shape, dtype=dtype) for shape in shapes] for _ in range(_STEPS)]

    def body(on: Any) -> Any:
        parameters = [nn.Parameter(start) for start in on[0]]
        optimizer = info.optim_cls(parameters, **copy.deepcopy(on[2]))

        def closure() -> torch.Tensor:
            return sum(_square(one) for one in parameters)

        with torch.set_grad_enabled(bool(on[2].get("differentiable"))):
            for gradients in on[1]:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient.to_sparse() if is_sparse else gradient.clone()
                _step(optimizer, info, closure)
        return [one.detach() for one in parameters], _state(optimizer)

    pair = run_on_both(body, (starts, slopes, kwargs))
    if pair.cpu.error is None:
        yield Outcome("optimizer", pair.difference())


def _state(optimizer: torch.optim.Optimizer) -> Any:
    """How many steps were done may be counted on the host."""
    state = optimizer.state_dict()["state"]
    return {
        key: {name: float(one) if name == "step" else one for name, one in some.items()}
        for key, some in state.items()
    }


def _square(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.abs() ** 2).sum()


def _step(optimizer: torch.optim.Optimizer, info: OptimizerInfo, closure: Any) -> None:
    if info.step_requires_closure:
        optimizer.step(closure)
    else:
        optimizer.step()
