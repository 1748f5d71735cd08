"""Runs plans without any launcher: one process imports torch and forks the ranks of each.

``forked.py PLAN..`` runs them in turn. It is how other backends are put to the same faults: no
launcher helps them, and none stops their ranks.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from .cells import Cell
from .plan import Plan

TESTS = Path(__file__).parents[1]
LIMIT_S = 60.0
TOGETHER = 4


def run(
    cells: Iterable[Cell], folder: Path, backend: str, timeout_s: Callable[[Cell], float]
) -> Iterator[Plan]:
    """One job for each cell; yields each when it has ended."""
    plans = []
    for index, cell in enumerate(cells):
        plans.append(Plan.together(folder / str(index), backend, [cell], timeout_s(cell)))
        plans[-1].write()
    with ThreadPoolExecutor(TOGETHER) as pool:
        # One interpreter for several plans: importing torch is most of what a small job costs.
        shares = [plans[start::TOGETHER] for start in range(min(TOGETHER, len(plans)))]
        for done in as_completed([pool.submit(run_share, share) for share in shares]):
            yield from done.result()


def run_share(plans: list[Plan]) -> list[Plan]:
    subprocess.run(
        [sys.executable, "-m", "fault_matrix.forked", *map(str, (plan.path for plan in plans))],
        cwd=TESTS,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(plans[0].folder / "stderr").open("w"),
        check=True,
    )
    return plans


def run_plan(plan: Plan) -> None:
    """Forks the ranks and waits for the innocent ones, not for ever, then for the others unless they may be
    stopped."""
    pids = [start(plan, rank) for rank in range(plan.world)]
    guilty = {pids[rank] for rank in plan.guilty_ranks()}
    deadline = time.monotonic() + LIMIT_S
    for pid in sorted(pids, key=guilty.__contains__):
        await_end(pid, 0 if plan.is_alone and pid in guilty else deadline - time.monotonic())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def await_end(pid: int, limit_s: float) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        select.select([descriptor], [], [], max(0.0, limit_s))
    finally:
        os.close(descriptor)


def start(plan: Plan, rank: int) -> int:
    pid = os.fork()
    if pid != 0:
        return pid
    try:
        from .rank import run

        run(plan, rank, f"file://{plan.folder}/store")
    except SystemExit:
        os._exit(0)
    except BaseException as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def main() -> None:
    import torch

    torch.set_num_threads(1)
    for path in sys.argv[1:]:
        run_plan(Plan.read(Path(path)))


if __name__ == "__main__":
    main()
