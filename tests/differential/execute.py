"""One program on one rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random

import torch.distributed as dist

from .calls import post
from .contents import mixed
from .formats import FORMATS
from .memory import Memory, same
from .oracle import Effects, Oracle
from .order import POST, actions
from .plants import Plant
from .posted import Posted, Team
from .program import Group, Program, Step


def execute(program: Program, rank: int, plant: Plant | None = None) -> tuple[list[tuple[str, str]], bool]:
    """Returns what is wrong, by step, and whether the ranks can not go on together."""
    wrong: list[tuple[str, str]] = []
    where = ""
    try:
        with environment(program.settings):
            teams = [team(group, rank) for group in program.groups]
        run = Run(program, teams, rank, plant, wrong)
        for act, step in actions(program, rank):
            where = str(step)
            run.act(act, step)
        where = ""
        run.look_again()
        part(program, teams)
    except Exception as error:
        return [*wrong, (where, f"{type(error).__name__}: {error}")], True
    return wrong, False


class Run:
    """A run holds what one rank has posted. It adds what it finds wrong to `wrong`."""

    def __init__(
        self,
        program: Program,
        teams: list[Team | None],
        rank: int,
        plant: Plant | None,
        wrong: list[tuple[str, str]],
    ) -> None:
        self.program, self.teams, self.rank, self.plant, self.wrong = program, teams, rank, plant, wrong
        self.pending: dict[int, tuple[Posted, Memory, Effects]] = {}
        self.done: list[tuple[Step, Memory]] = []

    def act(self, act: str, step: Step) -> None:
        """Posts a step, or waits for it."""
        try:
            self.post(step) if act == POST else self.wait(step)
        except AssertionError as error:
            self.wrong.append((str(step), str(error)))

    def post(self, step: Step) -> None:
        team = self.teams[step.group]
        effects = Oracle(self.program, step, team.place).effects()
        posted = step if self.plant is None else self.plant.before(step, team.place, effects)
        memory = Memory(step, effects, Random(mixed(self.program.seed, step.index, self.rank)))
        self.pending[step.index] = post(posted, team, memory.tensors), memory, effects
        if not step.is_async:
            self.wait(step)

    def wait(self, step: Step) -> None:
        posted, memory, effects = self.pending.pop(step.index)
        posted.wait(step.wait if step.is_async else "work")
        if effects.candidates:
            self._settle(posted, memory, effects)
        if self.plant is not None:
            self.plant.after(step, self.teams[step.group].place, memory)
        if problem := memory.problem() or _problem_of_returned(posted, effects, step):
            self.wrong.append((str(step), problem))
        else:
            self.done.append((step, memory))

    def _settle(self, posted: Posted, memory: Memory, effects: Effects) -> None:
        """Now that it is known which message came from whom."""
        sources = posted.sources()
        assert sorted(sources) == sorted(effects.candidates), f"received from {sources}"
        for one, source in zip(effects.held, sources, strict=True):
            memory.expect(one, effects.candidates[source])

    def look_again(self) -> None:
        """Whether anything was written to that was right before."""
        for step, memory in self.done:
            if problem := memory.problem():
                self.wrong.append((str(step), f"after it was done: {problem}"))


def _problem_of_returned(posted: Posted, effects: Effects, step: Step) -> str:
    form = FORMATS[step.dtype]
    if not effects.returned:
        return ""
    if len(posted.returned) != len(effects.returned):
        return f"expected {len(effects.returned)} tensors, got {len(posted.returned)}"
    for index, (tensor, (shape, wanted)) in enumerate(zip(posted.returned, effects.returned, strict=True)):
        if tuple(tensor.shape) != shape or tensor.dtype != form.dtype:
            return f"returned {index}: expected {shape}, got {tuple(tensor.shape)} of {tensor.dtype}"
        if not same(form, tensor, wanted):
            return f"returned {index}: expected {wanted[:4]}.., got {tensor.flatten()[:4]}.."
    return ""


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Variables that groups are made with."""
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]


def team(group: Group, rank: int) -> Team | None:
    """Makes the group; all ranks come here."""
    made = MAKERS[group.how](group, rank)
    return Team(made, group.ranks, group.ranks.index(rank)) if rank in group.ranks else None


def _local(group: Group, rank: int) -> dist.ProcessGroup:
    """The others make a group of their own meanwhile: torch names groups by how many a rank has made, so that
    ranks which made fewer would never again find together."""
    others = [other for other in range(dist.get_world_size()) if other not in group.ranks]
    mine = group.ranks if rank in group.ranks else others
    made = dist.new_group(mine, use_local_synchronization=True, sort_ranks=False)
    if rank not in group.ranks:
        dist.destroy_process_group(made)
    return made


def _enumerated(group: Group, rank: int) -> dist.ProcessGroup:
    mine, _ = dist.new_subgroups_by_enumeration([list(group.ranks)])
    return mine


MAKERS: dict[str, Callable[[Group, int], dist.ProcessGroup | None]] = {
    "default": lambda group, rank: dist.group.WORLD,
    "new": lambda group, rank: dist.new_group(group.ranks, sort_ranks=False),
    "local": _local,
    "enumerated": _enumerated,
}


def part(program: Program, teams: list[Team | None]) -> None:
    """Destroys the groups that the program made."""
    if program.meets_before_parting:
        dist.barrier()
    for group, mine in zip(program.groups, teams, strict=True):
        if mine is not None and group.how != "default":
            dist.destroy_process_group(mine.group)
