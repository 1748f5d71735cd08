"""In which order one rank posts its steps and waits for them.

Steps of one group come in the same order on all its ranks. Asynchronous steps of several groups, between two
synchronous ones, are posted in an order of each rank's own; what was posted is waited for in any order, at
any time. None of that can deadlock: a rank waits only for what all ranks post before they wait in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from random import Random
from typing import Any

from .contents import mixed
from .program import Program, Step

POST, WAIT = "post", "wait"
Action = tuple[str, Step]


def actions(program: Program, rank: int) -> list[Action]:
    """Returns the actions of this rank. Steps that it never waits for in between, it waits for at the end."""
    random = Random(mixed(program.seed, rank))
    done: list[Action] = []
    pending: list[Step] = []
    for stretch in _stretches(program.steps):
        mine = [step for step in stretch if rank in program.groups[step.group].ranks]
        posts = [(POST, step) for step in shuffled(mine, [step.group for step in mine], random)]
        now = [step for step in pending if random.random() < 0.4]
        random.shuffle(now)
        pending = [step for step in pending if step not in now] + [step for step in mine if step.is_async]
        waits = [(WAIT, step) for step in now]
        done += shuffled(posts + waits, [POST] * len(posts) + [WAIT] * len(waits), random)
    random.shuffle(pending)
    return done + [(WAIT, step) for step in pending]


def _stretches(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Each synchronous step alone, and the asynchronous ones between two of them together."""
    for is_async, together in groupby(steps, key=lambda step: step.is_async):
        if is_async:
            yield list(together)
        else:
            yield from ([step] for step in together)


def shuffled(things: Sequence[Any], lanes: Sequence[Any], random: Random) -> list[Any]:
    """In another order, but those of one lane in their own. `lanes` names that of each."""
    in_order = {
        lane: iter([one for one, its in zip(things, lanes, strict=True) if its == lane]) for lane in lanes
    }
    return [next(in_order[lane]) for lane in random.sample(lanes, len(lanes))]
