"""The backend ``tpu`` of ``torch.compile``: Dynamo, AOTAutograd, and a program for each graph.

``torch.compile`` without a backend comes here, too, for graphs with tensors of device ``tpu``. Modes say how
long a compiler may look for faster code; a program is built at once, so all of them are the same here.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import fx

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", None)
_EXECUTORS = ("native",)


def tpu(graph: fx.GraphModule, inputs: list[Any], **given: Any) -> Any:
    """Compile one graph of Dynamo's.

    Raises ``ValueError`` for a mode or an option that does not exist.
    """
    _check(given.pop("mode", "default"), given.pop("options", None) or {}, given)
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    from tpurun.compile._program import compiled

    return aot_autograd(
        fw_compiler=compiled,
        bw_compiler=compiled,
        inference_compiler=compiled,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(graph, inputs)


def _check(mode: Any, options: dict[str, Any], others: dict[str, Any]) -> None:
    if mode not in _MODES:
        known = ", ".join(repr(one) for one in _MODES[:-1])
        raise ValueError(f"tpurun: expected a mode of torch.compile ({known}), got {mode!r}")
    unknown = sorted((set(options) | set(others)) - {"executor"})
    if unknown:
        raise ValueError(f"tpurun: expected options of torch.compile among 'executor', got {unknown}")
    executor = options.get("executor", "native")
    if executor not in _EXECUTORS:
        raise ValueError(f"tpurun: expected an executor ({', '.join(_EXECUTORS)}), got {executor!r}")


def take_device(inductor: ModuleType) -> None:
    """Have graphs with tensors of the device come here from ``torch._inductor.compile_fx``."""
    original = inductor.compile_fx

    @functools.wraps(original)
    def compile_fx(graph: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        if _has_device(graph, inputs):
            return tpu(graph, list(inputs))
        return original(graph, inputs, *arguments, **named)

    if not hasattr(original, "__wrapped__"):
        inductor.compile_fx = compile_fx


def _has_device(graph: Any, inputs: Any) -> bool:
    if any(_is_on_device(one) for one in inputs):
        return True
    nodes = graph.graph.nodes if isinstance(graph, fx.GraphModule) else ()
    return any(_is_on_device(node.meta.get("example_value")) for node in nodes)


def _is_on_device(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "tpu"
