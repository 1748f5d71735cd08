"""One rank of a job that somebody else has started: all tests, in the same processes, in lock step.

``python -m conformance.lockstep PLAN`` under ``torchrun`` or ``tpurun``; with ``--spawn`` it starts the ranks
itself with ``torch.multiprocessing.spawn``. Every test has a process group of its own, so the ranks begin
and destroy as many of them as there are tests. When a test ends with a rank that does not come back, the
job ends, and whoever started it goes on after that test.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from .meeting import LIMIT_S
from .plan import SKIPPED, Outcome, Plan, together
from .ranked import Rank

# For a whole test, until the last rank is back from it.
BACK_S = LIMIT_S + 60


def main() -> None:
    plan = Plan.read(Path(sys.argv[1]))
    if "--spawn" in sys.argv[2:]:
        torch.multiprocessing.spawn(spawned, (plan,), plan.ranks)
    else:
        run(plan, int(os.environ["RANK"]))


def spawned(rank: int, plan: Plan) -> None:
    os.environ["RANK"] = str(rank)
    run(plan, rank)


def run(plan: Plan, rank: int) -> None:
    store, _, _ = next(dist.rendezvous("env://", rank, plan.ranks, timeout=timedelta(seconds=BACK_S)))
    ranked = Rank(plan, rank)
    for index, test in enumerate(plan.tests):
        own = dist.PrefixStore(f"conformance {index}", store)
        outcome = report(plan, rank, ranked.run(test, own), own)
        if outcome.ends or (ranked.suite.is_fresh and outcome.kind != SKIPPED):
            break
    # Rank 0 may host the store.
    store.set(f"left {rank}", "")
    if rank == 0:
        store.wait([f"left {other}" for other in range(plan.ranks)])


def report(plan: Plan, rank: int, outcome: Outcome, store: dist.Store) -> Outcome:
    """Tells rank 0 the outcome, which writes down that of all ranks; returns it when it has."""
    store.set_timeout(timedelta(seconds=BACK_S))
    store.set(f"outcome {rank}", outcome.line())
    if rank == 0:
        ranks = [Outcome.read(store.get(f"outcome {other}")) for other in range(plan.ranks)]
        line = together(outcome.test, ranks).line()
        with plan.outcomes.open("a") as file:
            file.write(line)
        store.set("written", line)
    return Outcome.read(store.get("written"))


if __name__ == "__main__":
    main()
