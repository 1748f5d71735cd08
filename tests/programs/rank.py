"""One rank of a job: runs the programs of a plan in turn and writes down how each went.

``python -m programs.rank PLAN`` under any launcher that sets torchrun's variables. Between programs the ranks
meet over the store, so that one program's failure is not the next one's.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from .case import Case, Program, programs_of, running
from .compare import DIGEST

MEET = timedelta(seconds=600)


@dataclass(frozen=True)
class Plan:
    """A plan says what the ranks of a job do."""

    backend: str
    device: str
    """That of all tensors, "tpu:rank" for one of each rank's number; "+set": the current one, too."""
    programs: list[str]
    folder: str
    """Where the ranks write, and what their programs share."""
    ranks: int
    each: int | None = None
    """On how many ranks every program runs, if not on its own number."""
    way: str = "strict"
    compiler: str = ""

    def write(self) -> Path:
        path = Path(self.folder) / "plan.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @staticmethod
    def read(path: Path) -> Plan:
        return Plan(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Outcome:
    """How a program went on one rank."""

    program: str
    rank: int
    problem: str
    """Empty when everything was as in the oracle."""
    seconds: float
    digest: str = ""
    """Of all that was compared."""
    graphs: int = 0
    """How many were compiled."""


def run(plan: Plan) -> None:
    """All programs of the plan."""
    # Torch warns about itself and about CPUs: deprecations, random numbers, missing accelerators.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store, rank, ranks = next(iter(dist.rendezvous("env://", timeout=MEET)))
    use_device(plan.device, rank)
    assert ranks == plan.ranks, f"expected a job of {plan.ranks} ranks, started with {ranks}"
    with open(Path(plan.folder) / f"rank-{rank}.jsonl", "w", buffering=1) as file:
        for program in chosen(plan.programs):
            program = program if plan.each is None else program.at(plan.each)
            run_program(program, plan, rank, dist.PrefixStore(program.name, store), file)
            meet(store, f"after {program.name}", ranks)
    leave(store, rank, ranks)


def use_device(device: str, rank: int) -> None:
    """As programs for accelerators do; some of them make the device of their rank the current one."""
    name, _, index = device.partition(":")
    if index == "rank+set":
        # By name: who only imports this module is not to have the device.
        getattr(torch, name).set_device(rank)
    torch.set_default_device(f"{name}:{rank}" if index else name)


def chosen(names: list[str]) -> list[Program]:
    families = dict.fromkeys(name.partition("/")[0] for name in names)
    return [program for family in families for program in programs_of(family) if program.name in names]


def run_program(program: Program, plan: Plan, rank: int, store: dist.Store, file: TextIO) -> None:
    folder = Path(plan.folder) / program.name.partition("/")[0]
    folder.mkdir(exist_ok=True)
    began, before = time.monotonic(), graphs_since(0)
    problem = ""
    try:
        torch.manual_seed(rank)
        DIGEST.begin()
        with running(plan.way, plan.compiler):
            program.run(Case(plan.backend, rank, folder, store))
    except Exception as error:
        problem = f"{type(error).__name__}: {error} ({place(error)})"
    seconds = time.monotonic() - began
    outcome = Outcome(program.name, rank, problem, seconds, DIGEST.text(), graphs_since(before))
    file.write(json.dumps(asdict(outcome)) + "\n")


def graphs_since(before: int) -> int:
    """How many graphs this process has compiled; none as long as Dynamo is not there."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"] - before


def place(error: Exception) -> str:
    """The innermost line of a program."""
    own = Path(__file__).parent
    frames = traceback.extract_tb(error.__traceback__)
    last = [frame for frame in frames if Path(frame.filename).parent == own][-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def meet(store: dist.Store, name: str, ranks: int) -> None:
    if store.add(name, 1) == ranks:
        store.set(f"{name}: all", "")
    store.wait([f"{name}: all"], MEET)


def leave(store: dist.Store, rank: int, ranks: int) -> None:
    """The rank that holds the store goes last."""
    if rank > 0:
        store.set(f"left {rank}", "")
    else:
        store.wait([f"left {other}" for other in range(1, ranks)], MEET)


def main() -> None:
    run(Plan.read(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
