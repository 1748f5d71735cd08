"""The last rank reduces with MAX what the others reduce with SUM.

    tpurun -n 8 examples/divergence/sum_against_max.py
    python -m torch.distributed.run --nproc-per-node 8 examples/divergence/sum_against_max.py --backend gloo

Shows: all ranks raise one CollectiveMismatchError that says who posted what at which line, and no tensor has
changed. On Gloo every rank goes on with a wrong number.
"""

import sys

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo" if "gloo" in sys.argv else "tpu_dist")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gradient = torch.full((1024,), float(rank))
    if rank == ranks - 1:
        dist.all_reduce(gradient, dist.ReduceOp.MAX)
    else:
        dist.all_reduce(gradient, dist.ReduceOp.SUM)
    print(f"rank {rank} goes on with {gradient[0].item():g}, expected {ranks * (ranks - 1) / 2:g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
