"""``tpurun -n N -m tests.performance.waiting``: how much ranks that wait slow one that computes.

Rank 0 computes the same again and again, while all others wait for it: idle in the kernel (they open a FIFO),
in a barrier of this backend, and in one of Gloo, in turn.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from . import turns

IDLE = "idle"
WIDTH = 96


def computing(runs: int) -> float:
    """The seconds that so many products of small matrices take, on one thread."""
    a = torch.eye(WIDTH)
    began = time.perf_counter()
    for _ in range(runs):
        a = a @ a
    return time.perf_counter() - began


def runs_in(seconds: float) -> float:
    """How many runs take that long, while no other rank computes."""
    computing(100)
    return seconds / computing(1000) * 1000


def met(group: dist.ProcessGroup, runs: int) -> float:
    """Rank 0 computes, the others are in a barrier of that group."""
    took = computing(runs) if dist.get_rank() == 0 else 0.0
    dist.barrier(group=group)
    return took


def idle(fifos: Path, runs: int) -> float:
    """Rank 0 computes, the others are blocked in the kernel until it opens their FIFO."""
    rank = dist.get_rank()
    if rank != 0:
        os.close(os.open(fifos / str(rank), os.O_RDONLY))
        return 0.0
    took = computing(runs)
    for other in range(1, dist.get_world_size()):
        os.close(os.open(fifos / str(other), os.O_WRONLY))
    return took


def seconds_in_turn(
    options: argparse.Namespace, groups: dict[str, dist.ProcessGroup], fifos: Path
) -> dict[str, list[float]]:
    runs = int(turns.most(runs_in(options.block_s) if dist.get_rank() == 0 else 0.0))
    seconds: dict[str, list[float]] = {name: [] for name in (IDLE, *groups)}
    for turn in range(options.turns + 1):
        for name, taken in seconds.items():
            dist.barrier()
            took = idle(fifos, runs) if name == IDLE else met(groups[name], runs)
            if turn > 0:  # the first one warms up
                taken.append(took)
    return seconds


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary directory of rank 0, which all ranks see."""
    with ExitStack() as stack:
        is_first = dist.get_rank() == 0
        folder = [stack.enter_context(tempfile.TemporaryDirectory()) if is_first else None]
        dist.broadcast_object_list(folder, src=0)
        yield Path(folder[0])


def main() -> None:
    options = turns.options(__doc__)
    groups = turns.groups()
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            for rank in range(1, dist.get_world_size()):
                os.mkfifo(folder / str(rank))
        dist.barrier()
        turns.write(seconds=seconds_in_turn(options, groups, folder))
        dist.barrier()  # nobody needs it any more
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
