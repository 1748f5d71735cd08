"""Rank 0 logs and evaluates in the middle of a step, while the others wait for it: that is no fault.

    tpurun -n 8 examples/divergence/evaluate_on_rank_0.py

Groups that rank 0 is not in go on meanwhile, and the group it is in waits: being slow is never a failure.
Shows: the job ends well, and says how long the others waited.
"""

import time

import torch
import torch.distributed as dist

EVALUATION_S = 2.0


def evaluate(model: torch.nn.Module) -> float:
    """Computes on this rank alone."""
    end = time.monotonic() + EVALUATION_S
    losses = []
    while time.monotonic() < end:
        batch = torch.randn(64, 16)
        losses.append(torch.nn.functional.mse_loss(model(batch), batch).item())
    return sum(losses) / len(losses)


def main() -> None:
    dist.init_process_group("tpu_dist")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    trainers = dist.new_group(list(range(1, ranks)))
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    for step in range(4):
        loss = torch.nn.functional.mse_loss(model(torch.ones(8, 16) * rank), torch.ones(8, 16))
        loss.backward()
        began = time.monotonic()
        if rank == 0 and step == 2:
            print(f"step {step}: evaluation loss {evaluate(model):.3f}")
        elif rank > 0:
            dist.barrier(trainers)
        in_trainers = time.monotonic() - began
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
            parameter.data.sub_(0.01 * parameter.grad)
            parameter.grad = None
        if rank == 1 and step == 2:
            waited = time.monotonic() - began
            print(f"step {step}: rank 1 spent {in_trainers:.1f} s in its other group, {waited:.1f} s in all")
    if rank == 0:
        print("trained 4 steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
