"""Distributed checkpoints: every rank writes its shards, and any number of ranks reads them back.

    tpurun -n 8 examples/checkpoint.py /tmp/checkpoint
    tpurun -n 4 examples/checkpoint.py /tmp/checkpoint    # goes on where 8 ranks stopped

Change DEVICE to run it anywhere else.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DEVICE = "tpu"
STEPS, BATCH, WIDTH = 20, 16, 64


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: tpurun -n 8 examples/checkpoint.py FOLDER")
    folder = Path(sys.argv[1])
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    teacher = nn.Linear(WIDTH, WIDTH).to(DEVICE)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to(DEVICE)
    fully_shard(model, mesh=init_device_mesh(DEVICE, (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    progress = {"step": torch.zeros((), dtype=torch.int64)}
    if (folder / ".metadata").exists():
        # The state is there before it is read: each rank reads into its own shards.
        parameters, moments = get_state_dict(model, optimizer)
        dcp.load({"model": parameters, "optimizer": moments, "progress": progress}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    begin = int(progress["step"])
    torch.manual_seed(1 + begin + rank)
    for step in range(begin, begin + STEPS):
        x = torch.randn(BATCH, WIDTH, device=DEVICE)
        with torch.no_grad():
            wanted = teacher(x)
        loss = nn.functional.mse_loss(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (begin, begin + STEPS - 1):
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:3}  loss {mean.item() / ranks:.4f}", flush=True)
    progress["step"] += STEPS
    parameters, moments = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": moments, "progress": progress}, checkpoint_id=folder)
    if rank == 0:
        print(f"saved step {int(progress['step'])} in {folder} from {ranks} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
