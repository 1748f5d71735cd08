"""A rank is killed in the middle of a step; the job goes on from the last checkpoint, one rank smaller.

    tpurun --elastic 4:8 examples/divergence/killed_rank_restart.py checkpoint.pt

Shows: the others learn within milliseconds who died, and the launcher starts them again, numbered anew. The
program only saves what it wants to keep, and reads it when it starts.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = 6


def load(path: Path) -> tuple[int, torch.Tensor]:
    """The step to go on with, and the weights."""
    if not path.exists():
        return 0, torch.zeros(1024)
    saved = torch.load(path)
    return saved["step"], saved["weights"]


def save(path: Path, step: int, weights: torch.Tensor) -> None:
    part = path.with_suffix(".part")
    torch.save({"step": step, "weights": weights}, part)
    part.replace(path)


def main() -> None:
    path = Path(sys.argv[1])
    dist.init_process_group("tpu_dist")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    is_first_world = os.environ["TPURUN_RESTART"] == "0"
    first, weights = load(path)
    dist.barrier()
    if rank == 0:
        print(f"{ranks} ranks begin with step {first}")
    for step in range(first, STEPS):
        gradient = torch.ones(1024)
        if is_first_world and rank == ranks - 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(gradient, dist.ReduceOp.AVG)
        weights -= 0.1 * gradient
        if rank == 0:
            save(path, step + 1, weights)
    if rank == 0:
        print(f"trained {STEPS} steps, weights {weights[0].item():.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
