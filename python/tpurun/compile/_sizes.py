"""Sizes of a traced graph: numbers, or expressions of numbers that each run is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

from tpurun import _C as _native


def _expression(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


class Sizes:
    """The table of sizes that are not known when a graph is traced, and how a run finds them.

    Symbols are numbers among the arguments of the graph, or sizes of its tensors. All sizes are computed from
    them by one function of Python, which is made when the first run needs it.
    """

    def __init__(self) -> None:
        self.numbers: dict[sympy.Expr, int] = {}
        self.sources: dict[sympy.Expr, str] = {}  # of symbols, as code
        self.arguments = 0
        self.tensors = 0
        self.function: Callable[[Sequence[int], Sequence[torch.Tensor]], tuple[int, ...]] | None = None

    def argument(self, size: Any) -> Any:
        """A number that is an argument of the graph, the next one."""
        self._found(size, f"numbers[{self.arguments}]")
        self.arguments += 1
        return self.of(size)

    def tensor(self, fake: torch.Tensor) -> None:
        """A tensor that is an argument of the graph, the next one."""
        name = f"tensors[{self.tensors}]"
        self.tensors += 1
        for at, (size, stride) in enumerate(zip(fake.shape, fake.stride(), strict=True)):
            self._found(size, f"{name}.shape[{at}]")
            self._found(stride, f"{name}.stride({at})")
        self._found(fake.storage_offset(), f"{name}.storage_offset()")

    def _found(self, size: Any, code: str) -> None:
        expression = _expression(size)
        if expression.is_Symbol:
            self.sources.setdefault(expression, code)

    def of(self, size: Any) -> Any:
        """A size as an argument of an operation."""
        expression = _expression(size)
        if expression.is_Integer:
            return int(expression)
        return _native.Unknown(self.numbers.setdefault(expression, len(self.numbers)))

    def are_given(self) -> bool:
        """Whether each run can find all of them."""
        symbols = {symbol for one in self.numbers for symbol in one.free_symbols}
        return symbols <= set(self.sources)

    def of_run(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[int]:
        """All sizes of the table, in a run with these arguments."""
        if not self.numbers:
            return []
        if self.function is None:
            self.function = self._compiled()
        return list(self.function(numbers, tensors))

    def _compiled(self) -> Callable[[Sequence[int], Sequence[torch.Tensor]], tuple[int, ...]]:
        names = {symbol: sympy.Symbol(f"_{at}", integer=True) for at, symbol in enumerate(self.sources)}
        printer = PythonPrinter()
        texts = [printer.doprint(one.xreplace(names)) for one in self.numbers]
        values = f"lambda {', '.join(str(name) for name in names.values())}: ({', '.join(texts)},)"
        given = f"lambda numbers, tensors: values({', '.join(self.sources.values())})"
        # Both are code of ours, of names and arithmetic alone.
        scope: dict[str, Any] = {"math": math, "torch": torch}
        scope["values"] = eval(values, scope)
        return eval(given, scope)
