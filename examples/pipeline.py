"""Pipeline parallel: each rank has some layers, and microbatches flow through them by 1F1B.

    tpurun -n 8 examples/pipeline.py

Change DEVICE to run it anywhere else.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

DEVICE = "tpu"
STEPS, ROWS, WIDTH = 30, 8, 32


def main() -> None:
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    microbatches = max(8, ranks)  # 1F1B wants one for each stage
    torch.manual_seed(rank)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(DEVICE)
    stage = PipelineStage(layers, rank, ranks, torch.device(DEVICE))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=3e-3)
    torch.manual_seed(0)
    x = torch.randn(microbatches * ROWS, WIDTH, device=DEVICE)
    wanted = torch.roll(x, 1, dims=1)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        is_first, is_last = rank == 0, rank == ranks - 1
        # The first stage takes what goes in, the last one knows what is to come out.
        schedule.step(
            *([x] if is_first else []),
            **({"target": wanted, "losses": losses} if is_last else {}),
        )
        optimizer.step()
        if is_last and (step % 10 == 0 or step == STEPS - 1):
            print(f"step {step:3}  loss {torch.stack(losses).mean().item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
