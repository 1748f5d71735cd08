"""Whole programs as text: what they are given, and what they compute of it.

A program is written while it runs, on the device in the mode that runs each operation at once: a statement
that torch refuses is left out. The text depends on the seed alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import torch
from torch.nn import functional

from .statements import STATEMENTS, Choices, random_numbers

Tensor = torch.Tensor
LENGTH = 24
LARGEST = 4096
KEPT = 10
SHAPES = (
    ("n", "m"), ("n", "m"), ("n", "m"), ("n",), ("m",), (1, "m"), ("n", 1), (), ("b", "n", "m"),
    ("m", "n"), ("m", "m"),
)  # fmt: skip
DTYPES = (torch.float32,) * 6 + (
    torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.complex64,
)  # fmt: skip
LAYOUTS = ("plain",) * 5 + ("transposed", "strided", "expanded", "moved")
# Torch's tracing fails with assertions of its own, too.
FAILURES = (
    RuntimeError, IndexError, TypeError, ValueError, NotImplementedError, AttributeError, AssertionError,
)  # fmt: skip


@dataclass(frozen=True)
class Input:
    """How one argument of a program is made, for any sizes."""

    dtype: torch.dtype
    shape: tuple[str | int, ...]
    layout: str
    gradient: str
    """`none`; `leaf`; or `inner`, of a tensor that itself is the result of an operation."""
    of: int | None = None
    """The number of the argument that it is a view of."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a program."""

    sizes: tuple[tuple[str, int], ...]
    key: int
    floating: float
    integer: int


@dataclass
class Program:
    inputs: list[Input]
    scalar_device: str
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    dynamic: bool | None = None
    grads: bool = True

    @property
    def text(self) -> str:
        names = ", ".join([*(f"a{k}" for k in range(len(self.inputs))), "z", "s", "i"])
        body = "".join(f"    {line}\n" for line in ["drawn = []", *self.lines])
        return f"def program({names}):\n{body}    return {', '.join(self.results)}, *drawn\n"

    def function(self) -> Callable:
        """A function of its own, which nothing has compiled yet."""
        names = namespace()
        exec(compile(self.text, "<program>", "exec"), names)
        return names["program"]


def namespace() -> dict[str, object]:
    return {"torch": torch, "functional": functional, "kept": kept}


def kept(tensor: Tensor, drawn: list[Tensor]) -> Tensor:
    """Adds a copy of random numbers to the results."""
    drawn.append(tensor.clone())
    return tensor


def arguments(program: Program, call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that a call is given, always the same ones, and the leaves they come from."""
    generator = torch.Generator().manual_seed(call.key)
    sizes = dict(call.sizes)
    made: list[Tensor] = []
    leaves: list[Tensor] = []
    for one in program.inputs:
        if one.of is not None:
            made.append(made[one.of][..., 1:])
            continue
        shape = [sizes.get(size, size) for size in one.shape]
        tensor = placed(values(one.dtype, shape, generator), one.layout)
        if one.gradient != "none":
            leaves.append(tensor.requires_grad_())
            tensor = tensor * 1 if one.gradient == "inner" else tensor
        made.append(tensor)
    scalar = torch.tensor(call.floating, dtype=torch.float64).to(program.scalar_device)
    return [*made, scalar], leaves


def values(dtype: torch.dtype, shape: list[int], generator: torch.Generator) -> Tensor:
    found = torch.randn(shape, generator=generator) * 2
    if dtype.is_floating_point or dtype.is_complex:
        return found.to(dtype)
    return found.to(torch.int16).to(dtype)


def placed(tensor: Tensor, layout: str) -> Tensor:
    """The tensor on the device, with the strides of a layout where it has dimensions for them."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.mT.contiguous().to("tpu").mT
    if layout == "strided" and tensor.dim():
        return tensor.repeat_interleave(2, -1).to("tpu")[..., ::2]
    if layout == "expanded" and tensor.dim() and tensor.shape[0]:
        return tensor[:1].to("tpu").expand_as(tensor)
    if layout == "moved" and tensor.dim():
        return torch.cat([tensor[:1], tensor]).to("tpu")[1:]
    return tensor.to("tpu")


def write(seed: int, length: int = LENGTH) -> Program:
    """The program of a seed."""
    random = Random(seed)
    program = Program(
        [_input(random) for _ in range(random.choice([1, 2, 3, 3]))], random.choice(["cpu", "tpu", "tpu"])
    )
    if random.random() < 0.15 and program.inputs[0].shape and program.inputs[0].gradient == "none":
        first = program.inputs[0]
        program.inputs.append(Input(first.dtype, first.shape, "view", "none", of=0))
    program.dynamic = random.choice([None, None, False, True])
    program.grads = any(one.gradient != "none" for one in program.inputs) or random.random() < 0.5
    first = Call(_sizes(random), random.randrange(1 << 32), random.choice([0.5, -1.5, 2.0]), 3)
    torch.manual_seed(first.key)
    with torch.set_grad_enabled(program.grads):
        _write_lines(program, first, random, length)
    program.calls = [first, *_others(program, first, random)]
    return program


def _input(random: Random) -> Input:
    dtype = random.choice(DTYPES)
    can = dtype in (torch.float32, torch.float64)
    gradient = random.choice(["none", "leaf", "inner"]) if can else "none"
    return Input(dtype, random.choice(SHAPES), random.choice(LAYOUTS), gradient)


def _sizes(random: Random) -> tuple[tuple[str, int], ...]:
    small = random.random() < 0.1
    sizes = (0, 1, 2) if small else (2, 3, 4, 5)
    return tuple((name, random.choice(sizes)) for name in "nmb")


def _write_lines(program: Program, call: Call, random: Random, length: int) -> None:
    tensors = arguments(program, call)[0]
    names = [f"a{k}" for k in range(len(program.inputs))] + ["z"]
    scope = namespace() | dict(zip(names, tensors, strict=True)) | {"s": call.floating, "i": call.integer}
    there = dict(zip(names, tensors, strict=True))
    for number in range(length):
        statement = random.choices([*STATEMENTS], weights=[*STATEMENTS.values()])[0]
        text = statement(Choices(random, there, ["s", "i", "z"]))
        versions = {name: one._version for name, one in there.items()}
        try:
            result = eval(text, scope)
        except FAILURES:
            continue
        if any(is_folded(one) and one._version != versions[name] for name, one in there.items()):
            # A compiler refuses to write to a tensor that has one element at several places.
            continue
        found = _tensors_of(result)
        if any(one.numel() > LARGEST or one.is_sparse for one in found):
            # It has run, and may have written; so it stays, but nothing takes up its result.
            program.lines.append(text)
            continue
        if statement is random_numbers:
            # Compilers leave out numbers that nothing uses, and then all later ones are others.
            text = f"kept({text}, drawn)"
        fresh = [f"t{number}"] if len(found) == 1 else [f"t{number}_{k}" for k in range(len(found))]
        program.lines.append(f"{', '.join(fresh)}{',' * (len(fresh) > 1)} = {text}" if fresh else text)
        if isinstance(result, (list, tuple)) and len(found) == 1:
            program.lines[-1] = f"{fresh[0]}, = {text}"
        scope.update(zip(fresh, found, strict=True))
        there.update(zip(fresh, found, strict=True))
        for old in [name for name in there if name.startswith("t")][:-KEPT]:
            del there[old]
    program.results = _results(random, there)


def is_folded(tensor: Tensor) -> bool:
    """Whether several elements are at one place of the memory."""
    spans = sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )
    reach = 0
    for stride, size in spans:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _tensors_of(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (list, tuple)) and all(isinstance(one, Tensor) for one in result):
        return [*result]
    return []


def _results(random: Random, there: dict[str, Tensor]) -> list[str]:
    """Some of the last tensors, arguments among them, and now and then the same one twice."""
    names = [*there]
    chosen = [name for name in names if random.random() < (0.5 if name.startswith("t") else 0.15)]
    chosen = chosen or names[-1:]
    if random.random() < 0.2:
        chosen.append(random.choice(chosen))
    random.shuffle(chosen)
    return chosen


def _others(program: Program, first: Call, random: Random) -> list[Call]:
    """Further calls: with other numbers, and with other scalars or sizes where the program can do these."""
    key = random.randrange(1 << 32)
    again = Call(first.sizes, key, first.floating, first.integer)
    how = random.choice(["same", "scalars", "sizes", "sizes"])
    if how == "same":
        return [again]
    if how == "scalars":
        return [again, Call(first.sizes, key, first.floating + 1.25, first.integer + 2)]
    for _ in range(3):
        other = Call(_sizes(random), key, first.floating, first.integer)
        if other.sizes != first.sizes and _runs(program, other):
            return [again, other]
    return [again]


def _runs(program: Program, call: Call) -> bool:
    torch.manual_seed(call.key)
    try:
        with torch.set_grad_enabled(program.grads):
            program.function()(*arguments(program, call)[0], call.floating, call.integer)
    except FAILURES:
        return False
    return True
