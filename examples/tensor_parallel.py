"""Tensor and sequence parallel: each layer's matrices are split over ranks, and data over the others.

    tpurun -n 8 examples/tensor_parallel.py

With an even number of ranks, half of them share each batch's layers. Change DEVICE to run it anywhere else.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

DEVICE = "tpu"
STEPS, BATCH, LENGTH, WIDTH = 30, 4, 16, 64


class Block(nn.Module):
    """The feed-forward half of a transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = 2 if ranks > 2 and ranks % 2 == 0 else 1
    mesh = init_device_mesh(DEVICE, (data, ranks // data), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    teacher = nn.Linear(WIDTH, WIDTH).to(DEVICE)
    model = nn.Sequential(Block(), Block()).to(DEVICE)
    for block in model:
        # Between the blocks each rank has a part of the sequence; the matrices see all of it.
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh["tensor"], plan)
    outer = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=False)
    parallelize_module(model, mesh["tensor"], outer)
    if data > 1:
        fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    torch.manual_seed(1 + mesh["data"].get_local_rank())  # the ranks of one tensor mesh have one batch
    part = mesh["tensor"].get_local_rank()
    for step in range(STEPS):
        x = torch.randn(BATCH, LENGTH, WIDTH, device=DEVICE)
        with torch.no_grad():
            wanted = teacher(x)
        pieces = x.chunk(mesh["tensor"].size(), dim=1)
        output = model(pieces[part]).full_tensor()
        loss = nn.functional.mse_loss(output, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 10 == 0 or step == STEPS - 1):
            print(f"step {step:3}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
