"""This module reduces all ranks' elements as the engine must, bit by bit.

Operands are combined in the order of the ranks, floats of 16 and 8 bits in float32, and rounded once: that is
documented, so no tolerance is needed. An average is right also where the sum is too large for the type.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold

import numpy as np

from .formats import BOOL, COMPLEX, FLOAT, INTEGER, Format

BITWISE = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
OPS = {
    BOOL: ("SUM", "PRODUCT", "MIN", "MAX", *BITWISE),
    INTEGER: ("SUM", "AVG", "PRODUCT", "MIN", "MAX", *BITWISE),
    FLOAT: ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"),
    COMPLEX: ("SUM", "AVG", "PRODUCT", "PREMUL_SUM"),
}
"""What is defined for each family of formats."""


def reduced(form: Format, op: str, operands: Sequence[np.ndarray], factor: float) -> np.ndarray:
    """`operands` by rank, as raw elements; `factor` of PREMUL_SUM."""
    with np.errstate(all="ignore"):
        if form.family == BOOL:
            return _bools(op, operands)
        if form.family == INTEGER:
            return _integers(op, operands)
        if form.half is not None:
            return _complexes(form, op, operands, factor)
        return form.encode(_floats(op, [form.decode(operand) for operand in operands], factor))


def _bools(op: str, operands: Sequence[np.ndarray]) -> np.ndarray:
    meaning = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}
    return fold(BITWISE[meaning.get(op, op)], operands)


def _integers(op: str, operands: Sequence[np.ndarray]) -> np.ndarray:
    if op == "AVG":
        raw = operands[0].dtype
        # Python's own integers hold the sums of those of 64 bits.
        total = fold(
            np.add, [operand.astype(np.int64 if raw.itemsize < 8 else object) for operand in operands]
        )
        # Truncates towards zero, where numpy rounds down.
        return (np.sign(total) * (np.abs(total) // len(operands))).astype(raw)
    plain = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
    return fold((plain | BITWISE)[op], operands)


def _floats(op: str, operands: Sequence[np.ndarray], factor: float) -> np.ndarray:
    if op == "PREMUL_SUM":
        operands = [operand * operand.dtype.type(factor) for operand in operands]
    if op == "AVG":
        return _average(operands)
    return fold(_COMBINE[op], operands)


def _average(operands: Sequence[np.ndarray]) -> np.ndarray:
    """Averages shares so small that no sum of them is too large. Each share is a power of two, which leaves
    an operand its bits."""
    real = operands[0].dtype.type
    share = real(1.0 if len(operands) == 1 else 0.5 / (1 << (len(operands) - 1).bit_length()))
    total = fold(np.add, [operand * share for operand in operands])
    average = total / (real(len(operands)) * share)
    most = np.finfo(real).max
    return np.where(np.isfinite(total), np.clip(average, -most, most), average)


def _least(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(left) | np.isnan(right), np.nan, np.where(right < left, right, left)).astype(
        left.dtype
    )


def _greatest(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(left) | np.isnan(right), np.nan, np.where(right > left, right, left)).astype(
        left.dtype
    )


_COMBINE = {
    "SUM": np.add,
    "PREMUL_SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": _least,
    "MAX": _greatest,
}


def _complexes(form: Format, op: str, operands: Sequence[np.ndarray], factor: float) -> np.ndarray:
    halves = [np.ascontiguousarray(operand).view(form.half.raw).reshape(-1, 2) for operand in operands]
    total = fold(_times, halves) if op == "PRODUCT" else _floats(op, halves, factor)
    return form.half.encode(total).view(form.raw).reshape(-1)


def _times(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    (a, b), (c, d) = left.T, right.T
    return np.stack([a * c - b * d, a * d + b * c], 1)
