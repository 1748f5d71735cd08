"""A compiled graph: what AOTAutograd calls in the place of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from tpurun.compile import _counters, _parts
from tpurun.compile._fusions import fuse
from tpurun.compile._lowering import Lowering, NotLowered


def compiled(graph: fx.GraphModule, _inputs: list[Any]) -> Callable[[list[Any]], list[Any]]:
    """The function that computes what a graph does; it takes its arguments in a list, and empties that."""
    fuse(graph)
    lowering = Lowering(graph)
    try:
        lowering.run()
    except NotLowered as error:
        _counters.kept_eager(graph, str(error))
        return _eager(graph)
    for part in lowering.parts:
        _counters.built(part.program)
    if len(lowering.parts) > 1:
        _counters.split(lowering.operations, len(lowering.parts), lowering.most_operations)
    return _function(lowering)


def _eager(graph: fx.GraphModule) -> Callable[[list[Any]], list[Any]]:
    def run(arguments: list[Any]) -> list[Any]:
        given = list(arguments)
        arguments.clear()
        return graph(*given)

    run._boxed_call = True
    return run


def _function(lowering: Lowering) -> Callable[[list[Any]], list[Any]]:
    constants, sizes, parts = lowering.constants, lowering.sizes, lowering.parts
    only_tensors = set(lowering.inputs) <= {"tensor"} and not constants
    only_results = all(kind == "tensor" for kind, _ in lowering.results)
    if only_tensors and only_results and not sizes.numbers and len(parts) == 1:
        run = lowering.program.run
        return _boxed(lambda arguments: run(arguments))
    kinds, results, related = lowering.inputs, lowering.results, lowering.related

    def with_numbers(arguments: list[Any]) -> list[Any]:
        numbers = [one for one, kind in zip(arguments, kinds, strict=True) if kind == "number"]
        tensors = [one for one, kind in zip(arguments, kinds, strict=True) if kind == "tensor"]
        arguments.clear()
        table = sizes.of_run(numbers, tensors)
        # In one list: what this one alone holds is let go in the middle of the run.
        tensors += constants
        made = iter(_parts.relate(_parts.run(parts, tensors, table), related))
        return [_result(kind, of, made, table) for kind, of in results]

    return _boxed(with_numbers)


def _result(kind: str, of: Any, made: Any, table: list[int]) -> Any:
    if kind == "tensor":
        return next(made)
    return table[of] if kind == "size" else of


def _boxed(function: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
    function._boxed_call = True  # type: ignore[attr-defined]
    return function
