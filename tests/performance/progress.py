"""Progress says on stderr what is being measured."""

from __future__ import annotations

import sys
import time


class Progress:
    """A line for each case, with the seconds since the beginning."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._part, self._case, self._cases = "", 0, 0

    def part(self, name: str, cases: int) -> None:
        self._part, self._case, self._cases = name, 0, cases

    def case(self, text: str) -> None:
        self._case += 1
        self._line(f"{self._part} {self._case}/{self._cases}: {text}")

    def note(self, text: str) -> None:
        self._line(f"{self._part}: {text}")

    def _line(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began_s:7.1f} s] {text}", file=sys.stderr, flush=True)
