"""Runs the same body over the same sample on the CPU and on the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .comparing import Values, aliases, difference
from .placing import DEVICE, Placing

SEED = 20
# The amount by which one operation advances the device's offset.
_STEP = 4
Body = Callable[[Any], Any]


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

    def difference(self, values: Values = Values.COUNT) -> str | None:
        """Returns the first difference of the results and their numbers. The CPU must have a result."""
        if self.device.error is not None:
            return f"raised {said(self.device.error)}"
        if self.trouble is not None:
            return self.trouble
        counted = Values.DIFFER if Values.DIFFER in (values, self.values) else Values.COUNT
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
