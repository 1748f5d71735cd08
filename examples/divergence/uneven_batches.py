"""The last rank has one batch less than the others.

    tpurun -n 8 examples/divergence/uneven_batches.py
    tpurun -n 8 examples/divergence/uneven_batches.py --join

It leaves the loop, and the program, while the others wait for its gradients. Shows: all of them learn at
once that it has finished; with ``--join`` torch's Join has it take part until all are done.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("tpu_dist")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = 3 if rank == ranks - 1 else 4
    with Join([model]) if "--join" in sys.argv else contextlib.nullcontext():
        for _ in range(batches):
            batch = torch.randn(8, 16)
            loss = torch.nn.functional.mse_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == 0:
        print(f"trained {batches} batches")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
