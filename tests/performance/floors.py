"""``tpurun -n N -m tests.performance.floors``: the least that so many processes take, whatever joins them.

A call of few bytes: all ranks give up their CPU once, since with more of them than cores each has to have its
turn, and do nothing else. A large sum of ordinary tensors: all ranks copy theirs
into a window that stays in the caches, add up their share of what would be there, and copy the result out,
and never wait. In turn with both backends.
"""

from __future__ import annotations

import os
from functools import partial

import torch
import torch.distributed as dist

from . import turns

SMALL_BYTES = 8
LARGE_BYTES = 16 << 20
LEAST = "least"
# As the engine has them, in float32.
WINDOWS_BYTES = 2 << 20
MOST_BYTES = 512 << 10
LEAST_BYTES = 64 << 10


def copies(tensor: torch.Tensor) -> turns.Work:
    """In and out of a window, and this rank's share of the sum, which reads as much and writes a share."""
    ranks = dist.get_world_size()
    count = min(max(WINDOWS_BYTES // ranks, LEAST_BYTES), MOST_BYTES) // tensor.element_size()
    window = torch.zeros(count)
    operands, total = window.view(ranks, -1), torch.zeros(count // ranks)
    stretches = tensor.split(count)

    def run() -> None:
        for stretch in stretches:
            window.copy_(stretch)
            torch.sum(operands, 0, out=total)
            stretch.copy_(window)

    return run


def main() -> None:
    options = turns.options(__doc__)
    groups = turns.groups()
    for bytes_ in (SMALL_BYTES, LARGE_BYTES):
        tensor = torch.zeros(bytes_ // 4)
        least = os.sched_yield if bytes_ == SMALL_BYTES else copies(tensor)
        works = {LEAST: least}
        works |= {name: partial(dist.all_reduce, tensor, group=group) for name, group in groups.items()}
        turns.write(bytes=bytes_, seconds=turns.in_turn(works, options.turns, options.block_s))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
