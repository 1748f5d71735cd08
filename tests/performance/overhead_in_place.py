"""``tpurun -n 8 --device tpu tests/performance/overhead_in_place.py``: collectives of tensors on device tpu
beside those of CPU tensors, in turn in one run. The former are used where they are, the latter are staged.

Every turn has a block of each, one operation after the other. Rank 0 writes one line of JSON: for each size
the seconds of one operation, by device and turn.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

SIZES = (64 << 10, 1 << 20, 16 << 20)
TURNS = 9
BLOCK_S = 0.3


def block(tensor: torch.Tensor, count: int) -> float:
    """Seconds of one of so many."""
    dist.barrier(device_ids=[0])
    began = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(tensor)
    torch.tpu.synchronize()
    return (time.perf_counter() - began) / count


def timed(size: int) -> dict[str, list[float]]:
    tensors = {device: torch.zeros(size // 4, device=device) for device in ("cpu", "tpu")}
    slowest = torch.tensor([block(tensor, 5) for tensor in tensors.values()], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    count = max(5, int(BLOCK_S / slowest.max().item()))
    seconds: dict[str, list[float]] = {device: [] for device in tensors}
    for _ in range(TURNS):
        for device, tensor in tensors.items():
            seconds[device].append(block(tensor, count))
    return seconds


def main() -> None:
    dist.init_process_group("cpu:tpu_dist,tpu:tpu_dist")
    found = {size: timed(size) for size in SIZES}
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps({"ranks": dist.get_world_size(), "seconds": found}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
