"""One rank of a job: runs the programs of a plan, and writes down what is wrong."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch

# Functional collectives import this at their first call. The import takes seconds in every rank, unless it
# comes before the fork.
import torch._dynamo
import torch.distributed as dist

from .execute import execute
from .plan import Plan
from .plants import Plant


def run(plan: Plan, rank: int, init_method: str = "env://") -> bool:
    """Whether the rank came to the end."""
    torch.set_num_threads(1)
    # Open to the end of the process, which may hang as well.
    stack = plan.stack(rank).open("w")
    limit(plan, stack)
    timeout = timedelta(seconds=plan.timeout_s)
    dist.init_process_group("tpu_dist", init_method, timeout=timeout, rank=rank, world_size=plan.ranks)
    plant = Plant(plan.plant) if plan.plant else None
    with plan.log(rank).open("w") as log:
        for item in plan.items:
            limit(plan, stack)
            wrong, is_over = execute(item.program(), rank, plant)
            print(json.dumps([[step, what, is_over] for step, what in wrong]), file=log, flush=True)
            if is_over:
                return False
    dist.destroy_process_group()
    return True


def limit(plan: Plan, stack) -> None:
    """Ends this process when it takes too long, whatever it hangs in."""
    faulthandler.dump_traceback_later(plan.limit_s, exit=True, file=stack)


if __name__ == "__main__":
    sys.exit(0 if run(Plan.read(Path(sys.argv[1])), int(os.environ["RANK"])) else 1)
