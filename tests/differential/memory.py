"""The memory of one rank in one step: all its tensors in one buffer, and what every byte of it must become.

Between tensors, and between their elements where they are strided, lie bytes that nobody may touch. How a
tensor lies in memory is this rank's own affair: it differs from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from random import Random

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from .contents import BITS
from .formats import COMPLEX, FLOAT, Format
from .oracle import Effects, Held
from .program import Step

PLAIN, STEPPED, TURNED, PADDED, EXPANDED, NEGATED = (
    "plain",
    "stepped",
    "turned",
    "padded",
    "expanded",
    "negated",
)
ALIGNMENT = 64
# Steps that torch does not take apart into reals first, which conjugated and negated views refuse. Only what
# is read may be one: torch hands a copy on, and what is written to that is lost, whatever the backend.
SEEN_WHOLE = ("reduce_scatter", "gather", "messages")
SIGNED = ("float32", "float64", "float16", "bfloat16")

Strides = tuple[int, ...]


class Memory:
    """`tensors` by name; everything else is for `problem`."""

    def __init__(self, step: Step, effects: Effects, random: Random) -> None:
        self.held = effects.held
        self._views: dict[str, tuple[int, Strides]] = {}
        self.layouts: dict[str, str] = {}
        size = self._place(step, random)
        self.buffer = _noise(size, random.randrange(1 << 16)).copy()
        self._before = {}
        for one in effects.held:
            if one.before is not None:
                self._write(self.buffer, one, one.before)
        self.untouched = self.buffer.copy()
        self.expected = self.buffer.copy()
        for one in effects.held:
            if one.after is not None:
                self._write(self.expected, one, one.after)
        self.tensors = {one.name: self._tensor(one) for one in effects.held}

    def expect(self, one: Held, after: np.ndarray) -> None:
        """Sets the content to expect of this tensor, where it was not known before."""
        self._write(self.expected, one, after)

    def problem(self) -> str:
        """The first difference to what must be, or nothing."""
        if np.array_equal(self.buffer, self.expected):
            return ""
        for one in self.held:
            given, wanted = self._raw(self.buffer, one), self._raw(self.expected, one)
            if given.tobytes() != wanted.tobytes():
                return self._difference(one, given.reshape(-1), wanted.reshape(-1))
        at = int(np.flatnonzero(self.buffer != self.expected)[0])
        return f"byte {at} of {len(self.buffer)}, in no tensor, was written to ({self._map()})"

    def _difference(self, one: Held, given: np.ndarray, wanted: np.ndarray) -> str:
        bits = np.dtype((np.void, one.form.bytes))
        differs = np.flatnonzero(given.view(bits) != wanted.view(bits))
        at = differs[0]
        first, second = (
            one.form.decode(raw[at : at + 1])[0] if raw.dtype != bits else raw[at] for raw in (wanted, given)
        )
        return (
            f"{one.name} {one.form.name}{list(one.shape)} {self.layouts[one.name]}: {len(differs)} of "
            f"{one.count} elements differ, the first at {at}: expected {first} "
            f"({wanted[at : at + 1].tobytes()[::-1].hex()}), got {second} "
            f"({given[at : at + 1].tobytes()[::-1].hex()})"
        )

    def _map(self) -> str:
        return ", ".join(f"{name} at {start}" for name, (start, _) in self._views.items())

    def _place(self, step: Step, random: Random) -> int:
        """Decides where everything lies; the size of the buffer."""
        parents = {one.inside[0] for one in self.held if one.inside}
        end = ALIGNMENT * random.randint(1, 2)
        for one in self.held:
            if one.inside:
                start, _ = self._views[one.inside[0]]
                self._views[one.name] = start + one.inside[1] * one.form.bytes, contiguous(one.shape)
                self.layouts[one.name] = f"inside {one.inside[0]}"
                continue
            layout = PLAIN if one.name in parents else _layout(step, one, random)
            strides = STRIDES[layout](one.shape)
            start = end + one.form.bytes * random.choice([0, 0, 1, 3])
            self._views[one.name] = start, strides
            self.layouts[one.name] = layout
            last = sum((size - 1) * stride for size, stride in zip(one.shape, strides, strict=True))
            end = start + (last + 1) * one.form.bytes if one.count else start
            end = -(-end // ALIGNMENT) * ALIGNMENT + ALIGNMENT * random.randint(1, 2)
        return end

    def _raw(self, buffer: np.ndarray, one: Held) -> np.ndarray:
        start, strides = self._views[one.name]
        if one.count == 0:
            return np.empty(one.shape, one.form.raw)
        typed = buffer[start : start + (len(buffer) - start) // one.form.bytes * one.form.bytes].view(
            one.form.raw
        )
        if self.layouts[one.name] == PLAIN:
            return typed[: one.count].reshape(one.shape)
        return as_strided(typed, one.shape, [stride * one.form.bytes for stride in strides])

    def _write(self, buffer: np.ndarray, one: Held, raw: np.ndarray) -> None:
        if self.layouts[one.name] == NEGATED:
            raw = _negated(one.form, raw)
        self._raw(buffer, one)[...] = raw.reshape(one.shape)

    def _tensor(self, one: Held) -> torch.Tensor:
        start, strides = self._views[one.name]
        typed = torch.from_numpy(self.buffer).view(one.form.dtype)
        tensor = typed.as_strided(one.shape, strides, start // one.form.bytes)
        if self.layouts[one.name] == NEGATED:
            return tensor.conj() if one.form.family == COMPLEX else torch._neg_view(tensor)
        return tensor


def same(form: Format, given: torch.Tensor, wanted: np.ndarray) -> bool:
    """Whether a tensor has these raw elements."""
    flat = given.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return wanted.size == 0
    return flat.view(torch.uint8).numpy().tobytes() == np.ascontiguousarray(wanted).tobytes()


def _layout(step: Step, one: Held, random: Random) -> str:
    possible = [PLAIN, PLAIN]
    if one.count > 1:
        possible += [STEPPED, PADDED]
        if len(one.shape) > 1:
            possible.append(TURNED)
        # One element repeated, as `contents` gives it.
        is_repeated = one.before is not None and one.before.strides == (0,)
        if is_repeated and one.after is None and not step.is_in_place:
            possible += [EXPANDED, EXPANDED]
    is_read = one.before is not None and one.after is None and not step.is_in_place
    if is_read and step.kind in SEEN_WHOLE and step.mode != BITS:
        # Complex messages are taken apart, too.
        is_complex = one.form.family == COMPLEX and step.kind != "messages"
        possible += [NEGATED] * (is_complex or one.form.name in SIGNED)
    return random.choice(possible)


def contiguous(shape: tuple[int, ...]) -> Strides:
    return tuple(prod(shape[at + 1 :]) for at in range(len(shape)))


def _turned(shape: tuple[int, ...]) -> Strides:
    return contiguous(shape[::-1])[::-1]


def _stepped(shape: tuple[int, ...]) -> Strides:
    return tuple(2 * stride for stride in contiguous(shape))


def _padded(shape: tuple[int, ...]) -> Strides:
    inner = contiguous((*shape[1:-1], shape[-1] + 3)) if len(shape) > 1 else ()
    return (prod(shape[1:-1]) * (shape[-1] + 3), *inner) if inner else (3,)


STRIDES: dict[str, Callable[[tuple[int, ...]], Strides]] = {
    PLAIN: contiguous,
    STEPPED: _stepped,
    TURNED: _turned,
    PADDED: _padded,
    EXPANDED: lambda shape: (0,) * len(shape),
    NEGATED: contiguous,
}


def _negated(form: Format, raw: np.ndarray) -> np.ndarray:
    """Returns what memory holds where the view changes the sign. The view of a complex number changes the
    sign of its imaginary part."""
    if form.family == COMPLEX:
        return np.conj(raw)
    assert form.family == FLOAT
    unsigned = np.dtype(f"u{form.bytes}")
    return (raw.view(unsigned) ^ unsigned.type(1 << 8 * form.bytes - 1)).view(raw.dtype)


@cache
def _pool() -> np.ndarray:
    return np.frombuffer(np.random.Generator(np.random.PCG64(2)).bytes(1 << 17), np.uint8)


def _noise(size: int, start: int) -> np.ndarray:
    pool = _pool()
    return pool[start : start + size] if start + size <= len(pool) else np.resize(pool, size)
