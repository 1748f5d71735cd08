"""The programs of a job that runs several in one world, and a process group for each.

``tpurun -n 1 learner.py : -n 4 actor.py`` makes two programs. Each rank sees both of them::

    import tpurun

    actors = tpurun.programs()["actor"]
    print(actors.ranks)  # range(1, 5)
    if tpurun.program() == actors:
        torch.distributed.all_reduce(steps, group=actors.group)

A job of one program, and a process that tpurun did not start, has one with all ranks.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME_VARIABLE = "TPURUN_PROGRAM"
LIST_VARIABLE = "TPURUN_PROGRAMS"
# The program of a process that tpurun did not start.
ALONE = "main"
# More groups than any process makes.
APART = 1 << 40


@dataclass(frozen=True)
class Program:
    """One program of the job and the ranks that run it."""

    name: str
    """The role if it was given one, else what its script, module or executable is called."""
    ranks: range
    """Its ranks in the world, which follow one another."""
    argv: tuple[str, ...]
    """The command, ``-m`` first for a module; empty when the commands of a job take more than 16 KiB."""

    @property
    def group(self) -> ProcessGroup:
        """The process group of its ranks, with the backend and the timeout of the world.

        Its first use by a rank creates it and returns when all ranks of the program have come to it; ranks of
        other programs take no part. It ends with the world it was made in.

        # Errors
        RuntimeError where torch.distributed is not initialised, or with another world than that of the job;
        ValueError on a rank of another program.
        """
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                f"group of program {self.name}: expected torch.distributed to be initialised, and it is not; "
                "call init_process_group first"
            )
        world, rank = dist.get_world_size(), dist.get_rank()
        if (expected := sum(len(program.ranks) for program in programs().values())) != world:
            raise RuntimeError(
                f"group of program {self.name}: expected the world of the job, {expected} ranks, "
                f"given {world}"
            )
        if rank not in self.ranks:
            raise ValueError(
                f"group of program {self.name}: expected to be asked for by one of its ranks "
                f"{_shown(self.ranks)}, given rank {rank}"
            )
        return _group(self)


def programs() -> Mapping[str, Program]:
    """All programs of the job by their names, in the order of their ranks.

    # Errors
    RuntimeError when TPURUN_PROGRAMS is set and was not set by tpurun.
    """
    text = os.environ.get(LIST_VARIABLE)
    if text is None:
        return MappingProxyType({ALONE: Program(ALONE, range(_world_size()), tuple(sys.argv))})
    try:
        listed = _parse(json.loads(text))
    except (KeyError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"{LIST_VARIABLE}: expected the list that tpurun sets, given {text[:200]}"
        ) from error
    return MappingProxyType({program.name: program for program in listed})


def program() -> Program:
    """The program that this rank runs.

    # Errors
    RuntimeError when TPURUN_PROGRAM names none of the job.
    """
    everybody = programs()
    name = os.environ.get(NAME_VARIABLE, ALONE) if LIST_VARIABLE in os.environ else ALONE
    if name not in everybody:
        raise RuntimeError(f"{NAME_VARIABLE}: expected one of {', '.join(everybody)}, given {name}")
    return everybody[name]


def _parse(entries: Any) -> list[Program]:
    """The programs of a list whose ranks follow one another from 0 on."""
    found: list[Program] = []
    for entry in entries:
        first, count = entry["first_rank"], entry["ranks"]
        if first != (found[-1].ranks.stop if found else 0) or count < 1:
            raise ValueError("the ranks do not follow one another")
        argv = tuple(str(word) for word in entry["argv"])
        found.append(Program(str(entry["name"]), range(first, first + count), argv))
    if not found:
        raise ValueError("the list is empty")
    return found


def _world_size() -> int:
    """As torch.distributed has it, else as a launcher says, else 1."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) > 0 else 1


def _group(program: Program) -> ProcessGroup:
    import torch.distributed as dist

    # Two threads that come at once must not make two groups of one name.
    with _lock:
        of_world = _groups.setdefault(dist.group.WORLD, {})
        if program.name not in of_world:
            with _numbered_apart():
                of_world[program.name] = dist.new_group(
                    list(program.ranks), use_local_synchronization=True, group_desc=f"program {program.name}"
                )
        return of_world[program.name]


@contextmanager
def _numbered_apart() -> Iterator[None]:
    """Gives the group made here the same name in all its ranks, and leaves the names of later ones alone.

    Torch makes the name of a group from how many this process has made before. Ranks of a program may differ
    in that; and where some programs use their groups and others do not, the groups that all ranks make
    afterwards would differ in their names, and nobody would ever meet in them.
    """
    from torch.distributed.distributed_c10d import _world

    before = _world.group_count
    _world.group_count = APART
    try:
        yield
    finally:
        _world.group_count = before


def _shown(ranks: range) -> str:
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start}-{ranks.stop - 1}"


_lock = threading.Lock()
# By world: a program may destroy its world and make another one.
_groups: WeakKeyDictionary[Any, dict[str, ProcessGroup]] = WeakKeyDictionary()
