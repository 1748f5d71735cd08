"""The results are kept in a file for each suite, and `page.py` makes the page from them."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .plan import FAILED, PASSED, SKIPPED, Outcome

# The results of `conformance.ops`, which lie in the same folder, have a form of their own.
_OF_OPERATIONS = "ops"
KINDS = (PASSED, FAILED, SKIPPED)


@dataclass
class Run:
    """A suite under one start method, on one number of ranks."""

    command: str
    start: str
    ranks: int
    debug: str
    seconds: float
    passed: list[str]
    failed: dict[str, str]
    """What the first rank that failed said, by test."""
    skipped: dict[str, list[str]]
    """The tests, by their reason."""

    @staticmethod
    def of(command: str, start: str, ranks: int, debug: str, outcomes: Sequence[Outcome]) -> Run:
        reasons = sorted({one.text for one in outcomes if one.kind == SKIPPED})
        return Run(
            command,
            start,
            ranks,
            debug,
            round(sum(one.seconds for one in outcomes), 1),
            [one.test for one in outcomes if one.kind == PASSED],
            {one.test: one.text for one in outcomes if one.kind == FAILED},
            {
                reason: [one.test for one in outcomes if (one.kind, one.text) == (SKIPPED, reason)]
                for reason in reasons
            },
        )

    def counts(self) -> Counter[str]:
        skipped = sum(map(len, self.skipped.values()))
        return Counter({PASSED: len(self.passed), FAILED: len(self.failed), SKIPPED: skipped})


@dataclass
class Result:
    """The result of one suite."""

    suite: str
    source: str
    torch: str
    about: str = ""
    python: str = field(default_factory=platform.python_version)
    runs: list[Run] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Keeps what is there of other start methods and debug levels, unless it is of another torch."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.suite}.json"
        kept = []
        if path.exists() and (before := Result.read(path)).torch == self.torch:
            new = {(run.start, run.debug) for run in self.runs}
            kept = [run for run in before.runs if (run.start, run.debug) not in new]
        self.runs = sorted(kept + self.runs, key=lambda run: (run.debug != "OFF", run.start, run.ranks))
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> Result:
        result = json.loads(path.read_text())
        runs = [Run(**run) for run in result.pop("runs")]
        return Result(**result, runs=runs)


def read_all(folder: Path) -> list[Result]:
    return [Result.read(path) for path in sorted(folder.glob("*.json")) if path.stem != _OF_OPERATIONS]
