"""One whole program, run at once on the device and in another way: compiled, or fused."""

from __future__ import annotations

import enum
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .program import Wrong, bits
from .written import FAILURES, Call, Program, arguments, write

Tensor = torch.Tensor


class Way(enum.Enum):
    """How a program runs that is compared with the same one in Strict."""

    COMPILED = "compiled"
    FUSED = "fused"


@dataclass
class Record:
    """All that a call of a program leaves to compare."""

    result: list[object]
    argument: list[Tensor]
    """After the call, which may have written to them."""
    gradient: list[Tensor | None]
    storages: list[tuple[int, ...]]
    """Results and arguments that share one, by their numbers."""
    generator: list[int]
    """Its seed and offset after the call."""
    error: str = ""


def run(seed: int, way: Way, backend: str, tell: Callable[[str], None] | None = None) -> bool:
    """Raises `Wrong` at the first call that leaves something else than in Strict.

    Returns whether the difference is one of torch's own tracing: the operations of the traced program, one
    after the other, refuse it as well or add up gradients in the same other order.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = write(seed)
        if tell is not None:
            tell(described(program))
        wanted = [record(program, program.function(), call) for call in program.calls]
        found = in_way(program, way, backend)
        number, problem = first_difference(found, wanted, way)
        if not problem:
            return False
        if way is Way.COMPILED and is_of_tracing(program, number, found):
            return True
        raise Wrong(f"call {number} of {len(program.calls)}: {problem}\n{described(program)}")


def is_of_tracing(program: Program, number: int, found: list[Record]) -> bool:
    """Whether torch's tracing, without any compiler, leaves exactly the same after this call.

    Functions without side effects, which a trace is made of, add up in another order, and refuse some
    programs.
    """
    traced = in_way(program, Way.COMPILED, "aot_eager")
    return not difference(found[number], traced[number], Way.COMPILED)


def described(program: Program) -> str:
    inputs = "\n".join(f"# a{k}: {one}" for k, one in enumerate(program.inputs))
    calls = "\n".join(f"# {call}" for call in program.calls)
    how = f"# dynamic={program.dynamic} gradients={program.grads} z on {program.scalar_device}"
    return f"{inputs}\n{calls}\n{how}\n{program.text}"


def in_way(program: Program, way: Way, backend: str) -> list[Record]:
    """Records all calls of one function that is called again and again."""
    function = program.function()
    if way is Way.COMPILED:
        torch._dynamo.reset()
        function = torch.compile(function, backend=backend, dynamic=program.dynamic)
        return [record(program, function, call) for call in program.calls]
    with torch.tpu.set_eager_mode("DEFER_AND_FUSE"):
        return [record(program, function, call) for call in program.calls]


def record(program: Program, function: Callable, call: Call) -> Record:
    """Runs one call, forward and, where it can be, backward."""
    with torch.random.fork_rng(devices=[], enabled=True):
        given, leaves = arguments(program, call)
    torch.manual_seed(call.key)
    try:
        with torch.set_grad_enabled(program.grads):
            results = [*function(*given, call.floating, call.integer)]
        gradients = backward(results, leaves, call.key)
    except FAILURES as error:
        # Dynamo's own errors name the compiler, and further down what it had traced by then.
        text = re.sub(r"backend='\w+'", "backend", str(error).partition("\n")[0])
        return Record([], [], [], [], [], f"{type(error).__name__}: {text}")
    drawn = torch.tpu.get_rng_state().view(torch.int64).tolist()
    return Record(results, given, gradients, sharing([*results, *given]), drawn)


def backward(results: list[object], leaves: list[Tensor], key: int) -> list[Tensor | None]:
    outputs = [one for one in results if isinstance(one, Tensor) and one.requires_grad]
    if not outputs or not leaves:
        return []
    generator = torch.Generator().manual_seed(key)
    seeds = [torch.randn(one.shape, generator=generator).to(one.device, one.dtype) for one in outputs]
    return [*torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)]


def sharing(tensors: list[object]) -> list[tuple[int, ...]]:
    """Groups of tensors in one storage, each group by the numbers of its members."""
    groups: dict[int, list[int]] = {}
    for number, one in enumerate(tensors):
        # Without elements there is nothing to share, whatever the size of the storage.
        if isinstance(one, Tensor) and one.numel():
            groups.setdefault(one.untyped_storage().data_ptr(), []).append(number)
    return sorted(tuple(group) for group in groups.values())


def first_difference(found: list[Record], wanted: list[Record], way: Way) -> tuple[int, str]:
    for number, (ours, other) in enumerate(zip(found, wanted, strict=True)):
        if problem := difference(ours, other, way):
            return number, problem
    return 0, ""


PARTS = ("result", "argument", "gradient", "storages", "generator")


def difference(found: Record, wanted: Record, way: Way, parts: Sequence[str] = PARTS) -> str:
    """Returns what is not the same in these parts, or an empty text."""
    if wanted.error or found.error:
        # Compiled code raises the same kind within another one.
        same = bool(wanted.error) == bool(found.error)
        return "" if same else f"expected {wanted.error or 'results'}, got {found.error or 'results'}"
    for part in parts:
        if problem := _of_parts(part, getattr(found, part), getattr(wanted, part), way):
            return problem
    return ""


def _of_parts(part: str, ours: list[object], others: list[object], way: Way) -> str:
    if part in ("storages", "generator"):
        return "" if ours == others else f"{part}: expected {others}, got {ours}"
    if len(ours) != len(others):
        return f"expected {len(others)} of {part}, got {len(ours)}"
    for number, (one, other) in enumerate(zip(ours, others, strict=True)):
        if part == "gradient" and way is Way.COMPILED:
            one, other = _without_none(one, other), _without_none(other, one)
        if problem := _of_values(one, other, way):
            return f"{part} {number}: {problem}"
    return ""


def _without_none(one: object, other: object) -> object:
    """Compiled code returns zeros where a gradient is None."""
    return torch.zeros_like(other) if one is None and isinstance(other, Tensor) else one


_LOOKS = ("dtype", "device", "shape", "requires_grad", "is_conj", "is_neg")
# A compiler computes `x.mul_(y)` as a new tensor, which may lie otherwise than the old one.
_PLACES = ("stride", "storage_offset")


def _of_values(ours: object, wanted: object, way: Way) -> str:
    if not isinstance(ours, Tensor) or not isinstance(wanted, Tensor):
        return "" if ours == wanted and type(ours) is type(wanted) else f"expected {wanted!r}, got {ours!r}"
    for name in _LOOKS + _PLACES * (way is Way.FUSED):
        one, other = getattr(ours, name), getattr(wanted, name)
        one, other = (one(), other()) if callable(one) else (one, other)
        if one != other:
            return f"{name}: expected {other}, got {one}"
    if not torch.equal(bits(ours.cpu()), bits(wanted.cpu())):
        return f"expected {wanted.tolist()}, got {ours.tolist()}"
    return ""
