"""Runs plans without any launcher: one process imports torch once and forks the ranks of each.

It reads the path of a plan from each line of its input, and answers with a line when all ranks have ended.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch

from .plan import Plan
from .rank import run


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        plan = Plan.read(Path(line.strip()))
        pids = [start(plan, rank) for rank in range(plan.ranks)]
        for pid in pids:
            os.waitpid(pid, 0)
        print("ended", flush=True)


def start(plan: Plan, rank: int) -> int:
    pid = os.fork()
    if pid != 0:
        return pid
    code = 1
    try:
        code = 0 if run(plan, rank, f"file://{plan.folder}/store") else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
