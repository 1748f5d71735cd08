"""Element types as numpy holds them: the bits in memory, and the numbers they mean.

numpy has no bfloat16 and no 8-bit floats; their numbers are calculated here from the definitions of the
formats, independent of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

BOOL, INTEGER, FLOAT, COMPLEX, OPAQUE = "bool", "integer", "float", "complex", "opaque"

# What a small float format keeps beyond finite numbers.
IEEE = "infinities and NaNs at the largest exponent"
FINITE = "one NaN at the largest magnitude; what overflows becomes the largest number"
UNSIGNED = "one NaN in place of negative zero; what overflows becomes it"


@dataclass(frozen=True)
class Format:
    """An element type. `name` is torch's."""

    name: str
    raw: np.dtype
    """What one element is in memory."""
    family: str

    def decode(self, raw: np.ndarray) -> np.ndarray:
        """The numbers, in the type that arithmetic is done in."""
        return raw

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """Rounds once, to nearest even; every NaN becomes the canonical one."""
        return numbers

    @property
    def bytes(self) -> int:
        return self.raw.itemsize


@dataclass(frozen=True)
class Wide(Format):
    """A float that arithmetic is done in as it is."""

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(numbers), self.raw.type(np.nan), numbers)


@dataclass(frozen=True)
class Half(Format):
    """IEEE half precision."""

    def decode(self, raw: np.ndarray) -> np.ndarray:
        return raw.view(np.float16).astype(np.float32)

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            bits = numbers.astype(np.float16).view(np.uint16)
        return np.where(np.isnan(numbers), np.uint16(0x7E00), bits)


@dataclass(frozen=True)
class Brain(Format):
    """The upper half of a float32."""

    def decode(self, raw: np.ndarray) -> np.ndarray:
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(numbers).view(np.uint32).astype(np.uint64)
        below, upper = bits & 0xFFFF, bits >> 16
        rounded = upper + ((below > 0x8000) | ((below == 0x8000) & (upper & 1 == 1)))
        return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded.astype(np.uint16))


@dataclass(frozen=True)
class Eight(Format):
    """An 8-bit float with this many bits of exponent and mantissa."""

    exponent: int = 4
    mantissa: int = 3
    bias: int = 7
    rule: str = FINITE
    nan: int = 0x7F

    @cached_property
    def numbers(self) -> np.ndarray:
        """Of every code."""
        magnitudes = [self._magnitude(code) for code in range(128)]
        table = np.array([*magnitudes, *(-number for number in magnitudes)], np.float32)
        if self.rule == UNSIGNED:
            table[0x80] = np.nan
        return table

    def _magnitude(self, code: int) -> float:
        power, fraction = code >> self.mantissa, code & ((1 << self.mantissa) - 1)
        if self.rule == IEEE and power == (1 << self.exponent) - 1:
            return np.nan if fraction else np.inf
        if self.rule == FINITE and code == 0x7F:
            return np.nan
        return self._finite(code)

    def _finite(self, code: int) -> float:
        power, fraction = code >> self.mantissa, code & ((1 << self.mantissa) - 1)
        if power == 0:
            return fraction * 2.0 ** (1 - self.bias - self.mantissa)
        return (1 + fraction / (1 << self.mantissa)) * 2.0 ** (power - self.bias)

    @cached_property
    def middles(self) -> np.ndarray:
        """Between each finite magnitude and the next, and the one where rounding overflows."""
        finite = [self._finite(code) for code in range(self.overflow + 1)]
        return np.array([(low + high) / 2 for low, high in pairwise(finite)])

    @property
    def overflow(self) -> int:
        """The first magnitude that is no finite number."""
        return {IEEE: ((1 << self.exponent) - 1) << self.mantissa, FINITE: 0x7F, UNSIGNED: 0x80}[self.rule]

    def decode(self, raw: np.ndarray) -> np.ndarray:
        return self.numbers[raw]

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            magnitudes = np.abs(numbers).astype(np.float64)
        codes = np.searchsorted(self.middles, magnitudes)
        # Exactly in the middle the code below was found; the even one is wanted.
        is_middle = (codes < self.overflow) & (
            self.middles[np.minimum(codes, self.overflow - 1)] == magnitudes
        )
        codes = codes + (is_middle & (codes & 1 == 1))
        signs = np.where(np.signbit(numbers), 0x80, 0)
        if self.rule == FINITE:
            codes = np.minimum(codes, 0x7E)
        if self.rule == UNSIGNED:
            signs = np.where((codes == 0) | (codes == 0x80), 0, signs)
        return np.where(np.isnan(numbers), self.nan, codes | signs).astype(np.uint8)


@dataclass(frozen=True)
class Complex(Format):
    """Pairs of a wide float."""

    half: Wide = Wide("float32", np.dtype(np.float32), FLOAT)


F32 = Wide("float32", np.dtype(np.float32), FLOAT)
F64 = Wide("float64", np.dtype(np.float64), FLOAT)

U8, U16, U32 = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32)
INTEGERS = [
    Format(name, np.dtype(name), INTEGER)
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
]
EIGHTS = [
    Eight("float8_e4m3fn", U8, FLOAT, 4, 3, 7, FINITE, 0x7F),
    Eight("float8_e5m2", U8, FLOAT, 5, 2, 15, IEEE, 0x7F),
    Eight("float8_e4m3fnuz", U8, FLOAT, 4, 3, 8, UNSIGNED, 0x80),
    Eight("float8_e5m2fnuz", U8, FLOAT, 5, 2, 16, UNSIGNED, 0x80),
]
FORMATS = {
    one.name: one
    for one in [
        F32,
        F64,
        Half("float16", U16, FLOAT),
        Brain("bfloat16", U16, FLOAT),
        *EIGHTS,
        *INTEGERS,
        Format("bool", U8, BOOL),
        Complex("complex64", np.dtype(np.complex64), COMPLEX, F32),
        Complex("complex128", np.dtype(np.complex128), COMPLEX, F64),
        # Can be moved, and nothing else.
        Format("complex32", U32, OPAQUE),
        Format("float8_e8m0fnu", U8, OPAQUE),
    ]
}
