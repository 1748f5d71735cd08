"""Checks, by kind and for one dtype, that an operation does on the device what it does on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.testing._internal import common_methods_invocations as invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from .comparing import Values, alias_anything
from .placing import OnHost, tensors_of
from .running import Outcome, Pair, called, run_on_both

# For lists of tensors, which optimizers use.
_FOREACH: tuple[OpInfo, ...] = tuple(
    op
    for name in ("unary", "binary", "pointwise", "reduce", "other")
    for op in getattr(invocations, f"foreach_{name}_op_db", ())
)

KINDS = ("forward", "views", "inplace", "out", "backward", "gradgrad", "jvp", "vmap", "sparse", "errors")
OPERATIONS: dict[str, OpInfo] = {op.full_name: op for op in (*op_db, *_FOREACH)}
# Operations that only compose other ones run in one dtype.
_ONCE = torch.float32
_LAYOUTS = ("coo", "csr", "csc", "bsr", "bsc")
# Where to split has to be a tensor of the CPU on every device.
_NUMBERS_ON_HOST = ("tensor_split",)
# Gradients of gradients take long, and the dtypes differ little in them.
_TWICE = (torch.float32, torch.float64, torch.complex128)


def dtypes_of(op: OpInfo) -> list[torch.dtype]:
    return sorted(op.supported_dtypes("cpu"), key=str)


def check(op: OpInfo, dtype: torch.dtype, kinds: Sequence[str]) -> Iterator[Outcome]:
    """Outcomes in the order of the samples, which is the same in every run."""
    forwards = {"forward", "views", "inplace", "out", "errors"}.intersection(kinds)
    if forwards:
        for sample in _samples(op, dtype, op.sample_inputs):
            yield from _forward(op, sample, forwards)
    if "errors" in kinds and op.error_inputs_func is not None:
        for one in op.error_inputs("cpu"):
            yield from _errors(op, one.sample_input)
    if dtype in op.supported_backward_dtypes("cpu") and op.supports_autograd:
        again = op.supports_gradgrad and dtype in _TWICE
        orders = [
            kind for kind in ("backward", "gradgrad") if kind in kinds and (kind == "backward" or again)
        ]
        if "jvp" in kinds and dtype == _ONCE and op.supports_forward_ad:
            orders.append("jvp")
        if orders:
            for sample in _samples(op, dtype, partial(op.sample_inputs, requires_grad=True)):
                for kind in orders:
                    yield from _jvp(op, sample) if kind == "jvp" else _gradients(op, sample, kind)
    if "vmap" in kinds and dtype == _ONCE:
        for sample in _samples(op, dtype, op.sample_inputs):
            if isinstance(sample.input, torch.Tensor):
                yield from _vmap(op, sample)
    if "sparse" in kinds:
        for layout in _LAYOUTS:
            if getattr(op, f"supports_sparse_{layout}" if layout != "coo" else "supports_sparse", False):
                yield from _sparse(op, dtype, layout)


def _samples(op: OpInfo, dtype: torch.dtype, make: Callable[..., Any]) -> Iterator[SampleInput]:
    """As PyTorch makes them; where that fails, what it has made by then."""
    torch.manual_seed(0)
    with contextlib.suppress(Exception):
        for sample in make("cpu", dtype):
            # Whoever runs it has a seed of its own.
            state = torch.get_rng_state()
            yield sample
            torch.set_rng_state(state)


def _tree(op: OpInfo, sample: SampleInput) -> tuple[Any, Any, Any]:
    args = sample.args
    if op.name in _NUMBERS_ON_HOST:
        args = tuple(OnHost(one) if isinstance(one, torch.Tensor) else one for one in args)
    return sample.input, args, sample.kwargs


def _values(op: OpInfo) -> Values:
    return Values.DIFFER if "empty" in op.name else Values.COUNT


def _forward(op: OpInfo, sample: SampleInput, kinds: set[str]) -> Iterator[Outcome]:
    tree = _tree(op, sample)
    pair = run_on_both(lambda on: called(op)(on[0], *on[1], **on[2]), tree)
    if pair.cpu.error is not None:
        yield from _if_in(kinds, "errors", pair.errors)
        return
    yield from _if_in(kinds, "forward", lambda: pair.difference(_values(op)))
    either = pair.device.error is None and (
        alias_anything(pair.cpu.aliases) or alias_anything(pair.device.aliases)
    )
    if either:
        yield from _if_in(kinds, "views", lambda: _of_aliases(pair))
    if "inplace" in kinds and op.get_inplace() is not None and not sample.broadcasts_input:
        inplace = op.get_inplace()
        pair = run_on_both(lambda on: (called(inplace)(on[0], *on[1], **on[2]), on[0]), tree)
        if pair.cpu.error is None:
            yield Outcome("inplace", pair.difference(_values(op)) or _of_aliases(pair))
    if "out" in kinds and op.supports_out:
        for prepare in (_same, _empty, _strided):
            yield from _out(op, tree, prepare)


def _if_in(kinds: set[str], kind: str, text: Callable[[], str | None]) -> Iterator[Outcome]:
    if kind in kinds:
        yield Outcome(kind, text())


def _of_aliases(pair: Pair) -> str | None:
    if pair.cpu.aliases == pair.device.aliases:
        return None
    return f"aliases: expected {pair.cpu.aliases}, got {pair.device.aliases}"


def _out(op: OpInfo, tree: Any, prepare: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Outcome]:
    def body(on: Any) -> Any:
        made = op(on[0], *on[1], **on[2])
        out = prepare(made) if isinstance(made, torch.Tensor) else type(made)(_each(prepare, made))
        result = called(op)(on[0], *on[1], **on[2], out=out)
        return result, out

    pair = run_on_both(body, tree)
    if pair.cpu.error is None:
        yield Outcome("out", pair.difference(_values(op)) or _of_aliases(pair))


def _each(prepare: Callable[[torch.Tensor], torch.Tensor], made: Any) -> Any:
    prepared = [prepare(one) for one in made]
    # Named tuples are made of one sequence, as of torch.return_types.
    return prepared


def _same(made: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(made)


def _empty(made: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=made.dtype, device=made.device)


def _strided(made: torch.Tensor) -> torch.Tensor:
    return torch.zeros((*made.shape, 2), dtype=made.dtype, device=made.device)[..., 1]


def _errors(op: OpInfo, sample: SampleInput) -> Iterator[Outcome]:
    pair = run_on_both(lambda on: op(on[0], *on[1], **on[2]), _tree(op, sample))
    if pair.cpu.error is not None:
        yield Outcome("errors", pair.errors())


class _NothingToDerive(Exception):
    pass


def _gradients(op: OpInfo, sample: SampleInput, kind: str) -> Iterator[Outcome]:
    def body(on: Any) -> Any:
        leaves = [one for one in tensors_of(on) if one.requires_grad]
        made = sample.output_process_fn_grad(called(op)(on[0], *on[1], **on[2]))
        first = derive(tensors_of(made), leaves, kind == "gradgrad")
        return first if kind == "backward" else (first, derive(tensors_of(first), leaves))

    def alone(on: Any) -> Any:
        # In this thread: the engine orders nodes by numbers that each thread counts for itself, and sums of
        # three gradients have other bits in another order.
        with torch.autograd.set_multithreading_enabled(False):
            return body(on)

    pair = run_on_both(body if kind == "backward" else alone, _tree(op, sample))
    if pair.cpu.error is None:
        yield Outcome(kind, pair.difference(_values(op)))


def derive(outputs: Any, leaves: Sequence[torch.Tensor], again: bool = False) -> tuple[Any, ...]:
    """Gradients of a weighted sum of outputs.

    The sum is one number, because with several roots the engine may begin with any of them. Three gradients
    that are added in another order have other bits.
    """
    outputs = [one for one in outputs if one.requires_grad]
    if not outputs or not leaves:
        raise _NothingToDerive
    total = sum(map(_weighted, outputs))
    return torch.autograd.grad(total, leaves, create_graph=again, allow_unused=True)


def _weighted(output: torch.Tensor) -> torch.Tensor:
    if output.layout != torch.strided:
        output = output.to_dense()
    if output.is_nested:
        return sum(_weighted(one) for one in output.unbind())
    if output.is_complex():
        output = torch.view_as_real(output.resolve_conj())
    generator = torch.Generator("cpu").manual_seed(output.numel())
    weights = torch.randn(output.shape, generator=generator, device="cpu").to(output.device, output.dtype)
    return (output * weights).sum().double()


def _jvp(op: OpInfo, sample: SampleInput) -> Iterator[Outcome]:
    def body(on: Any) -> Any:
        with forward_ad.dual_level():
            made = op(*_duals(on[0:1]), *_duals(on[1]), **_duals(on[2]))
            return [forward_ad.unpack_dual(one) for one in tensors_of(made)]

    pair = run_on_both(body, _tree(op, sample))
    if pair.cpu.error is None:
        yield Outcome("jvp", pair.difference(_values(op)))


def _duals(value: Any) -> Any:
    """Everything that wants a gradient, with a tangent."""
    if isinstance(value, torch.Tensor):
        value = value.detach() if value.requires_grad else value
        if value.is_floating_point() or value.is_complex():
            return forward_ad.make_dual(value, torch.ones_like(value))
        return value
    if isinstance(value, dict):
        return {key: _duals(one) for key, one in value.items()}
    return type(value)(map(_duals, value)) if type(value) in (list, tuple) else value


def _vmap(op: OpInfo, sample: SampleInput) -> Iterator[Outcome]:
    def body(on: Any) -> Any:
        batched = torch.func.vmap(lambda one: op(one, *on[1], **on[2]), randomness="different")
        return batched(torch.stack([on[0], on[0]]))

    pair = run_on_both(body, _tree(op, sample))
    if pair.cpu.error is None:
        yield Outcome("vmap", pair.difference(_values(op)))


def _sparse(op: OpInfo, dtype: torch.dtype, layout: str) -> Iterator[Outcome]:
    make = getattr(op, f"sample_inputs_sparse_{layout}")
    for sample in _samples(op, dtype, make):
        pair = run_on_both(lambda on: op(on[0], *on[1], **on[2]), _tree(op, sample))
        if pair.cpu.error is None:
            yield Outcome("sparse", pair.difference())
        else:
            yield Outcome("errors", pair.errors())
