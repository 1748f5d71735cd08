"""How fast the memory is, and the least that a collective moves through it: what bench.py compares with."""

from __future__ import annotations

import time
from typing import Any

# Below, the time goes into meeting, and nothing of it into memory.
LEAST_BYTES = 1 << 20
LONG_BYTES = 64 << 20
REPETITIONS = 3
COPIES = 2
# How many of the kernels below are like a collective.
KERNELS = {"all_reduce": COPIES + 2, "reduce_scatter": COPIES + 1, "reduce": COPIES + 1}


def floor_bytes(collective: str, largest: int, ranks: int) -> int:
    """Bytes read and written at least, by all ranks: each input once, each output once.

    ``largest`` is the size of the largest buffer of a rank; all others follow from it.
    """
    match collective:
        case "all_reduce" | "all_to_all" | "send_recv":
            return 2 * ranks * largest
        case "all_gather" | "reduce_scatter" | "reduce":
            return (ranks + 1) * largest
        case "broadcast":
            return ranks * largest
        case "gather" | "scatter":
            return 2 * largest
        case _:
            return 0


class Speed:
    """Bytes per second that all ranks together read and write, on buffers of one size each.

    The fastest of the kernels that do to memory what the collective does: a copy, through the caches or past
    them; where it adds, a sum of two buffers into a third; where the sum takes the place of what was added,
    an update in place. All ranks run them at once, as the collective would; measured once for each size.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], float] = {}

    def of(self, collective: str, bytes_each: int) -> float | None:
        """For buffers of this size; None for those that measure something else. Called by all ranks."""
        if bytes_each < LEAST_BYTES:
            return None
        key = (KERNELS.get(collective, COPIES), bytes_each)
        if key not in self._known:
            self._known[key] = _measured(*key)
        return self._known[key]


def _measured(kernel_count: int, bytes_each: int) -> float:
    import torch
    import torch.distributed as dist

    from tpurun import _C

    a, b, c = (torch.ones(bytes_each // 4) for _ in range(3))
    kernels: list[tuple[int, Any]] = [
        (2, lambda: b.copy_(a)),
        (2, lambda: _C.stream_copy(b, a)),
        (3, lambda: torch.add(a, b, out=c)),
        (2, lambda: a.mul_(1.0)),
    ]
    # Long enough that it makes no difference who leaves the barrier first.
    times = max(1, LONG_BYTES // bytes_each)
    best = 0.0
    for buffers, kernel in kernels[:kernel_count]:
        kernel()
        for _ in range(REPETITIONS):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(times):
                kernel()
            # From the first that began to the last that ended, on the one clock of the host: with more ranks
            # than cores, a rank may have one for itself from its begin to its end.
            span = torch.tensor([-start, time.perf_counter()], dtype=torch.float64)
            dist.all_reduce(span, op=dist.ReduceOp.MAX)
            moved = times * buffers * bytes_each * dist.get_world_size()
            best = max(best, moved / span.sum().item())
    return best


def moved(group: Any) -> tuple[int, int]:
    """Bytes read and written for CPU tensors, and of them staged, by all ranks of a group of this backend."""
    import torch
    import torch.distributed as dist

    # A rank that helps others counts for them, so all ranks have to be done.
    dist.barrier()
    read, written, staged = group._get_backend(torch.device("cpu")).traffic
    total = torch.tensor([read + written, staged])
    dist.all_reduce(total)
    return int(total[0]), int(total[1])
