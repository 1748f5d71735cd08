"""The time that a program of many parameters adds to a call, beyond guards and wrappers.

The same function is compiled three times with the same Dynamo and AOTAutograd, which differ in what runs in
the end: the backend's program, the one operation of that program called by hand, or nothing.

The function names all parameters, so that all are inputs of the program, and needs only the first one: an
operation that reads all of them would take longer than what is measured.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import torch
from torch._dynamo.backends.common import aot_autograd

from ..job import Row
from .options import Options
from .ways import REASONS, one_line

PARAMETERS = 150
CALLS = 1000
"""Calls of a block: some 30 ms."""

Executor = Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Callable[..., object]]


def measured(options: Options) -> Row:
    """The seconds of a call, round by round, by what runs in the end."""
    parameters = [torch.nn.Parameter(torch.ones(1, device="tpu")) for _ in range(PARAMETERS)]
    calls: dict[str, Callable[[], object]] = {}
    missing: dict[str, str] = {}
    for name, backend in (
        ("backend", options.backend),
        ("by hand", aot_autograd(fw_compiler=by_hand)),
        ("nothing", aot_autograd(fw_compiler=nothing(torch.full((1,), 2.0, device="tpu")))),
    ):
        try:
            calls[name] = compiled(parameters, backend)
        except REASONS as error:
            missing[name] = one_line(error)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.rounds):
        for name, call in calls.items():
            seconds[name].append(block(call))
    return {"parameters": PARAMETERS, "seconds": seconds, "missing": missing}


def compiled(parameters: Sequence[torch.Tensor], backend: object) -> Callable[[], object]:
    """The compiled function, called once."""

    def add(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        # Dynamo makes inputs of these, and AOTAutograd leaves the sums out.
        _ = [tensor + 1 for tensor in tensors]
        return tensors[0] + 1

    torch.compiler.reset()
    function = torch.compile(add, backend=backend)

    @torch.no_grad()
    def call() -> torch.Tensor:
        return function(parameters)

    if call().item() != 2.0:
        raise RuntimeError(f"expected 2 of the compiled function, got {call()}")
    return call


def by_hand(graph: torch.fx.GraphModule, _: Sequence[torch.Tensor]) -> Callable[..., object]:
    """Calls the operation of the graph without the graph."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    (node,) = (node for node in graph.graph.nodes if node.op == "call_function")
    if len(inputs) != PARAMETERS:
        raise RuntimeError(f"expected a program of {PARAMETERS} inputs, got {len(inputs)}")
    operation, index, rest = node.target, inputs.index(node.args[0]), node.args[1:]

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [operation(tensors[index], *rest)]

    return _boxed(run)


def nothing(made: torch.Tensor) -> Executor:
    """Returns what was made before, whatever is given."""
    return lambda *_: _boxed(lambda _: [made])


def block(call: Callable[[], object]) -> float:
    """The seconds of one of many calls."""
    gc.collect()
    gc.disable()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    took = (time.perf_counter() - began) / CALLS
    gc.enable()
    return took


def _boxed(run: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Callable[..., object]:
    """Marks a function that takes its tensors as one list, as AOTAutograd calls without another wrapper."""
    run._boxed_call = True
    return run
