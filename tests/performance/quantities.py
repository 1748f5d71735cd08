"""Numbers as the page shows them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A median with the least and the greatest value."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    @staticmethod
    def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
        """Returns the spread of the ratios of values that were measured in the same turn."""
        return Spread.of([a / b for a, b in zip(over, under, strict=True)])

    def seconds(self) -> str:
        return f"{duration(self.median)} ({duration(self.least)} to {duration(self.most)})"

    def ratio(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


def duration(seconds: float) -> str:
    """Three digits: 9.08 us, 101 us, 3.6 ms, 12 s."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds)} s"


def size(count: float) -> str:
    """8 B, 64 KiB, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def times(ratio: float) -> str:
    """How many times: 0.043 x, 0.85 x, 35.6 x, 331 x."""
    return f"{ratio:.2g} x" if ratio < 0.995 else f"{_three_digits(ratio)} x"


def _three_digits(number: float) -> str:
    decimals = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{decimals}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Numbers to the right, the first column to the left."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
