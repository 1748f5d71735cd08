"""``python -m tests.differential``: runs random programs and shows those that go wrong, made small."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tests.fault_matrix.start import FOREIGN

from . import jobs
from .generate import World, world_of
from .jobs import Failure
from .plan import Item
from .plants import PLANTS
from .shrink import shrunk

MOST_SHRUNK = 5


def main() -> int:
    options = parse()
    items = [Item(seed, options.steps) for seed in options.seeds]
    if options.list:
        print(*[item.program() for item in items], sep="\n")
        return 0
    prepare()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tpurun-differential-") as folder:
        failed = Session(options, Path(folder)).run(items)
    took = time.monotonic() - began
    print(
        f"{len(items)} programs, {len(items) - failed} right, {failed} wrong, "
        f"in {took:.0f} s: {len(items) / took:.1f} programs per second",
        flush=True,
    )
    return 1 if failed else 0


def prepare() -> None:
    """Ranks are forked from here: they have one thread, and obey no other job."""
    for name in [name for name in os.environ if FOREIGN.fullmatch(name)]:
        del os.environ[name]
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    torch.set_num_threads(1)


class Session:
    """Runs programs and tells of them."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.shrinks = 0

    def run(self, items: Sequence[Item]) -> int:
        """How many failed."""
        failed = 0
        for world in sorted(set(map(self._world, items))):
            some = [item for item in items if self._world(item) == world]
            for failure in self._failures(some, world, Progress(world, len(some))):
                failed += 1
                self._show(failure, world)
        return failed

    def _world(self, item: Item) -> World:
        world = world_of(item.seed)
        return world._replace(launcher=self.options.launcher or world.launcher)

    def _failures(self, items: Sequence[Item], world: World, progress=lambda done: None) -> Iterator[Failure]:
        timeout_s, plant = self.options.timeout, self.options.plant
        return jobs.run(items, world, self.folder, timeout_s=timeout_s, plant=plant, progress=progress)

    def _show(self, failure: Failure, world: World) -> None:
        if self.shrinks < MOST_SHRUNK and self.options.shrink:
            self.shrinks += 1
            failure = self._smaller(failure, world)
        item, options = failure.item, self.options
        words = ["--replay", item.seed]
        words += [] if item.kept is None else ["--steps", ",".join(map(str, item.kept))]
        words += ["--launcher", options.launcher] if options.launcher else []
        words += ["--plant", options.plant] if options.plant else []
        print(failure)
        print("  replay: python -m tests.differential", *words, flush=True)

    def _smaller(self, failure: Failure, world: World) -> Failure:
        seed = failure.item.seed
        found = {failure.item: failure}

        def failing(choices: list[tuple[int, ...]]) -> list[bool]:
            items = [Item(seed, choice) for choice in choices]
            found.update({one.item: one for one in self._failures(items, world)})
            return [item in found for item in items]

        steps = shrunk([step.index for step in failure.item.program().steps], failing)
        return found.get(Item(seed, steps), failure)


class Progress:
    """A line for each job."""

    def __init__(self, world: World, total: int) -> None:
        self.world, self.total = world, total
        self.began = time.monotonic()

    def __call__(self, done: int) -> None:
        rate = done / (time.monotonic() - self.began)
        print(f"{self.world}: {done} of {self.total} programs, {rate:.1f} per second", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--programs", type=int, default=300, help="how many [300]")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next ones follow it [0]")
    parser.add_argument("--replay", type=int, metavar="SEED", help="this program alone")
    parser.add_argument("--steps", type=numbers, help="only these steps of it, as in 0,3")
    parser.add_argument("--ranks", type=numbers, help="only programs of these numbers of ranks, as in 2,5")
    parser.add_argument(
        "--launcher", choices=jobs.LAUNCHERS, help="who starts the ranks [what each seed says]"
    )
    parser.add_argument("--timeout", type=float, default=60, help="of all groups, in seconds [60]")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false", help="show programs as they are")
    parser.add_argument("--list", action="store_true", help="show the programs, run none")
    parser.add_argument("--plant", choices=PLANTS, help="make an error on purpose, to see that it is found")
    options = parser.parse_args()
    last = options.seed + options.programs
    options.seeds = range(options.seed, last) if options.replay is None else [options.replay]
    if options.ranks:
        options.seeds = [seed for seed in options.seeds if world_of(seed).ranks in options.ranks]
    if options.steps and options.replay is None:
        parser.error("expected --replay with --steps")
    return options


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
