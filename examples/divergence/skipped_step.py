"""One rank finds a loss that is not finite and skips the step; the others do not.

    tpurun -n 8 examples/divergence/skipped_step.py

All steps look the same, so its next step matches the one it has skipped, and so on: what is missing shows
in the end, when it evaluates while the others are in their last step. Shows: they learn at once which rank
is in which operation at which line. Had every step looked different, the very next one would not have
matched.
"""

import math

import torch
import torch.distributed as dist

STEPS = 5


def main() -> None:
    dist.init_process_group("tpu_dist")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weights = torch.zeros(1024)
    for step in range(STEPS):
        loss = math.nan if (rank, step) == (ranks - 1, 2) else 1.0 / (1 + step)
        if not math.isfinite(loss):
            print(f"rank {rank} skips step {step}: its loss is {loss}")
            continue
        gradient = torch.full((1024,), loss)
        dist.all_reduce(gradient, dist.ReduceOp.AVG)
        weights -= 0.1 * gradient
    accuracy = torch.tensor(0.5)
    dist.all_reduce(accuracy, dist.ReduceOp.AVG)
    print(f"rank {rank} has trained {STEPS} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
