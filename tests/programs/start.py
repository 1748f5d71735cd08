"""Runs programs as jobs, under any launcher, and collects what every rank found."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tools import nodes
from tools.compiling import BACKEND, DEVICE
from tools.jobs import TPURUN, Finished, Job

from .case import FAMILIES, Program, programs_of
from .rank import Outcome, Plan

TESTS = Path(__file__).parents[1]
LIMIT_S = 600
HOSTS = 4
ENVIRONMENT = {
    "PYTHONPATH": str(TESTS),
    "OMP_NUM_THREADS": "1",
    # Compiled where it is needed: no processes beside the ranks.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
# The commands that are started, each with its environment beside ours.
Commands = Sequence[tuple[Sequence[str | Path], Mapping[str, str]]]


@dataclass(frozen=True)
class Launcher:
    """One of the ways to start the ranks of a plan."""

    commands: Callable[[Plan, Path, ExitStack], Commands]
    """Given a plan and where it is written; the stack is closed when all has ended."""
    hosts: int = 1
    """Of several, every program has them all: it runs on as many ranks as it can, in a job of no others."""


@dataclass(frozen=True)
class Verdict:
    """How one program went on all its ranks."""

    program: Program
    problems: list[str]
    """What each rank has to complain of, empty when all is well."""
    seconds: float
    digests: tuple[str, ...] = ()
    """Of what each rank has compared."""
    graphs: int = 0
    """How many were compiled, on all ranks."""


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
    way: str = "strict",
    compiler: str = BACKEND,
) -> list[Verdict]:
    """Each on its own number of ranks, or on `each`: one job with as many as the largest has, or on several
    hosts one for each number. Raises NotAllowed where there can be no network namespaces and must be."""
    chosen = LAUNCHERS[launcher]
    if each is None and chosen.hosts > 1:
        sizes = sorted({max(program.sizes) for program in programs})
        same_size = [[one for one in programs if max(one.sizes) == size] for size in sizes]
        jobs = [
            run_job(some, chosen, Plan(backend, device, [], "", 0, each, way, compiler))
            for some, each in zip(same_size, sizes, strict=True)
        ]
        return [verdict for job in jobs for verdict in job]
    return run_job(programs, chosen, Plan(backend, device, [], "", 0, each, way, compiler))


def run_beside_strict(programs: list[Program], way: str, **options: str) -> list[Verdict]:
    """Those of a way, on device tpu, where other results than Strict's are a problem, too."""
    strict = run(programs, device=DEVICE, **options)
    found = run(programs, device=DEVICE, way=way, **options)
    for one, other in zip(found, strict, strict=True):
        pairs = enumerate(zip(one.digests, other.digests, strict=False))
        differ = [rank for rank, (ours, wanted) in pairs if ours != wanted]
        one.problems.extend([f"ranks {differ}: other bits than in Strict"] if differ else [])
        one.problems.extend(f"in Strict: {problem}" for problem in other.problems)
    return found


def run_job(programs: list[Program], launcher: Launcher, what: Plan) -> list[Verdict]:
    """`what` says how they run; which, where and on how many ranks is added."""
    with tempfile.TemporaryDirectory(prefix="tpurun-programs-") as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "shared").mkdir()
        names = [program.name for program in programs]
        if what.each is not None:
            programs = [program.at(what.each) for program in programs]
        ranks = max(program.ranks for program in programs)
        plan = replace(what, programs=names, folder=str(folder / "shared"), ranks=ranks)
        ours = ENVIRONMENT | {"TPURUN_DEVICE": str(int(plan.device != "cpu"))}
        jobs = []
        for number, (command, env) in enumerate(launcher.commands(plan, plan.write(), stack)):
            (folder / str(number)).mkdir()
            jobs.append(Job(folder / str(number), command, env=ours | dict(env)))
            stack.callback(jobs[-1].end)
        # torchrun's processes outlive it for a moment.
        return verdicts(programs, plan, [job.wait(LIMIT_S, linger_s=10) for job in jobs])


PRELOADED = ["--preload", "programs.preloaded", "-m", "programs.rank"]


def tpurun(plan: Plan, path: Path, _: ExitStack) -> Commands:
    return [([TPURUN, "-n", str(plan.ranks), *PRELOADED, path], {})]


def torchrun(plan: Plan, path: Path, _: ExitStack) -> Commands:
    options = ["--standalone", "--nproc-per-node", str(plan.ranks), "-m", "programs.rank"]
    return [([sys.executable, "-m", "torch.distributed.run", *options, path], {})]


def spawn(plan: Plan, path: Path, _: ExitStack) -> Commands:
    return [([sys.executable, "-m", "programs.spawned", path], {})]


def on_pretended_hosts(plan: Plan, path: Path, _: ExitStack) -> Commands:
    return [([TPURUN, "--hosts", str(hosts_of(plan)), "-n", str(plan.ranks), *PRELOADED, path], {})]


def on_nodes(plan: Plan, path: Path, stack: ExitStack) -> Commands:
    """A tpurun in each of some network namespaces."""
    made = stack.enter_context(nodes.plugged(hosts_of(plan)))
    return nodes.commands(made, plan.ranks // len(made), *PRELOADED, path)


def hosts_of(plan: Plan) -> int:
    """All of them, where there is a rank for each."""
    return min(HOSTS, plan.ranks)


LAUNCHERS = {
    "tpurun": Launcher(tpurun),
    "torchrun": Launcher(torchrun),
    "spawn": Launcher(spawn),
    "hosts": Launcher(on_pretended_hosts, HOSTS),
    "nodes": Launcher(on_nodes, HOSTS),
}


def verdicts(programs: list[Program], plan: Plan, done: list[Finished]) -> list[Verdict]:
    outcomes = [
        Outcome(**json.loads(line))
        for path in Path(plan.folder).glob("rank-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    by_program: dict[str, list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.rank):
        by_program.setdefault(outcome.program, []).append(outcome)
    ends = "\n".join(f"exit code {one.code}\n{one.err[-4000:]}" for one in done if one.code != 0)
    found = [verdict(program, by_program.get(program.name, []), plan.ranks, ends) for program in programs]
    if ends and not any(one.problems for one in found):
        found[-1].problems.append(f"after all programs: {ends}")
    return found


def verdict(program: Program, outcomes: list[Outcome], ranks: int, ends: str) -> Verdict:
    problems = [f"rank {one.rank}: {one.problem}" for one in outcomes if one.problem]
    if missing := sorted({*range(ranks)} - {one.rank for one in outcomes}):
        problems.append(f"ranks {missing} did not come to its end: {ends}")
    seconds = max((one.seconds for one in outcomes), default=0.0)
    digests = tuple(one.digest for one in outcomes)
    return Verdict(program, problems, seconds, digests, sum(one.graphs for one in outcomes))
