"""The content of a tensor is a function of the program, the step, the tensor and the rank.

Elements are taken from a pool of each format, from a place that differs from tensor to tensor, so that
nobody pays for random numbers.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from .formats import BOOL, COMPLEX, FLOAT, FORMATS, INTEGER, OPAQUE, Format

BITS = "bits"
"""Every bit pattern: infinities, NaNs, subnormals, the largest numbers."""
FINE = "fine"
"""Between -1 and 1, with all bits of the mantissa: nothing is exact, so that orders of sums differ."""
WHOLE = "whole"
"""Small whole numbers: all is exact, in whatever order."""
UNITS = "units"
"""Powers of two and zero, and Gaussian integers on no axis: products are exact, too."""
CONSTANT = "constant"
"""One small number for the whole tensor, so that one element in memory can stand for all."""

# A prime, so that a repeated pool does not fit any block of the engine.
POOL = 65_537


def contents(form: Format, mode: str, key: int, count: int) -> np.ndarray:
    """`count` raw elements; read-only."""
    pool = _pool(form.name, WHOLE if mode == CONSTANT else mode)
    start = key % POOL
    if mode == CONSTANT:
        return np.broadcast_to(pool[start], (count,))
    if start + count <= len(pool):
        return pool[start : start + count]
    return np.take(pool[:POOL], np.arange(start, start + count), mode="wrap")


def mixed(*words: int) -> int:
    """One number from several, by the finalizer of SplitMix64."""
    state = 0
    for word in words:
        state = (state ^ word) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


_MASK = (1 << 64) - 1


@cache
def _pool(name: str, mode: str) -> np.ndarray:
    form = FORMATS[name]
    random = np.random.Generator(np.random.PCG64(1))
    pool = np.concatenate([_elements(form, mode, random)] * 2)
    pool.flags.writeable = False
    return pool


def _elements(form: Format, mode: str, random: np.random.Generator) -> np.ndarray:
    if form.family == BOOL:
        return random.integers(0, 2, POOL, np.uint8)
    if mode == BITS or form.family == OPAQUE:
        return np.frombuffer(random.bytes(POOL * form.bytes), form.raw)
    if form.family == INTEGER:
        low = -3 if np.issubdtype(form.raw, np.signedinteger) else 0
        return random.integers(low, 4, POOL).astype(form.raw)
    if form.half is not None and mode == UNITS:
        # Where a part of a product is zero, its sign depends on the order. No power of 1+2i has such a part.
        parts = random.choice(np.array([[1, 2], [-2, 1], [-1, -2], [2, -1]]), POOL)
        return parts.astype(form.half.raw).view(form.raw)[:, 0]
    if form.half is not None:
        return _numbers(mode, 2 * POOL, random).astype(form.half.raw).view(form.raw)
    assert form.family in (FLOAT, COMPLEX)
    return form.encode(_numbers(mode, POOL, random).astype(form.decode(np.zeros(1, form.raw)).dtype))


def _numbers(mode: str, count: int, random: np.random.Generator) -> np.ndarray:
    if mode == FINE:
        return random.uniform(-1, 1, count)
    if mode == UNITS:
        return random.choice([-1.0, 1.0, 2.0, 0.5, 0.0, -2.0], count, p=[0.25, 0.3, 0.2, 0.1, 0.05, 0.1])
    return random.integers(-2, 3, count).astype(np.float64)
