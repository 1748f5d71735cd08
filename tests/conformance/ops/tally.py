"""Counts of all cases, and the file that keeps them."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from .cases import KINDS, Done, Failure


@dataclass
class Tally:
    """The results of one command, or of one command for all and one that ran some of them again."""

    command: str
    again: list[str] = field(default_factory=list)
    """Commands that replaced the results of some names."""
    torch: str = field(default_factory=lambda: version("torch"))
    python: str = field(default_factory=platform.python_version)
    seconds: float = 0.0
    names: int = 0
    passed: dict[str, int] = field(default_factory=dict)
    failed: dict[str, list[Failure]] = field(default_factory=dict)
    excused: dict[str, list[Failure]] = field(default_factory=dict)
    by_name: dict[str, dict[str, int]] = field(default_factory=dict)
    """How many of each kind passed."""

    @staticmethod
    def of(command: str, seconds: float, cases: Iterable[Done]) -> Tally:
        made = Tally(command, seconds=round(seconds, 1))
        for done in cases:
            made.by_name[done.name] = dict(sorted(done.passed.items()))
            if done.failed:
                made.failed[done.name] = done.failed
            if done.excused:
                made.excused[done.name] = done.excused
        return made._counted()

    def over(self, before: Tally) -> Tally:
        """The results of before, but for the names that have run again."""
        made = replace(before, again=[*before.again, self.command])
        for part in ("by_name", "failed", "excused"):
            kept = {key: one for key, one in getattr(before, part).items() if key not in self.by_name}
            setattr(made, part, {**kept, **getattr(self, part)})
        return made._counted()

    def _counted(self) -> Tally:
        for part in ("by_name", "failed", "excused"):
            setattr(self, part, dict(sorted(getattr(self, part).items())))
        self.names = len(self.by_name)
        passed = sum(map(Counter, self.by_name.values()), Counter())
        self.passed = dict(sorted(passed.items()))
        return self

    @staticmethod
    def read(path: Path) -> Tally:
        made = Tally(**json.loads(path.read_text()))
        for some in (made.failed, made.excused):
            some.update({name: [Failure(**one) for one in failures] for name, failures in some.items()})
        return made

    def rows(self) -> list[tuple[str, int, int, int]]:
        """Returns how many checks of each kind passed, failed or were excused."""
        failed, excused = _by_kind(self.failed), _by_kind(self.excused)
        kinds = [kind for kind in (*KINDS, "crash") if kind in {*self.passed, *failed, *excused}]
        return [(kind, self.passed.get(kind, 0), failed[kind], excused[kind]) for kind in kinds]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = asdict(self)
        by_name = text.pop("by_name")
        # A line for each name: this is to be looked through.
        lines = [f"  {json.dumps(name)}: {json.dumps(counts)}" for name, counts in by_name.items()]
        head = json.dumps(text, indent=1).removesuffix("\n}")
        path.write_text(f'{head},\n "by_name": {{\n' + ",\n".join(lines) + "\n }\n}\n")


def _by_kind(failures: dict[str, list[Failure]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for some in failures.values():
        for one in some:
            counts[one.kind] += one.count
    return counts
