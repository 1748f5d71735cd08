"""Runs the same body over the same sample on the CPU and on the device."""

from __future__ import annotations

import contextlib
import enum
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .comparing import Values, aliases, difference
from .placing import DEVICE, Placing

SEED = 20
# The first words of a difference that compilers have no part in.
OF_TRACING = "torch's own tracing"
# The amount by which one operation advances the device's offset.
_STEP = 4
Body = Callable[[Any], Any]


class Way(enum.Enum):
    """The two sides of a comparison."""

    CPU = "cpu"
    """The device, with the CPU."""
    COMPILED = "compiled"
    """The device through torch.compile, with the device in Strict."""
    FUSED = "fused"
    """The device in DEFER_AND_FUSE, with the device in Strict."""


@dataclass
class _Chosen:
    way: Way = Way.CPU
    backend: str = ""
    compiles: bool = False
    """While the side runs that is to be compiled."""


_chosen = _Chosen()


def choose(way: str, backend: str) -> None:
    """For all checks of this process."""
    _chosen.way, _chosen.backend = Way(way), backend


def called(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a check is of, compiled where that is to be checked."""
    if not _chosen.compiles:
        return function
    torch._dynamo.reset()

    def plain(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return torch.compile(plain, backend=_chosen.backend)


@dataclass
class Outcome:
    """The outcome of one check. It has no text if the device does as the CPU does."""

    kind: str
    text: str | None


@dataclass
class Ran:
    """A body on one device."""

    result: Any = None
    aliases: Any = None
    error: Exception | None = None


@dataclass
class Pair:
    cpu: Ran
    device: Ran
    values: Values
    trouble: str | None = None
    """What else was wrong, whatever the result."""
    is_of_tracing: bool = False
    """Whether the operations that torch traces, run one by one, do the same."""

    def difference(self, values: Values = Values.COUNT) -> str | None:
        """Returns the first difference of the results and their numbers. The CPU must have a result."""
        text = self._difference(values)
        return f"{OF_TRACING}: {text}" if text is not None and self.is_of_tracing else text

    def _difference(self, values: Values) -> str | None:
        if self.device.error is not None:
            return f"raised {said(self.device.error)}"
        if self.trouble is not None:
            return self.trouble
        counted = Values.DIFFER if Values.DIFFER in (values, self.values) else Values.COUNT
        if _chosen.way is Way.COMPILED:
            return difference(_strided(self.cpu.result), _strided(self.device.result), counted)
        return difference(self.cpu.result, self.device.result, counted)

    def errors(self) -> str | None:
        """Whether the device refuses what the CPU refuses, loosely in the same way."""
        if self.device.error is None:
            return f"expected {said(self.cpu.error)}, got a result"
        kinds = type(self.cpu.error), type(self.device.error)
        related = issubclass(*kinds) or issubclass(*kinds[::-1])
        return None if related else f"expected {said(self.cpu.error)}, got {said(self.device.error)}"


def run_on_both(body: Body, sample: Any) -> Pair:
    """Random numbers included: where one operation draws, the CPU's engine starts as the device's did."""
    if _chosen.way is not Way.CPU:
        return _beside_strict(body, sample)
    random = torch.get_rng_state
    _seed(SEED)
    before = random()
    device = _run(body, sample, DEVICE)
    trouble = None if torch.equal(before, random()) else "drew random numbers from the CPU's generator"
    seed, offset = torch.tpu.get_rng_state().view(torch.int64).tolist()
    drawn = offset // _STEP
    values = Values.COUNT
    if drawn > 1:
        # Two engines in a row are two of the CPU's, which has one.
        values = Values.DIFFER
        _seed(SEED)
        trouble = trouble or _repeats(device, _run(body, sample, DEVICE))
    _seed(_first_engine(seed) if drawn == 1 else SEED)
    return Pair(_run(body, sample, "cpu"), device, values, trouble)


def _beside_strict(body: Body, sample: Any) -> Pair:
    """Both sides on the device, so that they draw the same numbers. The result of
    Strict comes to the CPU as the expected one."""
    _seed(SEED)
    strict = _run(body, sample, DEVICE)
    expected = Ran(Placing("cpu")(strict.result), strict.aliases, strict.error)
    drawn = torch.tpu.get_rng_state()
    _seed(SEED)
    with _in_way():
        found = _run(body, sample, DEVICE)
    same = torch.equal(drawn, torch.tpu.get_rng_state())
    pair = Pair(expected, found, Values.COUNT, None if same else "drew other random numbers than Strict")
    if _chosen.way is Way.COMPILED and expected.error is None and pair.difference() is not None:
        pair.is_of_tracing = _is_of_tracing(body, sample, found)
    return pair


def _strided(result: Any) -> Any:
    """The same with strides of 1 where there are not two elements: a trace has others there than a kernel."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, _with_plain_strides, result)


def _with_plain_strides(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        return tensor
    sizes = tuple(tensor.shape)
    strides = tuple(
        1 if size < 2 or not tensor.numel() else stride
        for size, stride in zip(sizes, tensor.stride(), strict=True)
    )
    return tensor.as_strided(sizes, strides) if strides != tensor.stride() else tensor


def _is_of_tracing(body: Body, sample: Any, found: Ran) -> bool:
    """Whether torch's tracing has the same result, or refuses, too, without any compiler."""
    backend, _chosen.backend = _chosen.backend, "aot_eager"
    try:
        _seed(SEED)
        with _in_way():
            traced = _run(body, sample, DEVICE)
    finally:
        _chosen.backend = backend
    if traced.error is not None or found.error is not None:
        return traced.error is not None and found.error is not None
    return difference(Placing("cpu")(traced.result), found.result) is None


@contextlib.contextmanager
def _in_way() -> Iterator[None]:
    if _chosen.way is Way.FUSED:
        with torch.tpu.set_eager_mode("DEFER_AND_FUSE"):
            yield
        return
    _chosen.compiles = True
    try:
        yield
    finally:
        _chosen.compiles = False


def _run(body: Body, sample: Any, device: str) -> Ran:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            placed = Placing(device)(sample)
            # Tensors that the body makes without naming a device are made there.
            with torch.device(device):
                result = body(placed)
        except Exception as error:
            # A traceback would hold what the body held.
            return Ran(error=error.with_traceback(None))
    return Ran(result, aliases(result, placed))


def _repeats(first: Ran, second: Ran) -> str | None:
    if first.error is not None or second.error is not None:
        return None
    text = difference(Placing("cpu")(first.result), second.result)
    return None if text is None else f"with the same seed again: {text}"


def _seed(seed: int) -> None:
    """Both devices. `torch.manual_seed` seeds all kinds, and formats a stack for each that is not there."""
    torch.default_generator.manual_seed(seed)
    torch.tpu.manual_seed(seed)


def _first_engine(seed: int) -> int:
    """The seed of the engine that the device uses at offset 0."""
    return _mixed(seed ^ _mixed(0))


def _mixed(word: int) -> int:
    mask = (1 << 64) - 1
    word = (word + 0x9E3779B97F4A7C15) & mask
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return word ^ (word >> 31)


def said(error: Exception | None) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:220]}"
