"""Results that kernels put in the place of an operand have the bits of those in memory of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tpurun import _C

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = ((3, 1), (7, 5), (64, 256), (3, 1000), (65, 1025))
Arguments = list[object]


def numbers(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def softmax(name: str, x: torch.Tensor) -> Iterator[Arguments]:
    yield [x, 1, False]


def softmax_backward(name: str, x: torch.Tensor) -> Iterator[Arguments]:
    forward = torch.log_softmax if "log" in name else torch.softmax
    yield [numbers(x.shape, x.dtype, 2), forward(x, 1), 1, x.dtype]


def gelu(name: str, x: torch.Tensor) -> Iterator[Arguments]:
    given = [numbers(x.shape, x.dtype, 2), x] if "backward" in name else [x]
    for approximate in ("none", "tanh"):
        yield [*given, {"approximate": approximate}]


def cross_entropy(name: str, x: torch.Tensor) -> Iterator[Arguments]:
    if x.shape[1] > 1:
        target = torch.arange(x.shape[0]) % x.shape[1]
        weight = torch.tensor(float(x.shape[0]), dtype=x.dtype)
        yield [torch.ones((), dtype=x.dtype), torch.log_softmax(x, 1), target, 1, -100, weight]


GIVEN = {
    "aten::_softmax": softmax,
    "aten::_log_softmax": softmax,
    "aten::_softmax_backward_data": softmax_backward,
    "aten::_log_softmax_backward_data": softmax_backward,
    "aten::gelu": gelu,
    "aten::gelu_backward": gelu,
    "tpurun_kernel::cross_entropy_backward": cross_entropy,
}


def told(packet: torch._ops.OpOverloadPacket) -> tuple[torch._ops.OpOverload, str]:
    """The overload that is told where to put its result, and the name of that argument."""
    for overload in packet.overloads():
        op = getattr(packet, overload)
        for argument in op._schema.arguments:
            if argument.is_out:
                return op, argument.name
    raise AssertionError(f"expected {packet} to have an overload with out")


def check(name: str, operand: int, given: Arguments) -> None:
    space, _, rest = name.partition("::")
    packet = getattr(getattr(torch.ops, space), rest)
    named = given.pop() if isinstance(given[-1], dict) else {}
    wanted = packet(*given, **named)
    arguments = [one.clone() if isinstance(one, torch.Tensor) else one for one in given]
    op, out = told(packet)
    op(*arguments, **named, **{out: arguments[operand]})
    assert torch.equal(arguments[operand], wanted), (
        f"{name} over argument {operand}: {wanted.shape} {wanted.dtype}"
    )


def test_every_kernel_of_the_table() -> None:
    table = _C.overwriting()
    assert table.keys() == GIVEN.keys()
    for name, operands in table.items():
        for dtype in TYPES:
            for shape in SHAPES:
                for operand in operands:
                    for given in GIVEN[name](name, numbers(shape, dtype, 1)):
                        check(name, operand, given)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_it_holds_on_other_processors(capability: str) -> None:
    script = "import test_overwriting as t; t.test_every_kernel_of_the_table()"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=Path(__file__).parent, check=True)
