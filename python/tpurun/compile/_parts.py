"""Graphs that are too large for one program: several programs, and what each leaves for those after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Related:
    """Results of the last program that share memory which an earlier one has made."""

    base: int
    views: list[int]


@dataclass
class Part:
    """A program among those that a graph has become, and where its tensors come from.

    Tensors between programs have numbers: arguments and constants of the graph from 0 up, what programs make
    from -1 down. Views never cross: each program makes its own.
    """

    program: Any
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    ending: set[int] = field(default_factory=set)
    """Those that no later program needs."""


def find_endings(parts: Sequence[Part]) -> None:
    """Fills in what each part is the last to need."""
    later: set[int] = set()
    for part in reversed(parts):
        part.ending = set(part.inputs) - later
        later |= part.ending


def run(parts: Sequence[Part], tensors: list[Any], table: list[int]) -> list[Any]:
    """Runs programs one after the other, and returns what the last one returns; empties `tensors`.

    A tensor that is not needed any more is in the list of its program alone, which then lets go of it.
    """
    held = dict(enumerate(tensors))
    tensors.clear()
    *first, last = parts
    for part in first:
        held.update(zip(part.outputs, part.program.run(_taken(held, part), table), strict=True))
    return last.program.run(_taken(held, last), table)


def _taken(held: dict[int, Any], part: Part) -> list[Any]:
    return [held.pop(number) if number in part.ending else held[number] for number in part.inputs]


def relate(made: list[Any], related: Sequence[Related]) -> list[Any]:
    """Makes results that share memory views of one tensor, as they are where one program makes all of it."""
    with torch.no_grad():
        for one in related:
            base = made[one.base]
            for at in one.views:
                if at != one.base and made[at].dtype == base.dtype:
                    view = made[at]
                    made[at] = base.as_strided(view.shape, view.stride(), view.storage_offset())
    return made
