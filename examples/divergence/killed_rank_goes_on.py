"""A rank is killed in the middle of a step; the others repeat the step without it, in the same processes.

    tpurun --elastic 4:8 examples/divergence/killed_rank_goes_on.py

Shows: the others learn within milliseconds who died, and are a smaller world a moment later: nothing is
started or loaded again. A rank that dies in an operation may let some complete it and others not, so all go
back to the last step that everybody has done.
"""

import os
import signal
import time

import torch
import torch.distributed as dist

import tpurun

STEPS = 6


def train_step(step: int, weights: torch.Tensor) -> torch.Tensor:
    is_doomed = dist.get_world_size() == int(os.environ["LOCAL_WORLD_SIZE"])
    if is_doomed and step == 3 and dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gradient = torch.ones(1024)
    dist.all_reduce(gradient, dist.ReduceOp.AVG)
    return weights - 0.1 * gradient


def last_step_of_all(step: int) -> int:
    least = torch.tensor(step)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


def main() -> None:
    dist.init_process_group("tpu_dist")
    done = {0: torch.zeros(1024)}
    step = 0
    while step < STEPS:
        try:
            done[step + 1] = train_step(step, done[step])
        except tpurun.RankLostError as error:
            began = time.perf_counter()
            rank = tpurun.reform()
            step = last_step_of_all(step)
            if rank == 0:
                took = (time.perf_counter() - began) * 1e3
                left = dist.get_world_size()
                print(f"lost {error.ranks}: {left} ranks repeat step {step} after {took:.0f} ms")
        else:
            step += 1
            done.pop(step - 2, None)
    if dist.get_rank() == 0:
        print(f"trained {STEPS} steps, weights {done[STEPS][0].item():.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
