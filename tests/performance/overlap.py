"""``tpurun -n N -m tests.performance.overlap``: communication behind computation.

An asynchronous all-reduce of 16 MiB, a computation that takes about as long, and then the wait; in turn with
each of the two alone.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from . import turns

BYTES = 16 << 20
WIDTH = 96
PROBED = 100


def compute(runs: int) -> None:
    a = torch.eye(WIDTH)
    for _ in range(runs):
        a = a @ a


def communicate(buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(buffer, group=group, async_op=True).wait()


def together(buffer: torch.Tensor, group: dist.ProcessGroup, runs: int) -> None:
    work = dist.all_reduce(buffer, group=group, async_op=True)
    compute(runs)
    work.wait()


def as_long_as(work: turns.Work) -> int:
    """How many runs of the computation take as long as that."""
    some = partial(compute, PROBED)
    for one in (work, some):
        turns.block(one, 3)  # warms up
    seconds, probe = turns.block(work, 10), turns.block(some, 10)
    return max(1, int(seconds / probe * PROBED))


def main() -> None:
    options = turns.options(__doc__)
    groups = turns.groups()
    buffer = torch.zeros(BYTES // 4)
    for backend, group in groups.items():
        alone = partial(communicate, buffer, group)
        runs = as_long_as(alone)
        works = {
            "communication": alone,
            "computation": partial(compute, runs),
            "together": partial(together, buffer, group, runs),
        }
        seconds = turns.in_turn(works, options.turns, options.block_s)
        turns.write(backend=backend, bytes=BYTES, seconds=seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
