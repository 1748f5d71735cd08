"""In which order one rank posts its steps and waits for them.

Steps of one group come in the same order on all its ranks. Asynchronous steps of several groups, between two
synchronous ones, are posted in an order of each rank's own; what was posted is waited for in any order, at
any time. None of that can deadlock: a rank waits only for what all ranks post before they wait in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from random import Random

from .contents import mixed
from .program import Program, Step

POST, WAIT = "post", "wait"
Action = tuple[str, Step]


def actions(program: Program, rank: int) -> list[Action]:
    """Of this rank. What is never waited for in between is waited for at the end."""
    random = Random(mixed(program.seed, rank))
    done: list[Action] = []
    pending: list[Step] = []
    for stretch in _stretches(program.steps):
        mine = [step for step in stretch if rank in program.groups[step.group].ranks]
        posts = [(POST, step) for step in _merged(mine, random)]
        now = [step for step in pending if random.random() < 0.4]
        random.shuffle(now)
        pending = [step for step in pending if step not in now] + [step for step in mine if step.is_async]
        done += _interleaved(posts, [(WAIT, step) for step in now], random)
    random.shuffle(pending)
    return done + [(WAIT, step) for step in pending]


def _stretches(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Each synchronous step alone, and the asynchronous ones between two of them together."""
    for is_async, together in groupby(steps, key=lambda step: step.is_async):
        if is_async:
            yield list(together)
        else:
            yield from ([step] for step in together)


def _merged(steps: Iterable[Step], random: Random) -> list[Step]:
    """Shuffled, but those of one group in order."""
    steps = list(steps)
    lanes = [step.group for step in steps]
    random.shuffle(lanes)
    by_lane = {lane: iter([step for step in steps if step.group == lane]) for lane in lanes}
    return [next(by_lane[lane]) for lane in lanes]


def _interleaved(posts: list[Action], waits: list[Action], random: Random) -> list[Action]:
    """Both in their own order."""
    sides = [posts] * len(posts) + [waits] * len(waits)
    random.shuffle(sides)
    iterators = {id(posts): iter(posts), id(waits): iter(waits)}
    return [next(iterators[id(side)]) for side in sides]
