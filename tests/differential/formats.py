"""Element types as numpy holds them: the bits in memory, and the numbers they mean.

numpy has no bfloat16 and no 8-bit floats: torch's own conversions stand in, which the engine does not use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

BOOL, INTEGER, FLOAT, COMPLEX, OPAQUE = "bool", "integer", "float", "complex", "opaque"


@dataclass(frozen=True)
class Format:
    """An element type."""

    name: str
    raw: np.dtype
    """What one element is in memory."""
    family: str
    nan: float = np.nan
    """What every NaN becomes, in `raw`."""
    half: Format | None = None
    """Of complex numbers, what they are pairs of."""

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.name)

    @property
    def bytes(self) -> int:
        return self.raw.itemsize

    @property
    def is_narrow(self) -> bool:
        """Whether arithmetic is done in float32."""
        return self.family == FLOAT and self.bytes <= 2

    def decode(self, raw: np.ndarray) -> np.ndarray:
        """The numbers, in the type that arithmetic is done in."""
        if not self.is_narrow:
            return raw
        return torch.from_numpy(raw.copy()).reshape(-1, 1).view(self.dtype).float().numpy().reshape(raw.shape)

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """Floats, rounded once."""
        raw = numbers
        if self.is_narrow:
            rounded = torch.from_numpy(numbers.copy()).reshape(-1, 1).to(self.dtype)
            raw = rounded.view(torch.uint8).numpy().view(self.raw).reshape(numbers.shape)
        return np.where(np.isnan(numbers), self.raw.type(self.nan), raw)


U8, U16, U32 = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32)
F32 = Format("float32", np.dtype(np.float32), FLOAT)
F64 = Format("float64", np.dtype(np.float64), FLOAT)
INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FORMATS = {
    one.name: one
    for one in [
        F32,
        F64,
        Format("float16", U16, FLOAT, 0x7E00),
        Format("bfloat16", U16, FLOAT, 0x7FC0),
        Format("float8_e4m3fn", U8, FLOAT, 0x7F),
        Format("float8_e5m2", U8, FLOAT, 0x7F),
        Format("float8_e4m3fnuz", U8, FLOAT, 0x80),
        Format("float8_e5m2fnuz", U8, FLOAT, 0x80),
        *(Format(name, np.dtype(name), INTEGER) for name in INTEGERS),
        Format("bool", U8, BOOL),
        Format("complex64", np.dtype(np.complex64), COMPLEX, half=F32),
        Format("complex128", np.dtype(np.complex128), COMPLEX, half=F64),
        # Can be moved, and nothing else.
        Format("complex32", U32, OPAQUE),
        Format("float8_e8m0fnu", U8, OPAQUE),
    ]
}
