"""Operations of the table of pointwise kernels, each with arguments, and their comparison with eager torch.

Run as a program it prints the differences as JSON: a process has one CPU capability of ATen.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tpurun import _C

FLOATING = (torch.float32, torch.float64)
INTEGRAL = (torch.int64, torch.int32)
REDUCED = (torch.bfloat16, torch.float16)
REAL = (*FLOATING, *REDUCED)
NUMERIC = (*REAL, *INTEGRAL)
ALL = (*FLOATING, *INTEGRAL, torch.bool, *REDUCED)

# Tiles of a multiple of every vector step: a piece of a tensor begins in the middle of its vector loop.
TILES = (64, 256, 1024)
IN_PLACE_SIZES = (1, 37, 64, 250, 2049)
SIZES = (*range(1, 300), 1000, 1023, 2049, 5000)


@dataclass(frozen=True)
class Case:
    name: str
    overload: str
    # Tensors of a case are made for each size: "x" is a tensor of the case's type, "b" one of bool.
    arguments: tuple[Any, ...]
    dtypes: tuple[torch.dtype, ...]
    keywords: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}.{self.overload}{self.arguments}{self.keywords or ''}"

    def in_order(self, arguments: list[Any]) -> list[Any]:
        """The arguments as a graph has them, with those by keyword in their places."""
        schema = operation_of(self)._schema.arguments
        rest = [self.keywords.get(a.name, a.default_value) for a in schema[len(arguments) :]]
        return arguments + rest


def operation_of(case: Case) -> Any:
    return getattr(getattr(torch.ops.aten, case.name), case.overload or "default")


def special_values(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.tensor([True, False])
    if not dtype.is_floating_point:
        top = torch.iinfo(dtype).max
        return torch.tensor([0, 1, -1, 2, -7, top, -top - 1, top // 3], dtype=dtype)
    info = torch.finfo(dtype)
    values = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 3.0, -3.0, 6.0, 20.0, 21.0, 88.0, -88.0, 104.0, -104.0]
    values += [float("nan"), float("inf"), float("-inf"), info.max, info.min, info.tiny, -info.tiny, info.eps]
    values += [info.smallest_normal / 4, -info.smallest_normal / 8, 1e-3, -1e-3, 0.1, -0.1, 1.5, 2.5, -2.5]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def random_values(dtype: torch.dtype, size: int, generator: torch.Generator) -> torch.Tensor:
    """Numbers of many magnitudes, with special ones strewn among them."""
    if dtype == torch.bool:
        return torch.rand(size, generator=generator) < 0.5
    if dtype.is_floating_point:
        near = torch.randn(size, generator=generator, dtype=torch.float64)
        scale = torch.randint(-12, 6, (size,), generator=generator).double()
        far = torch.rand(size, generator=generator) < 0.5
        values = torch.where(far, near * torch.pow(2.0, scale * 2), near * 2).to(dtype)
    else:
        values = torch.randint(-1000, 1000, (size,), generator=generator).to(dtype)
    special = special_values(dtype)
    where = torch.rand(size, generator=generator) < 0.1
    picks = special[torch.randint(len(special), (size,), generator=generator)]
    return torch.where(where, picks, values)


def number_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(3, dtype=dtype) if not dtype.is_floating_point else torch.tensor(0.7, dtype=dtype)


def materialise(case: Case, dtype: torch.dtype, size: int, generator: torch.Generator) -> list[Any]:
    offset = size % 4  # memory is not aligned
    makers: dict[str, Callable[[], Any]] = {
        "x": lambda: random_values(dtype, size + offset, generator)[offset:],
        "b": lambda: random_values(torch.bool, size + offset, generator)[offset:],
        "0": lambda: number_of(dtype),
        "f32": lambda: torch.tensor(0.7, dtype=torch.float32),
        "f64": lambda: torch.tensor(0.7, dtype=torch.float64),
    }
    return [makers[a]() if isinstance(a, str) and a in makers else a for a in case.arguments]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(width)


def difference(mine: torch.Tensor | None, eager: torch.Tensor) -> str | None:
    if mine is None:
        return "no kernel"
    if mine.dtype != eager.dtype or mine.shape != eager.shape:
        return f"{mine.dtype} {tuple(mine.shape)} instead of {eager.dtype} {tuple(eager.shape)}"
    differ = bits(mine) != bits(eager)
    if eager.dtype.is_floating_point:
        # Which of two NaNs goes on is the compiler's choice of the order of operands.
        differ &= ~(mine.isnan() & eager.isnan())
    if not differ.any():
        return None
    at = int(differ.nonzero()[0])
    values = f"{mine[at].item()!r} for {eager[at].item()!r}"
    return f"{int(differ.sum())} of {differ.numel()}, first at {at}: {values}"


def check(case: Case, dtype: torch.dtype, size: int, tile: int, generator: torch.Generator) -> str | None:
    arguments = materialise(case, dtype, size, generator)
    mine = _C.run_pointwise(case.name, case.overload, case.in_order(arguments), tile)
    eager = operation_of(case)(*(copied(a) for a in arguments), **case.keywords)
    if size in IN_PLACE_SIZES and has_in_place(case, eager.dtype, arguments):
        place = _C.run_pointwise(case.name + "_", case.overload, case.in_order(arguments), tile)
        mine = mine if difference(mine, eager) else place
    found = difference(mine, eager)
    if found is None:
        return None
    inputs = [a for a in arguments if isinstance(a, torch.Tensor) and a.dim() > 0]
    at = int(found.split("first at ")[1].split(":")[0]) if "first at" in found else 0
    return f"{found} of {[a[at].item() for a in inputs]}"


def copied(argument: Any) -> Any:
    """The same number in aligned memory."""
    return argument.clone() if isinstance(argument, torch.Tensor) else argument


def has_in_place(case: Case, result: torch.dtype, arguments: list[Any]) -> bool:
    """Whether the operation has a form that writes to its first argument."""
    packet = getattr(torch.ops.aten, case.name + "_", None)
    first = arguments[0]
    fits = isinstance(first, torch.Tensor) and first.dim() > 0 and first.dtype == result
    return fits and packet is not None and (case.overload or "default") in packet.overloads()


def unary(names: str, dtypes: tuple[torch.dtype, ...]) -> Iterator[Case]:
    for name in names.split():
        yield Case(name, "", ("x",), dtypes)


def binary(name: str, dtypes: tuple[torch.dtype, ...], numbers: tuple[Any, ...]) -> Iterator[Case]:
    yield Case(name, "Tensor", ("x", "x"), dtypes)
    for number in numbers:
        yield Case(name, "Tensor", ("x", number), dtypes)
    yield Case(name, "Tensor", ("0", "x"), dtypes)


ACTIVATIONS = (
    Case("relu", "", ("x",), NUMERIC),
    Case("gelu", "", ("x",), (torch.float64,), {"approximate": "none"}),
    Case("gelu", "", ("x",), REAL, {"approximate": "tanh"}),
    Case("leaky_relu", "", ("x", 0.01), REAL),
    Case("leaky_relu", "", ("x", -0.3), REAL),
    Case("hardtanh", "", ("x", -1.0, 1.0), REAL),
    Case("elu", "", ("x", 1.0, 1.0, 1.0), REAL),
    Case("elu", "", ("x", 1.6, 1.05, 0.9), REAL),
    Case("softplus", "", ("x", 1.0, 20.0), REAL),
    Case("softplus", "", ("x", 2.5, 10.0), REAL),
    Case("threshold_backward", "", ("x", "x", 0), REAL),
    Case("threshold_backward", "", ("x", "x", 0.5), REAL),
    Case("gelu_backward", "", ("x", "x"), REAL, {"approximate": "tanh"}),
    Case("silu_backward", "", ("x", "x"), REAL),
    Case("sigmoid_backward", "", ("x", "x"), (*FLOATING, torch.bfloat16)),
    Case("tanh_backward", "", ("x", "x"), REAL),
    Case("leaky_relu_backward", "", ("x", "x", 0.01, False), REAL),
    Case("hardtanh_backward", "", ("x", "x", -1.0, 1.0), REAL),
    Case("elu_backward", "", ("x", 1.6, 1.05, 0.9, False, "x"), REAL),
    Case("elu_backward", "", ("x", 1.6, 1.05, 0.9, True, "x"), REAL),
    Case("softplus_backward", "", ("x", "x", 2.5, 10.0), REAL),
    Case("mse_loss_backward", "", ("x", "x", "x", 0), FLOATING),
    Case("mse_loss_backward", "", ("0", "x", "x", 1), FLOATING),
    Case("native_dropout_backward", "", ("x", "b", 1.25), REAL),
)

CHOICES = (
    Case("clamp", "", ("x", -0.5, 1.5), REAL),
    Case("clamp", "", ("x", -5, 7), NUMERIC),
    Case("clamp", "", ("x", None, 1), NUMERIC),
    Case("clamp", "", ("x", 0), NUMERIC),
    Case("clamp_min", "", ("x", 0), NUMERIC),
    Case("clamp_max", "", ("x", 1), NUMERIC),
    Case("clamp", "Tensor", ("x", "x", "x"), NUMERIC),
    Case("clamp", "Tensor", ("x", None, "x"), NUMERIC),
    Case("clamp_min", "Tensor", ("x", "x"), NUMERIC),
    Case("clamp_max", "Tensor", ("x", "0"), NUMERIC),
    Case("where", "self", ("b", "x", "x"), ALL),
    Case("where", "self", ("b", "x", "0"), ALL),
    Case("masked_fill", "Scalar", ("x", "b", 2), NUMERIC),
    Case("masked_fill", "Scalar", ("x", "b", float("-inf")), REAL),
    Case("masked_fill", "Tensor", ("x", "b", "0"), ALL),
    Case("fill", "Scalar", ("x", 2.5), REAL),
    Case("fill", "Scalar", ("x", 3), ALL),
    Case("clone", "", ("x",), ALL),
)

TERNARY = (
    Case("addcmul", "", ("x", "x", "x"), REAL),
    Case("addcmul", "", ("x", "x", "x"), REAL, {"value": 0.3}),
    Case("addcdiv", "", ("x", "x", "x"), REAL),
    Case("addcdiv", "", ("x", "x", "x"), REAL, {"value": -0.3}),
    Case("lerp", "Scalar", ("x", "x", 0.1), REAL),
    Case("lerp", "Scalar", ("x", "x", 0.7), REAL),
    Case("lerp", "Tensor", ("x", "x", "x"), REAL),
)

COMPARISONS = [
    case
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for case in (
        Case(name, "Tensor", ("x", "x"), ALL),
        Case(name, "Tensor", ("x", "0"), ALL),
        Case(name, "Scalar", ("x", 1), (*FLOATING, *INTEGRAL, *REDUCED)),
        Case(name, "Scalar", ("x", 0.1), (*FLOATING, *REDUCED)),
    )
]

LOGIC = [
    *(Case(name, "", ("x", "x"), ALL) for name in ("logical_and", "logical_or", "logical_xor")),
    *unary("logical_not isnan", ALL),
    *(
        Case(name, "Tensor", ("x", "x"), (*INTEGRAL, torch.bool))
        for name in ("bitwise_and", "bitwise_or", "bitwise_xor")
    ),
    *unary("bitwise_not", (*INTEGRAL, torch.bool)),
]

CASES: list[Case] = [
    *binary("add", NUMERIC, (2,)),
    Case("add", "Tensor", ("x", 0.1), REAL),
    *(Case(name, "Tensor", ("x", "f64"), REAL) for name in ("add", "mul", "div")),
    *(Case(name, "Tensor", ("x", "f32"), REDUCED) for name in ("add", "sub", "mul", "div")),
    *(Case(name, "Tensor", ("f32", "x"), REDUCED) for name in ("add", "sub", "mul", "div")),
    Case("add", "Tensor", ("x", "x"), FLOATING, {"alpha": 0.3}),
    Case("add", "Scalar", ("x", 0.1), REAL),
    *binary("sub", NUMERIC, (2,)),
    Case("sub", "Tensor", ("x", "x"), FLOATING, {"alpha": 0.3}),
    Case("rsub", "Scalar", ("x", 1), NUMERIC),
    Case("rsub", "Scalar", ("x", 0.7), REAL),
    *binary("mul", NUMERIC, (3,)),
    Case("mul", "Tensor", ("x", 0.1), REAL),
    Case("mul", "Tensor", ("x", "b"), REAL),
    Case("mul", "Tensor", ("b", "x"), REAL),
    *binary("div", REAL, (3, 0.1)),
    Case("div", "Tensor_mode", ("x", "x"), FLOATING, {"rounding_mode": "trunc"}),
    Case("div", "Tensor_mode", ("x", 0.3), FLOATING, {"rounding_mode": "trunc"}),
    *unary("neg abs sign sgn", NUMERIC),
    *unary("reciprocal sqrt exp log log1p expm1 sin cos tanh sigmoid erf silu", REAL),
    *unary("rsqrt", FLOATING),
    *unary("floor ceil round trunc", REAL),
    *(Case("pow", "Tensor_Scalar", ("x", e), FLOATING) for e in (-0.5, 1.7, -3.5, 4)),
    *(Case("pow", "Tensor_Scalar", ("x", e), REAL) for e in (0, 1, 2, -1)),
    *(Case("pow", "Tensor_Scalar", ("x", e), (*FLOATING, torch.float16)) for e in (3, -2)),
    Case("pow", "Tensor_Scalar", ("x", 0.5), (*FLOATING, torch.bfloat16)),
    Case("maximum", "", ("x", "x"), NUMERIC),
    Case("minimum", "", ("x", "x"), NUMERIC),
    Case("maximum", "", ("x", "0"), NUMERIC),
    *ACTIVATIONS,
    *CHOICES,
    *TERNARY,
    *COMPARISONS,
    *LOGIC,
    *(Case("_to_copy", "", ("x",), ALL, {"dtype": to}) for to in ALL),
]


def every_short_number(case: Case, dtype: torch.dtype) -> str | None:
    """Compares a function of one 16-bit tensor for all its arguments, in both loops."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    for tail in (0, 13):
        several = torch.cat([numbers.roll(shift) for shift in range(3)])[: 3 * 2**16 - tail]
        arguments = [several if a == "x" else a for a in case.arguments]
        mine = _C.run_pointwise(case.name, case.overload, case.in_order(arguments), 1024)
        wrong = difference(mine, operation_of(case)(*arguments, **case.keywords))
        if wrong is not None:
            return wrong
    return None


def failures(cases: list[Case], sizes: tuple[int, ...]) -> list[str]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    found = []
    for case in cases:
        for dtype in case.dtypes:
            tensors = [a for a in case.arguments if a in ("x", "b", "0", "f32", "f64")]
            if dtype in REDUCED and tensors == ["x"]:
                wrong = every_short_number(case, dtype)
                if wrong is not None:
                    found.append(f"{case} {dtype}, all numbers: {wrong}")
            for size, tile in zip(sizes, itertools.cycle(TILES), strict=False):
                wrong = check(case, dtype, size, tile, generator)
                if wrong is not None:
                    found.append(f"{case} {dtype} of {size} in tiles of {tile}: {wrong}")
                    break
    return found


if __name__ == "__main__":
    json.dump(
        {"capability": torch.backends.cpu.get_cpu_capability(), "failures": failures(CASES, SIZES)},
        sys.stdout,
    )
