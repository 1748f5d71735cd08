"""How the ranks of one job measure several things in turn."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

BACKENDS = ("tpu_dist", "gloo")
Work = Callable[[], object]


def options(description: str) -> argparse.Namespace:
    """Parses the options that every program of ranks takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--block-s", type=float, default=1.0, help="seconds of a block")
    return parser.parse_args()


def groups() -> dict[str, dist.ProcessGroup]:
    """All ranks, once for each backend. Everything is computed by one thread of each rank."""
    torch.set_num_threads(1)
    dist.init_process_group(BACKENDS[0])
    return {backend: dist.new_group(backend=backend) for backend in BACKENDS}


def in_turn(works: Mapping[str, Work], turns: int, block_s: float) -> dict[str, list[float]]:
    """The seconds of one run of each on the slowest rank, turn by turn. All ranks call this together."""
    counts: dict[str, int] = {}
    for name, work in works.items():
        block(work, 1)  # sets up what only the first run does
        counts[name] = max(1, int(block_s / block(work, 1)))
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(turns):
        for name, work in works.items():
            seconds[name].append(block(work, counts[name]))
    return seconds


def block(work: Work, count: int) -> float:
    """The seconds of one of so many runs, on the slowest rank."""
    gc.collect()
    gc.disable()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        work()
    took = (time.perf_counter() - began) / count
    gc.enable()
    return most(took)


def most(value: float) -> float:
    """The greatest of what the ranks give."""
    greatest = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(greatest, dist.ReduceOp.MAX)
    return greatest.item()


def write(**row: object) -> None:
    """One line of JSON, of rank 0."""
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps({"ranks": dist.get_world_size(), **row}) + "\n")
        sys.stdout.flush()
