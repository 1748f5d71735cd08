"""DistributedDataParallel under Ray Train, on the workers of a Ray cluster.

    python examples/cluster/ray_train.py --workers 4

It starts Ray on this machine, unless RAY_ADDRESS says where a cluster is, whose nodes have tpurun installed.
Ray starts the workers and says who they are; nothing here is special to tpurun but the backend's name.
"""

import argparse
import os

import ray
import torch
import torch.distributed as dist
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

BATCH, WIDTH = 32, 64


def train_loop(config: dict) -> list[str]:
    """Every worker runs this function, in a process group that Ray has made."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    student = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 1))
    model = prepare_model(student)  # DistributedDataParallel
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + rank)  # other data on every rank
    lines = []
    for step in range(config["steps"]):
        x = torch.randn(BATCH, WIDTH)
        with torch.no_grad():
            wanted = teacher(x)
        loss = nn.functional.mse_loss(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()  # the gradients are the means over all ranks
        optimizer.step()
        if step % 20 == 0 or step == config["steps"] - 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            train.report({"step": step, "loss": mean.item() / ranks})
            lines.append(f"step {step:3}  loss {mean.item() / ranks:.4f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4, metavar="N")
    parser.add_argument("--steps", type=int, default=60, metavar="N")
    options = parser.parse_args()
    if "RAY_ADDRESS" not in os.environ:
        ray.init("local", num_cpus=options.workers)  # however many cores there are
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"steps": options.steps},
        scaling_config=train.ScalingConfig(num_workers=options.workers),
        torch_config=TorchConfig(backend="tpu_dist"),
    )
    print(*trainer.fit().return_value, sep="\n")  # what rank 0 has returned


if __name__ == "__main__":
    main()
