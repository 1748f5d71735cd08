"""``python -m tests.differential``: runs random programs and shows those that go wrong, made small."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from . import jobs
from .generate import ranks_of
from .jobs import Failure, Runner
from .plan import PLANTS, Item
from .shrink import shrunk

MOST_SHRUNK = 5


def main() -> int:
    options = parse()
    began = time.monotonic()
    items = [Item(seed, options.steps) for seed in options.seeds]
    if options.list:
        for item in items:
            print(item.program())
        return 0
    failed = 0
    with jobs.workplace() as folder:
        for launcher in jobs.LAUNCHERS if options.launcher == "both" else [options.launcher]:
            mine = share(items, launcher, options.launcher)
            with jobs.runner(launcher, folder) as runner:
                failed += Session(options, launcher, runner, folder / launcher).run(mine)
    took = time.monotonic() - began
    print(
        f"{len(items)} programs, {len(items) - failed} right, {failed} wrong, "
        f"in {took:.0f} s: {len(items) / took:.1f} programs per second",
        flush=True,
    )
    return 1 if failed else 0


def share(items: list[Item], launcher: str, chosen: str) -> list[Item]:
    """Of two launchers each gets every second program of each number of ranks."""
    if chosen != "both":
        return items
    seen: Counter[int] = Counter()
    mine = []
    for item in items:
        ranks = ranks_of(item.seed)
        if jobs.LAUNCHERS[seen[ranks] % 2] == launcher:
            mine.append(item)
        seen[ranks] += 1
    return mine


class Session:
    """Programs under one launcher."""

    def __init__(self, options: argparse.Namespace, launcher: str, runner: Runner, folder: Path) -> None:
        self.options, self.launcher, self.runner, self.folder = options, launcher, runner, folder
        self.shrinks = 0

    def run(self, items: list[Item]) -> int:
        """How many failed."""
        failed = 0
        for ranks in sorted({ranks_of(item.seed) for item in items}):
            some = [item for item in items if ranks_of(item.seed) == ranks]
            began = time.monotonic()
            for failure in self._failures(some, ranks, self.folder):
                failed += 1
                self._show(failure, ranks)
            took = time.monotonic() - began
            print(
                f"{self.launcher:>6}, {ranks} ranks: {len(some)} programs, {len(some) / took:.1f} per second",
                flush=True,
            )
        return failed

    def _failures(self, items: list[Item], ranks: int, folder: Path):
        return jobs.run(
            items, ranks, self.runner, folder, timeout_s=self.options.timeout, plant=self.options.plant
        )

    def _show(self, failure: Failure, ranks: int) -> None:
        if self.shrinks < MOST_SHRUNK and self.options.shrink:
            self.shrinks += 1
            failure = self._smaller(failure, ranks)
        item = failure.item
        steps = "" if item.kept is None else " --steps " + ",".join(map(str, item.kept))
        plant = f" --plant {self.options.plant}" if self.options.plant else ""
        print(item.program(), failure, sep="\n")
        print(
            f"  replay: python -m tests.differential --replay {item.seed}{steps} "
            f"--launcher {self.launcher}{plant}",
            flush=True,
        )

    def _smaller(self, failure: Failure, ranks: int) -> Failure:
        seed = failure.item.seed
        found = {failure.item: failure}

        def failing(choices: list[tuple[int, ...]]) -> list[bool]:
            items = [Item(seed, choice) for choice in choices]
            folder = self.folder / f"shrink-{seed}-{len(choices)}"
            found.update({one.item: one for one in self._failures(items, ranks, folder)})
            return [item in found for item in items]

        steps = shrunk([step.index for step in failure.item.program().steps], failing)
        return found.get(Item(seed, steps), failure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--programs", type=int, default=300, help="how many [300]")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next ones follow it [0]")
    parser.add_argument("--replay", type=int, metavar="SEED", help="this program alone")
    parser.add_argument("--steps", type=steps, help="only these steps of it, as in 0,3")
    parser.add_argument("--ranks", type=numbers, help="only programs of these numbers of ranks, as in 2,5")
    parser.add_argument(
        "--launcher", choices=[*jobs.LAUNCHERS, "both"], default="both", help="who starts the ranks [both]"
    )
    parser.add_argument("--timeout", type=float, default=60, help="of all groups, in seconds [60]")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false", help="show programs as they are")
    parser.add_argument("--list", action="store_true", help="show the programs, run none")
    parser.add_argument("--plant", choices=PLANTS, help="make an error on purpose, to see that it is found")
    options = parser.parse_args()
    last = options.seed + options.programs
    options.seeds = range(options.seed, last) if options.replay is None else [options.replay]
    if options.ranks:
        options.seeds = [seed for seed in options.seeds if ranks_of(seed) in options.ranks]
    if options.replay is not None and options.launcher == "both":
        options.launcher = "fork"
    if options.steps and options.replay is None:
        parser.error("expected --replay with --steps")
    return options


def steps(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def numbers(text: str) -> set[int]:
    return {int(part) for part in text.split(",")}


if __name__ == "__main__":
    sys.exit(main())
