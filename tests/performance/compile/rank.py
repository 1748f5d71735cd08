"""``tpurun -n 1 -m tests.performance.compile.rank``: what one process measures in turn, as JSON."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from ..job import Row
from .call import measured as measured_call
from .figures import FIGURES
from .options import Options, parse
from .ways import WAYS, NotThere, Runner, optimizer_of, runner

CHECKED_STEPS = 3
"""Steps whose losses are compared between the ways of a work."""


def is_rank() -> bool:
    """Whether a launcher started this process."""
    return "RANK" in os.environ


def measured(options: Options) -> Iterator[Row]:
    """The rows of the parts that need only this process."""
    torch.set_num_threads(1)
    if "steps" in options.parts:
        yield {"optimizers": {device: optimizer_of(device) for device in ("cpu", "tpu")}}
        for work in options.works:
            if ways := ways_of(work, options.ways):
                yield measured_work(work, ways, options)
    if "call" in options.parts:
        yield measured_call(options)


def ways_of(work: str, asked: Sequence[str]) -> tuple[str, ...]:
    """Those ways that a figure compares on this work."""
    needed = {way for figure in FIGURES if work in figure.asked for way in (figure.faster, figure.slower)}
    return tuple(way for way in WAYS if way in needed and way in asked)


def measured_work(work: str, ways: Sequence[str], options: Options) -> Row:
    """The seconds of a step in each way, round by round, and the losses of the first steps."""
    torch.compiler.reset()
    runners: dict[str, Runner] = {}
    missing: dict[str, str] = {}
    for way in ways:
        try:
            runners[way] = runner(work, way, options.backend, CHECKED_STEPS)
        except NotThere as reason:
            missing[way] = str(reason)
    blocks = {way: one.block for way, one in runners.items()}
    losses = {way: one.losses for way, one in runners.items()}
    return {
        "work": work,
        "seconds": in_turn(blocks, options.rounds, options.seconds),
        "losses": losses,
        "missing": missing,
    }


def in_turn(blocks: dict[str, Callable[[int], None]], rounds: int, seconds: float) -> dict[str, list[float]]:
    """The seconds of one step of each, round by round. All have a block in each round."""
    counts = {}
    for name, block in blocks.items():
        timed(block, 2)  # what only the first steps set up
        counts[name] = max(1, int(seconds / timed(block, 2)))
    taken: dict[str, list[float]] = {name: [] for name in blocks}
    for _ in range(rounds):
        for name, block in blocks.items():
            taken[name].append(timed(block, counts[name]))
    return taken


def timed(block: Callable[[int], None], count: int) -> float:
    """The seconds of one of so many steps."""
    gc.collect()
    gc.disable()
    began = time.perf_counter()
    block(count)
    took = (time.perf_counter() - began) / count
    gc.enable()
    return took


def main() -> None:
    for row in measured(parse(sys.argv[1:])):
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
