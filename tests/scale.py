"""How much of what takes long is tested: a slice of it with every change, all of it by `make full`."""

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

FULL = os.environ.get("TPURUN_TEST_FULL") == "1"


def some(of: Sequence[T], every: int) -> list[T]:
    """All of them by `make full`, else one of so many."""
    return list(of if FULL else of[::every])
