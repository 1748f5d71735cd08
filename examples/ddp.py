"""DistributedDataParallel: every rank has the whole model and its own part of each batch.

    tpurun -n 8 examples/ddp.py

Change DEVICE to run it anywhere else: "cpu", or "cuda" under torchrun.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DEVICE = "tpu"
STEPS, BATCH, WIDTH = 60, 32, 64


def main() -> None:
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).to(DEVICE)
    student = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 1)).to(DEVICE)
    model = DistributedDataParallel(student)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + rank)  # other data on every rank
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH, device=DEVICE)
        with torch.no_grad():
            wanted = teacher(x)
        loss = nn.functional.mse_loss(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()  # the gradients are the means over all ranks
        optimizer.step()
        if step % 20 == 0 or step == STEPS - 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:3}  loss {mean.item() / ranks:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
