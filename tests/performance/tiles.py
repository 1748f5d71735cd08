"""``python -m tests.performance.tiles``: what an element costs in a kernel of tiles, beside eager torch.

A kernel runs on one tile of 1024 elements, which stays in the nearest cache. Eager torch runs the same
operation on tensors of as many elements, and pays for its dispatch and its result as well. The table has
the fastest of some rounds, in nanoseconds an element.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "tests"))

from pointwise_cases import CASES, Case, materialise, operation_of
from tpurun import _C

ELEMENTS = 1024
ROUNDS = 7
CALLS = 200


def eager_ns(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            work()
        best = min(best, (time.perf_counter_ns() - start) / CALLS)
    return best


def measure(case: Case, dtype: torch.dtype) -> tuple[float, float] | None:
    """Nanoseconds an element of the kernel and of eager torch, on numbers of ordinary size."""
    generator = torch.Generator().manual_seed(3)
    arguments = [
        ordinary(a, generator) if isinstance(a, torch.Tensor) and a.dim() > 0 else a
        for a in materialise(case, dtype, ELEMENTS, generator)
    ]
    mine = _C.time_pointwise(case.name, case.overload, case.in_order(arguments), ROUNDS, CALLS)
    if mine is None:
        return None
    operation = operation_of(case)
    theirs = eager_ns(lambda: operation(*arguments, **case.keywords))
    return mine / ELEMENTS, theirs / ELEMENTS


def ordinary(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Denormals and NaNs take other ways through some functions, and those are slow."""
    if not tensor.dtype.is_floating_point:
        return tensor
    return (torch.rand(tensor.shape, generator=generator) + 0.5).to(tensor.dtype)


def main() -> None:
    torch.set_num_threads(1)
    print(f"{torch.backends.cpu.get_cpu_capability()}, {ELEMENTS} elements, ns an element\n")
    print(f"{'operation':58} {'type':9} {'tile':>7} {'eager':>7} {'times':>6}")
    for case in CASES:
        for dtype in case.dtypes:
            times = measure(case, dtype)
            if times is None:
                continue
            mine, theirs = times
            print(f"{case!s:58.58} {str(dtype)[6:]:9} {mine:7.3f} {theirs:7.3f} {theirs / mine:6.1f}")


if __name__ == "__main__":
    main()
