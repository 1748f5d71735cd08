"""The statements that whole programs are made of, as text.

Each function takes a `Choices`, which knows the tensors that there are by now, and returns an expression. The
expression is valid for most tensors; the writer of a program leaves out what torch refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
from torch.nn import functional

from .steps import BINARY, FLOATS, IN_PLACE_BINARY, IN_PLACE_UNARY, REDUCTIONS, UNARY

Tensor = torch.Tensor

# Results whose size depends on numbers: a compiler leaves them to Python, so they have their own statement.
OF_ANY_SIZE = (torch.nonzero, torch.unique, torch.equal, torch.count_nonzero, torch.trace)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)


class Choices:
    """The tensors and scalars that a statement may choose from, by their names in the program."""

    def __init__(self, random: Random, tensors: dict[str, Tensor], scalars: list[str]) -> None:
        self.random = random
        self.tensors = tensors
        self.scalars = scalars

    def tensor(self, *, of_floats: bool | None = None, dims: int = 0) -> str:
        """The name of a tensor, later ones more often; of those that fit, if any does."""
        names = [
            name
            for name, one in self.tensors.items()
            if one.dim() >= dims and (of_floats is None or one.is_floating_point() is of_floats)
        ] or [*self.tensors]
        return names[max(self.random.randrange(len(names)), self.random.randrange(len(names)))]

    def scalar(self) -> str:
        """A constant, an argument of the program, or the size of a tensor."""
        how = self.random.random()
        if how < 0.4:
            return self.random.choice(self.scalars)
        if how < 0.55:
            return f"{self.tensor(dims=1)}.shape[0]"
        return self.random.choice(["0", "1", "-2", "3", "0.5", "-1.5", "True", "float('inf')"])

    def dim(self, name: str) -> int:
        dims = self.tensors[name].dim()
        return self.random.randrange(-dims, dims) if dims else 0

    def size(self, name: str, dim: int) -> int:
        return self.tensors[name].shape[dim] if self.tensors[name].dim() else 1

    def number(self, most: int) -> int:
        return self.random.randrange(max(most, 1))

    def dtype(self) -> str:
        return str(self.random.choice(DTYPES))

    def seldom(self) -> bool:
        return self.random.random() < 0.3


Statement = Callable[[Choices], str]


def name_of(function: Callable) -> str:
    """How a program calls a function of torch."""
    name = function.__name__
    return f"torch.{name}" if getattr(torch, name, None) is function else f"functional.{name}"


def _named(functions: tuple[Callable, ...]) -> list[str]:
    names = [name_of(one) for one in functions if one not in OF_ANY_SIZE]
    known = {"torch": torch, "functional": functional}
    return [name for name in names if hasattr(known[name.partition(".")[0]], name.partition(".")[2])]


_UNARY, _BINARY, _REDUCTIONS = _named(UNARY), _named(BINARY), _named(REDUCTIONS)
_SMOOTH = ("tanh", "sigmoid", "sin", "exp", "relu", "abs", "square", "neg", "cos", "erf")


def unary(choices: Choices) -> str:
    return f"{choices.random.choice(_UNARY)}({choices.tensor()})"


def smooth(choices: Choices) -> str:
    return f"torch.{choices.random.choice(_SMOOTH)}({choices.tensor(of_floats=True)})"


def binary(choices: Choices) -> str:
    other = choices.scalar() if choices.seldom() else choices.tensor()
    return f"{choices.random.choice(_BINARY)}({choices.tensor()}, {other})"


def arithmetic(choices: Choices) -> str:
    one, other = choices.tensor(of_floats=True), choices.tensor()
    third = choices.scalar() if choices.seldom() else other
    return f"{one} {choices.random.choice('+-*/')} {third}"


def scaled_sum(choices: Choices) -> str:
    one, other, third = (choices.tensor(of_floats=True) for _ in range(3))
    return choices.random.choice([
        f"torch.addcmul({one}, {other}, {third}, value={choices.scalar()})",
        f"torch.add({one}, {other}, alpha={choices.scalar()})",
        f"torch.lerp({one}, {other}, {choices.scalar()})",
        f"torch.clamp({one}, -1, {choices.scalar()})",
        f"torch.where({one} > {choices.scalar()}, {other}, {third})",
        f"{one}.masked_fill({other}.to({one}.device) > 0, {choices.scalar()})",
    ])  # fmt: skip


def in_place(choices: Choices) -> str:
    one = choices.tensor()
    if choices.random.random() < 0.3:
        return f"{one}.{choices.random.choice(IN_PLACE_UNARY)}()"
    other = choices.scalar() if choices.seldom() else choices.tensor()
    return f"{one}.{choices.random.choice(IN_PLACE_BINARY)}({other})"


def in_place_on_view(choices: Choices) -> str:
    """Writes to a part of a tensor through an expression that nobody keeps."""
    one = choices.tensor(dims=1)
    write = choices.random.choice([
        f".mul_({choices.scalar()})",
        f".add_({choices.scalar()})",
        ".zero_()",
        ".sigmoid_()",
        ".neg_()",
    ])  # fmt: skip
    return f"{_part(choices, one)}{write}"


def assigned(choices: Choices) -> str:
    """Writes by index, as an expression: a program says `x[0] = y`, which is the same call."""
    one = choices.tensor(dims=1)
    key = choices.random.choice(["0", "-1", "slice(1, None)", "(..., 0)", "slice(None, None, 2)"])
    value = choices.scalar() if choices.seldom() else f"{one}[{key}] * 2"
    return f"{one}.__setitem__({key}, {value})"


def _part(choices: Choices, one: str) -> str:
    dim = choices.dim(one)
    begin = choices.number(choices.size(one, dim))
    return choices.random.choice([
        f"{one}[{begin}]",
        f"{one}[..., ::2]",
        f"{one}.narrow({dim}, 0, 1)",
        f"{one}.select({dim}, {begin})",
        f"{one}.transpose(0, -1)[0]",
        f"{one}.flatten()[1:]",
        f"{one}.view(-1)[:2]",
        f"{one}.diagonal()",
    ])  # fmt: skip


def view(choices: Choices) -> str:
    one = choices.tensor()
    dim, other = choices.dim(one), choices.dim(one)
    return choices.random.choice([
        f"{one}.transpose({dim}, {other})",
        f"{one}.unsqueeze({dim})",
        f"{one}.squeeze()",
        f"{one}.expand(2, *{one}.shape)",
        f"{one}.flatten()",
        f"{one}.reshape(-1, 1)",
        f"{one}.reshape({one}.shape[::-1])",
        f"{one}.view(-1)",
        f"{one}.unfold({dim}, 2, 1)",
        f"{one}.as_strided((2, 2), (1, 2), {choices.number(3)})",
        f"{one}.movedim({dim}, {other})",
        f"{one}.permute({', '.join(map(str, _order(choices, one)))})",
        f"{one}.chunk(2, {dim})",
        f"{one}.split(1, {dim})[:3]",
        f"{one}.unbind({dim})[:3]",
        f"{one}.detach()",
        f"{one}.mT",
        f"{one}[None, ..., 1:]",
        f"{one}.expand_as({choices.tensor()})",
        _part(choices, one),
        _part(choices, one),
    ])  # fmt: skip


def _order(choices: Choices, one: str) -> list[int]:
    order = [*range(choices.tensors[one].dim())]
    choices.random.shuffle(order)
    return order


def reduction(choices: Choices) -> str:
    one = choices.tensor()
    if choices.seldom():
        how = choices.random.choice(["sum", "amax", "mean", "any", "std", "argmin", "prod"])
        return f"{one}.{how}()"
    return f"{choices.random.choice(_REDUCTIONS)}({one}, dim={choices.dim(one)})"


def normalised(choices: Choices) -> str:
    one = choices.tensor(of_floats=True, dims=1)
    return choices.random.choice([
        f"torch.softmax({one}, -1)",
        f"torch.log_softmax({one}, {choices.dim(one)})",
        f"functional.layer_norm({one}, {one}.shape[-1:])",
        f"functional.rms_norm({one}, {one}.shape[-1:])",
        f"functional.normalize({one}, dim=-1)",
        f"functional.gelu({one})",
        f"functional.silu({one})",
        f"functional.pad({one}, (1, 2))",
        f"torch.var_mean({one}, -1)",
    ])  # fmt: skip


def product(choices: Choices) -> str:
    one, other = choices.tensor(of_floats=True, dims=1), choices.tensor(of_floats=True, dims=1)
    return choices.random.choice([
        f"{one} @ {other}",
        f"{one} @ {one}.mT",
        f"torch.matmul({one}.mT, {other})",
        f"functional.linear({one}, {other})",
        f"torch.einsum('...i,...i->...', {one}, {one})",
        f"torch.addmm({one}, {one} @ {one}.mT, {one})",
    ])  # fmt: skip


def random_numbers(choices: Choices) -> str:
    """Numbers fill a tensor in the order of its memory, and compiled code may lay out an inner one otherwise:
    all of these have the usual order."""
    one = choices.tensor(of_floats=True)
    plain = f"{one}.contiguous()"
    # Eager draws nothing for the dropout of an empty tensor, traced code does.
    filled = f"functional.pad({one}.flatten(), (0, 1))"
    return choices.random.choice([
        f"functional.dropout({filled}, 0.5)",
        f"functional.dropout({filled}, 0.3, training=True)",
        f"torch.randn_like({plain})",
        f"torch.rand_like({plain})",
        f"torch.empty_like({plain}).bernoulli_(0.4)",
        f"torch.empty_like({plain}).uniform_(-1, 1)",
        f"torch.bernoulli(torch.sigmoid({plain}))",
        f"torch.rand({one}.shape, device={one}.device)",
        f"torch.randint(0, 5, {one}.shape, device={one}.device)",
        f"{plain}.detach().clone().normal_()",
        f"torch.randperm({one}.numel(), device={one}.device)",
    ])  # fmt: skip


def indexed(choices: Choices) -> str:
    one = choices.tensor(dims=1)
    dim = choices.dim(one)
    which = _index(choices, one, dim)
    along = ["1"] * choices.tensors[one].dim()
    if along:
        along[dim] = "-1"
    spread = f"{which}.view({', '.join(along)})"
    return choices.random.choice([
        f"{one}.index_select({dim}, {which})",
        f"{one}[{which}]" if dim == 0 else f"{one}.index_select({dim}, {which})",
        f"{one}.gather({dim}, {spread})",
        f"{one}.index_add({dim}, {which}, {one}.index_select({dim}, {which}))",
        f"{one}.index_copy_({dim}, {which}, {one}.index_select({dim}, {which}.flip(0)))",
        f"{one}.index_fill_({dim}, {which}, 1)",
        f"{one}.scatter({dim}, {spread}, 2)",
        f"{one}.scatter_add({dim}, {spread}, {one}.gather({dim}, {spread}))",
        f"{one}.index_put(({which},), {one}[0] * 2)",
        f"{one}.index_put_(({which},), {one}[0] * 2, accumulate=True)",
        f"{one}.take({which})",
        f"{one}.masked_fill_({one} > 0, 2)",
        f"functional.embedding({which}, {one})",
        f"functional.one_hot({which})",
    ])  # fmt: skip


def _index(choices: Choices, one: str, dim: int) -> str:
    values = [choices.number(choices.size(one, dim)) for _ in range(3)]
    return f"torch.tensor({values}, device={one}.device)"


def ordered(choices: Choices) -> str:
    one = choices.tensor(dims=1)
    dim = choices.dim(one)
    return choices.random.choice([
        f"torch.sort({one}, {dim}, stable=True)",
        f"torch.argsort({one}, {dim}, descending=True, stable=True)",
        f"{one}.topk(1, {dim})",
        f"{one}.kthvalue(1, {dim})",
        f"{one}.cummax({dim})",
        f"torch.max({one}, {dim})",
        f"{one}.tril()" if choices.seldom() else f"{one}.roll(1, {dim})",
        f"{one}.flip({dim})",
        f"{one}.repeat_interleave(2, {dim})",
        f"torch.searchsorted({one}.flatten().sort().values, {one})",
    ])  # fmt: skip


def joined(choices: Choices) -> str:
    one, other = choices.tensor(), choices.tensor()
    how = choices.random.choice(["cat", "stack", "hstack", "broadcast_tensors"])
    if how == "broadcast_tensors":
        return f"torch.{how}({one}, {other})"
    return f"torch.{how}([{one}, {other}, {one}])" if choices.seldom() else f"torch.{how}([{one}, {one}])"


def converted(choices: Choices) -> str:
    one = choices.tensor()
    return choices.random.choice([
        f"{one}.to({choices.dtype()})",
        f"{one}.to({choices.dtype()}, copy=True)",
        f"{one}.type_as({choices.tensor()})",
        f"{one}.clone()",
        f"{one}.contiguous()",
        f"{one}.float()",
        f"{one}.double()",
        f"{one}.bfloat16()",
    ])  # fmt: skip


def made(choices: Choices) -> str:
    """New tensors, whose size is that of another one."""
    one = choices.tensor(dims=1)
    return choices.random.choice([
        f"torch.zeros({one}.shape[0], device={one}.device)",
        f"torch.arange({one}.shape[-1], device={one}.device)",
        f"torch.full_like({one}, {choices.scalar()})",
        f"torch.ones({one}.shape, dtype={choices.dtype()}, device={one}.device)",
        f"torch.tensor({choices.scalar()}, device={one}.device)",
        f"{one}.new_zeros(({one}.numel(), 1))",
        f"torch.empty(0, device={one}.device)",
        f"torch.linspace(-1, 1, {one}.shape[0], device={one}.device)",
    ])  # fmt: skip


def left_to_python(choices: Choices) -> str:
    """An operation that depends on numbers, in front of which a compiled program has to stop."""
    one = choices.tensor()
    return choices.random.choice([
        f"{one}[{one} != 0]",
        f"torch.nonzero({one})",
        f"torch.masked_select({one}, {one} > 0)",
        f"{choices.tensor()} * {one}.sum().item()",
        f"torch.unique({one})",
        f"({one} + 1 if {one}.sum() > 0 else {one} - 1)",
    ])  # fmt: skip


def branched(choices: Choices) -> str:
    """A branch that depends on scalars and sizes, which a compiled program checks before it runs."""
    one = choices.tensor(dims=1)
    return f"({one} * 2 if {choices.scalar()} > 1 else {one} + {choices.scalar()})"


STATEMENTS: dict[Statement, float] = {
    unary: 3,
    smooth: 4,
    binary: 4,
    arithmetic: 6,
    scaled_sum: 3,
    in_place: 4,
    in_place_on_view: 3,
    assigned: 1.5,
    view: 8,
    reduction: 3,
    normalised: 2,
    product: 2,
    random_numbers: 2,
    indexed: 4,
    ordered: 2,
    joined: 2,
    converted: 3,
    made: 2,
    left_to_python: 0.15,
    branched: 1,
}
"""How often each is taken."""
