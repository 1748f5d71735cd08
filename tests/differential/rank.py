"""One rank of a job: runs the programs of a plan, and writes down what is wrong.

``rank.py PLAN`` under a launcher; `forked.py` calls `run`.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from .execute import Trouble, execute
from .plan import Plan, Report
from .plants import Plant


def run(plan: Plan, rank: int, init_method: str = "env://") -> bool:
    """Whether the rank came to the end."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "tpu_dist",
        init_method,
        timeout=timedelta(seconds=plan.timeout_s),
        rank=rank,
        world_size=plan.ranks,
    )
    plant = Plant(plan.plant) if plan.plant else None
    stacks = plan.stacks(rank).open("w")
    for position, item in enumerate(plan.items):
        plan.reach(rank, position)
        # Ends this process, whatever it hangs in.
        faulthandler.dump_traceback_later(plan.limit_s, exit=True, file=stacks)
        try:
            wrong = execute(item.program(), rank, plant)
        except Trouble as trouble:
            Report(rank, position, str(trouble.step or ""), str(trouble), True).write(plan)
            return False
        for step, what in wrong:
            Report(rank, position, str(step), what, False).write(plan)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    plan.reach(rank, len(plan.items))
    return True


if __name__ == "__main__":
    sys.exit(0 if run(Plan.read(Path(sys.argv[1])), int(os.environ["RANK"])) else 1)
