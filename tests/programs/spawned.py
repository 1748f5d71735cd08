"""Starts the ranks of a plan by ``torch.multiprocessing.spawn``, without any launcher.

``python -m programs.spawned PLAN``
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch.multiprocessing as mp

from .rank import Plan, run


def spawned(rank: int, plan: Plan) -> None:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    run(plan)


def main() -> None:
    plan = Plan.read(Path(sys.argv[1]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(plan.ranks)}
    mp.spawn(spawned, (plan,), nprocs=plan.ranks)


if __name__ == "__main__":
    main()
