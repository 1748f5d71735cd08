"""Runs programs as jobs, under any launcher, and collects what every rank found."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jobs import TPURUN, Finished, Job

from .case import FAMILIES, Program, programs_of
from .rank import Outcome, Plan

TESTS = Path(__file__).parents[1]
LIMIT_S = 600
LAUNCHERS = ("tpurun", "torchrun", "spawn")


@dataclass(frozen=True)
class Verdict:
    """How one program went on all its ranks."""

    program: Program
    problems: list[str]
    """What each rank has to complain of, empty when all is well."""
    seconds: float


def all_programs(families: Iterable[str] = FAMILIES, device: str = "cpu") -> list[Program]:
    """Those that can run there."""
    found = [program for family in families for program in programs_of(family)]
    return [program for program in found if device in program.devices]


def run(
    programs: list[Program],
    *,
    launcher: str = "tpurun",
    backend: str = "tpu_dist",
    device: str = "cpu",
    each: int | None = None,
) -> list[Verdict]:
    """One job, with as many ranks as the largest program uses, or `each` of them."""
    with tempfile.TemporaryDirectory(prefix="tpurun-programs-") as name:
        folder = Path(name)
        (folder / "shared").mkdir()
        names = [program.name for program in programs]
        if each is not None:
            programs = [program.at(each) for program in programs]
        ranks = max(program.ranks for program in programs)
        plan = Plan(backend, device, names, str(folder / "shared"), ranks, each)
        job = Job(
            folder, command(plan, launcher), env=ENVIRONMENT | {"TPURUN_DEVICE": str(int(device == "tpu"))}
        )
        try:
            # torchrun's processes outlive it for a moment.
            done = job.wait(LIMIT_S, linger_s=10)
        finally:
            job.end()
        return verdicts(programs, plan, done)


ENVIRONMENT = {
    "PYTHONPATH": str(TESTS),
    "OMP_NUM_THREADS": "1",
    # Compiled where it is needed: no processes beside the ranks.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


def command(plan: Plan, launcher: str) -> list[str | Path]:
    path, count = plan.write(), str(plan.ranks)
    if launcher == "tpurun":
        return [TPURUN, "-n", count, "--preload", "programs.preloaded", "-m", "programs.rank", path]
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
        return [*torchrun, "-m", "programs.rank", path]
    assert launcher == "spawn", f"expected one of {', '.join(LAUNCHERS)}, given {launcher}"
    return [sys.executable, "-m", "programs.spawned", path]


def verdicts(programs: list[Program], plan: Plan, done: Finished) -> list[Verdict]:
    outcomes = [
        Outcome(**json.loads(line))
        for path in Path(plan.folder).glob("rank-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    by_program: dict[str, list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.rank):
        by_program.setdefault(outcome.program, []).append(outcome)
    return [verdict(program, by_program.get(program.name, []), plan.ranks, done) for program in programs]


def verdict(program: Program, outcomes: list[Outcome], ranks: int, done: Finished) -> Verdict:
    problems = [f"rank {one.rank}: {one.problem}" for one in outcomes if one.problem]
    if missing := sorted({*range(ranks)} - {one.rank for one in outcomes}):
        problems.append(f"ranks {missing} did not come to its end: exit code {done.code}\n{done.err[-4000:]}")
    return Verdict(program, problems, max((one.seconds for one in outcomes), default=0.0))
