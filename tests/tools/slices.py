"""Which tests run with a commit: those that are quick, and of the others as many as there is time for.

The hash of the commit chooses, so that after some commits each has run; `make full` runs all. Every file has
at least one test in every slice. ``tests/durations.json`` says how long each takes, by file and function, in
seconds for one variant; ``make durations`` measures it again.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
KNOWN = ROOT / "tests" / "durations.json"
FULL = os.environ.get("TPURUN_TEST_FULL") == "1"
# The name of the slice that has all of them but what is left to `make full`.
ALL = "all"
BUDGET_S = float(os.environ.get("TPURUN_TEST_BUDGET_S", "420"))
QUICK_S = 0.25
# The time that a test is thought to take if nobody has measured it.
USUAL_S = 2.0


def of_commit() -> str:
    """The name of the slice: what TPURUN_TEST_SLICE says, else the commit's hash."""
    if named := os.environ.get("TPURUN_TEST_SLICE"):
        return named
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "none"


def place(name: str, test: str) -> int:
    """Where a slice has a test in its order, which looks random and is the same everywhere."""
    return int.from_bytes(hashlib.sha256(f"{name} {test}".encode()).digest()[:8])


def some(of: Sequence[T], every: int) -> list[T]:
    """All of them by `make full`, else one of so many, other ones with each slice."""
    if FULL or not of:
        return list(of)
    return list(of[place(NAME, f"one of {len(of)}") % min(every, len(of)) :: every])


def durations(tests: Iterable[str], known: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """How long each test takes, by its node."""

    def duration(test: str) -> float:
        file, _, function = test.partition("::")
        return known.get(file, {}).get(function.partition("[")[0], USUAL_S)

    return {test: duration(test) for test in tests}


def chosen(name: str, seconds: Mapping[str, float], budget_s: float = BUDGET_S) -> set[str]:
    """The tests of a slice: all quick ones, one of each file, then others while there is time."""
    found = {test for test, took in seconds.items() if took <= QUICK_S}
    left = budget_s - sum(seconds[test] for test in found)
    in_order = sorted(seconds.keys() - found, key=lambda test: place(name, test))
    files = {test.partition("::")[0] for test in found}
    later = []
    for test in in_order:
        file = test.partition("::")[0]
        if file in files:
            later.append(test)
            continue
        files.add(file)
        found.add(test)
        left -= seconds[test]
    for test in later:
        if seconds[test] <= left:
            found.add(test)
            left -= seconds[test]
    return found


def known() -> dict[str, dict[str, float]]:
    return json.loads(KNOWN.read_text())


NAME = of_commit()
