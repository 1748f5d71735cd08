"""Runs many programs in few jobs, and says which of them failed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import rank as ranked
from .generate import World
from .plan import Finding, Item, Plan, findings

TESTS = Path(__file__).parents[1]
TPURUN, TORCHRUN = (Path(sys.executable).with_name(name) for name in ("tpurun", "torchrun"))
MOST = 250
"""Programs of one job."""
SHOWN = 4


@dataclass(frozen=True)
class Failure:
    """A program that did not do what it says."""

    item: Item
    findings: list[Finding]

    def __str__(self) -> str:
        more = len(self.findings) - SHOWN
        lines = [f"  {one}" for one in self.findings[:SHOWN]] + [f"  and {more} more"] * (more > 0)
        return "\n".join([str(self.item.program()), *lines])


def run(
    items: Sequence[Item],
    world: World,
    folder: Path,
    *,
    timeout_s: float,
    plant: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Iterator[Failure]:
    """All these programs; those behind one that ended its job in another job. `progress` gets how many are
    done."""
    done = 0
    while done < len(items):
        plan = Plan(
            Path(tempfile.mkdtemp(dir=folder)), world.ranks, items[done : done + MOST], timeout_s, plant
        )
        plan.write()
        judged, failures = judge(plan, LAUNCHERS[world.launcher](plan))
        yield from failures
        done += judged
        progress(done)


def judge(plan: Plan, ending: str) -> tuple[int, list[Failure]]:
    """How many programs were run, and those that failed."""
    by_rank = [findings(plan, rank) for rank in range(plan.ranks)]
    failures = []
    for at, item in enumerate(plan.items):
        found = [one for mine in by_rank if at < len(mine) for one in mine[at]]
        missing = [rank for rank, mine in enumerate(by_rank) if at >= len(mine)]
        is_last = at + 1 == len(plan.items)
        is_over = any(one.is_over for one in found)
        if not is_over and (missing or (ending and is_last)):
            found.append(_bad_end(plan, missing[0] if missing else None, ending))
        elif is_over and missing:
            # The others say only that they waited for it.
            found.insert(0, _bad_end(plan, missing[0], ending))
        found.sort(key=lambda one: not one.is_over)
        failures += [Failure(item, found)] * bool(found)
        if found and found[0].is_over:
            return at + 1, failures
    return len(plan.items), failures


def _bad_end(plan: Plan, rank: int | None, ending: str) -> Finding:
    where = "" if rank is None else _folded(plan.stack(rank))
    return Finding(rank, "", f"came to no good end: {where or ending}", True)


def tpurun(plan: Plan) -> str:
    """Runs a plan under `tpurun`; how it ended, if not well."""
    log = plan.folder / "run"
    ending = _command(plan, TPURUN, "-n", plan.ranks, "--preload", "torch._dynamo", "--log-dir", log)
    return ending and (_folded(log / "report.txt") or ending)


def torchrun(plan: Plan) -> str:
    """Runs a plan under torchrun."""
    return _command(plan, TORCHRUN, "--standalone", "--nproc-per-node", plan.ranks)


def _command(plan: Plan, *launcher: str | int | Path) -> str:
    command = [*launcher, "-m", "differential.rank", plan.path]
    with plan.output.open("w") as file:
        job = subprocess.run(
            [str(word) for word in command], cwd=TESTS, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    return _folded(plan.output) if job.returncode else ""


def _folded(path: Path) -> str:
    return " ".join(path.read_text().split())[-1000:] if path.exists() else ""


def fork(plan: Plan) -> str:
    """Runs a plan without any launcher."""
    pids = [_start(plan, rank) for rank in range(plan.ranks)]
    endings = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return f"the ranks ended with {endings} {_folded(plan.output)}" if any(endings) else ""


def _start(plan: Plan, rank: int) -> int:
    pid = os.fork()
    if pid != 0:
        return pid
    code = 1
    try:
        os.dup2(os.open(plan.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())
        code = 0 if ranked.run(plan, rank, f"file://{plan.folder}/store") else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


LAUNCHERS = {"fork": fork, "tpurun": tpurun, "torchrun": torchrun}
