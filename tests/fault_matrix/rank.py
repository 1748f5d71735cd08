"""One rank of a job of the matrix: runs the cells of a plan and writes down what it saw.

``rank.py PLAN`` reads a plan that `plan.py` wrote. Between cells the ranks meet over torch's store, which the
engine does not see: whoever waits there may, as far as it knows, still come.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from .acts import ACTS
from .cells import PATIENT_S, Cell
from .operations import Operation, Team, operation
from .plan import Plan
from .programs import Act, Call, Program, guilty, usual
from .seen import Seen, write

MEET_S = 600


def run(plan: Plan, rank: int, init_method: str = "env://") -> None:
    """All cells of the plan that this rank is in."""
    if plan.is_alone and rank not in plan.guilty_ranks():
        # The launcher stops the innocent, too, when it ends the job: they first see what they get to see.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group(
        plan.backend,
        init_method,
        timeout=timedelta(seconds=PATIENT_S),
        rank=rank,
        world_size=plan.world,
    )
    store = dist.PrefixStore("matrix", dist.distributed_c10d._get_default_store())
    store.set_timeout(timedelta(seconds=MEET_S))
    innocent = bystanders(plan, rank)
    with open(plan.folder / f"rank-{rank}.jsonl", "w", buffering=1) as file:
        for index, (cell, members) in enumerate(zip(plan.cells, plan.members, strict=True)):
            if rank in members:
                meet(store, f"begin {index}", len(members))
            # Also where this rank is in neither: torch names groups by how many there were.
            teams = {name: team(members, rank) for name in ("main", "second")}
            if rank in members:
                seen = Seen(cell.name, rank, members[cell.guilty] == rank)
                program = guilty(cell) if seen.is_guilty else usual(cell)
                begin(program, cell, teams, plan.timeout_s or cell.timeout_s)
                meet(store, f"ready {index}", len(members))
                write(seen, file)
                run_cell(cell, program, teams, innocent, seen, file)
                meet(store, f"end {index}", len(members) - cell.is_fatal)
            if rank == 0:
                print("cell", cell.name, flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def bystanders(plan: Plan, rank: int) -> Team | None:
    """The group of those who are innocent in every cell, and what a rank that is not among them has
    instead."""
    guilty_ranks = plan.guilty_ranks()
    return team([other for other in range(plan.world) if other not in guilty_ranks], rank)


def team(members: list[int], rank: int) -> Team | None:
    """A new group, on its members; its other ranks need not be there."""
    group = dist.new_group(members, timeout=timedelta(seconds=PATIENT_S))
    return Team(group, members, members.index(rank)) if rank in members else None


def begin(program: Program, cell: Cell, teams: dict[str, Team], timeout_s: float) -> None:
    """First operations that succeed: what comes is the groups' everyday, and what they need to begin is not
    what is asked here."""
    for name in program.groups():
        operation(Call(cell.op), teams[name]).run()
        dist.set_timeout(timedelta(seconds=timeout_s), teams[name].group)


def meet(store: dist.Store, name: str, ranks: int) -> None:
    if store.add(name, 1) == ranks:
        store.set(f"{name}: all", "")
    store.wait([f"{name}: all"])


def run_cell(
    cell: Cell, program: Program, teams: dict[str, Team], innocent: Team | None, seen: Seen, file: TextIO
) -> None:
    execute(program, cell, teams, seen, file)
    if innocent is not None:
        seen.others = problem_of_others(innocent)
    seen.is_over = True
    write(seen, file)
    for one in teams.values():
        if one.group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(one.group)


def execute(program: Program, cell: Cell, teams: dict[str, Team], seen: Seen, file: TextIO) -> None:
    """The steps of the program, up to the first error, and then what became of every tensor."""
    posted: list[Operation] = []

    def enter(run: Callable[[], None]) -> None:
        seen.entered_ns = time.monotonic_ns()
        run()

    try:
        for step in program.steps:
            if isinstance(step, Act):
                act(step, seen, file)
                continue
            posted.append(operation(step, teams[step.group]))
            enter(posted[-1].run if cell.mode == "sync" else posted[-1].post)
        for one in posted:
            enter(one.wait)
        posted.append(operation(program.end, teams[program.end.group]))
        enter(posted[-1].run)
    except Exception as error:
        note(error, seen)
    seen.ended_ns = time.monotonic_ns()
    settle(posted)
    seen.tensors = next(filter(None, (one.problem() for one in posted)), "")


def act(step: Act, seen: Seen, file: TextIO) -> None:
    seen.acted_ns = time.monotonic_ns()
    write(seen, file)
    ACTS[step.name]()


def note(error: Exception, seen: Seen) -> None:
    if isinstance(error, ValueError) and seen.is_guilty and seen.cell.startswith("raise/"):
        raise error
    seen.kind, seen.text = type(error).__name__, str(error)
    seen.names = [rank for rank in getattr(error, "ranks", ()) if isinstance(rank, int)]


def settle(posted: list[Operation]) -> None:
    """Waits for what is pending still, so that its tensors may be looked at."""
    for one in posted:
        try:
            one.wait()
        except Exception:
            continue


def problem_of_others(innocent: Team) -> str:
    """A group without the guilty rank works as ever."""
    one = operation(Call("all_reduce"), innocent)
    try:
        one.run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return one.problem()


def main() -> None:
    torch.set_num_threads(1)
    run(Plan.read(Path(sys.argv[1])), int(os.environ["RANK"]))


if __name__ == "__main__":
    main()
