"""Start method ``fork``: every test in new processes, forked from one that has imported torch and the suite.

``python -m conformance.forked PLAN`` runs a plan.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # what the first optimizer of every rank would import
import torch.distributed as dist

from .plan import FAILED, Outcome, Plan, together
from .ranked import Rank
from .suites import SUITES, reason_to_skip

# For a whole test.
LIMIT_S = 300.0


@dataclass
class Child:
    pid: int
    pipe: int


def main() -> None:
    plan = Plan.read(Path(sys.argv[1]))
    os.environ.update(plan.environment())
    torch.set_num_threads(1)
    case = SUITES[plan.suite].load()
    with plan.outcomes.open("a", buffering=1) as file:
        for test in plan.tests:
            ranks = 1 if reason_to_skip(case, test) is not None else plan.ranks
            file.write(together(test, run(plan, test, ranks)).line())


def run(plan: Plan, test: str, ranks: int) -> list[Outcome]:
    """Runs the test in forks, and returns the outcome on every rank."""
    os.makedirs(plan.folder / "stores", exist_ok=True)
    children = [start(plan, test, rank) for rank in range(ranks)]
    deadline = time.monotonic() + LIMIT_S
    return [outcome(test, child, deadline) for child in children]


def start(plan: Plan, test: str, rank: int) -> Child:
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid != 0:
        os.close(write)
        return Child(pid, read)
    try:
        store = dist.FileStore(str(plan.folder / "stores" / test), plan.ranks)
        one = Rank(plan, rank).run(test, store)
    except BaseException:
        one = Outcome(test, FAILED, traceback.format_exc())
    try:
        with os.fdopen(write, "w") as pipe:
            pipe.write(one.line())
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def outcome(test: str, child: Child, deadline: float) -> Outcome:
    text = b""
    with os.fdopen(child.pipe, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (piece := pipe.read(1 << 16)):
                break
            text += piece
    try:
        answer = Outcome.read(text)
    except ValueError:
        answer = None
        os.kill(child.pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    if answer is None:
        text = f"expected an outcome within {LIMIT_S:g} s, the process ended with {status}"
        return Outcome(test, FAILED, text)
    return answer


if __name__ == "__main__":
    main()
